"""Recipes for training on many devices, to be copied: each against the same training on one.

Why the mean of gradients is taken on both sides of `jax.grad`, `test_e25_mean_on_one_side` in
`test_placement.py` shows.
"""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jgrad
from tests.multi_device.meshes import mesh_of, place, shardings_of, specs_of

pytestmark = pytest.mark.slow

DEVICES = 8
GRID = {"data": 4, "model": 2}
ROWS = P("data")  # where a batch lies
EXACT = 5e-5  # of the largest element of a leaf: sums over devices are in another order

mean = functools.partial(jax.lax.pmean, axis_name="data")


def training_step(tx, gradient):
    @chex.assert_max_traces(n=1)
    def step(w, state, batch):
        updates, state = tx.update(gradient(w, batch), state, w)
        return optax.apply_updates(w, updates), state

    return step


def under_jit(tx, gradient, w, mesh, specs):
    """A step, parameters that lie as `specs` say, and a state that lies as they do."""
    own, batch = shardings_of(mesh, (specs, ROWS))
    w = jax.device_put(w, own)
    own = own, jgrad.state_shardings(tx, w)
    state = jax.jit(tx.init, out_shardings=own[1])(w)
    step = training_step(tx, gradient)
    step = jax.jit(step, in_shardings=(*own, batch), out_shardings=own, donate_argnums=(0, 1))
    return step, w, state


def in_shard_map(tx, gradient, w, mesh, specs, *, shard_over=None, batch=ROWS, check_vma=True):
    """The same in `shard_map`, where `zero` wants a state that is cut over an axis."""
    w = place(w, mesh, specs)
    states = jgrad.state_shardings(tx, w, shard_over=shard_over)
    state = jax.jit(tx.init, out_shardings=states)(w)
    own = specs, specs_of(states)
    step = training_step(tx, gradient)
    step = jax.shard_map(
        step, mesh=mesh, in_specs=(*own, batch), out_specs=own, check_vma=check_vma
    )
    return jax.jit(step, donate_argnums=(0, 1)), w, state


def train(step, w, state, batches):
    for batch in batches:
        w, state = jax.block_until_ready(step(w, state, batch))
    return w, state


def on_one_device(tx, loss, w, batches):
    """What the recipes have to find."""
    return train(jax.jit(training_step(tx, jax.grad(loss))), w, tx.init(w), batches)


def assert_close(found, expected):
    chex.assert_trees_all_equal_structs(found, expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=EXACT * np.max(np.abs(b)))


def assert_cut(tree, parts):
    """Each device has one part of each array."""
    for x in jax.tree.leaves(tree):
        assert {s.data.nbytes * parts for s in x.addressable_shards} == {x.nbytes}
        assert len(x.sharding.device_set) == DEVICES


# ---- a perceptron --------------------------------------------------------------------------------


def loss(w, x, contract=jnp.matmul):
    """`contract` is the product over hidden units, which tensor parallelism cuts."""
    hidden = jnp.tanh((x * w["gain"][None]) @ w["up"] + w["bias"][None])
    return jnp.mean(jnp.square(contract(hidden, w["down"]) - jnp.sin(x[:, :1])))


def mean_gradient(w, x, contract=jnp.matmul):
    """The gradient of the whole batch, of which each device has a part."""
    return mean(jax.grad(lambda w: mean(loss(w, x, contract)))(w))


def problem(steps=3):
    """Parameters and batches on the host; each batch larger than the one before."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: np.float32(rng.normal(size=shape))
    w = {"gain": draw(4), "up": draw(4, 16), "bias": draw(16), "down": draw(16, 1)}
    return w, [(1 + t) * draw(32, 4) for t in range(steps)]


# ---- data parallel -----------------------------------------------------------------------------

# Linear in gradients: Adam and LAMB would hardly tell eight times one from the right one.
descent = functools.partial(jgrad.gradient_descent, 0.01, momentum=0.9)
# With the usual epsilon, first steps would be the signs of gradients of the size of roundings.
lamb = functools.partial(
    jgrad.lamb, 0.1, weight_decay=0.1, epsilon=1e-3, bias_correction="step_size"
)


@pytest.mark.parametrize("way", ["jit", "shard_map", "shard_map, unchecked", "pmap"])
def test_data_parallel(way):
    """The loss is that of the whole batch, and so is its gradient."""
    mesh, (w, batches) = mesh_of(data=8), problem()
    expected = on_one_device(descent(), loss, w, batches)
    if way == "jit":
        step, *start = under_jit(descent(), jax.grad(loss), w, mesh, P())
    elif way == "pmap":
        step = training_step(descent(), mean_gradient)
        step = jax.pmap(step, "data", in_axes=(None, None, 0), out_axes=None)
        # On a mesh with the name of the axis; from elsewhere, JAX 0.10 would trace twice.
        start = place((w, descent().init(w)), mesh, P())
        batches = [x.reshape(DEVICES, -1, 4) for x in batches]
    else:
        check = {"check_vma": way == "shard_map"}
        step, *start = in_shard_map(descent(), mean_gradient, w, mesh, P(), **check)
    assert_close(train(step, *start, batches), expected)


# ---- tensor parallel -----------------------------------------------------------------------------

# Columns of the first product, and rows of the second: hidden units are cut.
SPECS = {"gain": P(), "up": P(None, "model"), "bias": P("model"), "down": P("model", None)}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("make", [jgrad.lamb, jgrad.adam])
def test_tensor_parallel_under_jit(make, axis_type):
    """Norms are those of whole leaves, and moments lie where parameters do."""
    mesh, (w, batches) = mesh_of(axis_type, **GRID), problem()
    contract = jnp.matmul
    if axis_type == AxisType.Explicit:  # which has to be told where a sum over devices lies
        contract = functools.partial(jnp.matmul, out_sharding=NamedSharding(mesh, P("data", None)))
    gradient = jax.grad(functools.partial(loss, contract=contract))
    tx = make(0.1, weight_decay=0.1)
    step, *start = under_jit(tx, gradient, w, mesh, SPECS)
    found, state = train(step, *start, batches)
    for tree in (found, state.mw, state.vw):
        assert_cut([tree[name] for name in ("up", "bias", "down")], parts=2)
    assert_close((found, state), on_one_device(tx, loss, w, batches))


# ---- micro-batches -------------------------------------------------------------------------------

EVERY = 4
every_method = pytest.mark.parametrize("tx", [descent(), lamb()], ids=["momentum", "lamb"])
packed_loss = lambda w, x: loss(jgrad.unpack(w), x)
window_loss = lambda w, xs: jnp.mean(jax.vmap(loss, in_axes=(None, 0))(w, xs))


def under_zero(tx, gradient, w, *, layer_axes=None, **options):
    """A step, packed parameters that are on each device, and an eighth of the state on each."""
    w = jgrad.pack(w, layer_axes=layer_axes, multiple_of=DEVICES)
    options |= {"shard_over": "data", "check_vma": False}
    return in_shard_map(jgrad.zero(tx, "data"), gradient, w, mesh_of(data=8), P(), **options)


def micro_batches():
    """Parameters, micro-batches, and the same micro-batches as two windows of four."""
    w, batches = problem(2 * EVERY)
    return w, batches, [np.stack(batches[:EVERY]), np.stack(batches[EVERY:])]


@every_method
def test_scan_of_micro_batches_under_zero(tx):
    """Each device sums up its own gradients, whole, for one reduce-scatter in all."""

    def gradient(w, window):
        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(packed_loss)(w, x)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, w), window)
        return jax.tree.map(lambda x: x / len(window), total)

    w, _, windows = micro_batches()
    step, *start = under_zero(tx, gradient, w, batch=P(None, "data"))
    program = step.lower(*start, windows[0]).compile()
    found = jgrad.unpack(train(program, *start, windows))
    assert_close(found, on_one_device(tx, window_loss, w, windows))
    loops, main = program.as_text().split("\nENTRY ")
    collective = r" (reduce-scatter|all-\w+|collective-\w+)(?:-start)?\("
    assert " while(" in main
    assert not re.search(collective, loops)
    found = re.findall(collective, main)
    assert [found.count(kind) for kind in ("reduce-scatter", "all-gather")] == [1, 1]
