"""Edits of a program by place and syntax: formatting, moves and most renames leave them valid.

A place is the name of a function, class or constant, as `numerics.scaled` or `Layout.share`: as
much of the dotted name as only one definition ends with. A pattern is an expression or statements,
found by their syntax trees inside the place: `X`, `Y` and other single capital letters stand for
any expression, the same wherever the letter stands, and `_` for any.
"""

import ast
import functools
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

PACKAGE = pathlib.Path(__file__).parents[2] / "jgrad"
_LETTER = re.compile("[A-Z]")


class Place(NamedTuple):
    """A definition.

    Attributes:
      name: dotted, from the folder of the file on.
      path: the file.
      tree: the definition itself.
    """

    name: str
    path: pathlib.Path
    tree: ast.AST


def find(name: str, package: pathlib.Path = PACKAGE) -> Place:
    """The only definition whose dotted name is `name`, or ends with it."""
    found = [x for x in _places(package) if f".{x.name}".endswith(f".{name}")]
    if len(found) != 1:
        names = ", ".join(x.name for x in found) or "none"
        raise ValueError(f"expected the name of one place of {package.name}, got {name!r}: {names}")
    return found[0]


def edited(place: Place, old: str, new: str) -> str:
    """The text of a place's file, with `new` for the only part of the place that `old` matches."""
    before, after = ast.parse(old).body, ast.parse(new).body
    is_expression = all(len(x) == 1 and isinstance(x[0], ast.Expr) for x in (before, after))
    pattern = [x.value for x in before] if is_expression else before
    found = [
        (nodes, letters)
        for nodes in _parts(place.tree, len(pattern), ast.expr if is_expression else ast.stmt)
        if _matches(pattern, nodes, letters := {})
    ]
    if len(found) != 1:
        raise ValueError(f"expected {old!r} once in {place.name}, found it {len(found)} times")
    nodes, letters = found[0]
    text = "\n".join(ast.unparse(_Filled(letters).visit(x)) for x in after)
    indented = text.replace("\n", "\n" + " " * nodes[0].col_offset)
    return _spliced(place, nodes, f"({text})" if is_expression else indented)


@functools.cache
def _places(package: pathlib.Path) -> list[Place]:
    found = []
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package).with_suffix("").parts)
        found += _definitions(Place(name, path, ast.parse(path.read_text())))
    return found


def _definitions(outer: Place) -> Iterator[Place]:
    """The definitions in a module or another definition, and those in them."""
    for node in ast.iter_child_nodes(outer.tree):
        names = []
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            is_overload = "overload" in map(ast.unparse, node.decorator_list)
            names = [] if is_overload else [node.name]
        elif isinstance(outer.tree, (ast.Module, ast.ClassDef)):
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            names = [x.id for x in targets if isinstance(x, ast.Name)]
        for name in names:
            yield Place(f"{outer.name}.{name}", outer.path, node)
        inner = f"{outer.name}.{names[0]}" if names else outer.name
        yield from _definitions(Place(inner, outer.path, node))


def _parts(tree: ast.AST, count: int, kind: type[ast.AST]) -> Iterator[list[Any]]:
    """Each expression of a tree, or each `count` statements that follow each other."""
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and kind is ast.expr:
            yield [node]
        for name in ("body", "orelse", "finalbody") if kind is ast.stmt else ():
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield from (block[i : i + count] for i in range(len(block) - count + 1))


def _matches(pattern: Any, value: Any, letters: dict[str, ast.expr]) -> bool:
    """Whether a part of a tree is what a pattern says; `letters` gets what they stand for."""
    if isinstance(pattern, ast.Name) and isinstance(value, ast.expr):
        if pattern.id == "_":
            return True
        if _LETTER.fullmatch(pattern.id):
            return ast.unparse(letters.setdefault(pattern.id, value)) == ast.unparse(value)
    if type(pattern) is not type(value):
        return False
    if isinstance(pattern, list):
        same_length = len(pattern) == len(value)
        return same_length and all(_matches(*x, letters) for x in zip(pattern, value, strict=True))
    if isinstance(pattern, ast.AST):
        fields = [name for name in pattern._fields if name != "ctx"]
        return all(_matches(getattr(pattern, x), getattr(value, x), letters) for x in fields)
    return bool(pattern == value)


class _Filled(ast.NodeTransformer):
    """A pattern with expressions in the places of its letters."""

    def __init__(self, letters: dict[str, ast.expr]):
        self._letters = letters

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._letters[node.id] if _LETTER.fullmatch(node.id) else node


def _spliced(place: Place, nodes: list[Any], new: str) -> str:
    """The text of a place's file, with `new` for some nodes. The columns of a node count bytes."""
    text = place.path.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    begin = starts[nodes[0].lineno - 1] + nodes[0].col_offset
    end = starts[nodes[-1].end_lineno - 1] + nodes[-1].end_col_offset
    return (text[:begin] + new.encode() + text[end:]).decode()
