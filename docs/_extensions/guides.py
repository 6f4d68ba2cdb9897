"""Each entry of the reference leads back to the guides that teach its name.

Those are the pages that have the name most often, as a span of code or in an example.
"""

import collections
import functools
import pathlib
import re
from typing import Any

from docutils import nodes
from public_names import MODULES, public_name
from sphinx import addnodes
from sphinx.application import Sphinx

DOCS = pathlib.Path(__file__).parents[1]
SPAN = re.compile(r"`([^`\n]+)`")
QUALIFIED = re.compile(r"\bjgrad\.(\w+)")
HEADING = re.compile(r"^#+ `?(\w+)`?$", re.MULTILINE)
MOST = 3


@functools.cache
def taught(page: str) -> dict[str, int]:
    """How often a page has each name; a section of its own counts like ten."""
    text = (DOCS / f"{page}.md").read_text()
    counts = collections.Counter(x for x in QUALIFIED.findall(text) if x in MODULES)
    counts.update(public_name(code, page) for code in SPAN.findall(text) if "jgrad." not in code)
    counts.update(dict.fromkeys(HEADING.findall(text), 10))
    return counts


def foremost(name: str, pages: list[str]) -> list[str]:
    """Those of some pages that have a name, by how often."""
    counts = {x: taught(x)[name] for x in pages}
    return sorted((x for x in pages if counts[x]), key=lambda x: -counts[x])


def title(page: str) -> str:
    """Of a page, in short."""
    return (DOCS / f"{page}.md").read_text().partition("\n")[0].removeprefix("# ").partition(":")[0]


def anchor(page: str, name: str) -> str:
    """Of the section whose title is the name, if a page has one."""
    is_title = name in HEADING.findall((DOCS / f"{page}.md").read_text())
    return f"#{name.lower()}" if is_title else ""


def lead_back(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Adds a line to each entry of a page of the reference."""
    if not page.startswith("reference/"):
        return
    contents = dict.fromkeys(app.env.toctree_includes.get("index", ()))
    guides = [x for x in contents if "/" not in x and x != "reference"]
    for entry in doctree.findall(addnodes.desc):
        name = entry[0]["ids"][0].removeprefix("jgrad.") if entry[0]["ids"] else ""
        most = foremost(name, guides)[:MOST]
        if most:
            line = nodes.paragraph("", "Guides: ", classes=["guides"])
            for i, guide in enumerate(x for x in guides if x in most):
                line += nodes.Text(", " if i else "")
                line += link(app, page, guide, name)
            entry[-1] += line


def link(app: Sphinx, page: str, guide: str, name: str) -> nodes.reference:
    """A link to a guide, to the section whose title is the name if it has one."""
    address: Any = app.builder.get_relative_uri(page, guide)
    if name in HEADING.findall((DOCS / f"{guide}.md").read_text()):
        address += f"#{nodes.make_id(name)}"
    title = app.env.titles[guide].astext().partition(":")[0]
    return nodes.reference("", title, internal=True, refuri=address)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-resolved", lead_back)
    return {"parallel_read_safe": True}
