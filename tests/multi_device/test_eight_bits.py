"""8-bit state on many devices: the same form, and the same bits, wherever leaves are cut.

`test_collectives.py` has its collectives, `tests/everywhere/test_surroundings.py` its training.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jgrad
from tests.multi_device.meshes import mesh_of
from tests.support.eight_bits import quantized, unquantized
from tests.support.loops import assert_equal

LAYOUTS = {"axis 0": P("d"), "last axis": P(None, "d")}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_e41_the_same_form_on_every_mesh(layout):
    """The size is that of the whole leaf: a share of 512 elements is in 8 bits as the leaf is."""
    mesh, spec = mesh_of(d=8), LAYOUTS[layout]
    tx = jgrad.adam(0.1, moment_dtype="8bit")
    shape = (8, 512) if layout == "axis 0" else (2, 2048)
    w = {"w": jnp.ones(shape)}
    own = jax.device_put(w, NamedSharding(mesh, spec))
    g = jax.device_put(
        {"w": jnp.linspace(-1.0, 1.0, 4096).reshape(shape)}, NamedSharding(mesh, spec)
    )
    state = tx.init(own)
    assert isinstance(state.mw["w"], jgrad.Blocks)
    assert state.mw["w"].codes.sharding.is_equivalent_to(own["w"].sharding, 2)
    assert state.mw["w"].codes.addressable_shards[0].data.size == 512
    states = jax.tree.map(lambda x: spec if x.ndim else P(), state)
    update = jax.shard_map(
        tx.update, mesh=mesh, in_specs=(spec, states, spec), out_specs=(spec, states)
    )
    updates, new = jax.jit(update)(g, state, own)
    expected, whole = jax.jit(tx.update)(g, state, own)
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-6)
    np.testing.assert_array_equal(new.mw["w"].scale, whole.mw["w"].scale)


# Shapes and specs on a mesh of two axes: blocks that are whole rows, that shards cut, and layers.
EXPLICIT = {
    "several rows": ((128, 64), P("a"), None),
    "columns": ((128, 64), P(None, "a"), None),
    "both": ((128, 64), P("a", "b"), None),
    "one axis": ((8192,), P("a"), None),
    "one axis over both": ((8192,), P(("a", "b")), None),
    "in rows": ((16, 2048), P("a", "b"), None),
    "ragged": ((70, 90), P("b"), None),
    "layers": ((8, 16, 64), P("a"), 0),
    "within layers": ((8, 16, 64), P(None, "a"), 0),
    "small layers": ((128, 64), P("a"), 0),
}


@pytest.mark.slow(always=["several rows"])
@pytest.mark.parametrize(("shape", "spec", "layer_axes"), EXPLICIT.values(), ids=EXPLICIT)
def test_e41_explicit_axes(shape, spec, layer_axes):
    """Codes and scales are those of one device, wherever blocks lie, and their types do not drift."""
    mesh = mesh_of(AxisType.Explicit, a=4, b=2)
    rng = np.random.default_rng(0)
    w, g = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    put = lambda x: jax.device_put(x, NamedSharding(mesh, spec))
    # Elementwise, with the blocks of layers.
    tx = jgrad.lamb(0.1, moment_dtype="8bit", layer_axes=layer_axes, trust_ratio_mask=False)
    _, expected = jax.jit(tx.update)(g, tx.init(w), w)
    state = tx.init(put(w))
    update = jax.jit(chex.assert_max_traces(tx.update, n=1))
    _, once = update(put(g), state, put(w))
    update(put(g), once, put(w))
    assert_equal(jax.device_get(once), jax.device_get(expected))
    shardings = jgrad.state_shardings(tx, put(w))
    for x in (state, jax.jit(tx.init)(put(w)), once):
        same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), x, shardings)
        assert all(jax.tree.leaves((same.mw, same.vw)))
    arrays = unquantized(once)
    assert arrays.mw.sharding.is_equivalent_to(put(w).sharding, w.ndim)
    again = unquantized(quantized(arrays, like=once))
    assert_equal(jax.device_get(again), jax.device_get(unquantized(expected)))
