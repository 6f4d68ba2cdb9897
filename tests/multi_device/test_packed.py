"""Packed trees on many devices: pmap, shard_map, and buffers cut over a mesh."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jgrad
from tests.multi_device.meshes import mesh_of
from tests.support.eight_bits import unquantized

pytestmark = pytest.mark.slow

DEVICES = 8
METHODS = {
    "adam": functools.partial(jgrad.adam, 0.1),
    "lamb": functools.partial(jgrad.lamb, 0.1, weight_decay=0.1),
    "lars": functools.partial(jgrad.lars, 0.1, weight_decay=0.1),
}
every_method = pytest.mark.parametrize("name", METHODS)


line = lambda name: mesh_of(**{name: DEVICES})


def model(seed):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return {"w": draw(40, 30), "b": draw(64), "h": draw(16, 16)}


def batches():
    """Gradients for each device, as one tree with an axis for them."""
    each = [model(seed) for seed in range(1, DEVICES + 1)]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *each)


def step(tx, w, state, g, axis=None):
    if axis is not None:
        g = jax.lax.pmean(g, axis)
    updates, state = tx.update(g, state, w)
    return optax.apply_updates(w, updates), state


def expected(tx, w, grads):
    """On one device, with the mean of all gradients, as a tree."""
    mean = jax.tree.map(lambda x: jnp.mean(x, 0), grads)
    return step(tx, w, tx.init(w), mean)


def assert_close(found, other):
    found = jgrad.unpack(found)
    assert jax.tree.structure(found) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@every_method
def test_pmap(name):
    """One array to be reduced, and copies that stay alike."""
    tx, w, grads = METHODS[name](), model(0), batches()
    many = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * DEVICES), tree)
    packed = jgrad.pack(w)
    update = jax.pmap(lambda w, s, g: step(tx, w, s, jgrad.pack(g), "i"), axis_name="i")
    found = update(many(packed), many(tx.init(packed)), grads)
    for i in range(DEVICES):
        assert_close(jax.tree.map(lambda x, i=i: x[i], found), expected(tx, w, grads))


@every_method
def test_shard_map(name):
    """One reduction for the whole model."""
    mesh = line("data")
    tx, w, grads = METHODS[name](), model(0), batches()

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
    def update(w, state, g):
        own = jgrad.pack(jax.tree.map(lambda x: x[0], g))
        return step(tx, w, state, own, "data")

    packed = jgrad.pack(w)
    args = packed, tx.init(packed), grads
    assert_close(update(*args), expected(tx, w, grads))
    text = update.lower(*args).compile().as_text()
    assert len(re.findall(r"= \S+ all-reduce(?:-start)?\(", text)) == 1


@every_method
def test_leaves_shard_over_a_mesh(name):
    """Each device packs its part; `mesh_axes` says that layers are cut."""
    mesh = line("model")
    w, g = model(0), model(1)
    cut = functools.partial(METHODS[name], **({} if name == "adam" else {"mesh_axes": "model"}))
    tx = cut()

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("model"), out_specs=P("model"))
    def update(w, g):
        new, _ = step(tx, jgrad.pack(w), tx.init(jgrad.pack(w)), jgrad.pack(g))
        return jgrad.unpack(new)

    whole = METHODS[name]()
    assert_close(update(w, g), step(whole, w, whole.init(w), g)[0])


def test_leaves_of_a_buffer_shard_over_different_axes():
    mesh = line("model")
    tx = jgrad.lars(0.1, mesh_axes={"w": "model", "b": None, "h": None})
    update = jax.shard_map(
        lambda w: tx.update(jgrad.pack(w), tx.init(jgrad.pack(w)), jgrad.pack(w))[0],
        mesh=mesh,
        in_specs=P("model"),
        out_specs=P("model"),
    )
    message = (
        "lars: `mesh_axes` at ['w']: ('model',), expected (), as for the other leaves in its "
        "buffer."
    )
    with pytest.raises(ValueError) as caught:
        update(model(0))
    assert str(caught.value) == message


@every_method
def test_buffers_shard_over_a_mesh(name):
    """Under jit: an eighth of parameters and moments on each device, in one trace."""
    mesh = line("data")
    tx, w, g = METHODS[name](), model(0), model(1)
    rows = NamedSharding(mesh, P("data"))
    packed = jax.device_put(jgrad.pack(w, multiple_of=DEVICES), rows)
    grads = jax.device_put(jgrad.pack(g, like=packed), rows)
    shardings = jgrad.state_shardings(tx, packed)
    state = jax.jit(tx.init, out_shardings=shardings)(packed)
    for x in (*jax.tree.leaves(packed), *jax.tree.leaves((state.mw, state.vw))):
        assert x.addressable_shards[0].data.size * DEVICES == x.size
    traces = []

    def counted(w, state, g):
        traces.append(1)
        return step(tx, w, state, g)

    update = jax.jit(counted, out_shardings=(jax.tree.map(lambda _: rows, packed), shardings))
    new, other = packed, state
    tree = w, tx.init(w)
    for _ in range(3):
        new, other = update(new, other, grads)
        tree = step(tx, *tree, g)
    assert len(traces) == 1
    assert_close((new, other), tree)


def test_large_leaves_keep_their_shardings():
    """Those that stay as they are, and their moments."""
    mesh = line("model")
    w = model(0)
    w["w"] = jax.device_put(w["w"], NamedSharding(mesh, P("model")))
    w["b"], w["h"] = jax.device_put((w["b"], w["h"]), NamedSharding(mesh, P()))
    tx = jgrad.pack_small(jgrad.adam(0.1), max_size=300)
    state = jax.jit(tx.init, out_shardings=jgrad.state_shardings(tx, w))(w)
    assert state.mw.buffers["leaf 2"].sharding.spec == P("model")
    assert state.mw.buffers["float32"].sharding.spec == P()


@pytest.mark.slow(always=True)
def test_layers_on_explicit_axes():
    """Numbers of rows that their type says are sharded become numbers of layers."""
    mesh, tree, tx = mesh_of(AxisType.Explicit, d=DEVICES), model(0), jgrad.lars(0.1)
    update = jax.jit(lambda w: tx.update(w, tx.init(w), w)[0])
    w = jax.device_put(jgrad.pack(tree, multiple_of=DEVICES), NamedSharding(mesh, P("d")))
    assert_close(jgrad.unpack(update(w)), update(tree))


@pytest.mark.slow(always=True)
def test_matrices_on_explicit_axes():
    """They are gathered for their iteration, and each device keeps its rows of what comes of it."""
    mesh, tree = mesh_of(AxisType.Explicit, d=DEVICES), {"w": jnp.ones((64, 96)), "b": jnp.ones(64)}
    w = jax.device_put(jgrad.pack(tree, multiple_of=DEVICES), NamedSharding(mesh, P("d")))
    matrices = {"w": True, "b": False}
    tx = jgrad.muon(0.1, matrices=matrices, adam_learning_rate=0.1)
    updates, state = jax.jit(lambda w: tx.update(w, tx.init(w), w))(w)
    types = lambda tree: [jax.typeof(x) for x in jax.tree.leaves(tree)]
    assert types(updates) == types(state.mw) == types(w)


@pytest.mark.parametrize("moment_dtype", [None, "8bit"])
def test_explicit_axes(moment_dtype):
    """Rows that are sharded by their type: what is unpacked is on each device, and packs again."""
    mesh = mesh_of(AxisType.Explicit, d=DEVICES)
    tree = {**model(0), "large": jnp.sin(jnp.arange(8192.0))}
    w = jax.device_put(jgrad.pack(tree, multiple_of=DEVICES), NamedSharding(mesh, P("d")))
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
    rows = {name: P("d") for name in tree}
    placed = jax.device_put(tree, jax.tree.map(lambda s: NamedSharding(mesh, s), rows))
    np.testing.assert_array_equal(
        jgrad.pack(placed, multiple_of=DEVICES).buffers["float32"], w.buffers["float32"]
    )


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10),
    reason="JAX 0.7 has no types for such tangents of a custom rule.",
)
def test_gradients_on_explicit_axes():
    """They have the type of the parameters."""
    sharding = NamedSharding(mesh_of(AxisType.Explicit, d=DEVICES), P("d"))
    w = jax.device_put(jgrad.pack(model(0), multiple_of=DEVICES), sharding)
    loss = lambda w: sum(jnp.sum(x**2) for x in jax.tree.leaves(jgrad.unpack(w))) / 2
    grads = jax.jit(jax.grad(loss))(w)
    assert jax.typeof(grads.buffers["float32"]) == jax.typeof(w.buffers["float32"])
    np.testing.assert_array_equal(grads.buffers["float32"], w.buffers["float32"])
