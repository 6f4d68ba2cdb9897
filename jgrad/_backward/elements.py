"""Whether other libraries compute each element by itself, as `elementwise=True` promises.

An update of a layer, and one of its whole stack, are traced, and operations that do not come from
jgrad are looked at. A norm of a layer is not that of the stack, and its random bits are others.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jgrad._arithmetic import elementwise
from jgrad._trees import shares
from jgrad._trees.trees import PyTree

_NAME = "step_in_backward"

# What to use in the place of transformations of optax, by names of functions that make them.
_OURS = {
    "apply_if_finite": "`jgrad.skip_nonfinite`",
    "scale_by_factored_rms": "`jgrad.adafactor`",
    "scale_by_trust_ratio": "`jgrad.lamb`, `jgrad.lars` or `jgrad.scale_by_trust_ratio`",
}
# What devices do with arrays, each of whose elements stays by itself.
_OF_DEVICES = {
    *("device_put", "pcast", "pmax", "pmin", "psum", "psum_invariant", "pvary", "reshard"),
    "sharding_constraint",
}
_OF_NORMS = "`jgrad.clip_by_global_norm` for a norm of all gradients"
_AROUND = {"_in_shares", "chain", "with_extra_args_support"}  # of what has no such function
_UPDATE = re.compile(r"(\w+)\.<locals>\.update")


def check(update: Callable[..., PyTree], layer: PyTree, stack: PyTree) -> None:
    """An error where another library does something else.

    Args:
      update: of a share, in which all that is jgrad's is marked.
      layer: its argument.
      stack: the same for all layers at once.
    """
    programs = [jax.make_jaxpr(update)(x).jaxpr for x in (layer, stack)]
    of_layer, of_stack = (list(_of_others(program.eqns)) for program in programs)
    for outer, equation in (*of_layer, *of_stack):
        name = equation.primitive.name
        if name not in _OF_DEVICES and elementwise.mixes(equation, lambda shape: shape != ()):
            _refuse(outer, f"`{name}`, which mixes elements")
    for a, b in itertools.zip_longest(of_layer, of_stack):
        if not (a and b) or elementwise.operation(a[1]) != elementwise.operation(b[1]):
            _refuse((a or b)[0], "something else of a layer than of its stack, by its shape")


def _refuse(equation: Any, does: str) -> None:
    name = _maker(equation)
    who = f"`{name}` of another library" if name else "a transformation of another library"
    ours = _OURS.get(name, _OF_NORMS if "`reduce_sum`" in does else None)
    remedy = f"use {ours}, or the ordinary step" if ours else "use the ordinary step"
    raise ValueError(
        f"{_NAME}: `tx`: {who} computes {does}. It sees one layer at a time: {remedy}."
    )


def _of_others(equations: Sequence[Any], outer: Any = None) -> Iterator[tuple[Any, Any]]:
    """The operations of other libraries, each with the outermost that it is in.

    Args:
      equations: of a program.
      outer: the operation whose program it is, if that is of another library.
    """
    for equation in equations:
        scopes = str(equation.source_info.name_stack)
        is_marked = shares.is_others(scopes)
        around = outer if is_marked is None else (outer or equation) if is_marked else None
        for inner in elementwise.programs(equation):
            yield from _of_others(inner.eqns, around)
        if around is not None:
            yield around, equation


def _maker(equation: Any) -> str:
    """The function that made the transformation which an operation is of; "" if nothing says it."""
    traceback = equation.source_info.traceback  # may change, checked in JAX 0.8 to 0.12
    codes = traceback.raw_frames()[0] if hasattr(traceback, "raw_frames") else ()
    names = (_UPDATE.match(code.co_qualname) for code in codes)
    name = next((name[1] for name in names if name), "")
    return "" if name in _AROUND else name
