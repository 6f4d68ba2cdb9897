"""`Blocks`, 8 bits, as a form; users choose it by `moment_dtype="8bit"`."""

from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import numerics
from jgrad._arithmetic.leaf_moment import LeafMoment, bounded
from jgrad._arithmetic.leafwise import Function
from jgrad._forms.chosen import ChosenForm
from jgrad._forms.kernels import Kernels
from jgrad._quantized import codec, encoding, words
from jgrad._quantized.blocks import Blocks, axis_of_words
from jgrad._quantized.codec import codec_of
from jgrad._quantized.geometry import geometry, in_rows
from jgrad._trees import checks
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import Leaf


class EightBits(ChosenForm):
    """Codes of 8 bits, and a scale for each block."""

    kind = Blocks
    name = "8bit"
    words = "8 bits"
    is_rounded = True
    precision = 0.25

    # ---- in an update

    def array(self, x: Blocks) -> jax.Array:
        return encoding.decoded(x)

    def check(
        self, arg: ArgLeaves, i: int, x: Leaf, like: Leaf, *, real: bool, remedy: str
    ) -> None:
        if axis_of_words(*x) is not None:
            expected = "expected `offload` around all of `tx`, or codes as `unpack` makes them"
            arg.fail(i, TypeError, f"{checks.describe(x)}, four in a word; {expected}")
        encoding.check(arg, i, x, codec.for_moments(second=real))

    def zeros(
        self,
        p: Leaf,
        like: Leaf,
        layout: tuple[int, ...],
        zeros: Callable[[Leaf], Leaf],
        real: bool,
    ) -> Blocks:
        x = numerics.zeros_like(p, np.dtype(np.float32))
        return encoding.zeros(x, layout, codec.for_moments(second=real))

    def write(self, moment: LeafMoment, rule: Function, args: tuple[Leaf, ...]) -> jax.Array:
        rule = bounded(rule, moment.flag, moment.clips)
        exact: jax.Array = rule(*args)
        moment.new = exact
        if moment.has_form:
            target = geometry(moment.old), codec_of(moment.old), moment.rounding
            new = encoding.encoded(rule, args, *target, exact)
            if moment.flag is not None:
                new = encoding.new_or_old(moment.flag, new, moment.old)
            moment.new = new
        return exact

    def kernels(self, x: Blocks) -> type[Kernels] | None:
        return Kernels if in_rows(x) else None

    # ---- in states

    def describe(self, x: Blocks) -> str:
        codes = getattr(x.codes, "dtype", type(x.codes).__name__)
        return f"Blocks of {codes} and shape {x.shape if hasattr(x.codes, 'shape') else ()}"

    def is_made_of(self, *parts: Leaf) -> bool:
        is_scale = getattr(parts[1], "dtype", 0) == np.float32
        return is_scale and codec_of(Blocks(*parts)) is not None

    def check_stored(self, arg: ArgLeaves, i: int, x: Blocks) -> None:
        encoding.check(arg, i, x)

    def form_of(self, x: Blocks) -> tuple[Hashable, ...]:
        return self.words, geometry(x), codec_of(x)

    def made_of(self, arg: ArgLeaves, i: int, like: Blocks, x: Leaf) -> Blocks:
        wanted = codec_of(like)
        is_floating = checks.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
        if not (codec_of(x) == wanted if isinstance(x, Blocks) else is_floating):
            expected = f"a floating array, or Blocks of {wanted.dtype.name}"
            arg.fail(i, TypeError, f"{checks.describe(x)}, expected {expected}")
        array = x if isinstance(x, Blocks) else x.astype(jnp.float32)
        return words.stored_as(encoding.recoded(array, geometry(like), wanted), like)

    def shardings(self, x: Blocks, part_sharding: Callable[..., Leaf]) -> Blocks:
        array = jax.ShapeDtypeStruct(x.shape, x.dtype)
        codes = part_sharding(x.codes, leaf=x, axis=axis_of_words(*x))
        return Blocks(codes, geometry(x).sharding_of_scale(part_sharding(array)))

    # ---- in host memory

    def to_words(self, x: Blocks) -> Blocks:
        return words.to_words(x)

    def to_codes(self, x: Blocks) -> Blocks:
        return words.to_codes(x)

    def as_stored(self, x: Blocks, like: Leaf) -> Blocks:
        return words.stored_as(x, like)

    def belong_on_host(self, x: Blocks, is_large: Callable[[Leaf], bool]) -> list[bool]:
        return words.belong_on_host(x, is_large)
