"""The blocks about derivatives, methods of one's own, and the defaults of each method."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import jgrad
from tests.pages.guides.entries import after, choices, run
from tests.support.pages import blocks, page
from tests.support.precision import in_64_bits

DIFFERENTIATE = "docs/differentiate.md"
YOUR_OWN = "docs/your_own.md"
METHODS = "docs/methods.md"
PAGES = (DIFFERENTIATE, YOUR_OWN, METHODS)


def tasks(seed, dtype):
    """Points of two sines with other phases."""
    x = jnp.asarray(np.random.default_rng(seed).uniform(-3, 3, size=(2, 10, 1)), dtype)
    return [(part, jnp.sin(part + seed)) for part in x]


@after(DIFFERENTIATE, 0)
def meta_gradients(names, printed):
    """Those of finite differences, by the first weights and by each rate; and they can be followed."""
    meta, given = names["meta"], tasks(1, jnp.float32)
    value, update, losses = jax.jit(names["meta_loss"]), jax.jit(names["outer"].update), []
    state = names["outer"].init(meta)
    for _ in range(20):
        losses.append(float(value(meta, *given)))
        updates, state = update(names["gradient"](meta, *given), state, meta)
        meta = optax.apply_updates(meta, updates)
    assert losses[-1] < losses[0]
    traced = str(jax.make_jaxpr(names["gradient"])(meta, *given))
    assert "checkpoint" in traced or "remat" in traced
    with in_64_bits():
        given = tasks(1, jnp.float64)
        flat, tree = ravel_pytree(jax.tree.map(lambda x: np.asarray(x, np.float64), meta))
        found, _ = ravel_pytree(names["gradient"](tree(flat), *given))
        assert np.all(np.asarray(jax.tree.leaves(tree(found)["log_rates"])) != 0)
        along = jnp.asarray(np.random.default_rng(0).normal(size=flat.size))
        at = lambda k: value(tree(flat + k * 2e-5 * along), *given)
        expected = (8 * (at(1.0) - at(-1.0)) - (at(2.0) - at(-2.0))) / 24e-5
        np.testing.assert_allclose(found @ along, expected, rtol=1e-8)


def test_functional_updates_stop_gradients():
    """Unless they are told otherwise, as the page says."""

    def updated(lr, **options):
        return jnp.sum(jgrad.adam_update(jnp.ones(3), jnp.ones(3), lr, 0.0, 0.0, 1, **options)[0])

    assert float(jax.grad(updated)(0.1)) == 0
    slope = jax.grad(lambda lr: updated(lr, stop_gradients=False))(0.1)
    assert float(slope) == pytest.approx(-3, rel=1e-5)


@after(YOUR_OWN, 0)
def own_method(names, printed):
    """The first direction of AdaMax is the sign of the gradient, whatever the betas are."""
    np.testing.assert_allclose(names["updates"]["w"], -1e-3 * 1.1, rtol=1e-5)
    np.testing.assert_allclose(names["updates"]["b"], -1e-3, rtol=1e-5)
    state = names["state"]
    assert int(state.skipped) == 0
    moments = optax.tree.get(state, "mw")
    assert isinstance(moments["w"], jgrad.Blocks)
    # Gradients of norm 1, and the beta of the call.
    np.testing.assert_allclose(moments["b"], 0.05 / (17 * 256) ** 0.5, rtol=1e-6)


def weights(seed):
    """Leaves of one size, so that steps of all methods matter."""
    shapes = {
        "embed": {"embedding": (50, 8)},
        "block": {"kernel": (8, 16), "bias": (16,)},
        "head": {"kernel": (16, 10)},
    }
    zeros = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
    drawn = optax.tree.random_like(jax.random.key(seed), zeros)
    return jax.tree.map(lambda x: 0.02 * x / jnp.sqrt(jnp.mean(x**2)), drawn)


def default_trains(names, printed):
    """Most of a quadratic loss is gone after its steps; targets have the norms of the weights."""
    tx, w, target = names["tx"], weights(0), weights(1)

    def loss(w):
        return optax.tree.norm(jax.tree.map(jnp.subtract, w, target), squared=True) / 2

    def body(carry, _):
        w, state = carry
        updates, state = tx.update(jax.grad(loss)(w), state, w)
        return (optax.apply_updates(w, updates), state), None

    train = jax.jit(lambda carry: jax.lax.scan(body, carry, length=names["steps"])[0])
    last, state = train((w, tx.init(w)))
    assert float(loss(optax.tree.get(state, "average", last))) < 0.1 * float(loss(w))


for i in range(1, len(blocks(METHODS))):
    after(METHODS, i, 0, slow=True)(default_trains)


def test_each_method_has_a_default():
    assert len(re.findall(r"^## \w+$", page(METHODS), re.MULTILINE)) + 1 == len(blocks(METHODS))


@pytest.mark.parametrize("block", choices(PAGES))
def test_block(block, standard_promotion):
    run(block)
