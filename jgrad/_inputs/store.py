"""New moments in the form in which a state has them: their dtype, or 8 bits.

Moments in bfloat16 and in 8 bits are rounded stochastically. To the nearest, a moment would neither
decay nor grow by less than half the distance between two numbers of its form: 0.2% in bfloat16, 3
to 6% in 8 bits.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import leafwise, numerics, one_pass, rules
from jgrad._arithmetic.apply import Stored
from jgrad._arithmetic.leafwise import Call, Function
from jgrad._inputs.commit import Commit
from jgrad._packed.arrays import ArraySpec
from jgrad._quantized import bfloat16, leaves
from jgrad._quantized.leaves import Rounding
from jgrad._quantized.random_bits import ElementKeys, bits_for, step_keys
from jgrad._trees.blocks import Blocks, is_blocks

_SEED = 0
_PURPOSE = 1  # moments; weights are rounded with other bits


class MomentStore:
    """What `apply.Store` is, for one update of a transformation.

    Args:
      specs: what each array stands for.
      step: the number of the update, counted from 1.
      commit: whether the update is committed; None where it always is.
    """

    def __init__(self, specs: Sequence[ArraySpec], step: jax.Array, commit: Commit | None) -> None:
        self._specs, self._step, self._commit = specs, step, commit
        self._known: dict[int, ElementKeys] = {}

    @functools.cached_property
    def _of_step(self) -> jax.Array:
        """Computed where something is rounded: most recipes round nothing."""
        return step_keys(self._step)

    def __call__(self, new: list[Call | None], old: list[Any]) -> Stored:
        """New moments in the form of the old ones, which stay where the update is not committed.

        Where they are rounded stochastically, a step is computed from what is rounded.
        """
        read = self._values(new, old)
        calls = [
            self._rounding_of(i, *row) for i, row in enumerate(zip(new, read, old, strict=True))
        ]
        rounded = leafwise.run(calls)
        plain = [x if r is None else None for x, r in zip(read, rounded, strict=True)]
        written = [
            x if r is None else r for x, r in zip(as_stored(plain, old), rounded, strict=True)
        ]
        if self._commit is not None:
            self._commit.keep(written, old)
        elif one_pass.is_chosen():
            # With a decision, XLA does not join the loops: they also read that.
            return Stored(written, self._values(one_pass.from_other_arrays(new), old))
        return Stored(
            written, [w if r is None else x for x, r, w in zip(read, rounded, written, strict=True)]
        )

    def of(self, specs: Sequence[ArraySpec]) -> "MomentStore":
        """That of other arrays in the same update."""
        other = copy.copy(self)
        other._specs, other._known = specs, {}
        return other

    def in_form_of(self, new: list[Any], old: list[Any]) -> list[Any]:
        """New moments that were computed in full precision, in parts, in the form of the old ones.

        Those that need no rounding are as they are; they have to be kept before.
        """
        calls = [
            (leafwise.identity, (n,)) if n is not None and is_rounded(o) else None
            for n, o in zip(new, old, strict=True)
        ]
        if not any(calls):
            return new
        written = self(calls, old).written
        return [n if w is None else w for n, w in zip(new, written, strict=True)]

    def _values(self, new: list[Call | None], old: list[Any]) -> list[Any]:
        """New moments before they are rounded; in 8 bits it is the codes that stay."""
        if self._commit is None:
            return leafwise.run(new)
        calls = [
            (_bounded(call[0]), call[1]) if call and is_blocks(o) else call
            for call, o in zip(new, old, strict=True)
        ]
        values = leafwise.run(calls)
        arrays = [None if is_blocks(o) else x for x, o in zip(values, old, strict=True)]
        kept = kept_arrays(arrays, old, self._commit)
        return [x if k is None else k for x, k in zip(values, kept, strict=True)]

    def _rounding_of(self, i: int, call: Call | None, value: Any, old: Any) -> Call | None:
        """What rounds a new moment stochastically; None where it is not."""
        if call is None:
            return None
        if not is_blocks(old):
            if not (old.dtype == jnp.bfloat16 and value.dtype == jnp.float32):
                return None
            return (_to_bfloat16, (value, self._of_step, *self._keys(i)))
        rule, arguments = call
        flag = () if self._commit is None else (self._commit.flag,)
        encoder = _encoder(rule, self._commit is not None)
        return (encoder, (old, value, self._of_step, *self._keys(i), *flag, *arguments))

    def _keys(self, i: int) -> ElementKeys:
        if i not in self._known:
            self._known[i] = self._specs[i].element_keys(_SEED, _PURPOSE)
        return self._known[i]


def is_rounded(moment: Any) -> bool:
    """Whether it is stored in 8 bits or in bfloat16."""
    return moment is not None and (is_blocks(moment) or moment.dtype == jnp.bfloat16)


def in_full_precision(moments: Sequence[Any]) -> list[Any]:
    """Moments with arrays of float32 for those in 8 bits or bfloat16."""
    calls = [(_in_float32, (x,)) if is_rounded(x) else None for x in moments]
    wide = leafwise.run(calls)
    return [x if w is None else w for x, w in zip(moments, wide, strict=True)]


@leafwise.jit_static_kwargs
def _in_float32(x: Any) -> jax.Array:
    return leaves.decoded(x) if is_blocks(x) else x.astype(jnp.float32)


def kept_arrays(new: Sequence[Any], old: Sequence[Any], commit: Commit | None) -> list[Any]:
    """The old arrays where the update is not committed."""
    if commit is None:
        return list(new)
    return leafwise.run(
        [
            None if n is None else (_kept(o.dtype), (n, o, commit.flag))
            for n, o in zip(new, old, strict=True)
        ]
    )


def as_stored(new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """In the dtypes of the old; in half precision XLA must not skip the rounding."""
    return [
        x if x is None or x.dtype == o.dtype else jax.lax.optimization_barrier(x.astype(o.dtype))
        for x, o in zip(new, old, strict=True)
    ]


@leafwise.jit_static_kwargs
def _to_bfloat16(x: jax.Array, of_step: jax.Array, leaf: jax.Array, first: jax.Array) -> jax.Array:
    return bfloat16.rounded(x, bits_for(x, of_step, ElementKeys(leaf, first)))


# One function object for each rule and dtype, so that JAX's caches find it again.


@functools.cache
def _kept(dtype: np.dtype) -> Function:
    """`rules.kept` for arrays that are stored in a dtype."""
    return functools.partial(rules.kept, largest=float(jnp.finfo(dtype).max))


@functools.cache
def _bounded(rule: Function) -> Callable[..., jax.Array]:
    """A rule whose results are finite, unless they are NaN."""

    def bounded(*arguments: Any) -> jax.Array:
        return numerics.clipped(rule(*arguments), float(jnp.finfo(jnp.float32).max))

    return bounded


@functools.cache
def _encoder(rule: Function, has_flag: bool) -> Callable[..., Blocks]:
    """What a rule makes of its arguments, in blocks; the old ones where a flag is False."""

    @jax.jit
    def encode(
        old: Blocks,
        value: jax.Array,
        of_step: jax.Array,
        leaf: jax.Array,
        first: jax.Array,
        *rest: Any,
    ) -> Blocks:
        rounding = Rounding(of_step, ElementKeys(leaf, first))
        own, dtype = leaves.geometry(old), old.codes.dtype
        if not has_flag:
            return leaves.encoded(rule, rest, own, dtype, rounding, value)
        flag, *arguments = rest
        new = leaves.encoded(_bounded(rule), arguments, own, dtype, rounding, value)
        return Blocks(*(jnp.where(flag, n, o) for n, o in zip(new, old, strict=True)))

    return encode
