"""Norms of the arrays of an update: of the layers of each, and by name for `watch`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jgrad._arithmetic import leafwise, numerics
from jgrad._inputs.inputs import Inputs
from jgrad._layers import norms
from jgrad._layers.layer_axes import LayerAxes
from jgrad._trees import checks, shares, trees
from jgrad._trees.shares import SUM

# What is measured of one call, by name.
Numbers = dict[str, jax.Array]

_GRADIENTS, _UPDATES, _PARAMS, _RATIO = "grad_norm", "update_norm", "param_norm", "update_ratio"
_NONFINITE = "nonfinite"
_LARGEST = float(jnp.finfo(jnp.float32).max)


def is_measure(key: str) -> bool:
    """Whether a number is one of these."""
    return key.partition("/")[0] in (_GRADIENTS, _UPDATES, _PARAMS, _RATIO, _NONFINITE)


def norms_of_update(
    inputs: Inputs,
    layers: Sequence[LayerAxes],
    w: Sequence[jax.Array | None],
    u: Sequence[jax.Array | None],
) -> Numbers:
    """What is measured of gradients, parameters and updates."""
    numbers = _norms_of(_GRADIENTS, inputs, inputs.g, layers)
    numbers |= _norms_of(_PARAMS, inputs, w, layers)
    numbers |= _norms_of(_UPDATES, inputs, u, layers)
    return numbers | _ratios(numbers)


def _norms_of(
    kind: str, inputs: Inputs, arrays: Sequence[jax.Array | None], layers: Sequence[LayerAxes]
) -> Numbers:
    """`kind`, the norm of all arrays, and `kind/<path>` of each leaf; 0 of an array that is None.

    Of gradients also the number of layers with one that is not finite, as their norms are then.
    """
    floating = list(map(checks.is_inexact, inputs.reference.leaves))
    batches, per_array = norms_per_array(
        [
            x if use and checks.is_inexact(x) else None
            for x, use in zip(arrays, floating, strict=True)
        ],
        layers,
    )
    norm = shares.of_all("watch", norms.OF_SHARES, norms.norm_of_norms(batches))
    numbers = {kind: numerics.saturating_float32(norm.value())}
    if kind == _GRADIENTS:
        bad = [jnp.sum(~jnp.isfinite(x), dtype=jnp.int32) for x in batches]
        numbers[_NONFINITE] = shares.of_all("watch", SUM, sum(bad, jnp.zeros((), jnp.int32)))
    names = trees.names(inputs.shapes)
    for i, (spec, axes) in enumerate(zip(inputs.specs, layers, strict=True)):
        if floating[i]:
            of_array = per_array.get(i, jnp.zeros((axes.num_layers,)))
            per_leaf = spec.per_leaf(numerics.saturating_float32(of_array), axes)
            for j, norm in zip(spec.positions, per_leaf, strict=True):
                numbers[f"{kind}/{names[j]}"] = norm
    return numbers


def norms_per_array(
    arrays: Sequence[jax.Array | None], layers: Sequence[LayerAxes]
) -> tuple[list[jax.Array], dict[int, jax.Array]]:
    """The norms of all layers in batches; and as a vector for each array that is not None."""
    measured = [i for i, x in enumerate(arrays) if x is not None]
    measured.sort(key=lambda i: layers[i].sort_key)
    axes = [layers[i] for i in measured]
    (batches,) = norms.layer_norms(axes, [(leafwise.identity, (arrays[i],)) for i in measured])
    vectors = norms.split(axes, batches, as_elements=False)
    return batches, dict(zip(measured, vectors, strict=True))


def _ratios(numbers: Numbers) -> Numbers:
    """|u| / |w| of each norm of updates and its parameters; 0 where the parameters are."""
    ends = [key.removeprefix(_UPDATES) for key in numbers if key.partition("/")[0] == _UPDATES]
    quotients = {
        end: numerics.safe_divide(numbers[_UPDATES + end], numbers[_PARAMS + end]) for end in ends
    }
    return {_RATIO + end: numerics.clipped(x, _LARGEST) for end, x in quotients.items()}
