"""Kernels on eight devices: the codes, scales and weights of one device, and nothing is gathered."""

import collections
import contextlib
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jgrad
from benchmarks import collectives
from jgrad._kernels import leaf_step, platforms
from tests.multi_device.meshes import mesh_of
from tests.support import oldest
from tests.support.kernels import ADAM, FORMS, MOMENTUM, normal, plain
from tests.support.loops import assert_equal

pytestmark = pytest.mark.bits
slow = pytest.mark.slow

# Rows, columns and both are cut, of matrices and of layers; the last has no blocks in its rows.
SHAPES = {"w": (16, 2048), "rows": (64, 256), "stack": (2, 8, 1024), "odd": (64, 100)}
SPECS = {"w": P("x", "y"), "rows": P(("x", "y")), "stack": P(None, "x", "y"), "odd": P()}
CUT_BLOCKS = {"w": P(None, ("y", "x")), "rows": P("x", "y"), "stack": P("y"), "odd": P()}


def model(dtype=jnp.float32):
    return normal(SHAPES, 0, dtype)


def gradients(count=2, dtype=jnp.float32):
    """Integers, so that a sum of squares is the same in any order."""
    rng = np.random.default_rng(1)
    draw = lambda shape: jnp.asarray(rng.integers(-8, 9, shape) / 256, dtype)
    is_shape = lambda x: isinstance(x, tuple)
    return [jax.tree.map(draw, SHAPES, is_leaf=is_shape) for _ in range(count)]


RECIPES = {
    "momentum": MOMENTUM,
    "adam": ADAM,
    "stochastic": lambda: jgrad.stochastic_rounding(ADAM()),
    "skip(clip(adam))": lambda: jgrad.skip_nonfinite(
        optax.chain(jgrad.clip_by_global_norm(1.0), ADAM())
    ),
}
# Sums over all elements, for each of three shardings; and in the rare step that repeats them rescaled.
SUMS = {"skip(clip(adam))": {"all-reduce": 6}}


def on_mesh(tree, mesh, specs):
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    return jax.tree.map(put, tree, specs)


@contextlib.contextmanager
def forced(form):
    """Yields a function that says how many leaves took the form."""
    with (
        platforms.forced(form),
        mock.patch.object(leaf_step, "on_shards", wraps=leaf_step.on_shards) as kernels,
        mock.patch.object(platforms, "in_two_passes", wraps=platforms.in_two_passes) as passes,
    ):
        yield lambda: kernels.call_count + passes.call_count


def assert_same(name, form, mesh, leaves, specs=SPECS, moved=None, **options):
    """As on one device, where it was, and moving no more than sums over all elements have to."""
    tx, dtype = RECIPES[name](), jnp.bfloat16 if name == "stochastic" else jnp.float32
    grads = gradients(dtype=dtype)
    expected = plain(tx, model(dtype), grads)
    with jax.set_mesh(mesh), forced(form) as count:
        w = on_mesh(model(dtype), mesh, specs)
        before = jax.tree.map(lambda x: x.sharding, w)
        state = tx.init(w)
        step = jax.jit(functools.partial(jgrad.apply_gradients, tx, **options))
        step = step.lower(w, state, w).compile()
        for g in grads:
            w, state = step(on_mesh(g, mesh, specs), state, w)
    assert_equal((w, state), (expected.w, expected.state))
    assert count() == leaves
    for x, place in zip(jax.tree.leaves(w), jax.tree.leaves(before), strict=True):
        assert x.sharding.is_equivalent_to(place, x.ndim)
    found = collections.Counter(x.kind for x in collectives.of(step.as_text(), 8))
    moved = SUMS.get(name, {}) if moved is None else moved
    assert found.keys() <= moved.keys()
    if not oldest.IS_OLDEST:  # whose XLA joins no sums on CPUs
        assert found == moved


def choices(quick, names=RECIPES):
    rows = [pytest.param(x, marks=() if x in quick else slow) for x in names]
    return pytest.mark.parametrize("name", rows)


@choices(("momentum",))
def test_explicit_axes(name):
    """Types say how leaves are sharded."""
    assert_same(name, "kernel", mesh_of(AxisType.Explicit, x=4, y=2), 3)


@pytest.mark.slow
@choices(("stochastic",))
def test_automatic_axes(name):
    """`mesh_axes` says it, leaf by leaf."""
    assert_same(name, "kernel", mesh_of(x=4, y=2), 3, mesh_axes=SPECS)


@choices((), ("momentum", "stochastic"))
def test_one_spec_for_all_leaves(name):
    """And none for a leaf that is whole, on whose kernel XLA would gather the rest."""
    specs = {"w": P("x"), "rows": P("x"), "stack": P(), "odd": P()}
    axes = specs | {"stack": None}
    assert_same(name, "kernel", mesh_of(x=8), 2, specs=specs, mesh_axes=axes)


@pytest.mark.slow
@choices(("momentum",))
@pytest.mark.parametrize("form", FORMS)
def test_automatic_axes_of_which_nothing_is_known(name, form):
    """No kernel; two passes are XLA's, which shards them."""
    assert_same(name, form, mesh_of(x=4, y=2), 0 if form == "kernel" else 3)


@choices((), ("momentum", "adam"))
def test_two_passes_on_explicit_axes(name):
    """The plain form, which says where everything is."""
    assert_same(name, "two passes", mesh_of(AxisType.Explicit, x=4, y=2), 0)


@pytest.mark.parametrize("kind", [AxisType.Explicit, pytest.param(AxisType.Auto, marks=slow)])
def test_shards_without_whole_blocks(kind):
    """Half a block in a shard: the plain form, for which two devices share a maximum."""
    options = {"mesh_axes": CUT_BLOCKS} if kind == AxisType.Auto else {}
    mesh, moved = mesh_of(kind, x=4, y=2), {"all-reduce": 1}
    assert_same("momentum", "kernel", mesh, 2, CUT_BLOCKS, moved, **options)


# ---- what each device does by itself -----------------------------------------------------------


@pytest.mark.slow
@choices(("stochastic",), ("momentum", "adam", "stochastic"))
@pytest.mark.parametrize("form", [FORMS[0], pytest.param(FORMS[1], marks=slow)])
def test_shard_map(name, form):
    """Kernels of shards, as the plain form of shards; a device cannot see that leaves are cut.

    JAX interprets kernels in loops, whose types it does not check here; see the next test.
    """
    dtype = jnp.bfloat16 if name == "stochastic" else jnp.float32
    tx, mesh = RECIPES[name](), mesh_of(x=8)
    shapes = {"w": (64, 1024), "stack": (8, 20, 256), "b": (8,)}
    w, grads = normal(shapes, 0, dtype), [normal(shapes, t, dtype) for t in (1, 2)]
    of_state = jax.tree.map(lambda x: P("x") if x.ndim else P(), tx.init(w))
    inside = functools.partial(jax.shard_map, mesh=mesh, check_vma=form != "kernel")
    init = inside(tx.init, in_specs=P("x"), out_specs=of_state)

    def train():
        step = inside(
            functools.partial(jgrad.apply_gradients, tx),
            in_specs=(P("x"), of_state, P("x")),
            out_specs=(P("x"), of_state),
        )
        step, own, state = jax.jit(step), w, jax.jit(init)(w)
        for g in grads:
            own, state = step(g, state, own)
        assert not collectives.of(step.lower(g, state, own).compile().as_text(), 8)
        return own, state

    expected = train()
    with forced(form) as count:
        assert_equal(train(), expected)
    assert count() >= 2


@pytest.mark.slow
@pytest.mark.parametrize("check", [True, False])
def test_types_inside_shard_map(check):
    """A program for a TPU, where JAX keeps account of what varies over devices."""
    tx, mesh = RECIPES["stochastic"](), mesh_of(x=8)
    w = normal({"w": (64, 1024), "whole": (16, 256)}, 0, jnp.bfloat16)
    spec = {"w": P("x"), "whole": P()}
    state = tx.init(w)
    of_state = jgrad.state_shardings(tx, on_mesh(w, mesh, spec))
    of_state = jax.tree.map(lambda x: x.spec, of_state)
    step = jax.shard_map(
        functools.partial(jgrad.apply_gradients, tx),
        mesh=mesh,
        in_specs=(spec, of_state, spec),
        out_specs=(spec, of_state),
        check_vma=check,
    )
    text = export.export(jax.jit(step), platforms=["tpu"])(w, state, w).mlir_module()
    assert text.count("tpu_custom_call") == 2


@choices((), ("momentum", "adam"))
def test_pmap(name):
    """A model on each device."""
    tx, shapes = RECIPES[name](), {"w": (8, 20, 256), "b": (8, 20)}
    w, g = normal(shapes), normal(shapes, 1)

    def step(w, g):
        return jgrad.apply_gradients(tx, g, tx.init(w), w)

    expected = jax.pmap(step)(w, g)
    with forced("kernel") as count:
        assert_equal(jax.pmap(lambda w, g: step(w, g))(w, g), expected)
    assert count() == 1


# ---- packed ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=slow)])
def test_packed(kind):
    """Rows of the buffer, each with the keys of its leaf; a spec says how rows are cut."""
    tx, mesh = jgrad.stochastic_rounding(MOMENTUM()), mesh_of(kind, x=8)
    pack = functools.partial(jgrad.pack, multiple_of=8)
    w, grads = pack(model(jnp.bfloat16)), list(map(pack, gradients(2, jnp.bfloat16)))
    expected = plain(tx, w, grads)
    options = {"mesh_axes": P("x")} if kind == AxisType.Auto else {}
    put = lambda tree: jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, P("x") if x.ndim else P())), tree
    )
    with jax.set_mesh(mesh), forced("kernel") as count:
        own, state = put(w), put(tx.init(w))
        step = jax.jit(functools.partial(jgrad.apply_gradients, tx, **options))
        step = step.lower(own, state, own).compile()
        for g in grads:
            own, state = step(put(g), state, own)
    assert_equal((own, state), (expected.w, expected.state))
    assert count() == 1
    assert not collectives.of(step.as_text(), 8)


# ---- answers -----------------------------------------------------------------------------------


def answers(axes=None, kind=AxisType.Auto, specs=SPECS):
    mesh = mesh_of(kind, x=4, y=2)
    with jax.set_mesh(mesh):
        w = on_mesh(model(), mesh, specs)
        return jgrad.leaf_programs(MOMENTUM(), w, mesh_axes=axes)


ONE = "one kernel"
ODD = "XLA: its last axis, 100, is not a multiple of 256"


def of_leaves(w=ONE, rows=ONE, stack=ONE):
    rows = {"odd": ODD, "rows": rows, "stack": stack, "w": w}
    return {f".mw[{name!r}]": answer for name, answer in rows.items()}


@pytest.mark.slow
def test_answers_on_meshes():
    unknown = "XLA: nothing says how it is sharded; a PartitionSpec as `mesh_axes` does"
    cut = "XLA: its shards along axis 1 have no whole blocks of 256"
    assert answers(SPECS) == answers(kind=AxisType.Explicit) == of_leaves()
    assert answers() == answers("x") == of_leaves(unknown, unknown, unknown)
    assert answers({**SPECS, "rows": None}) == of_leaves(rows=unknown)
    assert answers(CUT_BLOCKS, specs=CUT_BLOCKS) == of_leaves(rows=cut)
