"""Files of the repository outside docs/ as pages of the site, and links to them.

Pages link to each other as GitHub resolves links: `../colabs/quickstart.ipynb`, relative to the
page. Here each file that a page links to becomes a page, and links are rewritten while a page is
read.
"""

import ast
import functools
import pathlib
import re
import shutil

import trainings
from sphinx.application import Sphinx

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / "README.md"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(?=[)#])")
PAGES = (".md", ".ipynb")
LISTING = """\
---
orphan: true
---

# {name}

{sentence}

To save it: {link}

``````{language}
{text}``````
"""


def page(file: pathlib.Path) -> str:
    """Where a file of the repository is in docs/; README is a part of the home page."""
    path = pathlib.PurePosixPath(file.relative_to(ROOT))
    if file == README:
        return "index.md"
    if path.parts[0] == "docs":
        return str(path.relative_to("docs"))
    if path.suffix == ".ipynb":
        return f"gallery/{path.name}"
    if path.stem in trainings.NAMES:
        return f"gallery/{path.stem}.md"
    return (
        f"repository/{path}" if path.suffix in (*PAGES, ".png", ".svg") else f"repository/{path}.md"
    )


def followed(file: pathlib.Path, link: str) -> pathlib.Path | None:
    """The file of the repository to which a link of another leads."""
    found = (file.parent / link).resolve()
    return found if found.is_file() and found.is_relative_to(ROOT) else None


def scripts() -> list[pathlib.Path]:
    """Those that train and are no page of their own, which the gallery lists."""
    files = sorted(ROOT.glob("colabs/train_*.py"))
    return [file for file in files if file.stem not in trainings.NAMES]


@functools.cache
def files() -> list[pathlib.Path]:
    """README, guides, notebooks and scripts, and what is linked from there, directly or not."""
    found = [README, *ROOT.glob("docs/*.md"), *ROOT.glob("colabs/*.ipynb"), *scripts()]
    for file in found:  # which grows
        links = LINK.findall(file.read_text()) if file.suffix in PAGES else []
        targets = {followed(file, link) for link in links}
        found += sorted(x for x in targets if x and x not in found)
    return found


def copy(app: Sphinx) -> None:
    """Writes the pages of other folders: documents and images as they are, sources as listings."""
    shutil.rmtree(ROOT / "docs" / "repository", ignore_errors=True)
    for file in files():
        copied = ROOT / "docs" / page(file)
        if copied.is_relative_to(ROOT / "docs" / "repository"):
            copied.parent.mkdir(parents=True, exist_ok=True)
            if copied.name == file.name:
                shutil.copy2(file, copied)
            else:
                copied.write_text(listing(file))


def listing(file: pathlib.Path) -> str:
    """A page with the text of a file, which can be saved."""
    is_python = file.suffix == ".py"
    name, text = file.relative_to(ROOT), file.read_text()
    return LISTING.format(
        name=name,
        sentence=introduction(text) if is_python else "A file of the repository.",
        link=f"{{download}}`{file.name} </../{name}>`",
        language="python" if is_python else "text",
        text=text,
    )


def introduction(source: str) -> str:
    """The first line of the docstring of a file of Python."""
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def relink(file: pathlib.Path, text: str) -> str:
    """The text of a file with links to pages of the site, from its top."""

    def new(link: re.Match[str]) -> str:
        found = followed(file, link[1])
        return f"/{page(found)}" if found else link[1]

    return LINK.sub(new, text)


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """A page is read: `name` has no suffix."""
    for file in files():
        if file != README and page(file).rpartition(".")[0] == name and file.suffix in PAGES:
            source[0] = relink(file, source[0])


def include(app: Sphinx, path: pathlib.Path, name: str, source: list[str]) -> None:
    """A page includes a file, as the home page does README."""
    source[0] = relink((ROOT / "docs" / path).resolve(), source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", copy)
    app.connect("source-read", read)
    app.connect("include-read", include)
    return {"parallel_read_safe": True}
