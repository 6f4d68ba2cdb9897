"""`Factors`, averages of squares over rows and columns, as a form; Adafactor chooses it."""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import numerics
from jgrad._trees import checks, forms
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import Leaf


class Factors(NamedTuple):
    """Averages of the squares of a matrix over its inputs and over its outputs.

        element = rows columns / (mean of the rows of its matrix)

    `adafactor` stores second moments in this form: n + m numbers for a matrix with n outputs and m
    inputs. Field names are part of the checkpoint format.

    Attributes:
      rows: for each output, the mean over its inputs; in the shape of the array, with size 1 for
        inputs.
      columns: for each input, the mean over its outputs; with size 1 for outputs.

    Example:
      >>> state = jgrad.adafactor(1e-2).init({"w": jnp.ones((512, 256)), "b": jnp.zeros(256)})
      >>> rows, columns = state.vw["w"]
      >>> rows.shape, columns.shape, state.vw["w"].shape, state.vw["b"].shape
      ((1, 256), (512, 1), (512, 256), (256,))
    """

    rows: Leaf
    columns: Leaf

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array."""
        return np.broadcast_shapes(self.rows.shape, self.columns.shape)

    @property
    def ndim(self) -> int:
        """That of the array."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """That of the array."""
        return int(np.prod(self.shape))

    @property
    def dtype(self) -> np.dtype:
        """That of the averages."""
        return self.rows.dtype


Factors.__module__ = "jgrad"  # where users import it from, and what a pickle names


class RowsAndColumns(forms.Form):
    """Means over rows and over columns."""

    kind = Factors
    words = "rows and columns"
    named_part = None
    loses = "rows and columns, of which others can only be guessed, expected `reset=` for this leaf"

    def array(self, x: Factors) -> jax.Array:
        return x.rows * x.columns

    def array_dtype(self, x: Factors) -> np.dtype:
        return x.dtype

    def check(
        self, arg: ArgLeaves, i: int, x: Leaf, like: Leaf, *, real: bool, remedy: str
    ) -> None:
        if not isinstance(like, Factors):
            arg.fail(i, TypeError, f"{checks.describe(x)}, expected an array; {remedy}")
        for name, part, wanted in zip(Factors._fields, x, like, strict=True):
            if not (checks.is_array(part) and jnp.issubdtype(part.dtype, jnp.floating)):
                came = f"{name}, {checks.describe(part)}"
                arg.fail(i, TypeError, f"{came}, expected an array of a real floating dtype")
            if part.shape != wanted.shape:
                came = f"{name} of shape {part.shape}, expected {wanted.shape}"
                arg.fail(i, ValueError, f"{came}; {remedy}")

    def zeros(
        self, p: Leaf, like: Leaf, layout: None, zeros: Callable[[Leaf], Leaf], real: bool
    ) -> Factors:
        return Factors(*map(zeros, like))

    def is_made_of(self, *parts: Leaf) -> bool:
        """Of one array: where one has an axis, the other one has size 1."""
        shapes = [getattr(x, "shape", ()) for x in parts]
        pairs = [*zip(*shapes, strict=False)]
        alone = [any(pair[k] > 1 == pair[1 - k] for pair in pairs) for k in (0, 1)]
        fits = all(a == b or 1 in (a, b) for a, b in pairs)
        return len(shapes[0]) == len(shapes[1]) and fits and all(alone)

    def form_of(self, x: Factors) -> tuple[Hashable, ...]:
        return f"rows and columns in {x.dtype}", x.rows.shape, x.columns.shape

    def made_of(self, arg: ArgLeaves, i: int, like: Factors, x: Leaf) -> Factors:
        """Rows and columns, of the means of an array, or of others along the same axes."""
        if not isinstance(x, Factors):
            if not (checks.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)):
                arg.fail(i, TypeError, f"{checks.describe(x)}, expected real floating numbers")
            wide = numerics.wide(x)
            over = [np.flatnonzero(np.not_equal(x.shape, y.shape)).tolist() for y in like]
            x = Factors(*(jnp.mean(wide, axis=axes, keepdims=True) for axes in over))
        if [y.shape for y in x] != [y.shape for y in like]:
            arg.fail(i, ValueError, self.loses)
        pairs = zip(x, like, strict=True)
        return Factors(*(a if a.dtype == b.dtype else a.astype(b.dtype) for a, b in pairs))
