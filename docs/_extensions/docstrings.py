"""Docstrings as reStructuredText.

They are written for `help` and read like Markdown: single backticks, equations indented by four,
which equations.py sets, and Google's sections, which napoleon reads.
"""

import re
from typing import Any

import equations
import inline_equations
from public_names import public_name
from sphinx.application import Sphinx

SECTIONS = re.compile(r"^(?=(?:Args|Attributes|Returns|Raises|Examples?|Source):)", re.MULTILINE)
# Spans of code with an ending of a plural, and names of arguments that are described.
CODE = re.compile(r"(`[^`]+`s?|^  [\w*]+(?:, [\w*]+)*: )", re.MULTILINE)
EQUATION = re.compile(r"((?:^    .*\n(?:\n(?=    ))?)+)", re.MULTILINE)


def restructure(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Changes the lines of a docstring."""
    head, *sections = SECTIONS.split("\n".join(lines) + "\n")
    parts = EQUATION.split(head)
    prose = with_terms if len(parts) > 1 else marked
    parts = [
        equations.of_docstring(part, obj) or f".. code-block:: text\n\n{part}"
        if part.startswith("    ")
        else prose(part, name)
        for part in parts
    ]
    for section in sections:
        if section.startswith("Example"):
            parts.append(section)
            continue
        section = re.sub(r"^Source: ", "Source:\n  ", section)
        section = re.sub(r"^Raises:\n  (?=As )", ":raises: ", section)  # no type: one sentence
        parts.append(prose(section, name))
    lines[:] = "\n".join(parts).splitlines()


def with_terms(text: str, name: str) -> str:
    """Prose beside an equation, in which its quantities are set like there."""
    found = prose = ""
    for part in CODE.split(text):
        pieces = inline_equations.marked(part)
        if CODE.fullmatch(part):
            shown = inline_equations.of_code(part.strip("`"))
            pieces = [(part.strip("`") if shown else part, shown)]
        for written, shown in pieces:
            prose += "" if shown else written
            if shown:
                found += f"{marked(prose, name)}:term-of-equation:`{written}`"
                prose = ""
    return found + marked(prose, name)


def marked(text: str, name: str) -> str:
    """Prose with links to public names, and without characters that would mean something else."""

    def new(found: re.Match[str]) -> str:
        if found[1] is None:
            return f"\\{found[0]}"
        code = " ".join(found[1].split())  # napoleon reads a role to the end of its line
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
