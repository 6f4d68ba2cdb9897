"""Drawings in SVG stand in the page itself, so that their text has the color of the theme."""

import pathlib

from docutils import nodes
from sphinx.application import Sphinx

DOCS = pathlib.Path(__file__).parents[1]


def draw(app: Sphinx, doctree: nodes.document) -> None:
    """Replaces those of a page."""
    for image in list(doctree.findall(nodes.image)):
        path = DOCS / image["uri"]
        if path.suffix == ".svg" and path.is_file():
            app.env.note_dependency(image["uri"])
            image.replace_self(nodes.raw("", path.read_text(), format="html"))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", draw, priority=900)  # Sphinx has found the file
    return {"parallel_read_safe": True}
