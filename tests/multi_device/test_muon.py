"""Muon on several devices: whole matrices on each, and no collective inside its iterations."""

import collections as counting
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jgrad
from benchmarks import collectives
from jgrad._packed import layouts
from tests.multi_device.meshes import mesh_of
from tests.multi_device.test_zero import Sharded, train
from tests.support.errors import assert_error
from tests.support.loops import assert_equal, stack
from tests.support.packed_model import assert_close

pytestmark = pytest.mark.slow

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


def test_8_bits():
    """Codes and scales of a device's rows: those of the tree, where Adam's leaves are large."""
    shapes = {"up": [(8, 512)] * 8, "embed": (64, 100)}
    matrices = {"up": True, "embed": False}

    def tree(seed):
        rng = np.random.default_rng(seed)
        draw = lambda shape: jnp.asarray(rng.integers(-8, 9, shape), jnp.float32)
        return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))

    packed = jgrad.pack(tree(0), matrices=matrices, multiple_of=DEVICES)
    g = tree(1)  # integers: their mean over devices is exact
    tx = jgrad.muon(0.1, matrices=matrices, adam_learning_rate=0.01, moment_dtype="8bit")
    each = stack([jgrad.pack(g, like=packed)] * DEVICES)
    _, state = train(Sharded(tx, packed), packed, [each] * 2)
    w = tree(0)
    expected = tx.init(w)
    for _ in range(2):
        updates, expected = jax.jit(tx.update)(g, expected, w)
        w = optax.apply_updates(w, updates)
    found = jgrad.unpack(jax.device_get(state))
    assert found.vw["embed"].codes.dtype == jnp.uint8
    assert_equal(found.vw["embed"], expected.vw["embed"])
    assert_equal(found.mw["embed"], expected.mw["embed"])


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


@pytest.mark.slow(always=True)
def test_bytes_of_each_device():
    """An eighth of the momentum with its padding, and of the second moments of other leaves."""
    packed = packed_model()
    run = Sharded(muon(), packed)
    rows = packed.layout.shapes[0][1][0]
    row_order = layouts.row_order(packed.layout, packed.layout.shapes[0][0])
    others = sum(segment.rows for segment in row_order.segments if not segment.capacity)
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
        run.tx, jax.device_put(other, NamedSharding(run.mesh, P())), shard_over="data"
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


@pytest.mark.slow(always=True)
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


# ---- shard_map -----------------------------------------------------------------------------------

SPECS = {
    "stack": P("data"),
    "up": [P(None, "data"), P("data", None), P(), P(("data",)), P("data")],
    "down": [P("data"), P(None, "data"), P(), P(), P()],
    "b": P(),
    "embed": P(),
}


def of_eight_layers(tree):
    return tree | {"stack": jnp.concatenate([tree["stack"], tree["stack"][:2]])}


@pytest.mark.parametrize("rule", ["muon", "normuon"])
@pytest.mark.parametrize("check", [False, True])
def test_cut_matrices(rule, check):
    """Rows, columns, or layers cut: gathered where need be, and each device keeps its part."""
    mesh, w, g = mesh_of(data=DEVICES), of_eight_layers(normal(0)), of_eight_layers(normal(1))
    tx = muon(rule=rule, mesh_axes=SPECS)
    specs = jax.tree.map(lambda x, s: s, w, _full(SPECS, w))
    placed = jax.device_put(w, jax.tree.map(lambda s: NamedSharding(mesh, s), specs))
    state = tx.init(placed)
    shardings = jgrad.state_shardings(tx, placed)
    state_specs = jax.tree.map(lambda s: s.spec, shardings)
    update = jax.jit(
        jax.shard_map(
            tx.update,
            mesh=mesh,
            in_specs=(specs, state_specs, specs),
            out_specs=(specs, state_specs),
            check_vma=check,
        )
    )
    whole = muon(rule=rule)
    expected = whole.init(w)
    for _ in range(2):
        found, state = update(g, state, placed)
        updates, expected = jax.jit(whole.update)(g, expected, w)
        assert_close(found, updates, 1e-5)
    assert_close(state.mw, expected.mw)
    assert_close(state.vw, expected.vw, 1e-5)


def _full(specs, tree):
    """A spec for each leaf."""
    is_spec = lambda x: isinstance(x, P)
    return jax.tree.map(lambda s, t: jax.tree.map(lambda _: s, t), specs, tree, is_leaf=is_spec)


def test_cut_matrices_in_optax_are_several(standard_promotion):
    """D13: each part is orthogonalized by itself, silently; here it is an error to say nothing."""
    mesh, w, g = mesh_of(data=4), {"w": jnp.zeros((64, 32))}, {"w": normal_of(64, 32)}

    def step(tx):
        update = lambda g, w: tx.update(g, tx.init(w), w)[0]
        cut = jax.shard_map(
            update, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"), check_vma=False
        )
        return update, cut

    update, cut = step(optax.contrib.muon(1.0))
    whole, parts = update(g, w)["w"], cut(g, w)["w"]
    assert np.linalg.norm(whole - parts) > np.linalg.norm(whole)
    _, cut = step(jgrad.muon(1.0, matrices=True, adam_learning_rate=1.0))
    with pytest.raises(
        ValueError, match=r"muon: `mesh_axes` at \['w'\]: None inside `shard_map` or `pmap`, "
    ):
        cut(g, w)
    update, cut = step(
        jgrad.muon(1.0, matrices=True, adam_learning_rate=1.0, mesh_axes={"w": P("data")})
    )
    plain = jgrad.muon(1.0, matrices=True, adam_learning_rate=1.0)
    assert_close(cut(g, w), plain.update(g, plain.init(w), w)[0], 1e-5)


def normal_of(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.mark.slow(always=True)
def test_replicated_parameters_need_no_spec():
    """JAX knows that they are whole, unless it is told not to look; then `PartitionSpec()` says it."""
    mesh, w, g = mesh_of(data=DEVICES), normal(0), normal(1)

    def updates(tx, check):
        def update(g, w):
            own = 1 + jax.lax.axis_index("data").astype(float)
            g = jax.tree.map(lambda x: jax.lax.pmean(x * own, "data"), g)
            return tx.update(g, tx.init(w), w)[0]

        f = jax.shard_map(update, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=check)
        return jax.jit(f)(g, w)

    expected = updates(muon(mesh_axes=P()), False)
    assert_close(updates(muon(), True), expected)
    with pytest.raises(ValueError, match="whole matrices, `mesh_axes=PartitionSpec"):
        updates(muon(), False)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="To older versions a device under pmap has all it has."
)
def test_pmap():
    """Without a name each device has a model of its own; with one it may have a part of a matrix."""
    models, grads = ([normal(seed + i) for i in range(DEVICES)] for seed in (0, 100))
    update = lambda tx: lambda g, w: tx.update(g, tx.init(w), w)[0]
    stacked = stack(grads), stack(models)
    expected = stack([update(muon())(g, w) for g, w in zip(grads, models, strict=True)])
    assert_close(jax.pmap(update(muon()))(*stacked), expected)
    named = lambda tx: jax.pmap(update(tx), axis_name="data")(*stacked)
    assert_close(named(muon(mesh_axes=P())), expected)


@pytest.mark.slow(always=True)
def test_pmap_without_a_spec():
    """Traced only: without a name no device has a part of a model."""
    models, tx = stack([normal(seed) for seed in range(DEVICES)]), muon()
    update = lambda w: tx.update(w, tx.init(w), w)[0]
    jax.eval_shape(jax.pmap(update), models)
    with pytest.raises(ValueError) as caught:
        jax.eval_shape(jax.pmap(update, axis_name="data"), models)
    assert str(caught.value) == (
        "muon: `mesh_axes` at ['down'][0]: None inside `shard_map` or `pmap`, where a device may have a part of a matrix "
        "along 'data', expected the PartitionSpec of the leaf; where each device has whole matrices, "
        "`mesh_axes=PartitionSpec()`."
    )


@pytest.mark.slow(always=True)
def test_messages_of_mesh_axes():
    assert_error(
        TypeError,
        "muon: `mesh_axes`: 'data' of type str, expected None, or a PartitionSpec, which says "
        "which axes are sharded.",
        lambda: muon(mesh_axes="data"),
    )
    assert_error(
        ValueError,
        "muon: `mesh_axes` at ['down'][0]: 3 entries, expected at most 2, one for each axis of "
        "shape (64, 8).",
        lambda: muon(mesh_axes=P(None, None, "data")).init(normal(0)),
    )
    assert_error(
        ValueError,
        "muon: `mesh_axes` at ['down'][0]: a PartitionSpec of a packed leaf, expected None: `zero` "
        "knows its rows.",
        lambda: muon(mesh_axes=P("data")).init(jgrad.pack(normal(0))),
    )


# ---- jit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [6, 8, 12])
@pytest.mark.parametrize(
    "spec", [P("data"), P(None, "data"), P()], ids=["rows", "columns", "whole"]
)
def test_shard_over(count, spec):
    """At most three all-to-alls for a shape, none in a loop, whatever the count; the same numbers."""
    mesh = mesh_of(data=DEVICES)
    draws = np.random.default_rng(0)
    w = {f"{i}": jnp.asarray(draws.normal(size=(32, 64)), jnp.float32) for i in range(count)}
    w["stack"] = jnp.asarray(draws.normal(size=(2, 32, 64)), jnp.float32)
    layers = {name: 0 if name == "stack" else None for name in w}
    options = {"matrices": True, "layer_axes": layers, "adam_learning_rate": 0.1}
    tx = jgrad.muon(0.1, shard_over=("data",), **options)
    specs = {name: P(None, *spec) if name == "stack" else spec for name in w}
    placed = jax.device_put(w, {name: NamedSharding(mesh, s) for name, s in specs.items()})
    state = tx.init(placed)
    shardings = jax.tree.map(lambda x: x.sharding, (placed, state))
    program = jax.jit(tx.update, out_shardings=shardings).lower(placed, state, placed).compile()
    text = program.as_text()
    kinds = [x.kind for x in collectives.of(text, DEVICES)]
    assert len(kinds) <= 3
    assert set(kinds) <= ({"all-gather"} if spec == P() else {"all-to-all"})
    assert not in_loops(text)
    found, _ = program(placed, state, placed)
    plain = jgrad.muon(0.1, **options)
    expected, _ = jax.jit(plain.update)(w, plain.init(w), w)
    assert_close(jax.device_get(found), jax.device_get(expected), 1e-5)


@pytest.mark.parametrize("options", [{}, {"shard_over": "data"}], ids=["alone", "shared"])
@pytest.mark.parametrize("rule", ["muon", "normuon"])
def test_explicit_axes(options, rule):
    """Types that say how leaves are sharded: matrices are gathered, and sharded again."""
    mesh = mesh_of(AxisType.Explicit, data=DEVICES)
    w = {"a": normal_of(32, 64), "b": normal_of(64, 32), "c": normal_of(16)}
    specs = {"a": P("data"), "b": P(None, "data"), "c": P("data")}
    placed = jax.device_put(w, {name: NamedSharding(mesh, s) for name, s in specs.items()})
    chosen = {"a": True, "b": True, "c": False}
    tx = jgrad.muon(0.1, matrices=chosen, adam_learning_rate=0.1, rule=rule, **options)
    state = jax.jit(tx.init)(placed)
    found, state = jax.jit(tx.update)(placed, state, placed)
    assert {name: x.sharding.spec for name, x in found.items()}["a"] == P("data", None)
    plain = jgrad.muon(0.1, matrices=chosen, adam_learning_rate=0.1, rule=rule)
    expected, of_whole = jax.jit(plain.update)(w, plain.init(w), w)
    assert_close(jax.device_get(found), jax.device_get(expected), 1e-5)
    assert_close(jax.device_get(state.vw), jax.device_get(of_whole.vw), 1e-5)


# For a mesh, specs by the first letter of a name, and layers; how many collectives of each kind.
# Each shape is dealt out there and back, at once or its two kinds apart: where both together are
# fewer matrices for a device, by tiles of both.
KNOWN = {
    "fsdp": ({"data": 8}, {"": P("data")}, {"all-to-all": 4}),
    "columns": ({"data": 8}, {"": P(None, "data")}, {"all-to-all": 4}),
    "tensor": ({"data": 4, "tensor": 2}, {"": P("data", "tensor")}, {"all-to-all": 4}),
    "turned": ({"data": 2, "tensor": 4}, {"": P("tensor", "data")}, {"all-to-all": 4}),
    "both": ({"data": 4, "tensor": 2}, {"": P(("tensor", "data"))}, {"all-to-all": 4}),
    "experts": (
        {"data": 4, "expert": 2},
        {"": P("data"), "e": P("expert", "data")},
        {"all-to-all": 10},
    ),
    "whole": ({"data": 4, "tensor": 2}, {"": P()}, {"all-gather": 2}),
    "tensor alone": (
        {"data": 4, "tensor": 2},
        {"": P(None, "tensor")},
        {"all-to-all": 4, "all-gather": 2},
    ),
    "convolutions": (
        {"data": 2, "tensor": 4},
        {"": P("data"), "c": P("tensor", None, "data")},
        {"all-to-all": 6},
    ),
}


def of_layers(arrangement, layers=3):
    """Leaves, their specs, and axes of layers: two shapes, one of them up and down."""
    _, specs, _ = KNOWN[arrangement]
    shapes = {}
    for i in range(layers):
        shapes |= {f"up{i}": (16, 64), f"down{i}": (64, 16), f"square{i}": (16, 16)}
        if arrangement == "experts":
            shapes |= {f"expert_up{i}": (2, 8, 32), f"expert_down{i}": (2, 32, 8)}
        if arrangement == "convolutions":
            shapes |= {f"conv{i}": (8, 3, 4, 16)}
    draws = np.random.default_rng(0)
    w = {name: jnp.asarray(draws.normal(size=s), jnp.float32) for name, s in shapes.items()}
    own = {name: specs.get(name[0], specs[""]) for name in w}
    return w, own, {name: 0 if "expert" in name else None for name in w}


@pytest.mark.parametrize("rule", ["muon", "normuon"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("arrangement", KNOWN)
def test_shard_over_where_shardings_are_known(arrangement, kind, rule):
    """By `mesh_axes` or by types: all-to-alls alone, whatever the mesh axes; the same numbers."""
    axes, _, expected = KNOWN[arrangement]
    w, specs, layers = of_layers(arrangement)
    mesh = mesh_of(kind, **axes)
    options = {"matrices": True, "layer_axes": layers, "adam_learning_rate": 0.1, "rule": rule}
    known = {"mesh_axes": specs} if kind == AxisType.Auto else {}
    tx = jgrad.muon(0.1, shard_over="data", **options, **known)
    placed = {name: jax.device_put(w[name], NamedSharding(mesh, specs[name])) for name in w}
    state = jax.jit(tx.init)(placed)
    state = jax.device_put(state, jgrad.state_shardings(tx, placed))
    shardings = jax.tree.map(lambda x: x.sharding, (placed, state))
    program = jax.jit(tx.update, out_shardings=shardings).lower(placed, state, placed).compile()
    text = program.as_text()
    if rule == "muon":  # the other adds up squares of outputs
        assert counting.Counter(x.kind for x in collectives.of(text, DEVICES)) == expected
    assert not in_loops(text)
    found, state = program(placed, state, placed)
    plain = jgrad.muon(0.1, **options)
    expected, of_whole = jax.jit(plain.update)(w, plain.init(w), w)
    assert_close(jax.device_get(found), jax.device_get(expected), 1e-5)
    assert_close(jax.device_get(state.vw), jax.device_get(of_whole.vw), 1e-5)


@pytest.mark.slow(always=True)
def test_a_device_has_no_matrix_more_than_it_must():
    """Ten up and ten down are 20 for 8 devices: 3 each, which are 4 if both are dealt out apart."""
    w = {f"up{i}": normal_of(16, 64) for i in range(10)}
    w |= {f"down{i}": normal_of(64, 16) for i in range(10)}
    placed = jax.device_put(w, NamedSharding(mesh_of(data=DEVICES), P("data")))
    tx = jgrad.muon(
        0.1, matrices=True, adam_learning_rate=0.1, mesh_axes=P("data"), shard_over="data"
    )
    text = jax.jit(tx.update).lower(placed, tx.init(placed), placed).as_text()
    stacks = re.findall(r"call @orthogonalized\w*\(.*tensor<(\d+)x16x64xf32>\)", text)
    assert stacks == ["3"]


def test_mesh_axes_of_some():
    """Matrices of which nothing says how they are sharded are dealt out as well."""
    w = {"a": normal_of(8, 16), "b": normal_of(16, 8)}
    placed = jax.device_put(w, NamedSharding(mesh_of(data=DEVICES), P("data")))
    options = {"matrices": True, "adam_learning_rate": 0.1}
    tx = jgrad.muon(0.1, mesh_axes={"a": P("data"), "b": None}, shard_over="data", **options)
    found, _ = jax.jit(tx.update)(placed, tx.init(placed), placed)
    plain = jgrad.muon(0.1, **options)
    expected, _ = jax.jit(plain.update)(w, plain.init(w), w)
    assert_close(jax.device_get(found), jax.device_get(expected), 1e-5)


def test_mesh_axes_under_jit_alone():
    """Nothing is dealt out without `shard_over`, and whole matrices are the partitioner's."""
    w = {"a": normal_of(8, 16)}
    placed = jax.device_put(w, NamedSharding(mesh_of(data=DEVICES), P("data")))
    options = {"matrices": True, "adam_learning_rate": 0.1}
    tx = jgrad.muon(0.1, mesh_axes=P("data"), **options)
    found, _ = jax.jit(tx.update)(placed, tx.init(placed), placed)
    plain = jgrad.muon(0.1, **options)
    expected, _ = jax.jit(plain.update)(w, plain.init(w), w)
    assert_close(jax.device_get(found), jax.device_get(expected), 1e-5)


def test_optax_has_collectives_in_its_iterations(standard_promotion):
    """D7: two for each product of a sharded matrix."""
    mesh = mesh_of(data=DEVICES)
    tx, sharding = optax.contrib.muon(0.1), NamedSharding(mesh, P("data"))
    w = {f"{i}": jax.device_put(jnp.ones((32, 64)), sharding) for i in range(8)}
    text = jax.jit(tx.update).lower(w, tx.init(w), w).compile().as_text()
    assert len(collectives.of(text, DEVICES)) >= 40


def test_flops_of_each_device():
    """An eighth of the products."""
    mesh = mesh_of(data=DEVICES)
    w = {
        f"{i}": jax.device_put(normal_of(64, 64), NamedSharding(mesh, P("data"))) for i in range(8)
    }

    def flops(**options):
        tx = jgrad.muon(0.1, matrices=True, adam_learning_rate=0.1, **options)
        text = jax.jit(tx.update).lower(w, tx.init(w), w).compile().as_text()
        shapes = re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text)
        return max(int(s.split(",")[0]) if s.count(",") == 2 else 1 for s in shapes)

    assert flops(shard_over="data") == 1


@pytest.mark.slow(always=["muon"])
@pytest.mark.parametrize("name", ["muon", "scale_by_muon"])
def test_no_mesh(name):
    w, options = {"w": normal_of(8, 16)}, {"matrices": True, "shard_over": "data"}
    if name == "muon":
        tx = jgrad.muon(0.1, adam_learning_rate=0.1, **options)
    else:
        tx = optax.chain(jgrad.scale_by_muon(**options), optax.scale(-0.1))
    assert_error(
        ValueError,
        f"{name}: `shard_over`: no mesh with 'data' here, expected leaves with a NamedSharding on such "
        "a mesh, or a call of the compiled function under `jax.set_mesh(mesh)`.",
        lambda: jax.jit(tx.update)(w, tx.init(w), w),
    )
    if not hasattr(jax, "set_mesh"):  # JAX 0.7
        return
    with jax.set_mesh(mesh_of(data=DEVICES)):
        found, _ = jax.jit(tx.update)(w, tx.init(w), w)
    plain = jgrad.muon(0.1, matrices=True, adam_learning_rate=0.1)
    assert_close(found, plain.update(w, plain.init(w), w)[0], 1e-5)
