"""Shardings of the state: moments are sharded as their parameters, counters are replicated."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jgrad
from tests.cases import CASES
from tests.multi_device.meshes import mesh_of, place, specs_of
from tests.support import messages
from tests.support.errors import assert_error
from tests.support.loops import told

SPECS = {"tiles": P("a", "b"), "flat": P(("a", "b")), "columns": P(None, "b"), "whole": P()}
SHAPES = {"tiles": (4, 8), "flat": (16,), "columns": (3, 4), "whole": ()}
EIGHTHS = ("tiles", "flat")  # an eighth of these is on each device

INITS = {
    "eager": lambda tx, w: tx.init(w),
    "jit": lambda tx, w: jax.jit(tx.init)(w),
    "jit with out_shardings": lambda tx, w: jax.jit(
        tx.init, out_shardings=jgrad.state_shardings(tx, w)
    )(w),
}
STATEFUL = {
    case.name: case.without_masks().tx
    for case in CASES
    if case.state and case.moments_like_parameters
}
UNPACKED = {case.name for case in CASES if not case.packs}
WRAPPED = {
    "accumulate": lambda: jgrad.accumulate(jgrad.lamb(0.1), 2),
    "skip_nonfinite": lambda: jgrad.skip_nonfinite(jgrad.lamb(0.1), loss_scale=8.0),
    "master_weights": lambda: jgrad.master_weights(jgrad.lamb(0.1)),
    "ema": lambda: jgrad.average_params(jgrad.lamb(0.1), 0.9),
}

every_axis_type = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
every_init = pytest.mark.parametrize("init", INITS.values(), ids=INITS)


make_mesh = functools.partial(mesh_of, a=2, b=4)


def parameters(axis_type=AxisType.Auto, names=tuple(SPECS), dtype=jnp.float32):
    mesh = make_mesh(axis_type)
    ones = {k: jnp.ones(SHAPES[k], dtype) for k in names}
    return place(ones, mesh, {k: SPECS[k] for k in names})


def parameters_for(name, axis_type, **options):
    """Half precision where there are to be master copies."""
    dtype = jnp.bfloat16 if name == "master_weights" else jnp.float32
    return parameters(axis_type, dtype=dtype, **options)


def by_parameter(state):
    """Pairs of an array of the state and the name of its parameter, None for counters.

    Without SOAP's factors, which have shapes of their own.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if any(getattr(entry, "name", "") == "factors" for entry in path):
            continue
        keys = (entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
        yield x, next((key for key in keys if key in SPECS), None)


def assert_follows(state, w):
    """Moments lie as their parameters do, all else on every device; returns how many moments."""
    everywhere = NamedSharding(next(iter(w.values())).sharding.mesh, P())
    moments = 0
    for x, name in by_parameter(state):
        expected = everywhere if name is None else w[name].sharding
        assert x.shape == (() if name is None else w[name].shape)
        assert x.sharding.is_equivalent_to(expected, x.ndim), (name, x.sharding)
        assert len(x.sharding.device_set) == 8
        moments += name is not None
    return moments


# ---- init --------------------------------------------------------------------------------------


# How many arrays of a wrapped state are as large as each parameter, and how many counters it has.
SIZES = {
    "accumulate": (3, 4),  # total, mw, vw; mini_step, count, skipped, step
    "skip_nonfinite": (2, 4),  # mw, vw; skipped, streak, loss_scale, step
    "master_weights": (3, 1),  # master, mw, vw; step
    "ema": (3, 2),  # average, mw, vw; two steps
}


@pytest.mark.slow(
    always=[
        "eager-AxisType.Explicit-adamw",
        "jit with out_shardings-AxisType.Auto-momentum",
        "eager-AxisType.Auto-accumulate",
    ]
)
@pytest.mark.parametrize("name", [*STATEFUL, *WRAPPED])
@every_axis_type
@every_init
def test_e26_state_follows_parameters(name, axis_type, init):
    """Of each optimizer that has state; totals, copies and averages are as large as moments."""
    assert jax.device_count() == 8
    tx = (STATEFUL.get(name) or WRAPPED[name])()
    w = parameters_for(name, axis_type)
    state = init(tx, w)
    large = assert_follows(state, w)
    trees, counters = SIZES.get(name, (0, 1))
    factors = len(jax.tree.leaves(getattr(state, "factors", None)))
    assert len(jax.tree.leaves(state)) == large + counters + factors
    assert large == trees * len(w) if trees else large > 0
    chex.assert_trees_all_equal(state, tx.init(jax.tree.map(jnp.ones_like, jax.device_get(w))))


def test_e49_the_accumulator_is_sharded():
    """Under `jit`, optax's whole sum of gradients is on the first device; here each has its part."""
    names = ("tiles", "columns")
    w = parameters(names=names)

    def devices(total):
        return [len(total[name].sharding.device_set) for name in names]

    alone = jax.jit(optax.MultiSteps(optax.sgd(0.1), 2).init)(w).acc_grads
    assert devices(alone) == [1, 1]
    for weighted in (False, True):
        tx = jgrad.accumulate(jgrad.gradient_descent(0.1), 2, weighted=weighted)
        total = jax.jit(tx.init)(w).total
        assert devices(total) == [8, 8]
        assert all(total[x].sharding.is_equivalent_to(w[x].sharding, 2) for x in names)
        assert total["tiles"].addressable_shards[0].data.size == w["tiles"].size // 8


TYPED = (
    STATEFUL
    | WRAPPED
    | {
        "8 bits": lambda: jgrad.adam(0.1, moment_dtype="8bit"),
        "weighted": lambda: told(jgrad.accumulate(jgrad.adam(0.1), 2, weighted=True), weight=2.0),
        "in a branch": lambda: jgrad.skip_nonfinite(jgrad.adam(0.1), branch=True),
        "stochastic_rounding": lambda: jgrad.stochastic_rounding(jgrad.adam(0.1)),
        "schedule_free": lambda: jgrad.schedule_free(jgrad.gradient_descent(0.1)),
        "watch": lambda: jgrad.watch(jgrad.adam(0.1), every=3),
    }
)


@pytest.mark.slow(always=["adamw-tree", "accumulate-packed", "8 bits-tree"])
@pytest.mark.parametrize(
    ("name", "is_packed"),
    [
        pytest.param(name, is_packed, id=f"{name}-{'packed' if is_packed else 'tree'}")
        for name in TYPED
        for is_packed in (False, True)
        if not is_packed or name not in UNPACKED
    ],
)
def test_types_of_new_arrays(name, is_packed):
    """Under `jit` they say where an array lies as those of the parameters do.

    No mesh is set: JAX knows that of the arguments alone. What is as large as a parameter is a
    moment, a sum or an update of it.
    """
    w = {"tiles": jnp.ones((64, 128)), "flat": jnp.ones(48)}
    if name in ("master_weights", "stochastic_rounding"):
        w = jax.tree.map(lambda x: x.astype(jnp.bfloat16), w)
    mesh, spec = make_mesh(AxisType.Explicit), P(("a", "b"))
    w = jgrad.pack(w, multiple_of=8) if is_packed else w
    w = place(w, mesh, spec)
    specs = {x.shape: jax.typeof(x).sharding.spec for x in jax.tree.leaves(w)}

    def both(w):
        state = TYPED[name]().init(w)
        return state, TYPED[name]().update(w, state, w)

    large = [x for x in jax.tree.leaves(jax.eval_shape(both, w)) if x.shape in specs]
    assert len(large) >= 3 * len(specs)
    for x in large:
        assert x.sharding.spec == specs[x.shape]


# ---- state_shardings -----------------------------------------------------------------------------


def test_e26_state_shardings_without_arrays():
    """Shapes are enough, and shardings may be given apart, or one for several leaves."""
    tx, w = jgrad.lamb(0.1), parameters()
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), w)
    placed = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding), w)
    own = jax.tree.map(lambda p: p.sharding, w)
    expected = jgrad.OptState(P(), SPECS, SPECS)
    assert specs_of(jgrad.state_shardings(tx, w)) == expected
    assert specs_of(jgrad.state_shardings(tx, placed)) == expected
    assert specs_of(jgrad.state_shardings(tx, shapes, own)) == expected
    everywhere = dict.fromkeys(SPECS, P())
    found = jgrad.state_shardings(tx, w, NamedSharding(make_mesh(), P()))
    assert specs_of(found) == jgrad.OptState(P(), everywhere, everywhere)


@pytest.mark.slow
def test_e26_state_shardings_of_optax():
    """Any transformation will do; factored moments have other shapes, and are everywhere."""
    w = parameters()
    adam = jgrad.state_shardings(optax.chain(optax.clip(1.0), optax.adam(0.1)), w)
    assert specs_of(optax.tree.get(adam, "mu")) == SPECS
    assert optax.tree.get(adam, "count").spec == P()
    factored = jgrad.state_shardings(optax.adafactor(0.1, min_dim_size_to_factor=4), w)
    rows = optax.tree.get(factored, "v_row")
    assert {k: s.spec for k, s in rows.items()} == dict.fromkeys(SPECS, P())


@pytest.mark.parametrize(
    ("tx", "moments"),
    [
        (optax.masked(jgrad.adam(0.1), {"tiles": True, "flat": False}), 2),
        (optax.multi_transform({"lamb": jgrad.lamb(0.1), "lars": jgrad.lars(0.1)}, {"tiles": "lamb", "flat": "lars"}),
         3),
    ], ids=["masked", "multi_transform"],
)  # fmt: skip
def test_e26_state_shardings_of_masked(tx, moments):
    """Parts of the parameters under different methods."""
    w = parameters(names=EIGHTHS)
    state = INITS["jit with out_shardings"](tx, w)
    assert assert_follows(state, w) == moments


def test_e26_state_shardings_beside_none():
    """A parameter that is None has no moments, and no sharding."""
    tx, w = jgrad.adam(0.1), parameters(names=("flat",)) | {"missing": None}
    found = jgrad.state_shardings(tx, w, NamedSharding(make_mesh(), P("b")))
    assert found.mw["flat"].spec == P("b")
    assert found.mw["missing"] is None


LAMB = jgrad.lamb(0.1)
on_mesh = functools.partial(parameters, names=EIGHTHS)


def shardings(**others):
    return jgrad.state_shardings(LAMB, on_mesh() | others)


test_e26_state_shardings_errors = messages.test_of("state_shardings", globals())


def test_e26_other_shardings_are_named():
    """In JAX's words, which each version has of its own."""
    own, single = jax.tree.map(lambda p: p.sharding, on_mesh()), jnp.ones(16)
    text = f"state_shardings: `params` at ['flat']: sharding {single.sharding!r}, expected a NamedSharding."
    assert_error(TypeError, text, lambda: shardings(flat=single))
    text = f"state_shardings: `params_shardings` at ['tiles']: sharding {P('a')!r}, expected a NamedSharding."
    wrong = own | {"tiles": P("a")}
    assert_error(TypeError, text, lambda: jgrad.state_shardings(LAMB, on_mesh(), wrong))


@pytest.mark.parametrize("spec", [P("a", "b"), P("b")], ids=str)
def test_e26_state_shardings_that_do_not_fit(spec):
    """More axes than the parameter has, or one that does not divide by the devices."""
    with pytest.raises(ValueError, match=r"^state_shardings: .*\['w'\]"):
        jgrad.state_shardings(
            jgrad.adam(0.1), {"w": jnp.ones(3)}, {"w": NamedSharding(make_mesh(), spec)}
        )


# ---- the mean gradient of eight devices --------------------------------------------------------


def mean(x):
    return jax.lax.pmean(x, "data")


def product(w, x):
    """Of slope x: the mean over x = 0, 1, ..., 7 is 3.5."""
    return jnp.sum(w * x)


def outer(w, x):
    return mean(jax.grad(product)(w, x))


def inner(w, x):
    return jax.grad(lambda w: mean(product(w, x)))(w)


def both(w, x):
    return mean(inner(w, x))


def mapped(way, f):
    """`f` of a replicated weight and of an x per device; the result of each."""
    axes = {"axis_name": "data", "in_axes": (None, 0)}
    if way == "pmap":
        return jax.pmap(f, **axes)
    if way == "vmap":
        return jax.vmap(f, **axes)
    run = jax.shard_map(
        lambda w, x: f(w, x).reshape(1),
        mesh=mesh_of(data=8),
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        check_vma=way == "shard_map",
    )
    return jax.jit(run)


WAYS = ("shard_map", "shard_map without check_vma", "pmap", "vmap")


@pytest.mark.slow(always=["shard_map"])
@pytest.mark.parametrize("way", WAYS)
def test_e25_mean_on_one_side(way):
    """What the docs warn of: either half of the recipe is wrong somewhere, and both are right.

    Outside alone, it is 28 under `shard_map` with `check_vma`, where the gradient of a replicated
    weight is summed already. Inside alone, each device has its own elsewhere. JAX may change this;
    as of 0.8.1 and 0.10.2 the numbers are these.
    """
    w, x = jnp.float32(1.0), jnp.arange(8.0)
    checked = way == "shard_map"
    np.testing.assert_array_equal(mapped(way, outer)(w, x), np.full(8, 28.0 if checked else 3.5))
    np.testing.assert_array_equal(mapped(way, inner)(w, x), np.full(8, 3.5) if checked else x)
    np.testing.assert_array_equal(mapped(way, both)(w, x), np.full(8, 3.5))


@pytest.mark.slow
def test_empty_leaves_on_explicit_axes():
    """Eagerly, too: their moments are empty, and lie where they do."""
    mesh = mesh_of(AxisType.Explicit, d=8)
    place = lambda shape, spec: jax.device_put(jnp.zeros(shape), NamedSharding(mesh, spec))
    w = {"w": place((8, 4), P("d")), "empty": place((0, 4), P())}
    for tx in (jgrad.adam(0.1), jgrad.lamb(0.1), jgrad.accumulate(jgrad.adam(0.1), 2)):
        state = tx.init(w)
        updates, state = jax.jit(tx.update)(w, state, w)
        assert updates["empty"].shape == (0, 4)
        assert jax.tree.map(jax.typeof, updates) == jax.tree.map(jax.typeof, w)
