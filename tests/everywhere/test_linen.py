"""`TrainState` of flax's linen, with parameters in boxes that name mesh axes.

Most programs get the shardings of the whole state from the boxes, and take them off the state before
the first step. The truth is the same training without boxes, on one device.
"""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.serialization import from_state_dict, to_state_dict
from flax.training.train_state import TrainState
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec as P

import jgrad
from tests.multi_device.meshes import mesh_of

X = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = lambda size, *names: nn.Dense(
            size, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), names)
        )
        x = layer(64, None, "model")(x)
        return layer(256, "model", None)(jnp.tanh(x))


MODEL = Model()


def start(tx, key, *, is_boxed):
    params = MODEL.init(key, X)
    params = params if is_boxed else nn.unbox(params)
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=tx)


def step(state):
    def loss(params):
        return jnp.mean(jnp.square(state.apply_fn(params, X)))

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def train(state, run):
    losses = []
    for _ in range(3):
        state, value = run(state)
        losses.append(value)
    return losses, state


def eight_bits():
    return jgrad.watch(jgrad.adam(1e-2, moment_dtype="8bit"))


@functools.cache
def without_boxes():
    return train(start(eight_bits(), jax.random.key(0), is_boxed=False), jax.jit(step))


@pytest.mark.slow
@pytest.mark.parametrize("is_unboxed", [False, True])
def test_sharded_as_the_boxes_say(is_unboxed):
    make = functools.partial(start, eight_bits(), is_boxed=True)
    mesh = mesh_of(model=8)
    with jax.set_mesh(mesh):
        specs = nn.get_partition_spec(jax.eval_shape(make, jax.random.key(0)))
        codes, scale = specs.opt_state.inner.mw["params"]["Dense_1"]["kernel"]
        assert (codes, scale) == (P("model", None), P("model", None))
        codes, scale = specs.opt_state.inner.mw["params"]["Dense_0"]["kernel"]
        assert (codes, scale) == (P(None, "model"), P(None))  # flattened
        places = jax.tree.map(lambda x: NamedSharding(mesh, x), specs, is_leaf=is_spec)
        begin = (lambda key: nn.unbox(make(key))) if is_unboxed else make
        state = jax.jit(begin, out_shardings=places)(jax.random.key(0))
        run = jax.jit(step, out_shardings=(places, NamedSharding(mesh, P())))
        losses, last = train(state, run)
    expected, other = without_boxes()
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    assert jax.tree.structure(last.opt_state) == jax.tree.structure(state.opt_state)
    numbers = jgrad.report(last.opt_state), jgrad.report(other.opt_state)
    for name, x in numbers[1].items():
        same = name if name in numbers[0] else f"{name}/value"  # names of boxes are those of 1.0
        np.testing.assert_allclose(numbers[0][same], x, rtol=1e-4)
        assert name == "learning_rate" or x > 0 or name == "nonfinite"


def is_spec(x):
    return isinstance(x, P)


def test_a_sum_that_begins():
    """The state gets leaves that it did not have."""
    tx = jgrad.accumulate(jgrad.adam(1e-2, moment_dtype="8bit"), 1)
    boxed = {"w": nn.Partitioned(jnp.ones((32, 256)), ("model", None))}
    found = []
    for params in (boxed, nn.unbox(boxed)):
        _, state = tx.update(params, tx.init(params), params, emit=False)
        found.append((state, *tx.update(params, state, params)[::-1]))
    assert found[0][0].total["w"].names == boxed["w"].names
    for x, y in zip(*found, strict=True):
        jax.tree.map(np.testing.assert_array_equal, nn.unbox(x), y)


def test_described_alike():
    params = MODEL.init(jax.random.key(0), X)
    described = jgrad.hidden_matrices().describe
    assert described(params) == described(nn.unbox(params))
    rates = jgrad.by_path({"**/kernel": 1.0}, rest=0.0)
    assert rates.describe(params) == rates.describe(nn.unbox(params))


def test_a_file_of_1_0_without_a_target():
    """There a box held codes and scale; now each of them has a box of its own."""
    tx = jgrad.adam(1e-2, moment_dtype="8bit")
    _, last = train(start(tx, jax.random.key(0), is_boxed=True), jax.jit(step))
    state = last.opt_state

    def as_in_1_0(x):
        if isinstance(x, jgrad.Blocks):
            return {"value": {name: nn.unbox(y) for name, y in x._asdict().items()}}
        return {"value": x.unbox()} if isinstance(x, nn.Partitioned) else x

    is_leaf = lambda x: isinstance(x, (jgrad.Blocks, nn.Partitioned))
    file = jax.tree.map(as_in_1_0, state._asdict(), is_leaf=is_leaf)
    new, account = jgrad.carry_over(file, like=jax.eval_shape(tx.init, last.params), strict=True)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert not account.converted
    jax.tree.map(np.testing.assert_array_equal, new, state)


def test_a_file_of_named_arrays():
    """As EasyLM writes it. A method with one moment has None for the other, which is no array."""
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    tx = jgrad.lion(0.1)
    state = tx.update(params, tx.init(params))[1]
    named = flatten_dict(to_state_dict(state))
    arrays = {name: x for name, x in named.items() if x is not None}
    assert named.keys() - arrays.keys() == {("vw",)}
    restored = from_state_dict(tx.init(params), unflatten_dict(arrays | {("vw",): None}))
    chex.assert_trees_all_equal(restored, state)
