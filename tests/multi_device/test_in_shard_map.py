"""What varies over devices in `shard_map`: states of every wrapper fit the carry of a loop.

Numbers are in `tests/everywhere/test_surroundings.py`, gradients in `test_placement.py`, shards of a
state in `test_zero.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jgrad
from tests.multi_device.meshes import mesh_of
from tests.support.loops import step_of, told, with_loss
from tests.wrappers.test_every_wrapper import WRAPPERS

DEVICES = 8
RATE = 0.05
SHAPES = {"w": (16, 12), "up": (8, 8), "scale": (72,)}
# Which rows a device has of a fully sharded model.
ROWS = {"w": P("d"), "up": P("d"), "scale": P()}, dict.fromkeys(SHAPES, P("d"))


def recipe(tx, **axes):
    inner = jgrad.average_params(optax.chain(jgrad.clip_by_global_norm(0.5, **axes), tx), 0.9)
    return jgrad.skip_nonfinite(jgrad.accumulate(jgrad.master_weights(inner), 2, **axes), **axes)


def parameters():
    """Rows of scales from 0.01 to 10, so that the norm of a part is nowhere near that of a leaf."""
    rng = np.random.default_rng(0)
    scales = {name: np.logspace(-2, 1, shape[0]) for name, shape in SHAPES.items()}
    tree = {
        name: scales[name].reshape(-1, *[1] * (len(shape) - 1)) * rng.normal(size=shape)
        for name, shape in SHAPES.items()
    }
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def spec_of(specs, path):
    """As the parameter of the same name; counters, and norms of matrices, are on all devices."""
    if any(getattr(entry, "name", None) == "radius" for entry in path):
        return P()
    names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    return specs.get(names[-1], P()) if names else P()


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
    jax.eval_shape(run, parameters())


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
    for specs in ROWS:
        of_leaf = lambda path, _, specs=specs: spec_of(specs, path)
        for tx in txs(mesh_axes=specs):
            state = jax.eval_shape(tx.init, parameters())
            in_scan(tx, specs, (specs, jax.tree_util.tree_map_with_path(of_leaf, state)))


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
