"""Equations, which are plain text in docstrings and on pages, as mathematics: MathML for browsers.

    w'  = w - learning_rate (sign(beta1 m + (1 - beta1) g) + weight_decay w)

Factors stand side by side, with a space; products and quotients are read from the left. A name and
`(` without a space is a call. `|` opens behind a space, and closes elsewhere. Words that are no
quantities are text. What is not in this grammar, as code is not, stays as it is.
"""

import html
import inspect
import re
import textwrap
from collections.abc import Collection
from typing import Any, NamedTuple

from docutils import nodes
from sphinx.application import Sphinx

TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)(?!\w)"
    r"|`(?P<code>\w+)`"
    r"|(?P<name>[A-Za-z]\w*(?:'s\b|(?:-[A-Za-z]+)*))(?P<primes>'*)"
    r"|(?P<mark>>=|<=|\.\.\.|[-+=/^|()\[\],;:<>]))"
)
WORD = re.compile(r"[a-z-]{2,}|\w+'s")
GREEK = {"alpha", "beta", "delta", "epsilon", "eta", "gamma", "tau"}
SIGNS = {"-": "minus", ">=": "ge", "<=": "le", "...": "hellip", "<": "lt", ">": "gt"}
CLOSING = {"(": ")", "[": "]", "|": "|"}
SPACES = {
    ("factor", "factor"): 0.2,
    ("text", "factor"): 0.3,
    ("factor", "text"): 0.3,
    ("text", "text"): 0.3,
    ("comma", "text"): 0.2,
}
SPACE = '<mspace width="{}em"/>'
FRACTION = "<mfrac>{}{}</mfrac>"
PART = '<mstyle displaystyle="true" scriptlevel="0">{}</mstyle>'
PAGES = ("methods",)
EQUATION = re.compile(r"\w+' = ")


class Part(NamedTuple):
    kind: str  # factor, text, comma, or sign
    shown: str
    inside: str = ""  # of parentheses, which a fraction replaces
    power: str = "<msup>{}{}</msup>"  # how it takes an exponent


class Reader:
    """Reads a part of a line; names are those of quantities."""

    def __init__(self, line: str, names: Collection[str]) -> None:
        self.names = names
        self.tokens: list[re.Match[str]] = []
        self.at = end = 0
        while end < len(line.rstrip()):
            found = TOKEN.match(line, end)
            if not found:
                raise ValueError(f"no equation: {line[end:]!r}")
            self.tokens.append(found)
            end = found.end()

    def mark(self, *marks: str, apart: bool = True) -> str:
        """The next token if it is such a mark; `apart` allows a space before it."""
        token = self.tokens[self.at] if self.at < len(self.tokens) else None
        if token is None or (not apart and token[0][0].isspace()):
            return ""
        return token["mark"] if token["mark"] in marks else ""

    def is_word(self, at: int) -> bool:
        """Whether a token is a word of prose."""
        name = self.tokens[at]["name"] if 0 <= at < len(self.tokens) else None
        is_quantity = name in self.names or name in GREEK or (name and self.tokens[at]["primes"])
        return bool(name and not is_quantity and WORD.fullmatch(name))

    def all(self) -> str:
        """The whole part."""
        found = self.sequence()
        if self.at < len(self.tokens):
            raise ValueError("a mark that closes nothing")
        return found

    def sequence(self, closing: str = "") -> str:
        """Sums, relations and text, up to a closing mark or the end."""
        parts: list[Part] = []
        start = 0  # of the last product
        while self.at < len(self.tokens):
            if closing and self.mark(closing) and not (closing == "|" and self.opens()):
                break
            sign = self.mark(*"+-=,;:<>/", ">=", "<=", "...")
            if sign == "/":
                self.at += 1
                below, above = self.factor(), parts[start:]
                if not above:
                    raise ValueError("nothing is divided")
                lone = above[0].inside if len(above) == 1 else ""
                both = (lone or joined(above)), (below.inside or below.shown)
                parts[start:] = [Part("factor", FRACTION.format(*map(PART.format, both)))]
            elif sign:
                self.at += 1
                shown = f"<mo>&{SIGNS[sign]};</mo>" if sign in SIGNS else f"<mo>{sign}</mo>"
                parts.append(Part("comma" if sign in ",;:" else "sign", shown))
                start = len(parts)
            else:
                parts.append(self.factor())
                is_new = len(parts) > 1 and parts[-2].kind == "text"
                start = len(parts) - 1 if is_new or parts[-1].kind == "text" else start
        return f"<mrow>{joined(parts)}</mrow>"

    def opens(self) -> bool:
        """Whether the bar that comes next opens: behind a space, or a mark that opens."""
        before = self.tokens[self.at - 1]["mark"] if self.at else "("
        return before in ("(", "[") or not self.mark("|", apart=False)

    def group(self) -> Part:
        """What stands in parentheses, brackets or bars."""
        opening = self.mark("(", "[", "|")
        if not opening or (opening == "|" and not self.opens()):
            raise ValueError("no factor")
        self.at += 1
        inside, closing = self.sequence(CLOSING[opening]), CLOSING[opening]
        if not self.mark(closing):
            raise ValueError(f"{opening} is not closed")
        self.at += 1
        first, last = (f'<mo fence="true" form="{x}">' for x in ("prefix", "postfix"))
        shown = f"<mrow>{first}{opening}</mo>{inside}{last}{closing}</mo></mrow>"
        return Part("factor", shown, inside if opening != "|" else "")

    def factor(self) -> Part:
        """A number, a name, a call, a group or a word, with its exponent."""
        if self.at == len(self.tokens):
            raise ValueError("an end, where a factor should be")
        token = self.tokens[self.at]
        self.at += not token["mark"]
        if token["mark"]:
            found = self.group()
        elif token["number"]:
            found = Part("factor", f"<mn>{token['number']}</mn>")
        elif token["code"]:
            found = Part("text", f'<mi class="code" mathvariant="normal">{token["code"]}</mi>')
        else:
            found = self.named(token)
        if self.mark("^"):
            self.at += 1
            sign = "<mo>&minus;</mo>" if self.mark("-") else ""
            self.at += bool(sign)
            power = self.factor()
            power = f"<mrow>{sign}{power.inside or power.shown}</mrow>"
            found = Part("factor", found.power.format(found.shown, power))
        return found

    def named(self, token: re.Match[str]) -> Part:
        """What a name is, and what it is called with."""
        at, name = self.at - 1, token["name"]
        called = self.mark("(", "[", apart=False)
        if name == "sqrt" and called == "(":
            return Part("factor", f"<msqrt>{self.group().inside}</msqrt>")
        is_article = name == "a" and (self.is_word(at - 1) or self.is_word(at + 1))
        if is_article or (self.is_word(at) and not called):
            return Part("text", f'<mi mathvariant="normal">{name}</mi>')
        letter, index = symbol(name)
        if name in GREEK and called == "[":
            index, called = self.group().inside, ""
        shown = f"<mi>{letter}</mi>"
        if token["primes"]:
            shown = f"<mrow>{shown}<mo>{'&prime;' * len(token['primes'])}</mo></mrow>"
        if index and not called:
            is_power = self.mark("^")
            power = f"<msubsup>{{}}{index}{{}}</msubsup>"
            shown = shown if is_power else f"<msub>{shown}{index}</msub>"
            return Part("factor", shown, power=power)
        while self.mark("(", "[", apart=False):
            shown += self.group().shown
        return Part("factor", f"<mrow>{shown}</mrow>" if called else shown)


def joined(parts: list[Part]) -> str:
    """Parts with the spaces between them; signs have their own."""
    found = ""
    for i, part in enumerate(parts):
        width = SPACES.get((parts[i - 1].kind, part.kind)) if i else None
        found += (SPACE.format(width) if width else "") + part.shown
    return found


def symbol(name: str) -> tuple[str, str]:
    """A letter, or a word, and its index if it has one; Greek letters are named."""
    letters = {x: f"&{x};" for x in GREEK}
    found = re.fullmatch(r"([A-Za-z]+?)(?:_([a-z]|\d)|(\d))", name)
    if found and (found[2] or found[1] in GREEK):
        index = found[2] or found[3]
        kind = "mn" if index.isdigit() else "mi"
        return letters.get(found[1], found[1]), f"<{kind}>{index}</{kind}>"
    return letters.get(name, name), ""


def rows(text: str) -> list[tuple[str, list[str]]]:
    """By line what stands before the first `=`, and what behind it; spaces set notes apart."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        left, equals, right = line.partition(" = ")
        if equals:
            found.append((left.strip(), re.split(r"\s{2,}", right.strip())))
        elif found:
            found[-1][1][-1] += f" {line.strip()}"
        else:
            break
    if not found:
        raise ValueError(f"no equation: {text}")
    return found


def mathml(text: str, names: Collection[str] = (), end: str = "") -> str:
    """Lines of equations, and a mark behind the last; a ValueError if they have something else."""
    lines = rows(text)
    lefts = [left for left, _ in lines]
    lefts += [part.partition(" = ")[0] for _, right in lines for part in right if " = " in part]
    known = {*names, *re.findall(r"\w+", " ".join(lefts))}
    table = []
    for left, right in lines:
        cells = [Reader(left, known).all(), "<mo>=</mo>"]
        cells.append(SPACE.format(2).join(Reader(part, known).all() for part in right))
        table.append("".join(f"<mtd>{x}</mtd>" for x in cells))
    table[-1] = table[-1].removesuffix("</mtd>") + f"<mtext>{end}</mtext></mtd>"
    shown = "".join(f"<mtr>{row}</mtr>" for row in table)
    alt = html.escape(text).replace("\n", "&#10;")
    return (
        f'<math display="block" alttext="{alt}"><mtable displaystyle="true">{shown}</mtable></math>'
    )


def of_docstring(text: str, obj: Any) -> str:
    """Equations of a docstring as reStructuredText; nothing if they are none."""
    try:
        names = inspect.signature(obj).parameters if callable(obj) else ()
        shown = mathml(textwrap.dedent(text).rstrip(), names)
    except ValueError:
        return ""
    return f'.. raw:: html\n\n    <div class="equation">{shown}</div>\n\n'


def set_inline(app: Sphinx, doctree: nodes.document) -> None:
    """The equations of a page, each on a line of its own with the mark that follows it."""
    if app.env.docname not in PAGES:
        return
    for code in list(doctree.findall(nodes.literal)):
        follows = code.next_node(nodes.Text, descend=False, siblings=True)
        mark = re.match(r"[.,]", follows.astext()) if follows else None
        try:
            lines = code.astext().replace("; ", ";\n") if EQUATION.match(code.astext()) else ""
            shown = mathml(lines, end=mark[0] if mark else "")
        except ValueError:
            continue
        if mark:
            follows.parent.replace(follows, nodes.Text(follows.astext()[1:].lstrip()))
        shown = f'<span class="equation">{shown}</span>'
        code.replace_self(nodes.raw("", shown, format="html"))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", set_inline)
    return {"parallel_read_safe": True}
