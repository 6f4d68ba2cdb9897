"""Training on eight devices: pmap, and jit with sharded parameters."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.cases import CASES, CORE, params

# `test_variants.py` has each case under pmap.
every_case = pytest.mark.parametrize("case", [c for c in CASES if c.name in CORE], ids=str)


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
@every_case
def test_pmap(case):
    """Eight replicas stay identical, bit for bit, and train as one device does."""
    assert jax.device_count() == 8
    tx, w, data = case.tx(0.01), params(), batches(5)

    @functools.partial(jax.pmap, axis_name="data", donate_argnums=(0, 1))
    def step(w, state, x):
        # The mean on both sides of the gradient is right under pmap, vmap and shard_map alike.
        mean = lambda w: jax.lax.pmean(loss(w, x), "data")
        grads = jax.lax.pmean(jax.grad(mean)(w), "data")
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    replicate = lambda tree: jax.tree.map(lambda p: jnp.stack([p] * 8), tree)
    found, state = replicate(w), replicate(tx.init(w))
    for x in data:
        found, state = step(found, state, x.reshape(8, 4, 4))
        jax.block_until_ready(found)
    for leaf in jax.tree.leaves((found, state)):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
    first = jax.tree.map(lambda x: x[0], (found, state))
    chex.assert_trees_all_close(first, single(tx, w, data), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@every_case
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_jit_with_sharded_leaves(case, axis_type):
    """Under jit a norm is that of the whole leaf, wherever its parts live."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(axis_type,) * 2)
    tx = case.without_masks().tx(0.01)
    rng = np.random.default_rng(0)
    w = {"w": jnp.asarray(rng.normal(size=(4, 8)), jnp.float32), "b": jnp.ones(8)}
    grads = [jax.tree.map(lambda p, s=s: jnp.sin(s + 10 * p), w) for s in range(3)]
    specs = {"w": PartitionSpec("a", "b"), "b": PartitionSpec("b")}
    place = lambda tree: jax.device_put(tree, {k: NamedSharding(mesh, specs[k]) for k in specs})

    def run(w, grads):
        @jax.jit
        def step(w, state, g):
            updates, state = tx.update(g, state, w)
            return optax.apply_updates(w, updates), state

        state = tx.init(w)
        for g in grads:
            w, state = step(w, state, g)
            jax.block_until_ready(w)
        return w, state

    found, state = run(place(w), [place(g) for g in grads])
    expected, _ = run(w, grads)
    chex.assert_trees_all_close(jax.device_get(found), expected, rtol=1e-5, atol=1e-6)
    for name in case.state:
        for key, moment in getattr(state, name).items():
            assert moment.sharding.is_equivalent_to(NamedSharding(mesh, specs[key]), moment.ndim)
