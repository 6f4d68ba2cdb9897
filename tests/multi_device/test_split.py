"""`muon(split=)` on several devices: blocks of sharded leaves, whatever devices have of them."""

import collections as counting

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jgrad
from benchmarks import collectives
from tests.multi_device.meshes import mesh_of
from tests.multi_device.test_muon import in_loops
from tests.multi_device.test_zero import Sharded, train
from tests.support.loops import stack
from tests.support.packed_model import assert_close

pytestmark = pytest.mark.slow

DEVICES = 8
# (shape, layers, outputs, split): eight heads, queries wider than keys and values, equal blocks.
LEAVES = {
    "heads": ((16, 64), None, -1, 8),
    "dense": ((16, 8, 8), None, (1, 2), 8),
    "qkv": ((16, 64), None, -1, (32, 16, 16)),
    "gate_up": ((16, 32), None, -1, (16, 16)),
    "stack": ((8, 16, 32), 0, -1, (16, 8, 8)),
    "out": ((16, 16), None, -1, None),
}


def normal(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=x[0]).astype(np.float32) for name, x in LEAVES.items()}


def muon(rule="normuon", **options):
    own = {
        "layer_axes": {name: x[1] for name, x in LEAVES.items()},
        "output_axes": {name: x[2] for name, x in LEAVES.items()},
        "split": {name: x[3] for name, x in LEAVES.items()},
    }
    return jgrad.muon(0.1, matrices=True, adam_learning_rate=0.1, rule=rule, **own, **options)


# The mesh, and how leaves are sharded on it: "rows" are inputs, "columns" outputs.
ARRANGEMENTS = {
    "rows": ({"data": 8}, dict.fromkeys(LEAVES, P("data")) | {"stack": P(None, "data")}),
    "columns": (
        {"data": 8},
        dict.fromkeys(LEAVES, P(None, "data")) | {"stack": P(None, None, "data")},
    ),
    "layers": ({"data": 8}, dict.fromkeys(LEAVES, P()) | {"stack": P("data")}),
    "both": (
        {"data": 2, "tensor": 4},
        dict.fromkeys(LEAVES, P("data", "tensor")) | {"stack": P(None, "data", "tensor")},
    ),
    "three": (
        {"data": 2, "tensor": 4},
        dict.fromkeys(LEAVES, P(None, ("tensor", "data")))
        | {"dense": P(None, "data", "tensor"), "stack": P("data", None, "tensor")},
    ),
}
arrangements = pytest.mark.parametrize("arrangement", ARRANGEMENTS)


def expected_of(w, grads, rule="normuon"):
    """Updates of each step and the last state, on one device."""
    tx = muon(rule)
    state, found = tx.init(w), []
    for g in grads:
        updates, state = jax.jit(tx.update)(g, state, w)
        found.append(updates)
    return jax.device_get((found, state))


@pytest.mark.slow(always=["True-columns"])
@arrangements
@pytest.mark.parametrize("check", [False, True])
def test_inside_shard_map(arrangement, check):
    """Matrices of which devices have parts are gathered, and cut in blocks then."""
    axes, specs = ARRANGEMENTS[arrangement]
    mesh, w, *grads = mesh_of(**axes), *map(normal, range(3))
    tx = muon(mesh_axes=specs)
    placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in w.items()}
    state = tx.init(placed)
    state_specs = jax.tree.map(lambda s: s.spec, jgrad.state_shardings(tx, placed))
    update = jax.jit(
        jax.shard_map(
            tx.update,
            mesh=mesh,
            in_specs=(specs, state_specs, specs),
            out_specs=(specs, state_specs),
            check_vma=check,
        )
    )
    expected, expected_state = expected_of(w, grads)
    for g, updates in zip(grads, expected, strict=True):
        found, state = update(g, state, placed)
        assert_close(found, updates, 1e-4)
    assert_close(jax.device_get(state.vw), expected_state.vw, 1e-4)


@pytest.mark.slow(always=["known-three"])
@arrangements
@pytest.mark.parametrize("kind", ["known", "unknown", "explicit"])
def test_shard_over(arrangement, kind):
    """The numbers of one device, and no collective in an iteration."""
    axes, specs = ARRANGEMENTS[arrangement]
    mesh = mesh_of(AxisType.Explicit if kind == "explicit" else AxisType.Auto, **axes)
    w, *grads = map(normal, range(3))
    tx = muon(shard_over="data", **({"mesh_axes": specs} if kind == "known" else {}))
    place = lambda tree: {
        name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in tree.items()
    }
    placed = place(w)
    state = jax.jit(tx.init)(placed)
    state = jax.device_put(state, jgrad.state_shardings(tx, placed))
    shardings = jax.tree.map(lambda x: x.sharding, (placed, state))
    program = jax.jit(tx.update, out_shardings=shardings).lower(placed, state, placed).compile()
    assert not in_loops(program.as_text())
    expected, expected_state = expected_of(w, grads)
    for g, updates in zip(grads, expected, strict=True):
        found, state = program(place(g), state, placed)
        assert_close(jax.device_get(found), updates, 1e-4)
    assert_close(jax.device_get(state.vw), expected_state.vw, 1e-4)


def collectives_of(name, spec, kind=AxisType.Auto):
    """Of an update of one leaf that is sharded over eight devices."""
    shape, _, outputs, split = LEAVES[name]
    mesh = mesh_of(kind, data=DEVICES)
    w = jax.device_put({"w": jnp.ones(shape)}, NamedSharding(mesh, spec))
    known = {"mesh_axes": spec} if kind == AxisType.Auto else {}
    tx = jgrad.muon(
        0.1,
        matrices=True,
        adam_learning_rate=0.1,
        output_axes=outputs,
        split=split,
        shard_over="data",
        **known,
    )
    state = jax.jit(tx.init)(w)
    state = jax.device_put(state, jgrad.state_shardings(tx, w))
    shardings = jax.tree.map(lambda x: x.sharding, (w, state))
    text = jax.jit(tx.update, out_shardings=shardings).lower(w, state, w).compile().as_text()
    assert not in_loops(text)
    return dict(counting.Counter(x.kind for x in collectives.of(text, DEVICES)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_collectives(kind):
    """None where devices have whole heads; blocks of sharded outputs take an all-to-all more."""
    assert collectives_of("heads", P(None, "data"), kind) == {}
    assert collectives_of("dense", P(None, "data"), kind) == {}
    assert collectives_of("heads", P("data"), kind) == {"all-to-all": 2}
    assert collectives_of("qkv", P("data"), kind) == {"all-to-all": 4}
    assert collectives_of("qkv", P(None, "data"), kind) == {"all-to-all": 6}
    assert collectives_of("gate_up", P(None, "data"), kind) == {"all-to-all": 4}


@pytest.mark.parametrize("split", [None, (32, 16, 16)], ids=["whole", "split"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_residuals(kind, split):
    """What `watch` notes of sharded leaves is what it notes of whole ones."""
    w = {"w": jnp.asarray(normal(0)["qkv"])}
    placed = jax.device_put(w, NamedSharding(mesh_of(kind, data=DEVICES), P(None, "data")))
    tx = jgrad.watch(jgrad.muon(0.1, matrices=True, adam_learning_rate=0.1, split=split))
    of = lambda w: jgrad.report(jax.jit(tx.update)(w, jax.jit(tx.init)(w), w)[1])
    np.testing.assert_allclose(of(placed)["muon_residual/w"], of(w)["muon_residual/w"], rtol=1e-4)


def test_under_jit_alone():
    """Without `shard_over` whole matrices are the partitioner's."""
    mesh, w, g = mesh_of(data=DEVICES), normal(0), normal(1)
    _, specs = ARRANGEMENTS["columns"]
    placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in w.items()}
    tx = muon()
    found, _ = jax.jit(tx.update)(g, tx.init(placed), placed)
    assert_close(jax.device_get(found), expected_of(w, [g])[0][0], 1e-4)


@pytest.mark.parametrize("rule", ["muon", "normuon"])
def test_zero(rule):
    """Each device has whole matrices, and cuts them."""
    shapes = {"qkv": [(16, 32)] * 5, "stack": (8, 16, 64)}
    rest = {"qkv": None, "stack": 0}
    own = {"layer_axes": rest, "split": {"qkv": (16, 8, 8), "stack": 16}}
    tx = jgrad.muon(0.1, matrices=True, adam_learning_rate=0.1, rule=rule, **own)
    rng = np.random.default_rng(0)
    draw = lambda: jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    w = draw()
    packed = jgrad.pack(w, matrices=True, multiple_of=DEVICES, layer_axes=rest)
    each = [[draw() for _ in range(DEVICES)] for _ in range(2)]
    grads = [stack([jgrad.pack(g, like=packed) for g in row]) for row in each]
    found, _ = train(Sharded(tx, packed), packed, grads)
    state = tx.init(w)
    for row in each:
        mean = jax.tree.map(lambda *xs: sum(xs) / DEVICES, *row)
        updates, state = jax.jit(tx.update)(mean, state, w)
        w = jax.tree.map(jnp.add, w, updates)
    assert_close(jgrad.unpack(found), w, 1e-4)
