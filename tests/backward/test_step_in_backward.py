"""The numbers of the ordinary step, whatever the method: weights, state and losses of three steps.

The truth is `jax.value_and_grad` and `apply_gradients`, which know nothing of layers.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.backward import models

BATCHES = [models.batch(seed) for seed in range(3)]
AXES = {"embedding": None, "gate": None, "first": 0, "second": 0, "unused": None}
WIDE = {"width": 32, "hidden": 256}  # leaves of 4096 elements, from which on moments have 8 bits


def adam(learning_rate=1e-2, **options):
    return jgrad.adam(learning_rate, weight_decay=0.1, **options)


def muon(**options):
    return jgrad.muon(
        1e-2,
        matrices=jgrad.hidden_matrices(layer_axes=AXES, exclude=("embedding", "gate", "unused")),
        layer_axes=AXES,
        adam_learning_rate=1e-3,
        **options,
    )


def clipped(tx):
    return optax.chain(jgrad.clip_by_global_norm(0.05), tx)


def watched(tx):
    return jgrad.watch(tx, layer_axes=AXES)


class Recipe(NamedTuple):
    """A transformation.

    Attributes:
      make: makes it.
      options: of the step.
      dtype: of the weights.
      sizes: of the model.
      roundings: how many units in the last place both forms may differ by; 0 where all is
        elementwise, and XLA joins the same products and sums.
    """

    make: Any
    options: Mapping[str, Any] = MappingProxyType({})
    dtype: Any = jnp.float32
    sizes: Mapping[str, int] = MappingProxyType({})
    roundings: int = 0


FIRST = {"first_pass": True}
NORMS = 64  # norms are added in another order, and a few steps carry it on
BF16 = jnp.bfloat16

RECIPES = {
    "adam": Recipe(adam),
    "8 bits": Recipe(lambda: adam(moment_dtype="8bit"), sizes=WIDE),
    "bfloat16 moments": Recipe(lambda: adam(moment_dtype=BF16), roundings=4),
    "stochastic": Recipe(
        lambda: jgrad.stochastic_rounding(adam(moment_dtype="8bit")), dtype=BF16, sizes=WIDE
    ),
    "momentum": Recipe(
        lambda: jgrad.stochastic_rounding(
            jgrad.gradient_descent(1e-2, momentum=0.9, moment_dtype=BF16)
        ),
        dtype=BF16,
    ),
    "master": Recipe(lambda: jgrad.master_weights(adam()), dtype=BF16),
    "ema": Recipe(lambda: optax.chain(adam(), jgrad.ema(decay=0.9))),
    "schedule": Recipe(lambda: adam(learning_rate=optax.linear_schedule(1e-2, 0.0, 5))),
    "by_path": Recipe(
        lambda: jgrad.adam(jgrad.by_path({"first/*": 1e-2, "**/down": 1e-3}, rest=1e-4))
    ),
    "mask": Recipe(lambda: adam(weight_decay_mask=lambda p: jax.tree.map(lambda x: x.ndim > 2, p))),
    "schedule_free": Recipe(
        lambda: jgrad.schedule_free(adam(beta1=0.0), learning_rate=1e-2), roundings=4
    ),
    "skip_spikes": Recipe(lambda: jgrad.skip_spikes(adam(), window=4)),
    "lamb": Recipe(lambda: jgrad.lamb(1e-2, layer_axes=AXES), roundings=NORMS),
    "lars": Recipe(lambda: jgrad.lars(1e-2, layer_axes=AXES), roundings=NORMS),
    "muon": Recipe(muon, roundings=NORMS),
    "normuon": Recipe(lambda: muon(normuon_beta=0.95), roundings=NORMS),
    "hyperball": Recipe(
        lambda: jgrad.hyperball(
            jgrad.adam(1.0),
            1e-2,
            leaves={k: v is not None for k, v in AXES.items()},
            layer_axes=AXES,
        ),
        roundings=NORMS,
    ),
    "watch": Recipe(lambda: watched(adam()), roundings=NORMS),
    "clip": Recipe(lambda: clipped(adam()), FIRST, roundings=NORMS),
    "skip": Recipe(lambda: jgrad.skip_nonfinite(adam()), FIRST),
    "all": Recipe(
        lambda: watched(
            jgrad.skip_nonfinite(clipped(jgrad.stochastic_rounding(adam(moment_dtype="8bit"))))
        ),
        FIRST,
        BF16,
        WIDE,
        roundings=2**14,  # a bit of bfloat16 may fall to the other side
    ),
    # The norm is that of leaves that are in no stack, and no layer needs it.
    "partition": Recipe(
        lambda: optax.partition(
            {"layers": adam(), "rest": clipped(adam(moment_dtype=BF16))},
            lambda p: {k: "layers" if AXES[k] == 0 else "rest" for k in p},
        ),
        roundings=NORMS,
    ),
    "optax": Recipe(lambda: optax.sgd(1e-2, momentum=0.9), {"elementwise": True}, roundings=4),
}


def assert_equal(found, expected, roundings=0):
    """Leaf by leaf, to so many units in the last place of the largest element."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    paths = jax.tree_util.tree_leaves_with_path(expected)
    for (path, y), x in zip(paths, jax.tree.leaves(found), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), path
        if not roundings or not jnp.issubdtype(y.dtype, jnp.floating):
            np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))
            continue
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        unit = float(jnp.finfo(jnp.float32).eps) * (np.abs(y).max(initial=0) or 1)
        assert np.abs(x - y).max(initial=0) <= roundings * unit, path


def both(recipe, loss=models.loss, batches=BATCHES, **extra):
    """Three steps in the backward pass, and the ordinary ones."""
    tx, params = recipe.make(), models.params(recipe.dtype, **recipe.sizes)
    step = jgrad.step_in_backward(tx, loss, **recipe.options)
    found = models.run(step, params, tx.init(params), batches, **extra)
    return found, models.run(models.ordinary(tx, loss), params, tx.init(params), batches, **extra)


@pytest.mark.bits
@pytest.mark.slow(one_in=3, always=["adam", "8 bits", "stochastic", "clip", "skip", "lamb", "all"])
@pytest.mark.parametrize("name", RECIPES)
def test_numbers(name):
    assert_equal(*both(RECIPES[name]), RECIPES[name].roundings)
