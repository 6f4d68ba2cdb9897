"""Muon on several devices: whole matrices on each, and no collective inside its iterations."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jgrad
from benchmarks import collectives
from tests.errors import assert_error
from tests.loops import assert_equal, stack
from tests.multi_device.meshes import mesh_of
from tests.multi_device.test_zero import Sharded, train
from tests.packed_model import assert_close

DEVICES = 8
LAYERS = {"stack": 0, "up": None, "down": None, "b": None, "embed": None}
MATRICES = {"stack": True, "up": True, "down": True, "b": False, "embed": False}
SHAPES = {
    "stack": (6, 16, 16),
    "up": [(8, 64)] * 5,
    "down": [(64, 8)] * 5,
    "b": [(16,), (300,)],
    "embed": (50, 8),
}


def normal(seed):
    rng = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return jax.tree.map(draw, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def muon(rate=0.1, **options):
    options = {"matrices": MATRICES, "layer_axes": LAYERS, "weight_decay": 0.1} | options
    return jgrad.muon(rate, adam_learning_rate=0.01, **options)


def packed_model(tree=None, **options):
    options = {"matrices": MATRICES, "layer_axes": LAYERS, "multiple_of": DEVICES} | options
    return jgrad.pack(normal(0) if tree is None else tree, **options)


def of_devices(packed, devices, steps=3):
    """For each step the gradients of each device, and their mean."""
    found, means = [], []
    for step in range(steps):
        each = [normal(1 + step * devices + i) for i in range(devices)]
        found.append(stack([jgrad.pack(g, like=packed) for g in each]))
        means.append(jax.tree.map(lambda *xs: sum(xs) / devices, *each))
    return found, means


def in_loops(text):
    """The collectives in the bodies of loops, and in what those call."""
    bodies = {m[1]: m[2] for m in re.finditer(r"^%?([\w.-]+) .*?\{\n(.*?)^\}", text, re.M | re.S)}
    called = lambda body: set(re.findall(r"(?:body|condition|to_apply|calls)=%?([\w.-]+)", body))
    seen, todo = set(), set(re.findall(r"body=%?([\w.-]+)", text))
    assert todo  # there are loops
    while todo:
        name = todo.pop()
        seen.add(name)
        todo |= called(bodies.get(name, "")) - seen
    kinds = r"(all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(?:-start)?\("
    return [kind for name in seen for kind in re.findall(kinds, bodies.get(name, ""))]


# ---- zero ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [8, 4, 2])
@pytest.mark.parametrize("rule", ["muon", "normuon"])
def test_numbers_of_the_tree(devices, rule):
    """Packed for eight shards, on any number of devices that divides eight."""
    packed = packed_model()
    grads, means = of_devices(packed, devices)
    tx = muon(rule=rule)
    found, state = train(Sharded(tx, packed, mesh=mesh_of(data=devices)), packed, grads)
    w = normal(0)
    expected = tx.init(w)
    for g in means:
        updates, expected = jax.jit(tx.update)(g, expected, w)
        w = optax.apply_updates(w, updates)
    assert_close(jgrad.unpack(found), w, 1e-5)
    unpacked = jgrad.unpack(state)
    assert jax.tree.map(jnp.shape, unpacked) == jax.tree.map(jnp.shape, expected)
    assert_close(unpacked.vw, expected.vw, 1e-5)


def test_rates_and_masks_of_leaves():
    rates = {"stack": 0.1, "up": [0.1, 0.2, 0.3, 0.4, 0.5], "down": 0.2, "b": 0.3, "embed": 0.4}
    mask = jax.tree.map(lambda x: x.size % 3 == 0, normal(0))
    tx = muon(rates, weight_decay_mask=mask)
    packed = packed_model()
    grads, (mean,) = of_devices(packed, DEVICES, 1)
    found, _ = train(Sharded(tx, packed), packed, grads)
    w = normal(0)
    updates, _ = jax.jit(tx.update)(mean, tx.init(w), w)
    assert_close(jgrad.unpack(found), optax.apply_updates(w, updates), 1e-5)


@pytest.mark.parametrize("rule", ["muon", "normuon"])
def test_collectives(rule):
    """One reduce-scatter and one all-gather, outside of loops: as for any method."""
    packed = packed_model()
    run = Sharded(muon(rule=rule), packed)
    (g,), _ = of_devices(packed, DEVICES, 1)
    text = run.update.lower(packed, run.state, g).compile().as_text()
    assert sorted(x.kind for x in collectives.of(text, DEVICES)) == ["all-gather", "reduce-scatter"]
    assert not in_loops(text)


def test_bytes_of_each_device():
    """An eighth of the momentum with its padding, and of the second moments of other leaves."""
    packed = packed_model()
    run = Sharded(muon(), packed)
    rows = packed.layout.shapes[0][1][0]
    (deal,) = (deal for _, deal in packed.layout.deals)
    others = sum(segment.rows for segment in deal.segments if not segment.slots)
    assert others == 1  # 8 x 256 elements for 716
    mw, vw = run.state.mw.buffers["float32"], run.state.vw.buffers["float32"]
    assert mw.addressable_shards[0].data.shape == (rows // DEVICES, 256)
    assert vw.addressable_shards[0].data.shape == (others, 256)


def test_a_checkpoint_fits_any_number_of_devices():
    """From eight to two, and to the tree."""
    packed = packed_model()
    grads, means = of_devices(packed, DEVICES, 2)
    tx = muon()
    w, state = train(Sharded(tx, packed), packed, grads[:1])
    saved = jgrad.unpack((w, state))
    other = packed_model(saved[0], multiple_of=2)
    run = Sharded(tx, other, mesh=mesh_of(data=2))
    placed = jgrad.pack(saved[1], like=jax.eval_shape(tx.init, other))
    shardings = jgrad.state_shardings(
        run.tx, jax.device_put(other, NamedSharding(run.mesh, P())), cut_over="data"
    )
    run.state = jax.device_put(jax.device_get(placed), shardings)
    g = stack([jgrad.pack(means[1], like=other)] * 2)
    found, _ = train(run, other, [g])
    updates, _ = jax.jit(tx.update)(means[1], saved[1], saved[0])
    expected = optax.apply_updates(jax.device_get(saved[0]), jax.device_get(updates))
    assert_close(jgrad.unpack(found), expected, 1e-5)


def test_a_nan_on_one_device_is_skipped_on_all():
    packed = packed_model()
    (g, bad), _ = of_devices(packed, DEVICES, 2)
    bad.buffers["float32"] = bad.buffers["float32"].at[3, 2, 1].set(jnp.nan)
    tx = jgrad.skip_nonfinite(muon())
    found, state = train(Sharded(tx, packed), packed, [g, bad])
    expected, without = train(Sharded(tx, packed), packed, [g])
    assert_equal((found, state.inner), (expected, without.inner))
    assert int(state.skipped) == 1


def test_buffers_that_would_cut_a_matrix():
    """An error when `update` is traced, and never a part of a matrix by itself."""
    packed = jgrad.pack(normal(0), layer_axes=LAYERS, multiple_of=DEVICES)
    tx = muon()
    run = Sharded(tx, packed)
    (g,), _ = of_devices(packed, DEVICES, 1)
    assert_error(
        ValueError,
        "muon: `matrices` at ['down'][0]: a matrix in a buffer of which each of 8 devices has some "
        "rows, expected whole matrices on each: `pack(params, matrices=..., multiple_of=8)`.",
        lambda: run.update(packed, run.state, g),
    )
