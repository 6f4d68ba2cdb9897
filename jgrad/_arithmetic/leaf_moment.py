"""A moment of one leaf, and `write`, which stores the new one in the form of the old one.

A method is a function of one leaf. It gets a moment of each kind, reads `old`, and passes `write`
the rule that makes the new one. A form with a kernel hands it moments of its own.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import numerics, rules
from jgrad._arithmetic.leafwise import Function
from jgrad._trees import forms
from jgrad._trees.protocols import Leaf, PyTree
from jgrad._trees.shardings import barrier

T = TypeVar("T")


class Moments:
    """What a function of one leaf gets for a moment: a `LeafMoment`, or a kernel's own.

    Attributes:
      old: to read; rules decode it.
      new: what `write` stored.
    """

    old: Leaf
    new: Leaf = None

    def write(self, rule: Function, *args: Leaf) -> jax.Array:
        """The new moment as updates are computed from it, before it is rounded."""
        raise NotImplementedError

    @staticmethod
    def again(tree: T) -> T:
        """The arrays to compute with for a second time."""
        raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class LeafMoment(Moments):
    """A moment of one leaf, as arrays.

    Attributes:
      old: as the state has it, to read; rules decode it.
      rounding: how it is rounded; None where nothing is.
      flag: whether the update is committed; None where it always is.
      clips: whether what overflows then becomes the largest number.
      has_form: whether it is stored as it was; functional updates cast what they return.
      new: what `write` stored.
    """

    old: Leaf
    rounding: Any = None  # a `Rounding`, in a kernel a `TileRounding`
    flag: jax.Array | None = None
    clips: bool = dataclasses.field(default=False, metadata={"static": True})
    has_form: bool = dataclasses.field(default=True, metadata={"static": True})

    def write(self, rule: Function, *args: Leaf) -> jax.Array:
        """The new moment as updates are computed from it, before it is rounded.

        It is stored in the form of the old one, which stays where the update is not committed. The
        rule is elementwise, and may be called twice.
        """
        if (form := forms.find(self.old)) is not None:
            return form.write(self, rule, args)
        exact = rule(*args)
        if self.flag is not None:
            exact = kept(self.old.dtype, self.clips)(exact, self.old, self.flag)
        if self.has_form and self.rounding is not None and exact.dtype == jnp.float32:
            self.new = self.rounding.in_bfloat16(exact)
            return exact
        self.new = exact = as_stored(exact, self.old) if self.has_form else exact
        return exact

    @staticmethod
    def again(tree: T) -> T:
        """Arrays to compute with for a second time: XLA would write out what two kernels read."""
        return barrier(tree)


def written(moments: Sequence[Moments]) -> list[Leaf]:
    """The new moments, each of which a function of one leaf has to write."""
    new: list[Leaf] = []
    for moment in moments:
        if moment.new is None:
            remedy = "`moment.write(rule, *args)` makes it in the form of the old one"
            raise TypeError(f"jgrad: a function of one leaf wrote no new moment: {remedy}.")
        new.append(moment.new)
    return new


def is_rounded(moment: Leaf) -> bool:
    """Whether it is rounded at random when it is stored."""
    if (form := forms.find(moment)) is not None:
        return form.is_rounded
    return moment is not None and bool(moment.dtype == jnp.bfloat16)


def as_stored(new: Leaf, old: Leaf) -> Leaf:
    """In the dtype of the old array; in half precision XLA must not skip the rounding."""
    if new.dtype == old.dtype:
        return new
    return jax.lax.optimization_barrier(new.astype(old.dtype))


@functools.cache
def kept(dtype: np.dtype, clips: bool) -> Function:
    """`rules.kept` for arrays that are stored in a dtype."""
    largest = float(jnp.finfo(dtype).max) if clips else math.inf
    return functools.partial(rules.kept, largest=largest)


def bounded(rule: Function, flag: jax.Array | None, clips: bool) -> Function:
    """A rule whose results may be kept: finite unless they are NaN, where that is asked for."""
    if flag is None or not clips:
        return rule
    # Kept on the rule, so that it lives as long: it may be a user's.
    kept_there: Function = vars(rule).setdefault("_bounded", functools.partial(_bounded, rule))
    return kept_there


def _bounded(rule: Function, *args: PyTree) -> jax.Array:
    return numerics.clipped(rule(*args), float(jnp.finfo(jnp.float32).max))
