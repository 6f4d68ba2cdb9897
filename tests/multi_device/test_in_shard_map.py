"""Whole training in `shard_map`, as on TPUs: gradients, every wrapper and its state.

The truth is the same function on one device: `init`, then a scan over batches. All wrappers around
one optimizer are in one program.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jgrad
from tests.multi_device.meshes import (
    mesh_of,
    place,
    specs_of as specs_of_arrays,
    varying,
)
from tests.support.loops import step_of, told, with_loss
from tests.wrappers.test_every_wrapper import WRAPPERS, Wrapper
from tests.wrappers.test_hand_over import slowly

DEVICES = 8
RATE = 0.05
STEPS, BAD = 4, 1
EXACT = 1e-5  # a few roundings of float32
DTYPES = ("float32", "bfloat16")
SHAPES = {"w": (16, 12), "up": (8, 8), "scale": (72,)}
# Which rows a device has of a fully sharded model. Leaves of one buffer are sharded alike.
ROWS = {
    "tree": {"w": P("d"), "up": P("d"), "scale": P()},
    "packed": dict.fromkeys(SHAPES, P("d")),
}


def of_a_user(tx, **axes):
    """Inside `skip_nonfinite` the wrapper of CONTRIBUTING.md, which knows nothing of devices."""
    return jgrad.skip_nonfinite(slowly(tx, 0.25), **axes)


def recipe(tx, **axes):
    inner = jgrad.average_params(optax.chain(jgrad.clip_by_global_norm(0.5, **axes), tx), 0.9)
    return jgrad.skip_nonfinite(jgrad.accumulate(jgrad.master_weights(inner), 2, **axes), **axes)


OPTIMIZERS = {
    "adam": lambda **axes: jgrad.adam(RATE),
    "lamb": functools.partial(jgrad.lamb, RATE, weight_decay=0.1),
}
SUBJECTS = {
    "alone": Wrapper("alone", lambda tx: tx),
    "pack_small": Wrapper("pack_small", lambda tx: jgrad.pack_small(tx, max_size=70)),
    "recipe": Wrapper("recipe", recipe, dtype=jnp.bfloat16, shares=True, skips=True),
    "slowly": Wrapper("slowly", of_a_user, shares=True, skips=True),
} | {f"{wrapper}-{i}": wrapper for i, wrapper in enumerate(WRAPPERS)}


def subjects(optimizer, form, way):
    """Each transformation by its name."""
    specs = way.specs(form)
    axes = {} if specs == P() else {"mesh_axes": specs}
    for name, wrapper in SUBJECTS.items():
        # Packed trees are packed already, and `offload` belongs outside of `zero`.
        there = wrapper.name not in way.without and (form, name) != ("packed", "pack_small")
        if there:
            own = axes if wrapper.shares else {}
            # A matrix that keeps its norm has no decay.
            decays = {name: len(shape) < 2 for name, shape in SHAPES.items()}
            mask = {"weight_decay_mask": decays} if wrapper.name == "hyperball" else {}
            yield name, wrapper, wrapper.around(OPTIMIZERS[optimizer](**axes, **mask), **own)


# ---- the model ---------------------------------------------------------------------------------


def parameters(dtype):
    """Rows of scales from 0.01 to 10, so that the norm of a part is nowhere near that of a leaf."""
    rng = np.random.default_rng(0)
    scales = {name: np.logspace(-2, 1, shape[0]) for name, shape in SHAPES.items()}
    tree = {
        name: scales[name].reshape(-1, *[1] * (len(shape) - 1)) * rng.normal(size=shape)
        for name, shape in SHAPES.items()
    }
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def batches(skips):
    """Of each step; column i is for part i of a leaf. One number of them all may be NaN."""
    rng = np.random.default_rng(1)
    x = np.float32(0.3 * rng.normal(size=(STEPS, 16, DEVICES)))
    if skips:
        x[BAD, 5, 6] = np.nan
    return jnp.asarray(x)


def loss(w, x):
    def of(p, x):
        parts = jnp.expand_dims(p.reshape(x.shape[1], -1), 0)
        return jnp.mean(jnp.sum(jnp.cos(parts + jnp.expand_dims(x, 2)), axis=(1, 2)))

    # All devices would see a NaN in the gradient of the leaf that they all have.
    return sum(of(p, x[:, :1] if k == "scale" else x) for k, p in jgrad.unpack(w).items())


def wide(w):
    """Gradients are in float32, so that their mean is rounded alike everywhere."""
    return jax.tree.map(lambda p: p.astype(jnp.float32), w)


def whole_batch(w, x):
    return jgrad.grad(loss)(wide(w), x)


def mean(tree):
    return jax.tree.map(lambda y: jax.lax.pmean(y, "d"), tree)


def data_parallel(w, x):
    """The recipe of E25."""
    return mean(jgrad.grad(lambda w: mean(loss(w, x)))(wide(w)))


def fully_sharded(w, x):
    """What gathers rows of the weights adds up rows of the gradients of all devices."""
    whole = lambda p: jax.lax.all_gather(p, "d", tiled=True)
    if not isinstance(w, dict):
        return jgrad.grad(lambda w: loss(jax.tree.map(whole, jgrad.unpack(w)), x) / DEVICES)(
            wide(w)
        )
    own = wide(w) | {"scale": varying(wide(w["scale"]), "d")}
    cut = lambda w: {k: p if k == "scale" else whole(p) for k, p in w.items()}
    g = jgrad.grad(lambda w: loss(cut(w), x) / DEVICES)(own)
    return g | {"scale": jax.lax.psum(g["scale"], "d")}


def of_each_device(w, x):
    """`zero` takes the mean."""
    return jgrad.grad(loss)(jax.tree.map(lambda p: varying(p, "d"), wide(w)), x)


def train(tx, gradient, w, xs):
    def step(carry, x):
        return step_of(tx)(*carry, gradient(carry[0], x)), None

    return jax.lax.scan(step, (w, tx.init(w)), xs)[0]


def pack(w):
    return jgrad.pack(w, multiple_of=DEVICES)


# ---- the surroundings --------------------------------------------------------------------------


class Way(NamedTuple):
    """How gradients come about, where weights are, and what is around each transformation."""

    gradient: Callable[[Any, jax.Array], Any]
    specs: Callable[[str], Any] = lambda form: P()
    around: Callable[[Any], Any] = lambda tx: tx
    without: str = ""


ALONE = Way(whole_batch)
WAYS = {
    "data parallel": Way(data_parallel),
    "fully sharded": Way(fully_sharded, ROWS.get),
    "zero": Way(of_each_device, around=lambda tx: jgrad.zero(tx, "d"), without="offload"),
}


def inputs():
    """Weights of both dtypes; batches without NaN and with it."""
    return {x: parameters(x) for x in DTYPES}, {skips: batches(skips) for skips in (False, True)}


def program(optimizer, form, way):
    """A function of `inputs()`: weights and state of each subject after all steps."""

    def run(ws, xs):
        found = {}
        for name, wrapper, tx in subjects(optimizer, form, way):
            w = ws[jnp.dtype(wrapper.dtype).name]
            w = pack(w) if form == "packed" else w
            found[name] = train(way.around(tx), way.gradient, w, xs[wrapper.skips])
        # Of `zero`, a device has rows of the state, of which no tree can be made there.
        return found if way is WAYS["zero"] else jgrad.unpack(found)

    return run


@functools.cache
def on_one_device(optimizer):
    return jax.device_get(jax.jit(program(optimizer, "tree", ALONE))(*inputs()))


def specs_of_zero(optimizer, mesh):
    """As users ask for them, of each subject."""
    specs = {}
    for name, wrapper, tx in subjects(optimizer, "packed", WAYS["zero"]):
        w = place(pack(parameters(wrapper.dtype)), mesh, P())
        shardings = jgrad.state_shardings(jgrad.zero(tx, "d"), w, shard_over="d")
        specs[name] = P(), specs_of_arrays(shardings)
    return specs


def specs_of(path, way, form):
    """As the parameter of the same name; counters, and norms of matrices, are on all devices."""
    specs = way.specs(form)
    if any(getattr(entry, "name", None) == "radius" for entry in path):
        return P()
    names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    return specs[names[-1]] if specs != P() and names[-1] in specs else P()


def on_a_mesh(optimizer, form, way, axis_type, check_vma):
    mesh = mesh_of(axis_type, d=DEVICES)
    if way is WAYS["zero"]:
        out = specs_of_zero(optimizer, mesh)
    else:
        out = {name: on_one_device(optimizer)[name] for name, *_ in subjects(optimizer, form, way)}
        out = jax.tree_util.tree_map_with_path(lambda path, _: specs_of(path, way, form), out)
    own = dict.fromkeys(DTYPES, way.specs(form)), P(None, "d")
    run = program(optimizer, form, way)
    run = jax.shard_map(run, mesh=mesh, in_specs=own, out_specs=out, check_vma=check_vma)
    return jax.device_get(jgrad.unpack(jax.jit(run)(*place(inputs(), mesh, own))))


def assert_close(found, expected, start, tolerance, ulps):
    """Weights to a part of the largest step, and so many last bits; states to one of the largest element."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for name, w in start.items():
        a, b, w = (np.float64(x) for x in (found[0][name], expected[0][name], w))
        epsilon = 0 if start[name].dtype == jnp.float32 else float(jnp.finfo(start[name].dtype).eps)
        far = np.max(np.abs(b - w))
        assert far > 0
        off = np.abs(a - b)
        assert np.all(off <= tolerance * far + ulps * epsilon * np.abs(b)), (name, np.max(off))
    for a, b in zip(*(jax.tree.leaves(x[1]) for x in (found, expected)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.max(np.abs(b), initial=0))


def choices():
    for optimizer, form, way in itertools.product(OPTIMIZERS, ("tree", "packed"), WAYS):
        if (form, way) != ("tree", "zero"):
            for axis_type in (AxisType.Auto, AxisType.Explicit):
                for check_vma in (True, False):
                    mesh = f"{axis_type.name}-{'checked' if check_vma else 'unchecked'}"
                    choice = optimizer, form, WAYS[way], axis_type, check_vma
                    yield pytest.param(*choice, id=f"{optimizer}-{form}-{way}-{mesh}")


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "form", "way", "axis_type", "check_vma"), list(choices()))
def test_as_on_one_device(optimizer, form, way, axis_type, check_vma):
    """Weights and states; a step whose gradient has a NaN in one row is left out on all devices."""
    found = on_a_mesh(optimizer, form, way, axis_type, check_vma)
    expected = on_one_device(optimizer)
    for name, wrapper, _ in subjects(optimizer, form, way):
        # Nobody says where the elements of a part are: other bits round them at each step.
        other_bits = wrapper.name == "stochastic_rounding" and way.specs(form) != P()
        start = parameters(wrapper.dtype)
        assert_close(found[name], expected[name], start, *((0.3, 4) if other_bits else (EXACT, 1)))
        if wrapper.skips:
            counts = optax.tree_utils.tree_get_all_with_path(found[name][1], "skipped")
            assert {int(count) for _, count in counts} == {1}


def stacks(**axes):
    """Wrappers in wrappers, in which something decides or reports."""
    clipped = optax.chain(jgrad.clip_by_global_norm(0.5, **axes), jgrad.adam(RATE))
    window = jgrad.accumulate(clipped, 2, **axes)
    yield recipe(jgrad.adam(RATE), **axes)
    yield jgrad.watch(clipped, **axes)
    yield jgrad.watch(jgrad.skip_nonfinite(window, **axes), **axes)
    yield jgrad.skip_nonfinite(jgrad.watch(clipped, every=2, **axes), **axes)
    yield jgrad.accumulate(jgrad.watch(clipped, **axes), 2, **axes)
    yield with_loss(jgrad.skip_spikes(jgrad.skip_nonfinite(window, **axes), **axes))
    yield jgrad.skip_nonfinite(clipped, branch=True, **axes)
    yield told(jgrad.accumulate(clipped, 2, weighted=True, **axes), weight=2.0)
    # One counter decides about another: the first update does not show all types.
    yield jgrad.accumulate(clipped, 1, **axes)
    yield told(jgrad.accumulate(clipped, 1, weighted=True, **axes), weight=2.0)
    grows = jgrad.accumulate(clipped, lambda done: jnp.where(done < 2, 1, 3), **axes)
    yield from (grows, jgrad.watch(grows, **axes))
    # With an argument of its own: nothing can be tried in `init`.
    adam = jgrad.adam(RATE)
    of_value = lambda *args, value, **_: adam.update(*args, learning_rate=value)
    inner = optax.GradientTransformationExtraArgs(adam.init, of_value)
    yield told(jgrad.skip_nonfinite(inner, **axes), value=RATE)


def in_scan(tx, specs, out_specs):
    """A scan over steps in `shard_map`, `init` in it, too: JAX says whether types fit."""

    def run(w):
        def step(carry, _):
            w, state = carry
            return step_of(tx)(w, state, jax.tree.map(jnp.cos, w)), None

        found = jax.lax.scan(step, (w, tx.init(w)), length=2)[0]
        return found if isinstance(out_specs, tuple) else found[0]

    run = jax.shard_map(run, mesh=mesh_of(d=DEVICES), in_specs=(specs,), out_specs=out_specs)
    jax.eval_shape(run, parameters("float32"))


def each_wrapper(**axes):
    for wrapper in WRAPPERS:
        if wrapper.name != "offload":
            yield wrapper.around(jgrad.adam(RATE), **(axes if wrapper.shares else {}))


@pytest.mark.slow(always=["stacks"])
@pytest.mark.parametrize("txs", [stacks, each_wrapper], ids=["stacks", "each"])
def test_a_new_state_fits_the_carry(txs):
    """Where each device decides for its own model, counters vary; where all agree, none does."""
    for tx in txs():
        in_scan(tx, dict.fromkeys(SHAPES, P("d")), P("d"))
    way, w = WAYS["fully sharded"], parameters("float32")
    agree = [(form, tx) for form, specs in ROWS.items() for tx in txs(mesh_axes=specs)]
    for form, tx in agree:
        state = {"state": jax.eval_shape(tx.init, w)}
        of_leaf = lambda path, _, form=form: specs_of(path, way, form)
        of_state = jax.tree_util.tree_map_with_path(of_leaf, state)["state"]
        in_scan(tx, ROWS[form], (ROWS[form], of_state))


@pytest.mark.slow(always=["2"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_weight_of_each_device(every):
    """One of 0 updates nothing, though no gradient is looked at: counters vary."""

    def run(w, weight):
        tx = jgrad.accumulate(jgrad.adam(RATE), every, weighted=True, check_finite=False)
        step = lambda carry, _: (step_of(tx)(*carry, w, weight=weight[0]), None)
        w, state = jax.lax.scan(step, (w, tx.init(w)), length=2)[0]
        return w, jnp.expand_dims(state.inner.step, 0)

    run = jax.shard_map(run, mesh=mesh_of(d=DEVICES), in_specs=P("d"), out_specs=P("d"))
    weights = jnp.arange(8.0) % 2
    w, steps = jax.jit(run)(jnp.ones((8, 3)), weights)
    assert steps.tolist() == [0, 2 // every] * 4
    assert np.array_equal(w[:, 0] == 1, weights == 0)


def test_a_rate_of_each_device():
    """What devices differ in may be a number beside their models; nothing decides, so none counts apart."""

    def run(w, rate):
        tx = jgrad.schedule_free(jgrad.adam(rate[0]), learning_rate=rate[0])
        clipped = optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.adam(RATE))
        watched = jgrad.watch(jgrad.accumulate(clipped, 2, check_finite=False))
        assert {"clip_factor", "learning_rate"} <= watched.init(w).report.keys()

        def step(carry, _):
            (w, state), (v, seen) = carry
            updates, seen = watched.update(v, seen, v, learning_rate=rate[0])
            return (step_of(tx)(w, state, w), (v + updates, seen)), None

        carry = (w, tx.init(w)), (w, watched.init(w))
        ((w, free), (_, seen)), _ = jax.lax.scan(step, carry, length=2)
        return w, (free.done, seen.report["calls"], seen.inner.count)

    run = jax.shard_map(run, mesh=mesh_of(d=DEVICES), in_specs=P("d"), out_specs=(P("d"), P()))
    jax.eval_shape(run, jnp.ones((8, 3)), jnp.ones(8))


def test_an_error_of_what_is_inside():
    """`init` tries an update, to see which numbers vary; a wrong one is no missing argument."""

    def update(g, state, w=None):
        return jax.tree.map(lambda x: x @ jnp.ones((9, 9)), g), state

    wrong = optax.GradientTransformation(lambda w: optax.EmptyState(), update)
    init = jax.shard_map(
        jgrad.skip_nonfinite(wrong).init, mesh=mesh_of(d=2), in_specs=P("d"), out_specs=P()
    )
    with pytest.raises(TypeError, match="contracting dimensions"):
        jax.eval_shape(init, {"w": jnp.ones((8, 8))})


@pytest.mark.parametrize(
    "inner",
    [
        lambda: jgrad.skip_nonfinite(jgrad.adam(0.1), branch=True),
        lambda: jgrad.skip_nonfinite(jgrad.accumulate(jgrad.adam(0.1), 2)),
    ],
)
def test_a_report_fits_the_carry(inner):
    """Each device decides for its shard, so a rate that is noted in a branch varies, from `init`."""
    tx = jgrad.watch(inner(), mesh_axes={"w": P("d")})

    def run(w):
        step = lambda carry, _: (step_of(tx)(*carry, carry[0]), None)
        return jax.lax.scan(step, (w, tx.init(w)), length=2)[0][0]

    spec = {"w": P("d")}
    of_shards = jax.shard_map(run, mesh=mesh_of(d=2), in_specs=(spec,), out_specs=spec)
    assert jax.eval_shape(of_shards, {"w": jnp.ones((4, 3))})["w"].shape == (4, 3)
