"""8-bit moments in the compiled program: bytes, temporaries, and what must not be in it."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import jgrad
from benchmarks.recipes import program

# Bytes of temporaries per parameter, more than float32's, on a tree and packed. Updates and codes
# cannot both be written in place. LARS and packed LAMB take more: float32 moments are written where
# norms and updates read them, and those before rounding are nowhere, so XLA writes them, or what
# LARS adds to them, for the time of the step.
BEYOND = {"adamw": (2.3, 2.3), "momentum": (2.3, 2.3), "lamb": (2.3, 8.1), "lars": (4.7, 5.1)}
SHAPES = ((256, 512), (512, 256), (100, 300), (8192,))
MAKES = {
    "adamw": functools.partial(jgrad.adam, 1e-3, weight_decay=1e-2),
    "lamb": functools.partial(jgrad.lamb, 1e-3, weight_decay=1e-2),
    "lars": functools.partial(jgrad.lars, 1e-3, weight_decay=1e-2),
    "momentum": functools.partial(jgrad.gradient_descent, 1e-3, momentum=0.9),
}
slow = pytest.mark.slow
every_method = pytest.mark.parametrize(
    "name", ["adamw", *(pytest.param(x, marks=slow) for x in list(MAKES)[1:])]
)
packed_or_not = pytest.mark.parametrize("packed", [False, True], ids=["tree", "packed"])


def tree(leaves=20):
    return {f"w{i}": jnp.ones(SHAPES[i % len(SHAPES)]) for i in range(leaves)}


def built(tx, params):
    """A step of update and apply with what it changes donated."""
    step = program(tx, params, params, {})
    step.build()
    return step


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="The XLA of older versions writes more out."
)
@packed_or_not
@every_method
def test_twenty_leaves(name, packed):
    """Temporaries by XLA's own count; no generator of random numbers, and no table."""
    params = jgrad.pack(tree()) if packed else tree()
    count = sum(x.size for x in jax.tree.leaves(params))
    plain, eight = (built(MAKES[name](**o), params) for o in ({}, {"moment_dtype": "8bit"}))
    assert eight.temporary_bytes <= plain.temporary_bytes + BEYOND[name][packed] * count
    held = sum(x.nbytes for x in jax.tree.leaves(eight.carry[1]))
    assert held <= (1.02 if name in ("lars", "momentum") else 2.04) * count
    assert not re.search(r" (rng\S*|gather|dynamic-gather|sort|scatter)\(", eight.text)
    assert "threefry" not in eight.text


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="The XLA of older versions writes more out."
)
@packed_or_not
def test_bfloat16_moments(packed):
    """4 bytes between steps; those of temporaries are an update's; no generator of random numbers."""
    params = jgrad.pack(tree()) if packed else tree()
    count = sum(x.size for x in jax.tree.leaves(params))
    step = built(MAKES["adamw"](moment_dtype=jnp.bfloat16), params)
    assert sum(x.nbytes for x in jax.tree.leaves(step.carry[1])) <= 4 * count + 4
    assert step.temporary_bytes <= 4.01 * count
    assert not re.search(r" (rng\S*|gather|dynamic-gather|sort|scatter)\(", step.text)
