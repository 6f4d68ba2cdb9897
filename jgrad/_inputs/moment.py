"""The one door for moments: new ones are written in the form in which the state has the old ones.

The form is a dtype, or 8 bits. Moments in bfloat16 and in 8 bits are rounded stochastically. To the
nearest, a moment would neither decay nor grow by less than half the distance between two numbers of
its form: 0.2% in bfloat16, 3 to 6% in 8 bits.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.leafwise import Function
from jgrad._inputs.commit import Commit
from jgrad._inputs.numbers import OfCall
from jgrad._packed.array_spec import ArraySpec
from jgrad._quantized import bfloat16, encoding, regions
from jgrad._quantized.codec import codec_of
from jgrad._quantized.encoding import Rounding
from jgrad._quantized.geometry import geometry
from jgrad._quantized.random_bits import ElementKeys, bits_for, step_keys
from jgrad._trees import checks
from jgrad._trees.blocks import Blocks
from jgrad._trees.trees import PyTree

_SEED = 0
_PURPOSE = 1  # moments; weights are rounded with other bits


class NewMoments(NamedTuple):
    """What `Moment.write` returns: two lists with an entry per leaf, `None` without a gradient.

    Attributes:
      stored: what the state will hold.
      exact: what updates are computed from, before it was rounded.
    """

    stored: list[Any]
    exact: list[Any]


class RandomKeys:
    """What the random bits of one update are a hash of; computed where something is rounded."""

    def __init__(self, step: jax.Array) -> None:
        self._step = step
        self._known: dict[int, tuple[ArraySpec, ElementKeys]] = {}

    @functools.cached_property
    def of_step(self) -> jax.Array:
        """Of all elements."""
        return step_keys(self._step)

    def of_elements(self, spec: ArraySpec) -> ElementKeys:
        """Of each element of an array."""
        if id(spec) not in self._known:
            self._known[id(spec)] = spec, spec.element_keys(_SEED, _PURPOSE)
        return self._known[id(spec)][1]


class Moment:
    """A moment of every array in one update.

    Attributes:
      old: as the state has it; a list with an entry per leaf, with `Blocks` for arrays in 8 bits.
      specs: what each array stands for.
    """

    def __init__(
        self,
        old: list[Any],
        specs: Sequence[ArraySpec] = (),
        keys: RandomKeys | None = None,
        commit: Commit | None = None,
        *,
        has_form: bool = False,
    ) -> None:
        """Without keys nothing is rounded here: functional updates cast what they return.

        Args:
          old: see above.
          specs: see above.
          keys: what it is rounded with.
          commit: whether the update is committed; None where it always is.
        """
        self.old = old
        self.specs, self._keys, self._commit = specs, keys, commit
        self._has_form = has_form or keys is not None

    def rounded(self, values: list[Any]) -> list[Any]:
        """Arrays of full precision as they are stored; those that need no rounding as they are."""
        rows = [
            None if x is None or not _is_rounded(old) else (_rounded, (x, self.of_leaf(i)))
            for i, (x, old) in enumerate(zip(values, self.old, strict=True))
        ]
        new = leafwise.run(rows)
        self.settled(new)
        return [x if n is None else n for x, n in zip(values, new, strict=True)]

    def of_leaf(self, i: int) -> "LeafMoment":
        """The moment of one leaf, to read and to write."""
        old, keys = self.old[i], None
        if self._keys is not None and _is_rounded(old):
            keys = self._keys.of_step, *self._keys.of_elements(self.specs[i])
        flag = None if self._commit is None else self._commit.flag
        clips = self._commit is not None and self._commit.clips
        return LeafMoment(old, keys, flag, clips, self._has_form)

    def settled(self, new: list[Any]) -> NewMoments:
        """New moments that were written leaf by leaf."""
        if self._has_form and self._commit is not None:
            self._commit.keep(new, self.old)
        return NewMoments(new, new)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class LeafMoment:
    """A moment of one leaf: `old` to read, and the one door for the new one.

    Attributes:
      old: as the state has it.
      keys: of its random bits, if it is rounded.
      flag: whether the update is committed; None where it always is.
      clips: whether what overflows becomes the largest number then.
      has_form: whether it is stored as it was; functional updates cast what they return.
    """

    old: Any
    keys: Any = None
    flag: Any = None
    clips: bool = dataclasses.field(default=False, metadata={"static": True})
    has_form: bool = dataclasses.field(default=True, metadata={"static": True})
    new = None

    def write(self, rule: Function, *args: Any) -> jax.Array:
        """The new moment as updates are computed from it, before it is rounded."""
        is_blocks = isinstance(self.old, Blocks)
        rule = _bounded(rule) if is_blocks and self.flag is not None and self.clips else rule
        self.new = exact = rule(*args)
        if self.flag is not None and not is_blocks:
            kept = _kept(self.old.dtype, self.clips)
            self.new = exact = kept(exact, self.old, self.flag)
        if self.has_form and is_blocks:
            flag = () if self.flag is None else (self.flag,)
            encode = _encoder(rule, bool(flag), regions.is_possible(self.old))
            self.new = encode(self.old, exact, *self.keys, *flag, *args)
        elif self.has_form and _is_rounded(self.old) and exact.dtype == jnp.float32:
            self.new = _to_bfloat16(exact, *self.keys)
        elif self.has_form:
            self.new = exact = as_stored(exact, self.old)
        return exact


def _rounded(x: jax.Array, moment: LeafMoment) -> Any:
    moment.write(leafwise.identity, x)
    return moment.new


class MomentShapes(NamedTuple):
    """What a method keeps, for given parameters.

    Attributes:
      mw: a tree like the parameters with the shape of each first moment; None for no moment.
      vw: likewise of second moments.
      matrices: of Muon, where those of each leaf are; None for a leaf that is none.
    """

    mw: PyTree
    vw: PyTree
    matrices: list[Any] | None = None


class Step(NamedTuple):
    """What one update of a method starts from.

    Attributes:
      number: of this update, counted from 1.
      done: updates done before, as the state has it.
      mw: first moment, of nothing where the method has none.
      vw: second moment; likewise.
      matrices: of `MomentShapes`.
      numbers: keyword arguments of this call of `update`, such as `learning_rate`.
    """

    number: jax.Array
    done: jax.Array
    mw: Moment
    vw: Moment
    matrices: list[Any]
    numbers: OfCall

    @classmethod
    def of_count(cls, done: jax.Array) -> "Step":
        """Of a wrapper, for options: they ask a step for its number alone."""
        nothing = Moment([], [])
        return cls(done, done, nothing, nothing, [], OfCall({}))


def in_full_precision(moments: Sequence[Any]) -> list[Any]:
    """Moments with arrays of float32 for those in 8 bits or bfloat16."""
    calls = [(_in_float32, (x,)) if _is_rounded(x) else None for x in moments]
    wide = leafwise.run(calls)
    return [x if w is None else w for x, w in zip(moments, wide, strict=True)]


def _is_rounded(moment: Any) -> bool:
    """Whether it is stored in 8 bits or in bfloat16."""
    return moment is not None and (isinstance(moment, Blocks) or moment.dtype == jnp.bfloat16)


@leafwise.jit_static_kwargs
def _in_float32(x: Any) -> jax.Array:
    return encoding.decoded(x) if isinstance(x, Blocks) else x.astype(jnp.float32)


def check_form(function: str, new: Sequence[Any], old: Sequence[Any]) -> None:
    """No array is written where the state has codes: it would be cast to their dtype."""
    for n, o in zip(new, old, strict=True):
        if n is not None and isinstance(o, Blocks) and not isinstance(n, Blocks):
            expected = "expected Blocks, as `Moment.write` makes them"
            raise TypeError(f"{function}: a moment in 8 bits: {checks.describe(n)}, {expected}.")


def kept_arrays(new: Sequence[Any], old: Sequence[Any], commit: Commit | None) -> list[Any]:
    """The old arrays where the update is not committed."""
    if commit is None:
        return list(new)
    return leafwise.run(
        [
            None if n is None else (_kept(o.dtype, commit.clips), (n, o, commit.flag))
            for n, o in zip(new, old, strict=True)
        ]
    )


def as_stored(new: Any, old: Any) -> Any:
    """In the dtype of the old array; in half precision XLA must not skip the rounding."""
    if new is None or new.dtype == old.dtype:
        return new
    return jax.lax.optimization_barrier(new.astype(old.dtype))


@leafwise.jit_static_kwargs
def _to_bfloat16(x: jax.Array, of_step: jax.Array, leaf: jax.Array, first: jax.Array) -> jax.Array:
    return bfloat16.rounded(x, bits_for(x, of_step, ElementKeys(leaf, first)))


# One function object for each rule and dtype, so that JAX's caches find it again.


@functools.cache
def _kept(dtype: np.dtype, clips: bool) -> Function:
    """`rules.kept` for arrays that are stored in a dtype."""
    largest = float(jnp.finfo(dtype).max) if clips else math.inf
    return functools.partial(rules.kept, largest=largest)


@functools.cache
def _bounded(rule: Function) -> Callable[..., jax.Array]:
    """A rule whose results are finite, unless they are NaN."""

    def bounded(*arguments: Any) -> jax.Array:
        return numerics.clipped(rule(*arguments), float(jnp.finfo(jnp.float32).max))

    return bounded


@functools.cache
def _encoder(rule: Function, has_flag: bool, is_region: bool) -> Callable[..., Blocks]:
    """What a rule makes of its arguments, in blocks; the old ones where a flag is False."""

    def encode(
        old: Blocks,
        value: jax.Array,
        of_step: jax.Array,
        leaf: jax.Array,
        first: jax.Array,
        *rest: Any,
    ) -> Blocks:
        rounding = Rounding(of_step, ElementKeys(leaf, first))
        own, codec = geometry(old), codec_of(old)
        if not has_flag:
            return encoding.encoded(rule, rest, own, codec, rounding, value)
        flag, *arguments = rest
        new = encoding.encoded(rule, arguments, own, codec, rounding, value)
        return jax.tree.map(functools.partial(jnp.where, flag), new, old)

    if is_region:
        encode.__name__ = regions.ENCODE_IF if has_flag else regions.ENCODE
    return jax.jit(encode)
