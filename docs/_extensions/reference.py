"""The reference: a page for each group of docs/reference.md, with entries for its names.

docs/reference.md itself has a table for each group instead of names: what each is, by the first
line of its docstring, and the guides that teach it.
"""

import inspect
import pathlib
import re
import shutil

import guides
from contents import CONTENTS
from public_names import MODULES
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import jgrad

logger = logging.getLogger(__name__)
DOCS = pathlib.Path(__file__).parents[1]


def groups() -> dict[str, tuple[str, str, list[str]]]:
    """By the names of their pages: title, sentence and public names of each group."""
    _, _, *sections = (DOCS / "reference.md").read_text().split("\n## ")  # the first has options
    found = {}
    for section in sections:
        title, _, text = section.partition("\n")
        sentence, _, names = text.strip().rpartition(":")
        page = re.sub(r"\W+", "-", title.lower()).strip("-")
        sentence = sentence.replace("](", "](/")  # from the top of docs/
        found[page] = title, f"{sentence}.", re.findall(r"`(\w+)`", names)
    return found


def write(app: Sphinx) -> None:
    """Writes the pages."""
    shutil.rmtree(DOCS / "reference", ignore_errors=True)
    (DOCS / "reference").mkdir()
    for page, (title, sentence, names) in groups().items():
        is_class = [isinstance(getattr(jgrad, name), type) for name in names]
        entries = "\n".join(
            f".. auto{'class' if c else 'function'}:: {name}"
            for name, c in zip(names, is_class, strict=True)
        )
        (DOCS / "reference" / f"{page}.md").write_text(
            f"# {title}\n\n{sentence}\n\n"
            f"```{{eval-rst}}\n.. currentmodule:: jgrad\n\n{entries}\n```\n"
        )


def table(names: list[str]) -> str:
    """A row for each name, in Markdown."""
    rows = ["| name | what it is | in the guides |", "| --- | --- | --- |"]
    for name in names:
        what = (inspect.getdoc(getattr(jgrad, name)) or "").partition("\n")[0]
        what = what.removesuffix(" Field names are part of the checkpoint format.").replace(
            "|", "\\|"
        )
        links = [f"[{guides.title(x)}](/{x}.md{guides.anchor(x, name)})" for x in taught(name)]
        rows.append(f"| `{name}` | {what} | {', '.join(links)} |")
    return "\n".join(rows)


def taught(name: str) -> list[str]:
    """The pages of the sidebar that teach a name, the foremost first."""
    pages = [x for part in CONTENTS.values() for x in part if "/" not in x and x != "reference"]
    return guides.foremost(name, pages)[:2]


def read(app: Sphinx, page: str, text: list[str]) -> None:
    """Tables instead of names; and the pages stand under this one in the table of contents."""
    if page == "reference":
        first, second, *sections = text[0].split("\n## ")
        found = groups()
        for (group, (title, sentence, names)), _ in zip(found.items(), sections, strict=True):
            second += f"\n## [{title}](/reference/{group}.md)\n\n{sentence}\n\n{table(names)}\n"
        pages = "\n".join(f"reference/{page}" for page in found)
        text[0] = f"{first}\n## {second}\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"


def source(app: Sphinx, module: str, name: str) -> str | None:
    """The module of a public name, for the link to its source."""
    return MODULES.get(name)


def complete(app: Sphinx, env: BuildEnvironment) -> None:
    """Every public name has an entry."""
    public = {f"jgrad.{name}" for name in jgrad.__all__}
    for name in sorted(public - env.domains.python_domain.objects.keys()):
        logger.warning("%s has no entry: name it in a group of docs/reference.md", name)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write)
    app.connect("source-read", read)
    app.connect("env-check-consistency", complete)
    app.connect("viewcode-follow-imported", source)
    return {"parallel_read_safe": True}
