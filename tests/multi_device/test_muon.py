"""Muon on several devices: whole matrices, or whole blocks of them, on each; no collective in a loop."""

import collections as counting
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jgrad
from benchmarks import collectives
from tests.multi_device.meshes import mesh_of, place, update_in_shard_map
from tests.support import draws, messages
from tests.support.errors import assert_error
from tests.support.loops import stack
from tests.support.packed_model import assert_close

pytestmark = pytest.mark.slow

DEVICES = 8
SHAPES = {
    "stack": (6, 16, 16),
    "up": [(8, 64)] * 5,
    "down": [(64, 8)] * 5,
    "qkv": [(16, 32)] * 5,
    "b": [(16,), (300,)],
    "embed": (50, 8),
}
LAYERS = dict.fromkeys(SHAPES) | {"stack": 0}
MATRICES = dict.fromkeys(SHAPES, True) | {"b": False, "embed": False}
SPLIT = dict.fromkeys(SHAPES) | {"qkv": (16, 8, 8)}

RULES = {
    "muon": {"rule": "muon"},
    "normuon": {"rule": "normuon"},
    "dion2": {"rule": "muon", "fraction": 0.3},
    "dion3": {"rule": "normuon", "fraction": 0.3},
}
both_rules = pytest.mark.parametrize("rule", ["muon", "normuon"])
four_rules = pytest.mark.parametrize("rule", list(RULES))


normal = functools.partial(draws.normal, SHAPES)


def muon(rate=0.1, **options):
    usual = {"matrices": MATRICES, "layer_axes": LAYERS, "split": SPLIT, "weight_decay": 0.1}
    return jgrad.muon(rate, adam_learning_rate=0.01, **usual | options)


def muon_of_matrices(**options):
    return jgrad.muon(0.1, matrices=True, adam_learning_rate=0.1, **options)


def in_loops(text):
    """The collectives in the bodies of loops, and in what those call."""
    bodies = {m[1]: m[2] for m in re.finditer(r"^%?([\w.-]+) .*?\{\n(.*?)^\}", text, re.M | re.S)}
    called = lambda body: set(re.findall(r"(?:body|condition|to_apply|calls)=%?([\w.-]+)", body))
    seen, todo = set(), set(re.findall(r"body=%?([\w.-]+)", text))
    assert todo or " while(" not in text
    while todo:
        name = todo.pop()
        seen.add(name)
        todo |= called(bodies.get(name, "")) - seen
    kinds = r"(all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(?:-start)?\("
    return [kind for name in seen for kind in re.findall(kinds, bodies.get(name, ""))]


# ---- leaves that are sharded -----------------------------------------------------------------------


class Leaf(NamedTuple):
    """A shape, the axis of layers, the axes of outputs, and blocks."""

    shape: tuple[int, ...]
    layers: Any = None
    outputs: Any = -1
    split: Any = None


# Three of each, for which one iteration of two shapes is enough.
PLAIN = {}
for _i in range(3):
    PLAIN |= {f"up{_i}": Leaf((16, 64)), f"down{_i}": Leaf((64, 16)), f"square{_i}": Leaf((16, 16))}
EXPERTS = PLAIN | {"expert_up": Leaf((6, 8, 32), 0), "expert_down": Leaf((6, 32, 8), 0)}
CONVOLUTIONS = PLAIN | {f"conv{i}": Leaf((8, 3, 4, 16)) for i in range(3)}
# Eight heads, queries wider than keys and values, equal blocks.
BLOCKS = {
    "heads": Leaf((16, 64), split=8),
    "dense": Leaf((16, 8, 8), None, (1, 2), 8),
    "qkv": Leaf((16, 64), split=(32, 16, 16)),
    "gate_up": Leaf((16, 32), split=(16, 16)),
    "stack": Leaf((8, 16, 32), 0, split=(16, 8, 8)),
    "out": Leaf((16, 16)),
}


class Arrangement(NamedTuple):
    """A mesh, leaves on it, and what an update of them moves.

    Attributes:
      axes: of the mesh.
      specs: by the name of a leaf, or its first letter; that of "" for the others.
      leaves: by name.
      moves: how many collectives of each kind, where shardings are known; None where that is not
        promised. Each shape is dealt out there and back, at once or its two kinds apart: where
        both together are fewer matrices for a device, by tiles of both.
    """

    axes: dict[str, int]
    specs: dict[str, P]
    leaves: dict[str, Leaf] = PLAIN
    moves: dict[str, int] | None = None

    def specs_of_leaves(self):
        return {x: self.specs.get(x, self.specs.get(x[0], self.specs[""])) for x in self.leaves}

    def weights(self, seed=0):
        rng = np.random.default_rng(seed)
        draw = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
        return {name: draw(leaf.shape) for name, leaf in self.leaves.items()}

    def options(self):
        names = {"layer_axes": "layers", "output_axes": "outputs", "split": "split"}
        of_leaves = self.leaves.items()
        return {
            name: {k: getattr(leaf, field) for k, leaf in of_leaves}
            for name, field in names.items()
        }


LINE, WIDE, TALL = {"data": 8}, {"data": 4, "tensor": 2}, {"data": 2, "tensor": 4}
ARRANGEMENTS = {
    "fsdp": Arrangement(LINE, {"": P("data")}, moves={"all-to-all": 4}),
    "columns": Arrangement(LINE, {"": P(None, "data")}, moves={"all-to-all": 4}),
    "tensor": Arrangement(WIDE, {"": P("data", "tensor")}, moves={"all-to-all": 4}),
    "turned": Arrangement(TALL, {"": P("tensor", "data")}, moves={"all-to-all": 4}),
    "both": Arrangement(WIDE, {"": P(("tensor", "data"))}, moves={"all-to-all": 4}),
    "whole": Arrangement(WIDE, {"": P()}, moves={"all-gather": 2}),
    "tensor alone": Arrangement(WIDE, {"": P(None, "tensor")}, moves={"all-to-all": 4, "all-gather": 2}),
    "experts": Arrangement({"data": 4, "expert": 2}, {"": P("data"), "e": P("expert", "data")}, EXPERTS,
     {"all-to-all": 10}),
    "convolutions": Arrangement(TALL, {"": P("data"), "c": P("tensor", None, "data")}, CONVOLUTIONS,
     {"all-to-all": 6}),
    # Blocks: "rows" are inputs, "columns" outputs.
    "blocks, rows": Arrangement(LINE, {"": P("data"), "stack": P(None, "data")}, BLOCKS),
    "blocks, columns": Arrangement(LINE, {"": P(None, "data"), "stack": P(None, None, "data")}, BLOCKS),
    "blocks, layers": Arrangement(LINE, {"": P(), "stack": P("data")}, BLOCKS),
    "blocks, both": Arrangement(TALL, {"": P("data", "tensor"), "stack": P(None, "data", "tensor")}, BLOCKS),
    "blocks, three": Arrangement(TALL,
     {"": P(None, ("tensor", "data")), "dense": P(None, "data", "tensor"), "stack": P("data", None, "tensor")},
     BLOCKS),
}  # fmt: skip
# Nothing moves where devices have whole heads; blocks of sharded outputs take an all-to-all more.
for _name, _spec, _count in [
    ("heads", P(None, "data"), 0),
    ("dense", P(None, "data"), 0),
    ("heads", P("data"), 2),
    ("qkv", P("data"), 4),
    ("qkv", P(None, "data"), 6),
    ("gate_up", P(None, "data"), 4),
]:
    ARRANGEMENTS[f"{_name} {tuple(_spec)}"] = Arrangement(
        LINE, {"": _spec}, {_name: BLOCKS[_name]}, {"all-to-all": _count} if _count else {}
    )
OF_BLOCKS = [name for name in ARRANGEMENTS if name.startswith("blocks")]
KINDS = {"known": ARRANGEMENTS, "explicit": ARRANGEMENTS}
KINDS["unknown"] = ["fsdp", "columns", "whole", *OF_BLOCKS]
KINDS["some"] = KINDS["alone"] = KINDS["alone, typed"] = ["fsdp", "blocks, columns"]


def on_one_device(arrangement, rule):
    """Updates of two gradients, and the last state."""
    tx = muon_of_matrices(**RULES[rule], **arrangement.options())
    w = arrangement.weights()
    state, steps = tx.init(w), []
    for seed in (1, 2):
        updates, state = jax.jit(tx.update)(arrangement.weights(seed), state, w)
        steps.append(updates)
    return jax.device_get((steps, state))


@pytest.mark.slow(always=["normuon-known-blocks, three", "muon-known-qkv (None, 'data')"])
@pytest.mark.parametrize(("kind", "arrangement"), [(k, a) for k in KINDS for a in KINDS[k]])
@four_rules
def test_under_jit(kind, arrangement, rule):
    """The numbers of one device, whatever says how leaves are sharded; and no collective in a loop.

    `mesh_axes` or types say it, of all leaves or of some, or nothing does. "alone" is without
    `shard_over`: nothing is dealt out, and whole matrices are the partitioner's.
    """
    arrangement = ARRANGEMENTS[arrangement]
    specs, options = arrangement.specs_of_leaves(), RULES[rule] | arrangement.options()
    is_typed = kind in ("explicit", "alone, typed")
    mesh = mesh_of(AxisType.Explicit if is_typed else AxisType.Auto, **arrangement.axes)
    if kind == "known":
        options["mesh_axes"] = specs
    if kind == "some":
        options["mesh_axes"] = {
            name: s if i % 2 else None for i, (name, s) in enumerate(specs.items())
        }
    if not kind.startswith("alone"):
        options["shard_over"] = "data"
    tx = muon_of_matrices(**options)
    w = place(arrangement.weights(), mesh, specs)
    state = jax.device_put(jax.jit(tx.init)(w), jgrad.state_shardings(tx, w))
    if is_typed:
        updates, new = jax.eval_shape(tx.update, w, state, w)
        assert jax.tree.map(jax.typeof, (updates, new.mw)) == jax.tree.map(
            jax.typeof, (w, state.mw)
        )
    shardings = jax.tree.map(lambda x: x.sharding, (w, state))
    program = jax.jit(tx.update, out_shardings=shardings).lower(w, state, w).compile()
    if not kind.startswith("alone"):
        text = program.as_text()
        assert not in_loops(text)
        moved = counting.Counter(x.kind for x in collectives.of(text, DEVICES))
        # NorMuon adds up squares of outputs.
        if kind in ("known", "explicit") and rule == "muon" and arrangement.moves is not None:
            assert moved == arrangement.moves
        if (kind, rule, arrangement.axes) == (
            "unknown",
            "muon",
            LINE,
        ) and arrangement.leaves is PLAIN:
            assert moved.keys() == {"all-to-all"}
            assert moved.total() <= 3 * 2  # of each shape, up and down being one
    steps, expected = on_one_device(arrangement, rule)
    for seed, updates in enumerate(steps, start=1):
        found, state = program(place(arrangement.weights(seed), mesh, specs), state, w)
        assert_close(jax.device_get(found), updates, 1e-4)
    assert_close(jax.device_get(state.mw), expected.mw, 1e-5)
    assert_close(jax.device_get(state.vw), expected.vw, 1e-4)


@pytest.mark.slow(always=["normuon-True-blocks, columns"])
@pytest.mark.parametrize("arrangement", [*OF_BLOCKS, "fsdp", "experts", "convolutions", "tensor"])
@pytest.mark.parametrize("check", [False, True])
@four_rules
def test_in_shard_map(arrangement, check, rule):
    """Rows, columns or layers of which devices have parts: gathered, cut in blocks, and cut again."""
    arrangement = ARRANGEMENTS[arrangement]
    specs = arrangement.specs_of_leaves()
    mesh, w = mesh_of(**arrangement.axes), arrangement.weights()
    tx = muon_of_matrices(mesh_axes=specs, **RULES[rule], **arrangement.options())
    w = place(w, mesh, specs)
    update, state = update_in_shard_map(tx, w, mesh, specs, check_vma=check)
    steps, expected = on_one_device(arrangement, rule)
    for seed, updates in enumerate(steps, start=1):
        found, state = update(arrangement.weights(seed), state, w)
        assert_close(found, updates, 1e-4)
    assert_close(state.mw, expected.mw)
    assert_close(state.vw, expected.vw, 1e-4)


@pytest.mark.slow(always=True)
def test_a_device_has_no_matrix_more_than_it_must():
    """Ten up and ten down are 20 for 8 devices: 3 each, which are 4 if both are dealt out apart."""
    w = {f"up{i}": jnp.ones((16, 64)) for i in range(10)}
    w |= {f"down{i}": jnp.ones((64, 16)) for i in range(10)}
    w = place(w, mesh_of(data=DEVICES), P("data"))
    tx = muon_of_matrices(mesh_axes=P("data"), shard_over="data")
    text = jax.jit(tx.update).lower(w, tx.init(w), w).as_text()
    stacks = re.findall(r"call @orthogonalized\w*\(.*tensor<(\d+)x16x64xf32>\)", text)
    assert stacks == ["3"]


@pytest.mark.slow(always=["columns-8"])
@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("spec", ["columns", "rows"])
def test_what_a_fraction_of_rows_moves(spec, devices):
    """A quarter of the bytes, where devices have whole columns of the rows; and of the products less.

    Where they have some of the rows, all of those may be taken that a device has. Rows are chosen by
    norms, of which one number for each row is added up, or gathered.
    """
    mesh = mesh_of(data=devices)
    own = P(None, "data") if spec == "columns" else P("data")
    w = place({f"{i}": jnp.ones((32, 64)) for i in range(8)}, mesh, own)

    def counts(**options):
        tx = muon_of_matrices(mesh_axes=own, shard_over="data", **options)
        shardings = jax.tree.map(lambda x: x.sharding, w)
        step = lambda g, state: tx.update(g, state, g)[0]
        lowered = jax.jit(step, out_shardings=shardings).lower(w, tx.init(w))
        text = lowered.compile().as_text()
        assert not in_loops(text)
        return collectives.total(collectives.of(text, devices)), products(lowered.as_text())

    (whole, flops), (part, fewer) = counts(), counts(fraction=0.25)
    norms = 2 * 8 * 32 * 4  # as they are and scaled, of eight matrices
    moved = 0.25 if spec == "columns" else min(1.0, 0.25 * devices)
    assert part.pop("all-to-all") == moved * whole["all-to-all"]
    assert part == {"all-reduce" if spec == "columns" else "all-gather": norms}
    assert fewer <= 0.25 * flops


def products(text):
    """Operations of a step of Newton-Schulz, of the stacks of a lowered program."""
    stacks = re.findall(r"call @orthogonalized\w*\(.*?tensor<(\d+)x(\d+)x(\d+)xf32>\)", text)
    assert stacks
    return sum(n * (4 * rows**2 * m + 2 * rows**3) for n, rows, m in np.int64(stacks))


# ---- parameters that each device has ---------------------------------------------------------------


@pytest.mark.slow
def test_replicated_parameters_need_no_spec():
    """JAX knows that they are whole, unless it is told not to look; then `PartitionSpec()` says it."""
    mesh, w, g = mesh_of(data=DEVICES), normal(0), normal(1)

    def updates(tx, check):
        def update(g, w):
            factor = 1 + jax.lax.axis_index("data").astype(float)
            g = jax.tree.map(lambda x: jax.lax.pmean(x * factor, "data"), g)
            return tx.update(g, tx.init(w), w)[0]

        f = jax.shard_map(update, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=check)
        return jax.jit(f)(g, w)

    expected = updates(muon(mesh_axes=P()), False)
    assert_close(updates(muon(), True), expected)
    with pytest.raises(ValueError, match="whole matrices, `mesh_axes=PartitionSpec"):
        updates(muon(), False)


@pytest.mark.not_in_jax_0_8("names in pmap")
def test_pmap():
    """Without a name each device has a model of its own; with one it may have a part of a matrix."""
    models, grads = ([normal(seed + i) for i in range(DEVICES)] for seed in (0, 100))
    update = lambda tx: lambda g, w: tx.update(g, tx.init(w), w)[0]
    stacked = stack(grads), stack(models)
    expected = stack([update(muon())(g, w) for g, w in zip(grads, models, strict=True)])
    assert_close(jax.pmap(update(muon()))(*stacked), expected)
    named = lambda tx: jax.pmap(update(tx), axis_name="data")(*stacked)
    assert_close(named(muon(mesh_axes=P())), expected)


@pytest.mark.not_in_jax_0_8("names in pmap")
@pytest.mark.slow(always=True)
def test_pmap_without_a_spec():
    """Traced only: without a name no device has a part of a model."""
    models, tx = stack([normal(seed) for seed in range(DEVICES)]), muon()
    update = lambda w: tx.update(w, tx.init(w), w)[0]
    jax.eval_shape(jax.pmap(update), models)
    assert_error(
        ValueError,
        "muon: `mesh_axes` at ['down'][0]: None inside `shard_map` or `pmap`, where a device may have a part of a matrix "
        "along 'data', expected the PartitionSpec of the leaf; where each device has whole matrices, "
        "`mesh_axes=PartitionSpec()`.",
        lambda: jax.eval_shape(jax.pmap(update, axis_name="data"), models),
    )


test_messages_of_mesh_axes = pytest.mark.slow(always=True)(
    messages.test_of("mesh_axes_of_muon", globals())
)


@pytest.mark.slow(always=["muon"])
@pytest.mark.parametrize("name", ["muon", "scale_by_muon"])
def test_no_mesh(name):
    w = {"w": jnp.ones((8, 16))}
    tx = muon_of_matrices(shard_over="data")
    if name == "scale_by_muon":
        piece = jgrad.scale_by_muon(matrices=True, shard_over="data")
        tx = optax.chain(piece, optax.scale(-0.1))
    assert_error(
        ValueError,
        f"{name}: `shard_over`: no mesh with 'data' here, expected leaves with a NamedSharding on such "
        "a mesh, or a call of the compiled function under `jax.set_mesh(mesh)`.",
        lambda: jax.jit(tx.update)(w, tx.init(w), w),
    )
    with jax.set_mesh(mesh_of(data=DEVICES)):
        found, _ = jax.jit(tx.update)(w, tx.init(w), w)
    plain = muon_of_matrices()
    assert_close(found, plain.update(w, plain.init(w), w)[0], 1e-5)
