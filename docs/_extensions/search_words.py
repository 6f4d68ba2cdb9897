"""The words of words.py in the search: as entries of the index, at the names and the guides.

search.js puts their results in the form of results for names.
"""

import pathlib

import words
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

logger = logging.getLogger(__name__)
MAIN = "main"  # others come after all results


def add(app: Sphinx, doctree: nodes.document) -> None:
    """Adds words to a page; Sphinx has made the printed index by then, which stays as it is."""
    found = [(word, "") for word in words.GUIDES.get(app.env.docname, ())]
    for entry in doctree.findall(addnodes.desc_signature):
        for anchor in entry["ids"]:
            name = anchor.removeprefix("jgrad.")
            found += [(word, anchor) for word in words.NAMES.get(name, ())]
    if found:
        entries = [("single", word, anchor, MAIN, None) for word, anchor in found]
        doctree.insert(0, addnodes.index(entries=entries))


def check(app: Sphinx, env: BuildEnvironment) -> None:
    """The pages of words.py are there."""
    for page in sorted(words.GUIDES.keys() - env.found_docs):
        logger.warning("words.py has words for the page %s, which is not there", page)


def setup(app: Sphinx) -> dict[str, bool]:
    scorer = pathlib.Path(__file__).with_name("search.js")
    app.config.html_search_scorer = str(scorer)
    app.connect("doctree-read", add)
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True}
