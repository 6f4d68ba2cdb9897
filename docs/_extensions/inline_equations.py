"""Quantities and terms in prose as mathematics, beside the equations that have them.

`m' / sqrt(v')`, `|w|`, `g g^T` and single letters are found by their form, in docstrings that begin
with an equation and on the pages of equations.py. What that file cannot read stays as it is.
"""

import html
import re

from docutils import nodes
from docutils.parsers.rst import states
from equations import PAGES, Reader
from public_names import within
from sphinx.application import Sphinx

_NAMES = r"[B-HJ-Zb-z]|[a-z]+(?:_[a-z]+)+|average|ratio|beta\d?|epsilon|delta|eta"
_NAME = rf"(?:learning_rate direction|{_NAMES})(?![\w-])(?:'+(?!\w))?"
_GAP = r"(?: |\n *)"  # a line may end within a term
_NUMBER = r"\d+(?:\.\d+)?(?![\w.])"
_CALL = r"(?:sqrt|diag|RMS|min|max)\([^()`]*\)"
_GROUP = rf"\((?:{_NAME}|{_NUMBER}|[-+/^]|{_GAP})+\)"
_POWER = r"(?:\^(?:-?[A-Za-z\d]+|\([^()]*\)))?"
_FACTOR = rf"(?:\|[\w'. /]+\||{_CALL}|{_GROUP}|{_NAME}|{_NUMBER}){_POWER}"
# Of factors that stand side by side or have a sign between them, at least one is no plain number.
TERM = re.compile(
    rf"(?<![\w`'\u2019\"./\\\[=-])(?<!\w\(){_FACTOR}(?:(?:{_GAP}?(?:[-+/=<]|<=){_GAP}|{_GAP}){_FACTOR})*"
    r"(?![\w`\u2019\"/\[=(-])"
)
_MARK = re.compile(r"['^=|<]|sqrt|\b[B-HJ-Zb-z]\b|\beta\b|\bdelta\b")
_WORDS = re.compile(r"[\d.]+|[A-Z]*\d+")
PRIME = re.compile(r"(?<=\b[A-Za-z])\u2019(?!\w)")  # which Sphinx takes for an apostrophe
OTHERS = (nodes.title, nodes.literal_block, nodes.reference, nodes.table, nodes.raw)
DOT = "<mo>|</mo><mo>&sdot;</mo><mo>|</mo>"


def mathml(text: str) -> str:
    """A term in a line; a ValueError if it is none."""
    words = " ".join(text.split())
    if not _MARK.search(words) or _WORDS.fullmatch(words):
        raise ValueError(f"no term: {text!r}")
    shown = DOT if words == "|.|" else Reader(words, ()).all()
    return f'<math alttext="{html.escape(words)}">{shown}</math>'


def marked(prose: str) -> list[tuple[str, str]]:
    """Prose in parts: text, and a term with its MathML or with nothing."""
    found, end = [], 0
    for term in TERM.finditer(prose):
        try:
            shown = mathml(term[0])
        except ValueError:
            continue
        found += [(prose[end : term.start()], ""), (term[0], shown)]
        end = term.end()
    return [*found, (prose[end:], "")]


def of_code(code: str) -> str:
    """A span of code as MathML, if it is a term and no code; else nothing."""
    if not re.search(r"['^|]|sqrt\(| / ", code) or code.startswith("'"):
        return ""
    try:
        return mathml(code)
    except ValueError:
        return ""


def role(
    name: str, rawtext: str, text: str, lineno: int, inliner: states.Inliner
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """`:term-of-equation:` in docstrings."""
    return [nodes.raw("", mathml(text.replace("\x00", "")), format="html")], []


def set_terms(app: Sphinx, doctree: nodes.document) -> None:
    """Those of a page, in prose and as spans of code."""
    if app.env.docname not in PAGES:
        return
    for text in list(doctree.findall(nodes.Text)):
        if within(text, OTHERS):
            continue
        if isinstance(text.parent, nodes.literal):
            if shown := of_code(text.astext()):
                text.parent.replace_self(nodes.raw("", shown, format="html"))
            continue
        parts = marked(PRIME.sub("'", text.astext()))
        if len(parts) > 1:
            new = [nodes.raw("", m, format="html") if m else nodes.Text(t) for t, m in parts]
            text.parent.replace(text, new)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_role("term-of-equation", role)
    app.connect("doctree-read", set_terms, priority=600)  # equations.py is done
    return {"parallel_read_safe": True}
