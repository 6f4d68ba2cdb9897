"""The gallery: whole programs, notebooks and scripts of colabs/, and a page with a card for each.

Programs are shown with their prose, notebooks as they are stored, scripts as listings by
repository.py.
"""

import base64
import json
import pathlib
import re
import shutil
from typing import Any

import panels
import repository
import trainings
from sphinx.application import Sphinx

ROOT = pathlib.Path(__file__).parents[2]
GALLERY = ROOT / "docs" / "gallery"

PAGE = """\
# Gallery

## Whole programs

Each of these trains a model, saves it, and goes on from where it was stopped. Copy one and put your
model in its place.

::::{{grid}} 1 2 2 3
:gutter: 3

{programs}
::::

## Notebooks

Each notebook is shown with its stored outputs. CI executes all of them, half of them each day.

::::{{grid}} 1 2 2 3
:gutter: 3

{cards}
::::

## Scripts

These are larger trainings, to run from a terminal in a clone.

::::{{grid}} 1 2 2 3
:gutter: 3

{scripts}
::::

```{{toctree}}
:hidden:

{names}
```
"""

CARD = """\
:::{{grid-item-card}} {title}
:link: {name}
:link-type: doc
:img-top: {image}
:class-img-top: thumbnail

{sentence}
:::
"""
PICTURES = "/_static/cards/{}.svg"  # of programs: `python -m benchmarks.drawings`


def introduction(notebook: dict[str, Any]) -> tuple[str, str]:
    """The title, and the first sentence, without links."""
    title, _, text = "".join(notebook["cells"][0]["source"]).partition("\n")
    text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", " ".join(text.split()))
    return title.removeprefix("# "), trainings.sentences(text)[0]


def script(name: str, file: pathlib.Path) -> str:
    """The card of a script: its name, and the first line of its docstring."""
    sentence = repository.introduction(file.read_text())
    image = PICTURES.format(file.stem)
    return CARD.format(name=name, title=f"`{file.name}`", sentence=sentence, image=image)


def program(name: str) -> str:
    """Writes the page of a whole program; its card."""
    page = trainings.page(name)
    (GALLERY / f"{name}.md").write_text(page.text)
    image = PICTURES.format(name)
    return CARD.format(name=name, title=page.title, sentence=page.sentence, image=image)


def thumbnail(notebook: dict[str, Any]) -> bytes:
    """The first panel of the first image among the outputs, which every notebook has."""
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                return panels.first(base64.b64decode("".join(output["data"]["image/png"])))
    raise ValueError(f"no image: {introduction(notebook)[0]}")


def write(app: Sphinx) -> None:
    """Copies the notebooks, in the order in which README names them, and writes all pages."""
    shutil.rmtree(GALLERY, ignore_errors=True)
    GALLERY.mkdir()
    named = re.findall(r"\(colabs/(\w+)\.ipynb\)", (ROOT / "README.md").read_text())
    files = {x.stem: x for x in sorted(ROOT.glob("colabs/*.ipynb"))}
    files = {name: files[name] for name in dict.fromkeys([*named, *files])}
    cards = []
    for name, file in files.items():
        shutil.copy2(file, GALLERY)
        notebook = json.loads(file.read_text())
        title, sentence = introduction(notebook)
        (GALLERY / f"{name}.png").write_bytes(thumbnail(notebook))
        cards.append(CARD.format(name=name, title=title, sentence=sentence, image=f"{name}.png"))
    scripts = {f"/{repository.page(x)}".removesuffix(".md"): x for x in repository.scripts()}
    listings = [f"{x.name} <{page}>" for page, x in scripts.items()]
    page = PAGE.format(
        programs="\n".join(map(program, trainings.NAMES)),
        cards="\n".join(cards),
        scripts="\n".join(script(*item) for item in scripts.items()),
        names="\n".join([*trainings.NAMES, *files, *listings]),
    )
    (GALLERY / "index.md").write_text(page)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}
