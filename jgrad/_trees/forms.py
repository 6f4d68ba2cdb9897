"""The other forms of an array, each a leaf for this library: in 8 bits, or by rows and columns."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

SIZE = 256  # elements of a block; each row of a packed buffer is one
# Elements of a global array from which it is stored in 8 bits: below, nothing is gained.
SMALLEST = 4096


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Form:
    """How an array is written, as far as the arrays of `Blocks` do not say it; static.

    No shapes: those that `jax.vmap` and `jax.shard_map` show are others than those outside.

    Attributes:
      codec: a `_quantized.codec.Codec`; None for the one that the dtype of the codes names, as in
        files of 0.6 and before, which name no other.
      axis: along which blocks lie, counted from the last, -1; None for the last axis where that is
        a multiple of `size`, else the flattened array or layer.
      size: elements of a block.
      padding: codes at the end of the last axis that fill up a byte.
    """

    codec: Any = None
    axis: int | None = None
    size: int = SIZE
    padding: int = 0

    @functools.cached_property
    def _unnamed(self) -> tuple[Any, ...]:
        """What the dtype of the codes does not say."""
        codec = None if self.codec is None or self.codec.is_named_by_dtype else self.codec
        return codec, self.axis, self.size, self.padding

    # Structures of trees are compared by it. So moments of both kinds have one structure, as they
    # had when the dtype said everything, and so have `Blocks(codes, scale)` that a user made.
    # JAX also compares dtypes before it takes two calls of a compiled function for equal.

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Form) and self._unnamed == other._unnamed)

    def __hash__(self) -> int:
        return hash(self._unnamed)

    def __repr__(self) -> str:
        axis = "" if self.axis is None else f" along axis {self.axis}"
        name = "" if self.codec is None else f"{self.codec.name}, "
        return f"{name}blocks of {self.size}{axis}"

    def __reduce__(self) -> tuple[Callable[..., "Form"], tuple[Any, ...]]:
        return Form, self._unnamed

    @property
    def is_named_by_dtype(self) -> bool:
        """Whether it is one of those of 0.6 and before, of which files say nothing."""
        return self == _OF_FILES


_OF_FILES = Form()


class _Arrays(NamedTuple):
    codes: jax.Array
    scale: jax.Array


@jax.tree_util.register_pytree_with_keys_class
class Blocks(_Arrays):
    """An array in 8 bits, with a code for each element and a scale for each block of 256.

        element = decode(code) scale

    An 8-bit moment in an `OptState`. The field names are a file format: checkpoints hold them.
    `jgrad.carry_over` makes arrays of them.

    Attributes:
      codes: of the array's shape; int8 for a first moment, uint8 for a second one.
      scale: float32, a power of two for each block, and 0 for a block of zeros. Its shape is
        (..., n / 256) where the last axis n is a multiple of 256; else (blocks,) of the flattened
        array, or where layers are stacked (..., blocks), with the size of each stacked axis and 1
        for each other one.
      form: static: the codec, and where blocks lie. Without it, as the dtype of the codes says.

    Example:
      >>> tx = jgrad.adam(1e-3, moment_dtype="8bit")
      >>> state = tx.init({"w": jnp.ones((64, 256)), "b": jnp.zeros(256)})
      >>> codes, scale = state.mw["w"]
      >>> codes.dtype.name, codes.shape, scale.shape
      ('int8', (64, 256), (64, 1))
      >>> state.mw["b"].dtype.name  # below 4096 elements
      'float32'
    """

    form: Form = _OF_FILES

    def __new__(cls, codes: Any, scale: Any, form: Form = _OF_FILES) -> "Blocks":
        # JAX and its users put objects of all kinds in the place of the arrays.
        self = super().__new__(cls, codes, scale)
        self.form = form
        return self

    def __repr__(self) -> str:
        # Of kinds and shapes: nobody reads codes, and states are printed with many of them.
        return f"Blocks({', '.join(map(in_short, self))})"

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array."""
        codec, shape = self.form.codec, self.codes.shape
        if codec is None or codec.per_byte == 1:
            return shape
        return (*shape[:-1], shape[-1] * codec.per_byte - self.form.padding)

    @property
    def dtype(self) -> Any:
        """That of the codes."""
        return self.codes.dtype

    def _replace(self, **arrays: Any) -> "Blocks":
        new = super()._replace(**arrays)
        return Blocks(new.codes, new.scale, self.form)

    __replace__ = _replace

    def tree_flatten_with_keys(self) -> tuple[Any, Form]:
        return tuple(zip(_KEYS, self, strict=True)), self.form

    def tree_flatten(self) -> tuple[Any, Form]:
        return tuple(self), self.form

    @classmethod
    def tree_unflatten(cls, form: Form, arrays: Any) -> "Blocks":
        codes, scale = arrays
        return cls(codes, scale, form)

    # As `Blocks(codes, scale)` has always been pickled, where that says everything.

    def __reduce__(self) -> tuple[Callable[..., "Blocks"], tuple[Any, ...]]:
        form = () if self.form.is_named_by_dtype else (self.form,)
        return Blocks, (*self, *form)


def in_short(x: Any) -> str:
    """`float32[3, 2]` for an array; the repr of what is none."""
    is_array = hasattr(x, "dtype") and hasattr(x, "shape")
    return f"{x.dtype}{list(x.shape)}" if is_array else repr(x)


_KEYS = tuple(jax.tree_util.GetAttrKey(name) for name in Blocks._fields)

Blocks.__module__ = "jgrad"  # where users import it from, and what a pickle names


class Factors(NamedTuple):
    """Averages of the squares of a matrix over its rows and over its columns.

        element = rows columns / (mean of the rows of its matrix)

    A second moment of `adafactor` in an `OptState`. The field names are a file format: checkpoints
    hold them. Of a matrix with n outputs and m inputs these are n + m numbers.

    Attributes:
      rows: a number for each output, the mean over its inputs; of the array's shape, with inputs of
        size 1.
      columns: a number for each input, the mean over its outputs; with outputs of size 1.

    Example:
      >>> state = jgrad.adafactor(1e-2).init({"w": jnp.ones((512, 256)), "b": jnp.zeros(256)})
      >>> rows, columns = state.vw["w"]
      >>> rows.shape, columns.shape, state.vw["w"].shape, state.vw["b"].shape
      ((1, 256), (512, 1), (512, 256), (256,))
    """

    rows: Any  # arrays, or what JAX and its users put in their place
    columns: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array."""
        return np.broadcast_shapes(self.rows.shape, self.columns.shape)

    @property
    def ndim(self) -> int:
        """Likewise."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Likewise."""
        return int(np.prod(self.shape))

    @property
    def dtype(self) -> Any:
        """That of the averages."""
        return self.rows.dtype


Factors.__module__ = "jgrad"  # where users import it from, and what a pickle names
