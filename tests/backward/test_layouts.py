"""Layers as users regroup them: `layers` need not list leaves in the order of `params`.

Leaves of two stacks and of no stack are renamed, nested and mixed at random, in `params` and again in
each call of `scan_layers`. Some have equal shapes, so that a confusion of two would pass unnoticed.
The truth is the ordinary step, in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.backward import models
from tests.support.other_platforms import as_on
from tests.support.private import forced

WIDTH, RANK = 4, 2
BASE = dict.fromkeys(("wq", "wk", "wv"), (WIDTH, WIDTH)) | {"up": (WIDTH, 6), "down": (6, WIDTH)}
ADAPTERS = {"a": (WIDTH, RANK), "b": (RANK, WIDTH)}
STACKS = {"encoder": (3, BASE | ADAPTERS), "decoder": (2, BASE)}
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
    x = x + (jnp.tanh(x @ w["wq"]) * (x @ w["wk"])) @ w["wv"]
    if "a" in w:
        x = x + (x @ w["a"]) @ w["b"]
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def model(seed):
    """Parameters, the loss, and the names of the leaves in the tree of parameters."""
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

    return filled(names, by_name), loss, names


def of_adapters(names):
    """Adam for adapters, and a base that stays; the labels know a leaf by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(names)
    label = {path: "adam" if str(name)[-2:] in ("/a", "/b") else "stays" for path, name in leaves}

    def labels(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: label[path], params)

    transformations = {"adam": jgrad.adam(1e-2), "stays": optax.set_to_zero()}
    return optax.partition(transformations, labels)


def check(seed, tx, params, loss, **options):
    step = jgrad.step_in_backward(tx, loss, **options)
    x = jnp.asarray(np.random.default_rng(seed).normal(size=(5, WIDTH)))
    given = params, tx.init(params), x
    expected = jax.jit(models.ordinary(tx, loss))(*given)
    found = jax.jit(step)(*given)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-14)
    return given, found


@pytest.mark.slow(always=["0"])
@pytest.mark.parametrize("seed", range(12))
def test_layers_in_another_order(x64, seed):
    params, loss, _ = model(seed)
    _, (new, *_) = check(seed, jgrad.adam(1e-2, weight_decay=0.1), params, loss)
    moved = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), new, params)
    assert 5e-3 < min(jax.tree.leaves(moved)) <= max(jax.tree.leaves(moved)) < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_adapters_beside_a_base_that_stays(x64, seed):
    params, loss, names = model(seed)
    _, (new, *_) = check(seed, of_adapters(names), params, loss, elementwise=True)
    moves = named(names, jax.tree.map(lambda a, b: bool((a != b).any()), new, params))
    assert {name for name, x in moves.items() if x} == {"encoder/a", "encoder/b"}


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_the_programs_of_other_platforms(x64, platform):
    """What a GPU and a TPU run, without the switch that other tests use."""
    params, loss, _ = model(3)
    tx = jgrad.adam(1e-2, weight_decay=0.1)
    given, expected = check(3, tx, params, loss)
    with forced(False):
        found = as_on(platform, jgrad.step_in_backward(tx, loss))(*given)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-14)
