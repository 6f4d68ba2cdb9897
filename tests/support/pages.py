"""README, docs/ and the notes as tests read them: sections, tables and blocks of code."""

import functools
import inspect
import pathlib
import re
import textwrap
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
# `docs/index.md` is written when the site is built: README, and the table of contents.
GUIDES = sorted(f"docs/{x.name}" for x in (ROOT / "docs").glob("*.md") if x.stem != "index")
NOTES = sorted(f"benchmarks/notes/{file.name}" for file in (ROOT / "benchmarks/notes").glob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", "BUILD_NOTES.md", "CHANGELOG.md", *GUIDES, *NOTES]


@functools.cache
def page(name):
    return (ROOT / name).read_text()


def blocks(name, language="python"):
    """The blocks of a language, those in lists too."""
    return blocks_of(page(name), language)


def blocks_of(text, language="python"):
    """Those of a part of a page."""
    fenced = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(text) for _, text in fenced]


def run_example(name, index, names):
    """Runs a block of a page in the given names, and returns them."""
    exec(compile(blocks(name)[index], name, "exec"), names)
    return names


def section(name, title):
    """What stands under a heading, up to the next of its kind."""
    found = re.search(
        rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page(name), re.DOTALL | re.MULTILINE
    )
    return found[1]


def rows(text):
    """The cells of each line of the tables, without headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    heads = {i for i, row in enumerate(cells) if i + 1 < len(cells) and cells[i + 1][0] == "---"}
    return [row for i, row in enumerate(cells) if i not in heads and row[0] != "---"]


def docstring(name: str, thing: Any) -> str:
    """That of something public, which has to have one."""
    text = inspect.getdoc(thing)
    asked = "an equation, Args, Returns, Raises, an example and the source"
    assert text, f"{name} has no docstring. CONTRIBUTING, How it reads, asks for {asked}."
    return text
