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


# ---- words in host memory ------------------------------------------------------------------------

# By shapes and specs: whether the words are sharded, of which the last has 257 rows; and where types
# show that shards have no whole words, codes stay on the device.
WORDS = {
    "FSDP": ((1024, 512), P("a"), True),
    "layers": ((4, 256, 1024), P("b"), True),
    "rows of layers": ((4, 256, 1024), P(None, ("a", "b")), True),
    "columns": ((4, 256, 1024), P(None, None, "b"), True),
    "both": ((1024, 512), P("a", "b"), True),
    "shards of no whole words": ((1028, 512), P("a"), False),
}


@pytest.mark.not_in_jax_0_8("host memory")
@pytest.mark.slow(
    always=["Auto-rows of layers", "Explicit-both", "Explicit-shards of no whole words"]
)
@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
def test_words(axes, name):
    """They are sharded as the parameter, in and out of codes; `state_shardings` says it before."""
    (shape, spec, is_whole), tx = WORDS[name], jgrad.lion(0.1, moment_dtype="8bit")
    w = {"w": jnp.sin(jnp.arange(float(np.prod(shape)))).reshape(shape).astype(jnp.bfloat16)}
    there = jgrad.offload(tx)
    mesh = mesh_of(getattr(AxisType, axes), a=4, b=2)
    with jax.set_mesh(mesh):
        own = jax.device_put(w, NamedSharding(mesh, spec))
        shardings = jgrad.state_shardings(there, own)
        state = jax.jit(there.init, out_shardings=shardings)(own)
        in_words = state.mw["w"].codes.dtype == jnp.int32
        assert in_words == (is_whole or axes == "Auto")
        if is_whole:
            assert state.mw["w"].codes.sharding.is_equivalent_to(
                NamedSharding(mesh, spec, memory_kind="pinned_host"), len(shape)
            )
        updates, new = jax.jit(there.update)(own, state, own)
        assert jax.tree.map(lambda x: x.sharding, new) == shardings
        codes = jgrad.unpack(new)
        back = jgrad.pack(codes, like=new)
    for x, y in zip(*map(jax.tree.leaves, (back, new)), strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    expected, whole = jax.jit(tx.update)(w, tx.init(w), w)
    np.testing.assert_array_equal(updates["w"], expected["w"])
    for x, y in zip(codes.mw["w"], whole.mw["w"], strict=True):
        np.testing.assert_array_equal(x, y)
