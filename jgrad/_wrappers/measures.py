"""Norms of gradients, updates and parameters by name: of the whole model, and of each leaf."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jgrad._arithmetic import leafwise, numerics
from jgrad._inputs.inputs import Inputs
from jgrad._layers import norms
from jgrad._layers.layer_axes import LayerAxes
from jgrad._trees import checks, trees

# What is measured of one call, by name.
Numbers = dict[str, jax.Array]

GRADIENTS, UPDATES, PARAMS, RATIO = "grad_norm", "update_norm", "param_norm", "update_ratio"
NONFINITE = "nonfinite"
_LARGEST = float(jnp.finfo(jnp.float32).max)


def is_measure(key: str) -> bool:
    """Whether a number is one of these."""
    return key.partition("/")[0] in (GRADIENTS, UPDATES, PARAMS, RATIO, NONFINITE)


def norms_of(
    kind: str, inputs: Inputs, arrays: Sequence[Any], layers: Sequence[LayerAxes]
) -> Numbers:
    """`kind`, the norm of all arrays, and `kind/<path>` of each leaf; 0 of an array that is None.

    Of gradients also the number of layers with one that is not finite, as their norms are then.
    """
    floating = list(map(checks.is_inexact, inputs.reference.leaves))
    chosen = [i for i, x in enumerate(arrays) if floating[i] and checks.is_inexact(x)]
    chosen.sort(key=lambda i: layers[i].sort_key)
    own = [layers[i] for i in chosen]
    (batches,) = norms.layer_norms(own, [(leafwise.identity, (arrays[i],)) for i in chosen])
    per_array = dict(zip(chosen, norms.split(own, batches, as_elements=False), strict=True))
    found = {kind: _in_float32(norms.norm_of_norms(batches))}
    if kind == GRADIENTS:
        bad = [jnp.sum(~jnp.isfinite(x), dtype=jnp.int32) for x in batches]
        found[NONFINITE] = sum(bad, jnp.zeros((), jnp.int32))
    names = trees.names(inputs.shapes)
    for i, (spec, axes) in enumerate(zip(inputs.specs, layers, strict=True)):
        if floating[i]:
            each = per_array.get(i, jnp.zeros((axes.num_layers,)))
            parts = spec.per_leaf(_in_float32(each), axes)
            pairs = zip(spec.positions, parts, strict=True)
            found |= {f"{kind}/{names[j]}": x for j, x in pairs}
    return found


def ratios(found: Numbers) -> Numbers:
    """|u| / |w| of each norm of updates and its parameters; 0 where the parameters are."""
    ends = [key.removeprefix(UPDATES) for key in found if key.partition("/")[0] == UPDATES]
    quotients = {
        end: numerics.safe_divide(found[UPDATES + end], found[PARAMS + end]) for end in ends
    }
    return {RATIO + end: numerics.clipped(x, _LARGEST) for end, x in quotients.items()}


def _in_float32(x: jax.Array) -> jax.Array:
    """At most the largest number, where the norm is finite."""
    if x.dtype == jnp.float32:
        return x
    return jnp.where(jnp.isinf(x), x, numerics.clipped(x, _LARGEST)).astype(jnp.float32)
