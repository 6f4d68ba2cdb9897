"""8-bit state on many devices: no collective beyond float32's, and the same bits on 1, 2 and 8."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jgrad
from benchmarks import collectives
from tests.cases import ONE_EACH
from tests.multi_device.meshes import mesh_of
from tests.support import eight_bits
from tests.support.eight_bits import quantized, unquantized
from tests.support.loops import assert_equal

# Muon has its own in test_muon.py. SOAP's products and decompositions are of whole matrices, so that
# sums in another order turn codes, and its factors are sharded otherwise than its leaves.
MAKES = {name: eight_bits.MAKES[name] for name in ONE_EACH if name in eight_bits.MAKES}
del MAKES["muon"], MAKES["soap"]
every_method = pytest.mark.parametrize("name", MAKES)
LAYOUTS = {"axis 0": P("d"), "last axis": P(None, "d"), "packed": P("d")}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
SHAPES = {"axis 0": (64, 512), "last axis": (6, 4096), "packed": (64, 512)}


def model(layout, seed=0):
    """Two large leaves, and when packed a small and a ragged one beside them."""
    rng = np.random.default_rng(seed)
    shapes = {"a": SHAPES[layout], "b": SHAPES[layout]}
    if layout == "packed":
        shapes |= {"c": (4099,), "d": (5,)}
    tree = {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}
    return jgrad.pack(tree, multiple_of=8) if layout == "packed" else tree


def placed(tree, layout, mesh):
    """Leaves, codes and scales alike; counters on each device."""
    put = lambda x: jax.device_put(x, NamedSharding(mesh, LAYOUTS[layout] if x.ndim else P()))
    return jax.tree.map(put, tree)


def step(tx, w, state, g):
    updates, state = tx.update(g, state, w)
    return optax.apply_updates(w, updates), state


def compiled(tx, layout, mesh):
    """A step whose results lie as its arguments, and these."""
    args = tuple(
        placed(x, layout, mesh) for x in (model(layout), tx.init(model(layout)), model(layout, 1))
    )
    out = jax.tree.map(lambda x: x.sharding, args[:2])
    run = jax.jit(functools.partial(step, tx), out_shardings=out, donate_argnums=(0, 1))
    return run.lower(*args).compile(), args


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="The XLA of older versions writes more out."
)
@every_layout
@every_method
def test_e41_collectives_are_those_of_float32(name, layout):
    """Of the same kinds and bytes; and moments are cut as parameters are."""
    mesh = mesh_of(d=8)
    found, expected = (
        collectives.of(compiled(make(), layout, mesh)[0].as_text(), 8)
        for make in (functools.partial(MAKES[name], moment_dtype="8bit"), MAKES[name])
    )
    assert found == expected


@pytest.mark.slow
@every_layout
@every_method
def test_e40_the_same_bits_on_any_number_of_devices(name, layout):
    """Three steps on 1, 2 and 8: codes and scales bit for bit, where no norm enters a moment.

    Where one does, its sum is taken in another order, and a code may be the next one.
    """
    tx, ends = MAKES[name](moment_dtype="8bit"), []
    for devices in (1, 2, 8):
        run, (w, state, _) = compiled(tx, layout, mesh_of(d=devices))
        for t in (1, 2, 3):
            w, state = run(w, state, placed(model(layout, t), layout, mesh_of(d=devices)))
        ends.append(jax.device_get((w, state)))
    assert any(
        isinstance(x, jgrad.Blocks)
        for x in jax.tree.leaves(ends[0][1], is_leaf=lambda x: isinstance(x, jgrad.Blocks))
    )
    for w, state in ends[1:]:
        moments, expected = ((x.mw, x.vw) for x in (state, ends[0][1]))
        if MAKES[name].func not in (jgrad.lars, jgrad.adafactor):
            assert_equal(moments, expected)
        for a, b in zip(*map(jax.tree.leaves, (moments, expected)), strict=True):
            is_code = a.dtype in (jnp.int8, jnp.uint8)
            atol, rtol = (1, 0) if is_code else (0, 1e-5)
            np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=rtol, atol=atol)
        for a, b in zip(jax.tree.leaves(w), jax.tree.leaves(ends[0][0]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["axis 0", "last axis"])
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
