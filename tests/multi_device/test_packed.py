"""Packed trees on many devices: leaves that are cut over a mesh, and buffers whose types say so.

`tests/everywhere/test_surroundings.py` has every optimizer on packed trees under jit and in `shard_map`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jgrad
from tests.multi_device.meshes import mesh_of, place
from tests.support import draws
from tests.support.eight_bits import unquantized
from tests.support.errors import assert_error

pytestmark = pytest.mark.slow

DEVICES = 8


model = functools.partial(draws.normal, {"w": (40, 30), "b": (64,), "h": (16, 16)})


def assert_close(found, other):
    found = jgrad.unpack(found)
    assert jax.tree.structure(found) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_leaves_of_a_buffer_shard_over_different_axes():
    mesh = mesh_of(model=DEVICES)
    tx = jgrad.lars(0.1, mesh_axes={"w": "model", "b": None, "h": None})
    update = jax.shard_map(
        lambda w: tx.update(jgrad.pack(w), tx.init(jgrad.pack(w)), jgrad.pack(w))[0],
        mesh=mesh,
        in_specs=P("model"),
        out_specs=P("model"),
    )
    message = "lars: `mesh_axes` at ['w']: ('model',), expected (), as for the other leaves in its buffer."
    assert_error(ValueError, message, lambda: update(model(0)))


def test_large_leaves_keep_their_shardings():
    """Those that stay as they are, and their moments."""
    mesh = mesh_of(model=DEVICES)
    w = model(0)
    w = place(w, mesh, dict.fromkeys(w, P()) | {"w": P("model")})
    tx = jgrad.pack_small(jgrad.adam(0.1), max_size=300)
    state = jax.jit(tx.init, out_shardings=jgrad.state_shardings(tx, w))(w)
    assert state.mw.buffers["leaf 2"].sharding.spec == P("model")
    assert state.mw.buffers["float32"].sharding.spec == P()


@pytest.mark.slow(always=True)
def test_layers_on_explicit_axes():
    """Numbers of rows that their type says are sharded become numbers of layers."""
    mesh, tree, tx = mesh_of(AxisType.Explicit, d=DEVICES), model(0), jgrad.lars(0.1)
    update = jax.jit(lambda w: tx.update(w, tx.init(w), w)[0])
    w = place(jgrad.pack(tree, multiple_of=DEVICES), mesh, P("d"))
    assert_close(jgrad.unpack(update(w)), update(tree))


@pytest.mark.parametrize("moment_dtype", [None, "8bit"])
def test_explicit_axes(moment_dtype):
    """Rows that are sharded by their type: what is unpacked is on each device, and packs again."""
    mesh = mesh_of(AxisType.Explicit, d=DEVICES)
    tree = {**model(0), "large": jnp.sin(jnp.arange(8192.0))}
    w = place(jgrad.pack(tree, multiple_of=DEVICES), mesh, P("d"))
    tx = jgrad.adam(0.1, moment_dtype=moment_dtype)
    state = jax.jit(tx.update)(w, tx.init(w), w)[1]
    _, expected = jax.jit(tx.update)(tree, tx.init(tree), tree)
    for unpack in (jgrad.unpack, jax.jit(jgrad.unpack)):
        found = unpack(state)
        large = unquantized((found.mw["large"], expected.mw["large"]))
        np.testing.assert_array_equal(*large)
        assert_close(unpack(w), tree)
    again = jgrad.pack(found, like=state)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    # Leaves that are sharded.
    again = jgrad.pack(place(tree, mesh, P("d")), multiple_of=DEVICES)
    np.testing.assert_array_equal(again.buffers["float32"], w.buffers["float32"])


@pytest.mark.not_in_jax_0_8("explicit tangents")
def test_gradients_on_explicit_axes():
    """They have the type of the parameters."""
    mesh = mesh_of(AxisType.Explicit, d=DEVICES)
    w = place(jgrad.pack(model(0), multiple_of=DEVICES), mesh, P("d"))
    loss = lambda w: sum(jnp.sum(x**2) for x in jax.tree.leaves(jgrad.unpack(w))) / 2
    grads = jax.jit(jax.grad(loss))(w)
    assert jax.typeof(grads.buffers["float32"]) == jax.typeof(w.buffers["float32"])
    np.testing.assert_array_equal(grads.buffers["float32"], w.buffers["float32"])
