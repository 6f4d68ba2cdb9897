"""Docstrings as reStructuredText.

They are written for `help` and read like Markdown: single backticks, equations indented by four,
which equations.py sets, and Google's sections, which napoleon reads.
"""

import re
from typing import Any

import equations
from public_names import public_name
from sphinx.application import Sphinx

SECTIONS = re.compile(r"^(?=(?:Args|Attributes|Returns|Raises|Examples?|Source):)", re.MULTILINE)
EQUATION = re.compile(r"((?:^    .*\n(?:\n(?=    ))?)+)", re.MULTILINE)


def restructure(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Changes the lines of a docstring."""
    head, *sections = SECTIONS.split("\n".join(lines) + "\n")
    parts = [
        equations.of_docstring(part, obj) or f".. code-block:: text\n\n{part}"
        if part.startswith("    ")
        else marked(part, name)
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
        other = public_name(code)
        is_link = other and name != f"jgrad.{other}"
        role = f":py:obj:`{code} <jgrad.{other}>`" if is_link else f"``{code}``"
        plural = text[found.end() : found.end() + 1].isalpha()  # a letter has to be set apart
        return f"{role}\\ " if plural else role

    # The last: "s." after the name of an argument would be an item of a list.
    return re.sub(r"`([^`]+)`|[|*]|(?<=: )(?=\w\.\s)", new, text)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", restructure, priority=400)  # before napoleon
    return {"parallel_read_safe": True}
