"""`moment_dtype` and `full_precision`: in which form the moments of each leaf are stored."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jgrad._inputs import options
from jgrad._inputs.options import Mask
from jgrad._inputs.state import OptState, counter, zeros, zeros_of_shapes
from jgrad._inputs.update import Update
from jgrad._layers.layer_axes import read_layer_axes
from jgrad._packed import arrays
from jgrad._packed.arrays import ArraySpec
from jgrad._quantized.encoding import SMALLEST
from jgrad._trees import checks, trees
from jgrad._trees.blocks import is_blocks
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.trees import PyTree

# A dtype, 8 bits in blocks, or None for the parameter's dtype, but at least float32.
MomentDType = DTypeLike | Literal["8bit"] | None

_EIGHT_BITS = "8bit"


class MomentOptions(NamedTuple):
    """What a user gave.

    Attributes:
      dtype: `moment_dtype`.
      full_precision: leaves that "8bit" leaves alone.
      layer_axes: axes over which layers are stacked, which start on a block.
    """

    dtype: MomentDType
    full_precision: Mask = None
    layer_axes: PyTree = None

    def check(self, function: str) -> None:
        """What the factory can say already. A dtype has the range of float32, so no float16."""
        if isinstance(self.dtype, str) and self.dtype == _EIGHT_BITS:
            return
        try:
            dtype = np.dtype(np.float32 if self.dtype is None else self.dtype)
            fits = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).maxexp >= 128
        except TypeError:
            fits = False
        if not fits:
            expected = f"a real floating dtype with the range of float32, or {_EIGHT_BITS!r}"
            raise TypeError(f"{function}: `moment_dtype`: {self.dtype!r}, expected {expected}.")
        if self.full_precision is not None:
            expected = f"None without `moment_dtype={_EIGHT_BITS!r}`"
            came = checks.describe(self.full_precision)
            raise ValueError(f"{function}: `full_precision`: {came}, expected {expected}.")

    @property
    def is_8_bits(self) -> bool:
        """Whether large leaves are stored in blocks."""
        return isinstance(self.dtype, str) and self.dtype == _EIGHT_BITS

    def init(self, function: str, params: PyTree, *, mw: bool, vw: bool | PyTree) -> OptState:
        """The state before the first update; `mw` and `vw` share no buffer, for donation.

        `vw` may be a tree of shapes, of second moments that only some elements have.
        """
        dtype: Any = None if self.is_8_bits else self.dtype
        stacked = some = None
        if self.is_8_bits:
            checks.parameters(ArgLeaves.from_tree(function, "params", params).with_arrays())
            inputs = Update(function, params, params)
            stacked = self._stacked(inputs, True)
            some = stacked if vw is True else self._stacked(inputs, vw)
        first = zeros(function, params, dtype, stacked=stacked) if mw else None
        if isinstance(vw, bool):
            second = zeros(function, params, dtype, stacked=some, real=True) if vw else None
        else:
            second = zeros_of_shapes(params, vw, dtype, stacked=some)
        return OptState(counter(params), first, second)

    def check_state(self, inputs: Update, state: OptState, *, vw: bool | PyTree) -> None:
        """Moments are stored in the form that was asked for; of a read state, lists of leaves."""
        first = self._in_8_bits(inputs, True)
        second = first if vw is True else self._in_8_bits(inputs, vw)
        for name, moments, expected in (("mw", state.mw, first), ("vw", state.vw, second)):
            arg = inputs.reference._replace(name=f"state.{name}", leaves=moments or [])
            for i, x in enumerate(arg.leaves):
                if inputs.g[i] is None or is_blocks(x) == expected[i]:
                    continue
                if is_blocks(x) and self._is_possible(inputs, i):
                    continue
                _fail(arg, i, x)

    def _is_possible(self, inputs: Update, i: int) -> bool:
        """Whether an array below the limit may be a shard of one above it, inside `shard_map`."""
        if not self.is_8_bits or inputs.specs[i].is_buffer:
            return False
        full = _full_precision(inputs, self.full_precision)
        return not full[inputs.specs[i].positions[0]]

    def _in_8_bits(self, inputs: Update, like: bool | PyTree) -> list[bool]:
        """Whether each array is stored in 8 bits: of moments like the parameters, or of shapes."""
        if not self.is_8_bits or like is False:
            return [False] * len(inputs.specs)
        full = _full_precision(inputs, self.full_precision)
        if like is True:
            pairs = zip(inputs.specs, inputs.reference.leaves, strict=True)
            return [_is_in_8_bits(inputs, spec, x, full) for spec, x in pairs]
        rows = zip(arrays.specs(like), trees.flatten(like)[0], strict=True)
        return [
            _has_every_element(inputs, i, spec, x) and _is_in_8_bits(inputs, spec, x, full)
            for i, (spec, x) in enumerate(rows)
        ]

    def _stacked(self, inputs: Update, like: bool | PyTree) -> list[tuple[int, ...] | None]:
        """For each array the axes of its layers; None where it is not stored in 8 bits."""
        axes = inputs.option("layer_axes", read_layer_axes(inputs.function, self.layer_axes))
        rows = zip(
            inputs.specs, self._in_8_bits(inputs, like), inputs.reference.leaves, strict=True
        )
        return [
            None if not is_in else _stacked(spec, axes.leaves[spec.positions[0]].values, x)
            for spec, is_in, x in rows
        ]


def _has_every_element(inputs: Update, i: int, spec: ArraySpec, x: Any) -> bool:
    """Whether second moments of some leaves are one for each element of these."""
    if x is None:
        return False
    if not spec.spans:
        return bool(x.shape == inputs.reference.leaves[i].shape)
    leaves = trees.flatten(inputs.shapes)[0]
    pairs = zip(spec.positions, spec.spans, strict=True)
    return all(span.layers.shape == leaves[j].shape for j, span in pairs)


def _stacked(spec: ArraySpec, axes: tuple[int, ...], x: jax.Array) -> tuple[int, ...]:
    if spec.is_buffer:
        return spec.spans[0].layers.stacked if spec.is_unpacked else ()
    return tuple(sorted({axis % x.ndim for axis in axes}))


def _full_precision(inputs: Update, mask: Mask) -> list[bool]:
    """For each leaf of the unpacked tree, whether the user keeps it in full precision."""
    if mask is None:
        return [False] * len(inputs.updated_shapes().leaves)
    return options.mask(inputs, "full_precision", mask)


def _is_in_8_bits(inputs: Update, spec: ArraySpec, x: Any, full: Sequence[bool]) -> bool:
    """Whether an array is large enough, and real; small leaves of a buffer are as their buffer."""
    if x is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return False
    sizes = [span.size for span in spec.spans] or [x.size]
    own = [full[i] for i in spec.positions]
    if max(sizes) < SMALLEST or all(own):
        return False
    arg = inputs.updated_shapes()._replace(name="full_precision")
    position = spec.positions[int(np.argmax(sizes))]
    if any(own):
        remedy = (
            "the same for all leaves of its buffer, since they share an array; leave it unpacked"
        )
        arg.fail(spec.positions[own.index(True)], ValueError, f"True, expected {remedy}")
    if x.dtype == np.float64:
        arg = arg._replace(name=inputs.reference.name)
        remedy = "expected at most float32 beside 8 bits; keep it by `full_precision`"
        arg.fail(position, TypeError, f"dtype float64, {remedy}")
    return True


def _fail(arg: ArgLeaves, i: int, x: Any) -> None:
    if is_blocks(x):
        remedy = "make it one by `unquantized(state)`"
        arg.fail(i, TypeError, f"Blocks of shape {x.shape}, expected an array; {remedy}")
    remedy = "make them by `quantized(state, like=jax.eval_shape(tx.init, params))`"
    arg.fail(i, TypeError, f"{checks.describe(x)}, expected Blocks, 8 bits; {remedy}")
