"""Public names in prose, with their signatures or without, as links to their entries."""

import ast
import inspect
import re

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

import jgrad

IMPORTS = [x for x in ast.parse(inspect.getsource(jgrad)).body if isinstance(x, ast.ImportFrom)]
MODULES = {name.name: x.module for x in IMPORTS for name in x.names}
CALL = re.compile(r"(?:jgrad\.)?(\w+)(?:\(|$)")
LINKED = frozenset(  # pages whose functions are all jgrad's
    [
        "index",
        "reference",
        "getting_started",
        "choose_a_recipe",
        "wrappers",
        "recipes",
        "packed",
        "devices",
        "memory",
        "half_precision",
        "muon",
        "variants",
        "design",
    ]
)
LINKS = (nodes.reference, addnodes.pending_xref, nodes.title)


def public_name(code: str) -> str | None:
    """The public name that a piece of code is, or calls."""
    found = CALL.match(code)
    return found[1] if found and found[1] in MODULES else None


def link(app: Sphinx, doctree: nodes.document) -> None:
    """Links the names of a page."""
    if app.env.docname not in LINKED:
        return
    for code in list(doctree.findall(nodes.literal)):
        name = public_name(code.astext())
        if name and not within(code, LINKS):
            reference = addnodes.pending_xref(
                "",
                refdomain="py",
                reftype="obj",
                reftarget=f"jgrad.{name}",
                refdoc=app.env.docname,
            )
            code.replace_self(reference)
            reference += code


def within(node: nodes.Node | None, kinds: tuple[type[nodes.Node], ...]) -> bool:
    """Whether a node is of one of the kinds, or in one that is."""
    return node is not None and (isinstance(node, kinds) or within(node.parent, kinds))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", link)
    return {"parallel_read_safe": True}
