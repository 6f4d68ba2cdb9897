"""How near a step comes to the speed of the memory, and how many kernels it launches.

What counts on a GPU, where one loop may write several arrays. On a CPU it runs too, for tests.
"""

import collections
import math
import re
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.measure import seconds
from benchmarks.methods import METHODS
from benchmarks.updates import program
from benchmarks.workloads import Shapes, tree

WORKS = ("one leaf, 32 M", "BERT-base, vocabulary 4096: 197 leaves, 88 M")

_IN_A_ROW = 10  # calls, so that launching one hides behind another

# Operations of a compiled program that do no work.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}

Operations = collections.Counter[str]


class Rate(NamedTuple):
    """Of one compiled step.

    Attributes:
      work: the model, in words.
      method: the name of the method.
      form: the name of the form.
      seconds: of a step.
      rate: bytes that a step must move, per second.
      copy: bytes that a copy moves, per second.
      launches: how many operations of each kind.
    """

    work: str
    method: str
    form: str
    seconds: float
    rate: float
    copy: float
    launches: Operations


def rates(work: str, shapes: Shapes, *, rounds: int) -> list[Rate]:
    """How fast each form of each method is, beside a copy."""
    elements = sum(math.prod(shape) for shape in shapes.values())
    copied = bandwidth(elements, rounds=rounds)
    found = []
    for method in ("Adam", "LAMB"):
        for form in ("optax", "tree", "packed"):
            step = program(method, form, tree(shapes, 0), tree(shapes, 1))
            step.build()
            time = _sustained(step, rounds)
            rate = METHODS[method].floor * elements / time
            found.append(Rate(work, method, form, time, rate, copied, launches(step.text)))
    return found


def bandwidth(elements: int, *, rounds: int) -> float:
    """Bytes per second of a loop that reads and writes a float32 array in place."""
    negate = jax.jit(jnp.negative, donate_argnums=0)
    x = jnp.ones(elements, jnp.float32)

    def step() -> jax.Array:
        nonlocal x
        x = negate(x)
        return x

    return 8 * elements / _sustained(step, rounds)


def _sustained(step: Callable[[], Any], rounds: int) -> float:
    """Seconds of a step among others, the median over some rows of them."""

    def row() -> Any:
        for _ in range(_IN_A_ROW - 1):
            step()
        return step()

    jax.block_until_ready(row())
    return statistics.median(seconds(row) for _ in range(rounds)) / _IN_A_ROW


def launches(text: str) -> Operations:
    """The operations of a program in XLA's words: of its entry, and of what that calls.

    A loop or a branch is one operation here, whatever happens in it.
    """
    bodies: dict[str, list[tuple[str, str]]] = {}
    entry = ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line):
            body = bodies[head[2]] = []
            entry = head[2] if head[1] else entry
        # A type comes first, in which no word stands before a parenthesis.
        elif operation := re.match(r" .* = .*? ([a-z][\w-]*)\(", line):
            called = re.search(r"to_apply=%?([\w.-]+)", line)
            body.append((operation[1], called[1] if called else ""))

    def within(name: str) -> Operations:
        found: Operations = collections.Counter()
        for operation, called in bodies[name]:
            if operation == "call":
                found += within(called)
            elif operation not in _FREE:
                found[operation] += 1
        return found

    return within(entry)
