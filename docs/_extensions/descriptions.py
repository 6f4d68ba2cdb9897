"""A description of each page, for search engines and previews of links: its first sentence.

A page that another one lists with a sentence has that, and so has one that begins with something
else than what it is about. Addresses and images are left out as long as
no public address of the site is known.
"""

import html
import re
from typing import Any

import trainings
from contents import MEASUREMENTS, PROJECT
from docutils import nodes
from public_names import within
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)
NOT_PROSE = (nodes.table, nodes.list_item, nodes.definition, addnodes.desc)
OWN = {
    "getting_started": "A first train step, compiled, with schedules, clipping and checkpoints.",
    "faq": "What to do if the loss differs from optax's, 8 bits do nothing, or a step is NaN.",
    "runs": "How to find out why a run diverges, and how to change it in the middle.",
    "benchmarks": "Times and memory of jgrad beside optax and PyTorch, and what is slower.",
}
LENGTH = 50  # at least: after a shorter sentence comes the next
TAG = '<meta {}="{}" content="{}" />'


def first_sentence(doctree: nodes.document) -> str:
    """Of the prose of a page."""
    found = ""
    for paragraph in doctree.findall(nodes.paragraph):
        if not within(paragraph, NOT_PROSE):
            for sentence in trainings.sentences(paragraph.astext()):
                found = f"{found} {sentence}".strip()
                if len(found) >= LENGTH:
                    return re.sub(":$", ".", found)
    return found


def describe(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Adds the tags to a page; those without a document, as that of the search, have none."""
    if doctree is None:
        return
    sentence = (MEASUREMENTS | PROJECT | OWN).get(page) or first_sentence(doctree)
    if not sentence:
        logger.warning("%s has no paragraph that could describe it", page)
    title = re.sub(r"<.*?>", "", context["title"])  # which is escaped
    about = html.escape(sentence)
    tags = [
        TAG.format("name", "description", about),
        TAG.format("property", "og:title", title),
        TAG.format("property", "og:description", about),
        TAG.format("property", "og:type", "website"),
        TAG.format("property", "og:site_name", app.config.project),
    ]
    context["metatags"] += "\n".join(["", *tags])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("html-page-context", describe)
    return {"parallel_read_safe": True}
