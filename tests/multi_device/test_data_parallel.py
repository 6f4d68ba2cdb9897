"""Training on eight devices under pmap; `tests/everywhere/test_surroundings.py` has jit and shard_map."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jgrad
from tests.cases import CASES, CORE, DECAYED, ONE_EACH, RATE, gradients, params

KINDS = [case for case in CASES if case.name in {*CORE, *ONE_EACH, *DECAYED}]


def loss(w, x):
    """A loss whose gradient is dense in every leaf, and differs from device to device."""
    h = jnp.tanh(x @ w["layer"]["w"] + jnp.expand_dims(w["layer"]["b"], 0))
    rest = sum(jnp.sum(jnp.sin(leaf)) for leaf in w["rest"])
    return jnp.mean(jnp.square(jnp.sum(h, axis=1) - rest * jnp.mean(x)))


def batches(steps):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(32, 4)), jnp.float32) for _ in range(steps)]


def single(tx, w, data):
    """The same on one device, with the mean of the gradients of the eight parts."""

    @jax.jit
    def step(w, state, x):
        grads = jax.vmap(jax.grad(loss), in_axes=(None, 0))(w, x.reshape(8, 4, 4))
        updates, state = tx.update(jax.tree.map(lambda g: jnp.mean(g, 0), grads), state, w)
        return optax.apply_updates(w, updates), state

    state = tx.init(w)
    for x in data:
        w, state = step(w, state, x)
    return w, state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "form"),
    # Not SOAP, whose bases turn by roundings of the mean.
    [
        (case, form)
        for form in ("tree", "packed")
        for case in KINDS
        if case.packs or (form == "tree" and case.make is jgrad.muon)
    ],
    ids=str,
)
def test_pmap(case, form):
    """Eight replicas stay identical, bit for bit, and train as one device does."""
    assert jax.device_count() == 8
    # Of matrices in `pmap`, which may have parts of them, methods want to know that they are whole.
    options = {"mesh_axes": P()} if case.has_specs and form == "tree" else {}
    tx, w, data = case.tx(0.01, **options), params(), batches(5)
    pack = jgrad.pack if form == "packed" else lambda tree: tree

    @functools.partial(jax.pmap, axis_name="data", donate_argnums=(0, 1))
    def step(w, state, x):
        # The mean on both sides of the gradient is right under pmap, vmap and shard_map alike.
        mean = lambda w: jax.lax.pmean(loss(jgrad.unpack(w), x), "data")
        grads = jax.lax.pmean(jax.grad(mean)(w), "data")
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    replicate = lambda tree: jax.tree.map(lambda p: jnp.stack([p] * 8), tree)
    found, state = replicate(pack(w)), replicate(tx.init(pack(w)))
    for x in data:
        found, state = step(found, state, x.reshape(8, 4, 4))
        jax.block_until_ready(found)
    for leaf in jax.tree.leaves((found, state)):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
    first = jgrad.unpack(jax.tree.map(lambda x: x[0], (found, state)))
    expected = single(case.tx(0.01), w, data)
    chex.assert_trees_all_close(first, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in KINDS if case.step], ids=str)
def test_functional_update(case):
    """The first step on each device, beside the reference."""
    w, (g,) = params(), gradients(1)
    m = jax.tree.map(lambda x: 0 * x, w)
    replicate = lambda tree: jax.tree.map(lambda p: jnp.stack([p] * 8), tree)
    found = jax.pmap(lambda w, g: case.step(w, g, RATE, m, m, 1)[0])(replicate(w), replicate(g))
    (expected,) = case.trajectory(w, [g])
    for a, b in zip(jax.tree.leaves(found), expected, strict=True):
        np.testing.assert_allclose(a[7], b, rtol=1e-5, atol=1e-5 * np.max(np.abs(b), initial=0))
