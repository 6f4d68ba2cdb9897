"""Public names in prose, with their signatures or without, as links to their entries."""

import ast
import inspect
import re

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import jgrad

logger = logging.getLogger(__name__)
IMPORTS = [x for x in ast.parse(inspect.getsource(jgrad)).body if isinstance(x, ast.ImportFrom)]
MODULES = {name.name: x.module for x in IMPORTS for name in x.names}
CALL = re.compile(r"(jgrad\.)?(\w+)(?:\(|$)")
# Of the guides, those with functions of others: there a name needs `jgrad.`.
MIXED = frozenset(["from_optax", "from_elsewhere", "benchmarks", "correctness"])
LINKS = (nodes.reference, addnodes.pending_xref, nodes.title)


def public_name(code: str, page: str = "reference") -> str | None:
    """The public name that a piece of code of a page is, or calls."""
    found = CALL.match(code)
    is_own = found and (found[1] or not ("/" in page or page in MIXED))
    return found[2] if found and is_own and found[2] in MODULES else None


def link(app: Sphinx, doctree: nodes.document) -> None:
    """Links the names of a page."""
    for code in list(doctree.findall(nodes.literal)):
        name = public_name(code.astext(), app.env.docname)
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


def check(app: Sphinx, env: BuildEnvironment) -> None:
    """The pages of the list are there."""
    for page in sorted(MIXED - env.found_docs):
        logger.warning("public_names.py names the page %s, which is not there", page)


def within(node: nodes.Node | None, kinds: tuple[type[nodes.Node], ...]) -> bool:
    """Whether a node is of one of the kinds, or in one that is."""
    return node is not None and (isinstance(node, kinds) or within(node.parent, kinds))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", link)
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True}
