"""The reference: a page for each group of docs/reference.md, with entries for its names."""

import pathlib
import re
import shutil

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


def read(app: Sphinx, page: str, text: list[str]) -> None:
    """The pages stand under that of the reference in the table of contents."""
    if page == "reference":
        pages = "\n".join(f"reference/{page}" for page in groups())
        text[0] += f"\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"


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
