"""The reference: a page for each section of docs/reference.md, generated from docstrings.

Docstrings are written for `help` and read like Markdown: single backticks, equations indented by
four.
"""

import ast
import inspect
import pathlib
import re
import shutil
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import jgrad

logger = logging.getLogger(__name__)

DOCS = pathlib.Path(__file__).parents[1]
SECTIONS = re.compile(r"^(?=(?:Args|Attributes|Returns|Raises|Examples?|Source):)", re.MULTILINE)
EQUATION = re.compile(r"((?:^    .*\n(?:\n(?=    ))?)+)", re.MULTILINE)
PUBLIC = re.compile(r"(?:jgrad\.)?(\w+)(?:\(|$)")  # a name alone or with a signature
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
IMPORTS = [x for x in ast.parse(inspect.getsource(jgrad)).body if isinstance(x, ast.ImportFrom)]
MODULES = {name.name: x.module for x in IMPORTS for name in x.names}


def write(app: Sphinx) -> None:
    """Writes the pages, with entries for the names in the tables of docs/reference.md."""
    shutil.rmtree(DOCS / "reference", ignore_errors=True)
    (DOCS / "reference").mkdir()
    _, *sections = (DOCS / "reference.md").read_text().split("\n## ")
    for section in sections:
        title = section.partition("\n")[0]
        if names := re.findall(r"^\| `(\w+)", section, re.MULTILINE):
            is_class = [isinstance(getattr(jgrad, name), type) for name in names]
            entries = "\n".join(
                f".. auto{'class' if c else 'function'}:: {name}"
                for name, c in zip(names, is_class, strict=True)
            )
            (DOCS / "reference" / f"{title.lower().replace(' ', '-')}.md").write_text(
                f"# {title}\n\n```{{eval-rst}}\n.. currentmodule:: jgrad\n\n{entries}\n```\n"
            )


def restructure(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """A docstring as reStructuredText with the sections that napoleon reads."""
    head, *sections = SECTIONS.split("\n".join(lines) + "\n")
    parts = [
        f".. code-block:: text\n\n{part}" if part.startswith("    ") else marked(part, name)
        for part in EQUATION.split(head)
    ]
    for section in sections:
        if section.startswith("Example"):
            parts.append(section)
            continue
        section = re.sub(r"^Source: ", "Source:\n  ", section)
        section = re.sub(r"^Raises:\n  (?=As )", ":raises: ", section)  # no type: one sentence
        parts.append(marked(section, name))
    lines[:] = "\n".join(parts).splitlines()


def marked(text: str, name: str) -> str:
    """Prose with links to public names, and without characters that would mean something else."""

    def new(found: re.Match[str]) -> str:
        code = found[1]
        if code is None:
            return f"\\{found[0]}"
        other = PUBLIC.match(code)
        if other and other[1] in MODULES and name != f"jgrad.{other[1]}":
            role = f":py:obj:`{code} <jgrad.{other[1]}>`"
        else:
            role = f"``{code}``"
        plural = text[found.end() : found.end() + 1].isalpha()  # a letter has to be set apart
        return f"{role}\\ " if plural else role

    # The last: "s." after the name of an argument would be an item of a list.
    return re.sub(r"`([^`]+)`|[|*]|(?<=: )(?=\w\.\s)", new, text)


def link(app: Sphinx, doctree: nodes.document) -> None:
    """Links each public name of some pages, alone or with a signature, to its entry."""
    if app.env.docname not in LINKED:
        return
    for code in list(doctree.findall(nodes.literal)):
        name = PUBLIC.match(code.astext())
        if name and name[1] in MODULES and not within(code, LINKS):
            target = f"jgrad.{name[1]}"
            reference = addnodes.pending_xref(
                "", refdomain="py", reftype="obj", reftarget=target, refdoc=app.env.docname
            )
            code.replace_self(reference)
            reference += code


def within(node: nodes.Node | None, kinds: tuple[type[nodes.Node], ...]) -> bool:
    return node is not None and (isinstance(node, kinds) or within(node.parent, kinds))


def source(app: Sphinx, module: str, name: str) -> str | None:
    """The module of a public name, for the link to its source."""
    return MODULES.get(name)


def complete(app: Sphinx, env: BuildEnvironment) -> None:
    """Every public name has an entry."""
    public = {f"jgrad.{name}" for name in jgrad.__all__}
    for name in sorted(public - env.domains.python_domain.objects.keys()):
        logger.warning("%s has no entry: name it in a table of docs/reference.md", name)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write)
    app.connect("autodoc-process-docstring", restructure, priority=400)  # before napoleon
    app.connect("doctree-read", link)
    app.connect("env-check-consistency", complete)
    app.connect("viewcode-follow-imported", source)
    return {"parallel_read_safe": True}
