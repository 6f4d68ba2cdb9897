"""The collectives of a compiled program, and the bytes that they reduce or gather."""

import collections
import re
from collections.abc import Iterable
from typing import NamedTuple


class Collective(NamedTuple):
    """Its kind, and bytes of the array that is reduced or gathered, when it is whole."""

    kind: str
    whole: int


# The name of an operation's result, its type, the operation, its operands.
_LINE = re.compile(r" *(?:ROOT )?%([\w.-]+) = (.*?) ([a-z][\w-]*)\(([^)]*)\)")
_KIND = re.compile(
    r"(all-reduce|reduce-scatter|all-gather|(?:ragged-)?all-to-all|collective-\w+)(?:-start)?"
)
_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,]*)\]")


def of(text: str, devices: int) -> list[Collective]:
    """Those of a compiled program, in XLA's words, if each is over all devices.

    Their bytes are those of operands, since a result may be a tuple, and that of a `-start` has the
    operands in it. In a loop they count once.
    """
    sizes, calls = {}, []
    for line in text.splitlines():
        if found := _LINE.match(line):
            name, result, operation, operands = found.groups()
            sizes[name] = sum(_size(*array) for array in _ARRAY.findall(result))
            if not operation.endswith("-done") and (kind := _KIND.fullmatch(operation)):
                calls.append((kind[1], re.findall(r"%([\w.-]+)", operands)))
    return [
        Collective(kind, sum(sizes[x] for x in own) * (devices if kind == "all-gather" else 1))
        for kind, own in calls
    ]


def _size(letters: str, bits: str, shape: str) -> int:
    """Bytes of `f32[2,3]`; a `pred` has one byte."""
    size = int(bits) if bits else 8
    for length in filter(None, shape.split(",")):
        size *= int(length)
    return size // 8


def total(found: Iterable[Collective]) -> collections.Counter[str]:
    """Bytes by kind, which merging leaves as they are."""
    sums: collections.Counter[str] = collections.Counter()
    for x in found:
        sums[x.kind] += x.whole
    return sums
