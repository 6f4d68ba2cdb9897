"""The one door for moments: new ones are written in the form in which the state has the old ones.

The form is a dtype, or 8 bits. Moments in bfloat16 and in 8 bits are rounded stochastically. To the
nearest, a moment would neither decay nor grow by less than half the distance between two numbers of
its form: 0.2% in bfloat16, 3 to 6% in 8 bits.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.leafwise import Call, Function
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

    def write(self, new: list[Call | None]) -> NewMoments:
        """New moments, from the calls that compute them.

        They have the form of the old ones, which stay where the update is not committed. All new
        moments of a method come by here: what is cast to codes of 8 bits would be meaningless.
        """
        exact = leafwise.run(new) if self._commit is None else self._old_or_new(new, self._commit)
        if self._keys is None:
            return NewMoments(exact, exact)
        rounded = leafwise.run(list(map(self._rounding, range(len(new)), new, exact)))
        stored = []
        for i, (x, r, old) in enumerate(zip(exact, rounded, self.old, strict=True)):
            stored.append(as_stored(x, old) if r is None else r)
            if r is None:
                exact[i] = stored[i]
        if self._commit is not None:
            self._commit.keep(stored, self.old)
        return NewMoments(stored, exact)

    def rounded(self, values: list[Any]) -> list[Any]:
        """Arrays of full precision as they are stored; those that need no rounding as they are."""
        pairs = zip(values, self.old, strict=True)
        new = [
            (leafwise.identity, (x,)) if x is not None and _is_rounded(o) else None
            for x, o in pairs
        ]
        if not any(new):
            return values
        stored = self.write(new).stored
        return [x if s is None else s for x, s in zip(values, stored, strict=True)]

    def _old_or_new(self, new: list[Call | None], commit: Commit) -> list[Any]:
        """New moments, or the old ones, before they are rounded; `_encoder` keeps codes."""
        pairs = zip(new, self.old, strict=True)
        values = leafwise.run(
            [
                (self._kept_rule(call[0]), call[1]) if call and isinstance(o, Blocks) else call
                for call, o in pairs
            ]
        )
        arrays = [
            None if isinstance(o, Blocks) else x for x, o in zip(values, self.old, strict=True)
        ]
        kept = kept_arrays(arrays, self.old, commit)
        return [x if k is None else k for x, k in zip(values, kept, strict=True)]

    def _rounding(self, i: int, call: Call | None, value: Any) -> Call | None:
        """What rounds a new moment stochastically; None where it is not."""
        old = self.old[i]
        if call is None or not _is_rounded(old):
            return None
        if not (isinstance(old, Blocks) or value.dtype == jnp.float32):
            return None
        assert self._keys is not None
        keys = self._keys.of_step, *self._keys.of_elements(self.specs[i])
        if not isinstance(old, Blocks):
            return (_to_bfloat16, (value, *keys))
        rule, arguments = call
        flag = () if self._commit is None else (self._commit.flag,)
        encode = _encoder(self._kept_rule(rule), bool(flag), regions.is_possible(old))
        return (encode, (old, value, *keys, *flag, *arguments))

    def _kept_rule(self, rule: Function) -> Function:
        """A rule whose results may be kept: finite, where its arguments are known to be."""
        return _bounded(rule) if self._commit is not None and self._commit.clips else rule


class MomentShapes(NamedTuple):
    """What a method keeps, for given parameters.

    Attributes:
      mw: a tree like the parameters with the shape of each first moment; None for no moment.
      vw: likewise of second moments.
      found: what the method found out about the parameters, for its update.
    """

    mw: PyTree
    vw: PyTree
    found: Any = None


class Step(NamedTuple):
    """What one update of a method starts from.

    Attributes:
      number: of this update, counted from 1.
      done: updates done before, as the state has it.
      mw: first moment, of nothing where the method has none.
      vw: second moment; likewise.
      found: of `MomentShapes`.
      numbers: keyword arguments of this call of `update`, such as `learning_rate`.
    """

    number: jax.Array
    done: jax.Array
    mw: Moment
    vw: Moment
    found: Any
    numbers: OfCall

    @classmethod
    def of_count(cls, done: jax.Array) -> "Step":
        """Of a wrapper, for options: they ask a step for its number alone."""
        nothing = Moment([], [])
        return cls(done, done, nothing, nothing, None, OfCall({}))


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
