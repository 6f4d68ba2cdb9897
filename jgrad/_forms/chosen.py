"""Which leaves of a moment are stored in a form that a user chose by `moment_dtype`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._inputs import options
from jgrad._inputs.inputs import Parameters
from jgrad._inputs.transformation import MomentOptions, say_once
from jgrad._layers.array_spec import ArraySpec
from jgrad._layers.layer_axes import read_layer_axes
from jgrad._trees import forms, trees
from jgrad._trees.annotations import Mask
from jgrad._trees.protocols import Leaf, PyTree


class ChosenForm(forms.Form):
    """A form of few bits, for real leaves that are large enough and not in `full_precision`.

    The layout of an array is the axes over which its layers are stacked.
    """

    def layouts(
        self, params: Parameters, shapes: PyTree, options: MomentOptions
    ) -> list[tuple[int, ...] | None]:
        full, leaves = _full_precision(params, options.full_precision), params.reference.leaves
        columns = zip(params.specs, trees.flatten(shapes)[0], leaves, strict=True)
        stored = [
            x is not None and np.shape(x) == p.shape and self._is_stored(params, spec, p, full)
            for spec, x, p in columns
        ]
        axes_of_leaves: Any = None
        if options.layer_axes is not None and any(stored):
            axes = read_layer_axes(params.function, options.layer_axes)
            axes_of_leaves = params.option("layer_axes", axes).leaves
        return [
            _stacked(spec, axes_of_leaves[spec.positions[0]].values if axes_of_leaves else (), p)
            if is_stored
            else None
            for spec, is_stored, p in zip(params.specs, stored, leaves, strict=True)
        ]

    def may_be(self, params: Parameters, i: int, options: MomentOptions) -> bool:
        """An array below the limit may be a shard of one above it, inside `shard_map`."""
        if params.specs[i].is_buffer:
            return False
        full = _full_precision(params, options.full_precision)
        return not full[params.specs[i].positions[0]]

    def say_if_unused(self, params: Parameters, options: MomentOptions) -> None:
        """Where no leaf is large enough, so that a user who counts on it knows it."""
        leaves = params.updated_shapes().leaves
        full = _full_precision(params, options.full_precision)
        sizes = [x.size for x, f in zip(leaves, full, strict=True) if x is not None and not f]
        if sizes and max(sizes) < forms.SMALLEST:
            say_once(
                params,
                f"`moment_dtype={self.name!r}` has no effect on these leaves: moments are in "
                f"{self.words} from {forms.SMALLEST} elements of a leaf on, and the largest of "
                f"these has {max(sizes)}.",
            )

    def _is_stored(
        self, params: Parameters, spec: ArraySpec, x: Leaf, full: Sequence[bool]
    ) -> bool:
        """Large enough, and real; small leaves of a buffer are as their buffer."""
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return False
        sizes = [span.size for span in spec.spans] or [x.size]
        is_full = [full[i] for i in spec.positions]
        if max(sizes) < forms.SMALLEST or all(is_full):
            return False
        if any(is_full):
            arg = params.updated_shapes()._replace(name="full_precision")
            remedy = (
                "the same for all leaves of a packed buffer, since they share an array; leave it "
                "unpacked"
            )
            arg.fail(spec.positions[is_full.index(True)], ValueError, f"True, expected {remedy}")
        if x.dtype == np.float64:
            arg = params.updated_shapes()._replace(name=params.reference.name)
            position = spec.positions[int(np.argmax(sizes))]
            remedy = f"expected at most float32 beside {self.words}; keep it by `full_precision`"
            arg.fail(position, TypeError, f"dtype float64, {remedy}")
        return True


def _stacked(spec: ArraySpec, axes: tuple[int, ...], x: jax.Array) -> tuple[int, ...]:
    if spec.is_buffer:
        return spec.spans[0].layers.stacked if spec.is_unpacked else ()
    return tuple(sorted({axis % x.ndim for axis in axes})) if axes else ()


def _full_precision(inputs: Parameters, mask: Mask | None) -> list[bool]:
    """For each leaf of the unpacked tree, whether the user keeps it in full precision."""
    if mask is None:
        return [False] * len(trees.flatten(inputs.shapes)[0])
    return options.mask(inputs, "full_precision", mask)
