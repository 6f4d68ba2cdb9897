"""Layers that are sharded over the axes of a mesh, stacked for scan, or both.

Expected is always what one device finds with whole leaves, one per layer. Scales differ widely from
shard to shard, so that the norm of a part is nowhere near that of the whole.
"""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jgrad
from jgrad._trees import shardings
from tests.multi_device.meshes import mesh_of, shardings_of
from tests.support.loops import step_of

pytestmark = pytest.mark.slow

RATE = 0.1
EXACT = 3e-6  # a few roundings of float32
GRID, LINE = "2-D", "1-D"
MESHES = {GRID: {"data": 4, "model": 2}, LINE: {"data": 8}}
LAYOUTS = {
    GRID: {"tiles": P("data", "model"), "columns": P(None, "model"), "rows": P("data"), "flat": P(("data", "model")),
     "whole": P()},
    LINE: {"rows": P("data"), "columns": P(None, "data"), "whole": P()},
}  # fmt: skip

check_or_not = pytest.mark.parametrize("check_vma", [True, False])


# ---- methods: (init, step) for given axes ------------------------------------------------------


def from_transformation(make):
    """A step of a transformation, as a function of its axes."""

    def method(**axes):
        tx = make(**axes)
        return tx.init, step_of(tx)

    return method


def from_lamb_update(**axes):
    def step(w, state, g):
        t = state.step + 1
        options = {"max_trust_ratio": None, "decay_lambda": 0.1, **axes}
        w, mw, vw = jgrad.lamb_update(w, g, RATE, state.mw, state.vw, t, **options)
        return w, jgrad.OptState(t, mw, vw)

    return jgrad.lamb(RATE).init, step


def from_lars_update(**axes):
    def step(w, state, g):
        return jgrad.lars_update(w, g, RATE, decay_lambda=0.1, **axes), state

    return lambda w: (), step


def lamb(**axes):
    return jgrad.lamb(RATE, weight_decay=0.1, max_trust_ratio=None, **axes)


def lars(**axes):
    return jgrad.lars(RATE, trust_coefficient=1.0, weight_decay=0.1, **axes)


def trust_ratio(**axes):
    return optax.chain(jgrad.scale_by_trust_ratio(max_trust_ratio=None, **axes), optax.scale(-RATE))


def clipping(mesh_axes=None):
    return optax.chain(jgrad.clip_by_global_norm(10.0, mesh_axes=mesh_axes), optax.scale(-RATE))


METHODS = {
    "lamb": from_transformation(lamb),
    "lars": from_transformation(lars),
    "scale_by_trust_ratio": from_transformation(trust_ratio),
    "clip_by_global_norm": from_transformation(clipping),
    "lamb_update": from_lamb_update,
    "lars_update": from_lars_update,
}


# ---- running them --------------------------------------------------------------------------------


def make_mesh(name, axis_type=AxisType.Auto):
    return mesh_of(axis_type, **MESHES[name])


def specs_like(tree, specs):
    """The spec of the parameter of the same name for each array of a state, P() for counters."""

    def find(path, _):
        names = (entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
        return next((specs[name] for name in names), P())

    return jax.tree_util.tree_map_with_path(find, tree)


def compiled(method, w, mesh, specs, *, check_vma):
    """One compiled step on a mesh, each leaf cut as its spec says, and where its arguments lie."""
    init, step = method
    own = specs, specs_like(jax.eval_shape(init, w), specs), specs
    mesh = make_mesh(mesh)
    run = jax.shard_map(step, mesh=mesh, in_specs=own, out_specs=own[:2], check_vma=check_vma)
    return jax.jit(run), shardings_of(mesh, own)


def in_shard_map(method, w, mesh, specs, *, check_vma):
    """The same, with arguments that are put there: others would make it another program."""
    run, shardings = compiled(method, w, mesh, specs, check_vma=check_vma)
    return lambda *args: run(*jax.device_put(jax.device_get(args), shardings))


def train(method, step, w, gradients):
    """The weights after each step."""
    state, found = method[0](w), []
    for g in gradients:
        w, state = jax.block_until_ready(step(w, state, g))
        found.append(jax.device_get(w))
    return found


@functools.cache
def plain(name):
    """The compiled step on whole leaves."""
    return jax.jit(METHODS[name]()[1])


def errors(found, expected, start):
    """The largest error of each leaf in any step, relative to how far each element went so far.

    Digits that cancel in w - step therefore do not count, and small elements do.
    """
    path, last = {k: np.abs(start[k]) for k in start}, start
    largest = dict.fromkeys(start, 0.0)
    for a, b in zip(found, expected, strict=True):
        for k in start:
            assert np.isfinite(a[k]).all()
            path[k] = path[k] + np.abs(b[k] - last[k])
            off = np.abs(a[k] - b[k]).astype(float)
            # Where an element never moved from zero, its absolute error is none, or enough.
            off = np.divide(off, path[k], out=off, where=path[k] > 0)
            largest[k] = max(largest[k], float(np.max(off)))
        last = b
    return largest


def uneven(names, seed, *, reverse=False, shape=(16, 8)):
    """Leaves with rows from 0.01 to 10 times a column's scale, or from 10 to 0.01 times."""
    rng = np.random.default_rng(seed)
    rows, columns = np.logspace(-2, 1, shape[-2]), np.logspace(0, 1, shape[-1])
    scale = np.outer(rows[::-1] if reverse else rows, columns)
    return {name: np.float32(scale * rng.normal(size=shape)) for name in names}


def problem(names, steps=3, **options):
    """Weights, and gradients that are large where weights are small."""
    gradients = [uneven(names, seed=1 + t, reverse=True, **options) for t in range(steps)]
    return uneven(names, seed=0, **options), gradients


# ---- cut leaves --------------------------------------------------------------------------------


@functools.cache
def five_layouts(name, mesh, check_vma, own_axes):
    """The compiled step on five leaves, cut in five ways; without `mesh_axes` if not `own_axes`."""
    specs = LAYOUTS[mesh]
    method = METHODS[name](mesh_axes=specs if own_axes else None)
    return in_shard_map(method, uneven(specs, 0), mesh, specs, check_vma=check_vma)


def off_by(name, w, gradients, mesh=GRID, *, check_vma, own_axes=True):
    """The errors of leaves that are cut, beside whole ones."""
    method = METHODS[name]()
    found = train(method, five_layouts(name, mesh, check_vma, own_axes), w, gradients)
    return errors(found, train(method, plain(name), w, gradients), w)


@pytest.mark.slow(always=["2-D-lamb-True"])
@pytest.mark.parametrize(
    ("mesh", "name", "check_vma"),
    [(GRID, name, True) for name in METHODS]
    + [(GRID, name, False) for name in ("lamb", "lars", "clip_by_global_norm")]
    + [(LINE, "lamb_update", True), (LINE, "lars_update", False)],
)
def test_e12_cut_leaves_as_whole_ones(mesh, name, check_vma):
    """Five layouts in one model, on a 2-D mesh and those there are on a 1-D mesh, step by step."""
    off = off_by(name, *problem(LAYOUTS[mesh]), mesh, check_vma=check_vma)
    assert max(off.values()) < EXACT


@pytest.mark.slow(always=["True-1.0-1e+25-lamb"])
@pytest.mark.parametrize("name", ["lamb", "lars", "clip_by_global_norm"])
@pytest.mark.parametrize("scale", [1e25, 1e-25])
@pytest.mark.parametrize("others", [1.0, 0.0])
@check_or_not
def test_e12_scales_in_one_shard(name, scale, others, check_vma):
    """Only devices with the first rows leave the plain sums of squares; none waits for another."""
    rows = np.where(np.arange(16) < 2, scale, others)[:, None].astype(np.float32)
    draw = lambda seed: jax.tree.map(lambda x: rows * x, uneven(LAYOUTS[GRID], seed))
    w, gradients = draw(0), [draw(1), draw(2)]
    if name == "clip_by_global_norm":  # of which the smallest steps are to be seen
        w = jax.tree.map(np.zeros_like, w)
    assert max(off_by(name, w, gradients, check_vma=check_vma).values()) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lars", "lars_update", "scale_by_trust_ratio"])
@pytest.mark.parametrize("scale", [5e37, 3e38])
def test_e12_norms_above_the_largest_number(name, scale):
    """Where each shard has a norm that is a number, too: all find it of the whole leaf."""
    w = uneven(LAYOUTS[GRID], 0)
    gradients = [jax.tree.map(lambda x: np.full_like(x, scale), w)]
    assert max(off_by(name, w, gradients, check_vma=True).values()) < EXACT


def everything_with_norms(w, **axes):
    """Results that do not depend on quotients of norms alone, in which a factor would cancel."""
    g = jax.tree.map(jnp.cos, w)
    clipped, _ = jgrad.clip_by_global_norm(1.0, **axes).update(g, ())
    moved = jgrad.lars_update(w, g, RATE, epsilon=1.0, **axes)
    tx = jgrad.watch(optax.identity(), **axes)
    _, state = tx.update(g, tx.init(w), w)
    return [clipped, moved], (state.report, jgrad.global_norm(w, **axes))


@pytest.mark.slow(always=True)
def test_e12_one_name_beside_copies():
    """A leaf that is on all devices counts once, by its type; unchecked, as it is said, on each."""
    specs = {"a": P("data"), "b": P()}
    w = uneven(specs, 0)
    w["b"] *= np.float32(10)

    def in_parts(f, out_specs, check_vma):
        mesh = mesh_of(data=2)
        run = jax.shard_map(
            f, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=check_vma
        )
        return jax.device_get(jax.jit(run)(w))

    expected = jax.device_get(jax.jit(everything_with_norms)(w))
    named = functools.partial(everything_with_norms, mesh_axes="data")
    chex.assert_trees_all_close(
        in_parts(named, ([specs] * len(expected[0]), P()), True), expected, rtol=1e-5, atol=1e-6
    )
    norms = lambda w: [jgrad.global_norm(w, mesh_axes=axes) for axes in ("data", specs)]
    by_leaf = np.array([np.sum(np.square(x, dtype=float)) for x in w.values()])
    wrong, right = in_parts(norms, P(), False)
    np.testing.assert_allclose(wrong, np.sqrt(by_leaf @ (1, 2)), rtol=1e-6)
    np.testing.assert_allclose(right, np.sqrt(by_leaf.sum()), rtol=1e-6)


@pytest.mark.slow(always=True)
def test_e12_constants_are_shards_where_a_tree_says_it():
    """Their types say that they are the same on all devices, which a name for all would believe."""
    specs = {"a": P("data"), "b": P()}

    def norms(rows, specs):
        w = {"a": jnp.full((rows, 4), 0.5), "b": jnp.full(3, 0.25)}
        a = w["a"]
        alone = jgrad.lars_update(a, 4 * a, RATE, epsilon=1.0, mesh_axes=specs["a"])
        tx = jgrad.hyperball(
            jgrad.adam(RATE), RATE, leaves={"a": True, "b": False}, mesh_axes=specs
        )
        return jgrad.global_norm(w, mesh_axes=specs), alone[0, 0], tx.init(w).radius["a"]

    run = functools.partial(norms, 4, specs)
    cut = jax.shard_map(run, mesh=mesh_of(data=2), in_specs=(), out_specs=P())
    chex.assert_trees_all_close(jax.jit(cut)(), norms(8, {"a": None, "b": None}), rtol=1e-6)


@pytest.mark.slow(always=True)
def test_e12_clip_asks_types_of_parameters():
    """A gradient that is the same on all devices is that of a shard where its parameter is one."""
    specs = {"a": P("data"), "b": P()}
    w = uneven(specs, 0)

    def clipped(w, **axes):
        g = jax.tree.map(lambda x: jnp.full(x.shape, 3.0), w)
        return jgrad.clip_by_global_norm(1.0, **axes).update(g, optax.EmptyState(), w)[0]

    run = functools.partial(clipped, mesh_axes="data")
    cut = jax.shard_map(run, mesh=mesh_of(data=2), in_specs=(specs,), out_specs=specs)
    chex.assert_trees_all_close(jax.jit(cut)(w), clipped(w), rtol=1e-6)


@pytest.mark.slow(always=True)
def test_e12_asking_types_writes_nothing():
    """And the answer is that of the `shard_map` around, whatever another one has answered before."""
    for check_vma in (True, False, True):

        def asks(x, known=check_vma):
            assert shardings.unknown_axes(x) == (() if known else ("data",))
            return x

        whole = {"in_specs": P(), "out_specs": P(), "check_vma": check_vma}
        run = jax.shard_map(asks, mesh=mesh_of(data=2), **whole)
        (outer,) = jax.make_jaxpr(run)(jnp.ones(2)).eqns
        assert outer.params["jaxpr"].eqns == []


def conditions(method, specs, check_vma):
    """How many `cond` there are in one step that are not of a platform."""
    w, _ = problem(specs, steps=1)
    run, _ = compiled(method, w, LINE, specs, check_vma=check_vma)
    text = str(jax.make_jaxpr(run)(w, method[0](w), w))
    return len(re.findall(r"= cond\[", text)) - text.count("branches_platforms=(")


@pytest.mark.slow(always=True)
@pytest.mark.parametrize("name", ["lars", "clip_by_global_norm"])
def test_e12_one_condition_where_leaves_vary_alike(name):
    """And one for each way in which they vary, where types say it: a choice, under `vmap`, varies."""
    cut = {"w0": P("data"), "w1": P(None, "data")}
    of_cut, of_all = (METHODS[name](mesh_axes=x) for x in (cut, cut | {"b": P()}))
    assert conditions(of_cut, cut, True) == 1
    assert conditions(of_all, cut | {"b": P()}, True) == 2
    if name == "lars":
        assert conditions(of_all, cut | {"b": P()}, False) == 1


@pytest.mark.not_in_jax_0_8("sums of one value")
@pytest.mark.slow(always=True)
def test_e12_a_constant_gradient_under_vmap():
    """Of a sharded leaf: its type is that of a replica, and a choice reads both."""
    w = uneven(["a"], 0)
    w, g = (jnp.stack([x, 2 * x]) for x in (w["a"], jnp.ones_like(w["a"])))
    moved = lambda w, g, **axes: jgrad.lars_update(w, g, RATE, **axes)
    run = jax.shard_map(
        jax.vmap(functools.partial(moved, mesh_axes="data")),
        mesh=mesh_of(data=2),
        in_specs=(P(None, "data"), P()),
        out_specs=P(None, "data"),
    )
    found = jax.jit(run)(w, g[:, :8])
    np.testing.assert_allclose(found, jax.vmap(moved)(w, g), rtol=1e-6, atol=1e-6)


@pytest.mark.slow(always=True)
def test_e12_replicas_beside_experts():
    """Each device has an expert of its own, whose axis is not named, beside a leaf that all have."""
    specs = {"experts": P("data"), "shared": P()}
    w, gradients = problem(specs, steps=2, shape=(8, 16, 8))
    whole = from_lars_update(layer_axes={"experts": 0, "shared": None})
    expected = train(whole, jax.jit(whole[1]), w, gradients)
    method = from_lars_update()
    step = in_shard_map(method, w, LINE, specs, check_vma=True)
    off = errors(train(method, step, w, gradients), expected, w)
    assert max(off.values()) < EXACT, off


# Shapes whose parts are equal, so that it is not the shape by which leaves cut alike are found.
OF_EQUAL_PARTS = {
    "tiles": (16, 16),
    "columns": (4, 16),
    "rows": (16, 8),
    "flat": (32, 8),
    "whole": (4, 8),
}


@pytest.mark.parametrize("layouts", [["tiles"], list(OF_EQUAL_PARTS)], ids=["one", "five"])
def test_e12_few_collectives(layouts):
    """For 40 leaves at most 18 of all kinds, and not 240.

    Norms come in columns of up to 16 leaves that are cut alike, so that there are three columns of
    weights and three of directions here, with at most two maxima and a sum for each. XLA joins some
    that are over the same axes: in jax 0.10.2, 8 remain for one layout and 12 for five; in 0.8.1,
    all 18.
    """
    kinds = {f"layer_{i:02}": layouts[i % len(layouts)] for i in range(40)}
    specs = {k: LAYOUTS[GRID][kind] for k, kind in kinds.items()}
    w = {k: np.ones(OF_EQUAL_PARTS[kind], np.float32) for k, kind in kinds.items()}
    method = METHODS["lamb"](mesh_axes=specs)
    step, _ = compiled(method, w, GRID, specs, check_vma=True)
    lowered = step.lower(w, method[0](w), w)
    assert lowered.as_text().count("stablehlo.all_reduce") <= 18
    kinds = "all-reduce|all-gather|all-to-all|collective-permute"
    found = re.findall(rf" ({kinds})(?:-start)?\(", lowered.compile().as_text())
    assert set(found) == {"all-reduce"}
    assert 2 <= len(found) <= 18


# ---- wrappers ----------------------------------------------------------------------------------


INNER = {"lamb": lamb, "adam": lambda mesh_axes=None: jgrad.adam(RATE)}
WRAPPERS = {
    "skip_nonfinite": lambda tx, mesh_axes=None: jgrad.skip_nonfinite(tx, mesh_axes=mesh_axes),
    "accumulate": lambda tx, mesh_axes=None: jgrad.accumulate(tx, 2, mesh_axes=mesh_axes),
}


@pytest.mark.slow(always=["skip_nonfinite-adam-False-False"])
@pytest.mark.parametrize(
    ("wrapper", "inner", "own_axes", "check_vma"),
    [
        ("skip_nonfinite", "lamb", True, True),
        ("skip_nonfinite", "adam", False, False),
        ("accumulate", "lamb", True, True),
        ("accumulate", "lamb", True, False),
        # Without axes, LAMB inside would wait for the device that leaves the mini-batch out.
        ("accumulate", "adam", False, False),
    ],
)
def test_e12_nan_on_one_device(wrapper, inner, own_axes, check_vma):
    """All devices leave out what one of them finds not finite; without axes, that one alone."""
    specs = {"tiles": P("data", "model"), "whole": P()}
    w, gradients = problem(specs, steps=4)
    gradients[1]["tiles"][0, 0] = np.nan
    method = from_transformation(lambda **axes: WRAPPERS[wrapper](INNER[inner](**axes), **axes))
    whole, cut = method(), method(mesh_axes=specs if own_axes else None)
    step = in_shard_map(cut, w, GRID, specs, check_vma=check_vma)
    found = train(whole, step, w, gradients)
    expected = train(whole, jax.jit(whole[1]), w, gradients)
    off = errors(found, expected, w)
    assert max(off.values()) < EXACT if own_axes else off["tiles"] > 0.1, off
    assert all(np.any(expected[-1][name] != w[name]) for name in specs)


# ---- stacked leaves ----------------------------------------------------------------------------

# "scan" is cut within its layers. The layers of "pipeline" are divided whole: nothing of them is
# elsewhere. Of "grid", a device has two layers, each cut over the others.
STACKED = {"scan": P(None, "data", "model"), "pipeline": P("data"), "grid": P("model", "data")}
STACKED_AXES = {"scan": ("data", "model"), "pipeline": None, "grid": "data"}


def stacked_problem():
    """Four layers per leaf, of weights from 1e-3 to 1e3."""
    w, gradients = problem(STACKED, steps=2, shape=(4, 16, 8))
    layers = np.logspace(-3, 3, 4, dtype=np.float32).reshape(4, 1, 1)
    return jax.tree.map(lambda x: x * layers, w), gradients


@functools.cache
def one_by_one(name):
    """The steps of the stacked problem with each layer by itself."""
    init, step = METHODS[name]()
    w, gradients = stacked_problem()
    return train((jax.vmap(init), None), jax.jit(jax.vmap(step)), w, gradients)


BOTH = {"mesh_axes": STACKED_AXES, "layer_axes": 0}
EITHER = {
    "no layer_axes": ({"mesh_axes": STACKED_AXES}, ["scan", "grid"]),
    "no mesh_axes": ({"layer_axes": 0}, ["scan", "grid"]),
    "one name": ({"mesh_axes": "data", "layer_axes": 0}, ["scan", "pipeline"]),
}


@pytest.mark.parametrize(
    ("name", "check_vma", "axes", "wrong"),
    [
        ("lamb", True, BOTH, []),
        ("lamb", False, BOTH, []),
        ("scale_by_trust_ratio", True, BOTH, []),
        ("lars_update", True, BOTH, []),
        *(pytest.param("lars_update", False, *x, id=name) for name, x in EITHER.items()),
    ],
)
def test_e14_stacked_and_cut(name, check_vma, axes, wrong):
    """Layers that are stacked for scan and cut, or stacked and divided, as each by itself.

    One of the two options does not do the work of both.
    """
    w, gradients = stacked_problem()
    step = in_shard_map(METHODS[name](**axes), w, GRID, STACKED, check_vma=check_vma)
    off = errors(train(METHODS[name](), step, w, gradients), one_by_one(name), w)
    assert {k for k in off if off[k] > 0.1} == set(wrong), off
    assert wrong or max(off.values()) < EXACT, off


# ---- gradients through an update ---------------------------------------------------------------


def lamb_weights(w, g, mesh_axes=None):
    """The weights after one step, differentiable."""
    # Moments that are not zero: Adam's first step is a sign, without a slope by the gradient.
    moments = 0.3, 0.5, 2
    options = {"max_trust_ratio": None, "mesh_axes": mesh_axes, "stop_gradients": False}
    return jgrad.lamb_update(w, g, RATE, *moments, decay_lambda=0.1, **options)[0]


def lars_weights(w, g, mesh_axes=None):
    options = {"decay_lambda": 0.1, "mesh_axes": mesh_axes, "stop_gradients": False}
    return jgrad.lars_update(w, g, RATE, **options)


def objective(w):
    return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(w))


def assert_slopes(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.max(np.abs(b)))


@check_or_not
@pytest.mark.parametrize("where", ["around", "inside"])
def test_e12_slopes(where, check_vma):
    """The derivatives of norms that are put together from parts are those of whole norms.

    Around `shard_map`, or inside of it, of the sum of what the devices compute. For leaves of which
    there are copies, what that sum means depends on `check_vma`: with it each copy counts, without
    it each device has the slope of its own. So all leaves are cut over all axes there.
    """
    names, weights = {
        "around": (("columns", "whole"), lars_weights),
        "inside": (("tiles",), lamb_weights),
    }[where]
    specs = {k: LAYOUTS[GRID][k] for k in names}
    pair = uneven(specs, 0), uneven(specs, 1, reverse=True)
    of = functools.partial(jax.shard_map, mesh=make_mesh(GRID), check_vma=check_vma)
    if where == "around":
        run = lambda w, g: weights(w, g, specs)
        run = of(run, in_specs=(specs, specs), out_specs=specs)
        slopes = jax.grad(lambda pair: objective(run(*pair)))
    else:
        slopes = jax.grad(lambda pair: objective(weights(*pair, specs)))
        slopes = of(slopes, in_specs=((specs, specs),), out_specs=(specs, specs))
    found = jax.block_until_ready(jax.jit(slopes)(pair))
    assert_slopes(found, jax.grad(lambda pair: objective(weights(*pair)))(pair))
