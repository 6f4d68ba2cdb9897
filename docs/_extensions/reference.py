"""The reference: a page for each section of docs/reference.md, with entries for its names."""

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


def write(app: Sphinx) -> None:
    """Writes the pages; names are the first cells of tables."""
    shutil.rmtree(DOCS / "reference", ignore_errors=True)
    (DOCS / "reference").mkdir()
    _, *sections = (DOCS / "reference.md").read_text().split("\n## ")
    for section in sections:
        title = re.split(r"[:\n]", section, maxsplit=1)[0].strip()
        file = re.sub(r"\W+", "-", title.lower()).strip("-")
        if names := re.findall(r"^\| `(\w+)", section, re.MULTILINE):
            is_class = [isinstance(getattr(jgrad, name), type) for name in names]
            entries = "\n".join(
                f".. auto{'class' if c else 'function'}:: {name}"
                for name, c in zip(names, is_class, strict=True)
            )
            (DOCS / "reference" / f"{file}.md").write_text(
                f"# {title}\n\n```{{eval-rst}}\n.. currentmodule:: jgrad\n\n{entries}\n```\n"
            )


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
    app.connect("env-check-consistency", complete)
    app.connect("viewcode-follow-imported", source)
    return {"parallel_read_safe": True}
