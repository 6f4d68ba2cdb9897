"""Whole programs of colabs/ as pages: their docstring as prose, and the code behind it."""

import ast
import pathlib
import re
from typing import NamedTuple

FOLDER = pathlib.Path(__file__).parents[2] / "colabs"
NAMES = ("train_nnx", "train_linen", "train_equinox", "train_sharded_nnx", "finetune_lora")


class Page(NamedTuple):
    title: str
    sentence: str  # for a card
    text: str  # Markdown


def page(name: str) -> Page:
    """The page of a program, whose docstring is Markdown below a title."""
    source = (FOLDER / f"{name}.py").read_text()
    docstring = ast.parse(source).body[0]
    title, prose = ast.literal_eval(docstring.value).strip().split("\n\n", 1)
    title = title.removesuffix(".")
    code = "\n".join(source.splitlines()[docstring.end_lineno :]).strip()
    text = f"# {title}\n\n{prose}\n\n```python\n{code}\n```\n"
    return Page(title, sentences(prose)[0], text)


def sentences(prose: str) -> list[str]:
    """Those of prose, each in one line."""
    return re.split(r"(?<=\.)\s", " ".join(prose.split()))
