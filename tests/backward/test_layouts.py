"""Layers as users regroup them: `layers` need not list leaves in the order of `params`.

Leaves of two stacks and of no stack are renamed, nested and mixed at random, in `params` and again in
each call of `scan_layers`. Some have equal shapes, so that a confusion of two would pass unnoticed.
The truth is the ordinary step, in float64.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from tests.backward import models

WIDTH = 4
BASE = dict.fromkeys(("wq", "wk"), (WIDTH, WIDTH)) | {"up": (WIDTH, 6), "down": (6, WIDTH)}
STACKS = {"encoder": (3, BASE), "decoder": (2, BASE)}
OTHERS = {"first": (WIDTH, WIDTH), "last": (WIDTH, WIDTH)}


def arrays(rng):
    """By name, each leaf of the model."""
    shapes = dict(OTHERS)
    for stack, (layers, leaves) in STACKS.items():
        shapes |= {f"{stack}/{name}": (layers, *shape) for name, shape in leaves.items()}
    return {name: jnp.asarray(0.4 * rng.normal(size=shape)) for name, shape in shapes.items()}


def grouped(rng, names):
    """A tree of these names, in an order of its own, under keys of its own."""
    names = [names[i] for i in rng.permutation(len(names))]
    if len(names) < 3 or rng.random() < 0.2:
        parts = names
    else:
        parts = [grouped(rng, list(part)) for part in np.array_split(names, rng.integers(2, 4))]
    kind = rng.integers(3)
    if kind == 2:
        keys = rng.permutation(len(parts))
        return {f"k{key}": part for key, part in zip(keys, parts, strict=True)}
    return (tuple, list)[kind](parts)


def filled(tree, by_name):
    return jax.tree.map(lambda name: by_name[str(name)], tree)


def named(tree, leaves):
    """The reverse: leaves by name."""
    return dict(zip(map(str, jax.tree.leaves(tree)), jax.tree.leaves(leaves), strict=True))


def block(w, x):
    x = x + jnp.tanh(x @ w["wq"]) * (x @ w["wk"])
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def model(seed):
    """Parameters and the loss."""
    rng = np.random.default_rng(seed)
    by_name = arrays(rng)
    names = grouped(rng, list(by_name))
    layouts = {
        stack: grouped(rng, [f"{stack}/{name}" for name in leaves])
        for stack, (_, leaves) in STACKS.items()
    }

    def loss(params, x):
        by_name = named(names, params)
        x = x @ by_name["first"]
        for layout in layouts.values():

            def of_layer(layer, x, layout=layout):
                return block({k.split("/")[1]: w for k, w in named(layout, layer).items()}, x)

            x = jgrad.scan_layers(of_layer, filled(layout, by_name), x)
        return jnp.mean(jnp.square(x @ by_name["last"]))

    return filled(names, by_name), loss


@pytest.mark.slow(always=["0"])
@pytest.mark.parametrize("seed", range(12))
def test_layers_in_another_order(x64, seed):
    params, loss = model(seed)
    x = jnp.asarray(np.random.default_rng(seed).normal(size=(5, WIDTH)))
    tx = jgrad.gradient_descent(0.1, momentum=0.9)
    steps = jgrad.step_in_backward(tx, loss), models.ordinary(tx, loss)
    found, expected = (jax.jit(step)(params, tx.init(params), x) for step in steps)
    chex.assert_trees_all_close(found, expected, rtol=1e-11, atol=1e-14)
    assert all(
        jnp.all(a != b) for a, b in zip(*map(jax.tree.leaves, (found[0], params)), strict=True)
    )
