"""Every optimizer in every precision, at every scale: nothing that is not finite, forward or back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.cases import every_case

DTYPES = ("float16", "bfloat16", "float32", "float64")
SCALES = ["zero", "subnormal", 1e-4, 1.0, 300.0, 1e20, "largest"]

# Slopes are multiplied by this before they are stored as float16: at a gradient of 0, Adam's is
# 1 / epsilon, that of Ivy's LARS |w| / 1e-12, that of Adafactor 1 / sqrt(1e-30), and that of Dion3
# at the smallest gradient 7e7.
SMALL = {"lars_ivy": 1e-7, "muon_dion3": 1e-7}
SMALL |= dict.fromkeys(("adafactor", "adafactor_factored", "adafactor_momentum"), 1e-12)


def value(scale, dtype):
    """A scale as a number of the dtype; None for one that it does not have."""
    info = jnp.finfo(dtype)
    named = {"zero": 0, "subnormal": info.smallest_subnormal, "largest": float(info.max)}
    found = named.get(scale, scale)
    return None if found > float(info.max) else jnp.asarray(found, dtype)


def tree(dtype):
    """Ones of both signs, beside a leaf that starts at zero."""
    signs = {"a": [[1, -1, 1], [-1, 1, 1]], "b": [1, -1], "c": 1}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), signs, is_leaf=lambda x: type(x) is list)


@pytest.mark.slow
@every_case(("lars_masked",))
@pytest.mark.parametrize("dtype", DTYPES)
def test_e05_e16_finite_at_every_scale(case, dtype, x64):
    """Gradients at each scale beside weights of 1, weights beside gradients of 1, and both."""
    tx, small = case.without_masks().tx(), SMALL.get(case.name, 1e-3)
    ones = tree(dtype)
    ones["b"] = jnp.zeros_like(ones["b"])

    @jax.jit
    def step(w, state, g):
        updates, new = tx.update(g, state, w)
        return optax.apply_updates(w, updates), new

    @jax.jit
    def slopes(w, g):
        def loss(w, g):
            updates, _ = tx.update(g, tx.init(w), w)
            return sum(jnp.sum(small * u.astype(float)) for u in jax.tree.leaves(updates))

        return jax.grad(loss, argnums=(0, 1))(w, g)

    def finite(*trees):
        return all(np.all(np.isfinite(np.asarray(x, np.float64))) for x in jax.tree.leaves(trees))

    for scale in SCALES:
        if (by := value(scale, dtype)) is None:
            continue
        scaled = jax.tree.map(lambda x: x * by, tree(dtype))
        pairs = [(ones, scaled), (scaled, tree(dtype))]
        if scale != "largest":
            pairs.append((scaled, scaled))  # of the same sign: a step makes them smaller
        for w, g in pairs:
            assert finite(slopes(w, g)), scale
            state = tx.init(w)
            for _ in range(1 if scale == "largest" else 3):
                w, state = step(w, state, g)
                assert finite(w, state), scale
