"""The home page: README, with cards behind its example.

And the pages that contents.py lists.
"""

import pathlib
from collections.abc import Iterable

from contents import CONTENTS, MEASUREMENTS, PROJECT
from sphinx.application import Sphinx

DOCS = pathlib.Path(__file__).parents[1]

LIST = """\
# {title}

{sentence}

{items}

{table}
"""

PAGE = """\
```{include} ../README.md
:end-before: <!-- The home page
```

::::{grid} 1 2 2 3
:gutter: 3

:::{grid-item-card} Getting started
:link: getting_started
:link-type: doc

The first training, line by line.
:::

:::{grid-item-card} Choose a setup
:link: choose
:link-type: doc

Lines to copy, for each kind of model.
:::

:::{grid-item-card} Gallery
:link: gallery/index
:link-type: doc

Whole programs to copy, and notebooks with their outputs.
:::

::::

```{include} ../README.md
:start-after: parts here. -->
```

"""


def table(pages: Iterable[str], caption: str = "") -> str:
    """A table of contents that is shown in the sidebar alone."""
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    lines = ["```{toctree}", *options, "", *(f"/{page}" for page in pages), "```"]
    return "\n".join(lines) + "\n"


def index(title: str, sentence: str, pages: dict[str, str]) -> str:
    """A page that lists others."""
    items = "\n".join(f"- {{doc}}`/{page}`\\\n  {text}" for page, text in pages.items())
    return LIST.format(title=title, sentence=sentence, items=items, table=table(pages))


def write(app: Sphinx) -> None:
    """Writes the pages; README is read when it is included."""
    tables = (table(pages, caption) for caption, pages in CONTENTS.items())
    (DOCS / "index.md").write_text("\n".join([PAGE, *tables]))
    folder = DOCS / "contents"
    folder.mkdir(exist_ok=True)
    sentence = "What was measured, beside what, and the commands that measure it again."
    (folder / "measurements.md").write_text(index("Measurements", sentence, MEASUREMENTS))
    sentence = "Where to ask, what jgrad promises, how it changes, and how to take part."
    title = "Help, stability, changes"
    (folder / "project.md").write_text(index(title, sentence, PROJECT))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}
