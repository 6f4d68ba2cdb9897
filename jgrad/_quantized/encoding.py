"""Arrays as blocks of elements that share a scale, and back.

If the last axis is a multiple of 256, blocks run along it, so an array and its scales can be
sharded alike. Otherwise, the array is flattened. Blocks do not straddle layers: with stacked axes,
each layer starts on a new block, and its last block may be shorter. The shape of the scales shows
which of these applies, and the dtype of the codes shows the codec.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgrad._quantized import bfloat16, codec as coding
from jgrad._quantized.blocks import SIZE, Blocks
from jgrad._quantized.codec import BY_DTYPE, Codec, codec_of
from jgrad._quantized.geometry import Geometry, geometry
from jgrad._quantized.random_bits import ElementKeys, random_bits
from jgrad._quantized.words import to_codes
from jgrad._trees import checks
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import Leaf
from jgrad._trees.shardings import is_sharded, on_automatic_axes, sharded_as
from jgrad._trees.trees import is_leaf

# For a maximum over rows, XLA's CPU backend writes its input to memory, 4 bytes per element. A
# maximum over an axis that is not the last is a loop that computes what it reads, so a block is
# seen as 8 rows of 32. A step of Adam then takes 1.2 times as long as in float32; with 4 rows 1.6
# times, with 16 rows 1.9 times.
_PARTS = 8


def check(arg: ArgLeaves, i: int, x: Blocks, codec: Codec | None = None) -> None:
    """A leaf that is written as here, so that others are not read as wrong numbers.

    Args:
      arg: the argument.
      i: which of its leaves.
      x: the leaf.
      codec: of such a moment; None for any.
    """
    codes, scale = x
    dtypes = list(BY_DTYPE) if codec is None else [codec.dtype]
    if not (checks.is_array(codes) and x.dtype in dtypes):
        expected = " or ".join(dtype.name for dtype in dtypes)
        arg.fail(i, TypeError, f"{checks.describe(codes)} as `codes`, expected {expected}")
    if not checks.is_array(scale) or scale.dtype != jnp.float32:
        arg.fail(i, TypeError, f"{checks.describe(scale)} as `scale`, expected float32")
    if not geometry(x).is_right:
        expected = f"a number for each block of {SIZE} elements of `codes`, of shape {x.shape}"
        arg.fail(i, ValueError, f"`scale` of shape {scale.shape}, expected {expected}")


@jax.jit
def decoded(blocks: Blocks) -> jax.Array:
    """The array, float32."""
    codes, scale = blocks = to_codes(blocks)
    codec, source = codec_of(blocks), geometry(blocks)
    is_piece = scale.ndim == codes.ndim and scale.shape[-1] == 1  # or a buffer

    def decode(codes: jax.Array, scale: jax.Array) -> jax.Array:
        scales = scale if is_piece else source.per_element(scale)
        return codec.decode(codes, scales)

    if not is_sharded(codes):
        return decode(codes, scale)
    return on_automatic_axes(decode, jax.typeof(codes).sharding, codes, scale)


def zeros(x: jax.Array, stacked: Sequence[int], codec: Codec) -> Blocks:
    """Zeros for an array of zeros, sharded as it is."""
    target = Geometry.for_leaf(x.shape, stacked)

    def blocks(x: jax.Array) -> Blocks:
        columns = [piece[..., :1] for piece in target.pieces(x)]
        return Blocks(x.astype(codec.dtype), target.scale_of_pieces(columns))

    return _sharded(blocks, target, x)


def recoded(x: jax.Array | Blocks, target: Geometry, codec: Codec) -> Blocks:
    """An array, or one in other blocks, in these; to the nearest, which changes no decoded one."""
    if isinstance(x, Blocks) and geometry(x) == target and codec_of(x) == codec:
        return x
    if 0 in target.shape:
        scale = jnp.zeros(target.scales, jnp.float32)
        return Blocks(jnp.zeros(target.shape, codec.dtype), scale)
    return encoded(lambda value: value, [decoded(x) if isinstance(x, Blocks) else x], target, codec)


class Rounding(NamedTuple):
    """How codes are rounded.

    Attributes:
      keys_of_step: see `random_bits.step_keys`.
      keys: of the array.
    """

    keys_of_step: jax.Array
    keys: ElementKeys

    def bits(self, x: jax.Array) -> jax.Array:
        """32 random bits for each element of a leaf, or of some rows of a buffer."""
        # With explicit axes, each device would otherwise compute the bits of all devices.
        return random_bits(*self, sharded_as(self.keys.element_numbers(x.shape), x))

    @jax.jit
    def in_bfloat16(self, x: jax.Array) -> jax.Array:
        """Rounded at random."""
        return bfloat16.rounded(x, self.bits(x))

    @staticmethod
    def to_bfloat16(bits: jax.Array) -> jax.Array:
        """The bfloat16 numbers whose bits are the upper half of these."""
        return bfloat16.from_bits(bits)


def encoded(
    compute: Callable[..., jax.Array],
    arguments: Sequence[jax.Array | Blocks],
    target: Geometry,
    codec: Codec,
    rounding: Rounding | None = None,
    value: jax.Array | None = None,
) -> Blocks:
    """What an elementwise function makes of its arguments, in blocks.

    Args:
      compute: a function to float32 of arrays that broadcast to one shape, some in 8 bits.
      arguments: its arguments.
      target: where the blocks are that are made.
      codec: of the codes.
      rounding: for random bits; None to round to the nearest.
      value: what the function makes, if it is known: half the operations for XLA to compare.
    """

    def blocks(
        rounding: Rounding | None, value: jax.Array | None, *arguments: jax.Array | Blocks
    ) -> Blocks:
        alike = [
            decoded(x) if isinstance(x, Blocks) and geometry(x) != target else x for x in arguments
        ]
        pieces = zip(*(target.pieces(x) for x in alike), strict=True)
        columns = [_largest(compute, piece) for piece in pieces]
        scale = coding.scale_of(target.scale_of_pieces(columns))
        value = compute(*arguments) if value is None else value
        return with_scale(value, scale, target, codec, rounding)

    return _sharded(blocks, target, rounding, value, *arguments)


def with_scale(
    value: jax.Array, scale: jax.Array, target: Geometry, codec: Codec, rounding: Rounding | None
) -> Blocks:
    """An array in blocks whose scales are known."""
    random = jnp.asarray(coding.HALF, jnp.uint32)
    if rounding is not None:
        random = random_bits(
            *rounding, rounding.keys.element_numbers(target.shape, first_axes=target.stacked)
        )
    inverse = target.per_element(coding.inverse(scale))
    return Blocks(codec.encode(value, inverse, random), scale)


def new_or_old(flag: jax.Array, new: Blocks, old: Blocks) -> Blocks:
    """The new codes and scales, or the old ones where the flag is False."""
    blocks: Blocks = jax.tree.map(lambda n, o: jnp.where(flag, n, o), new, old)
    return blocks


def _sharded(make: Callable[..., Blocks], target: Geometry, *args: Leaf) -> Blocks:
    """`make(*args)`, sharded as the one among its arguments that has the shape of the array."""
    leaves: list[Leaf] = jax.tree.leaves(args, is_leaf=is_leaf)
    like = next(x for x in leaves if x is not None and x.shape == target.shape)
    codes = like.codes if isinstance(like, Blocks) else like
    if not is_sharded(codes):
        return make(*args)
    codes_sharding = jax.typeof(codes).sharding
    same = isinstance(like, Blocks) and geometry(like) == target
    scale_sharding = (
        jax.typeof(like.scale).sharding if same else target.sharding_of_scale(codes_sharding)
    )
    return on_automatic_axes(make, Blocks(codes_sharding, scale_sharding), *args)


def _largest(compute: Callable[..., jax.Array], piece: Sequence[jax.Array | Blocks]) -> jax.Array:
    """The bits of the largest magnitude of each block, with a last axis of size 1."""
    width = max(x.shape[-1] for x in piece if x.shape)
    parts = _PARTS if width % _PARTS == 0 else 1

    def in_parts(x: jax.Array | Blocks) -> jax.Array | Blocks:
        if isinstance(x, Blocks):
            return x._replace(codes=in_parts(x.codes), scale=x.scale[..., None])
        if jnp.ndim(x) == 0:
            return x
        return x.reshape((*x.shape[:-1], *((parts, -1) if x.shape[-1] == width else (1, 1))))

    # Computed from arrays that XLA does not recognize as the arguments, because it writes to memory
    # what several kernels read.
    others = jax.lax.optimization_barrier(list(map(in_parts, piece)))
    largest = jnp.max(coding.magnitude(compute(*others)), axis=-2)
    return jnp.max(jax.lax.optimization_barrier(largest), axis=-1, keepdims=True)
