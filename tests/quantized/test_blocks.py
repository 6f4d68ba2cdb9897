"""`Blocks` as a node of a tree: its paths, files, and `Blocks` of a user."""

import copy
import functools
import pickle

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import serialization
from jax.sharding import PartitionSpec as P

import jgrad
from tests.support.eight_bits import quantized, unquantized
from tests.support.errors import assert_error
from tests.support.loops import assert_equal

W = {"w": jnp.linspace(-1.0, 1.0, 64 * 64).reshape(64, 64), "b": jnp.ones(3)}
G = jax.tree.map(lambda x: x + 0.5, W)
tx = jgrad.adam(0.1, moment_dtype="8bit")
update = jax.jit(tx.update)


def trained():
    return update(G, tx.init(W), W)[1]


def rewritten(state, f):
    """The state with other objects for its `Blocks`."""
    return jax.tree.map(
        lambda x: f(x) if isinstance(x, jgrad.Blocks) else x,
        state,
        is_leaf=lambda x: isinstance(x, jgrad.Blocks),
    )


def test_beside_numbers_of_python():
    """Which a model may have among its arrays."""
    for make in (jgrad.adam, jgrad.adan, jgrad.lion, jgrad.lars):
        state = make(0.1, moment_dtype="8bit").init(W | {"x": 1.5, "n": 3})
        assert isinstance(state.mw["w"], jgrad.Blocks)
        assert (state.mw["x"].shape, state.mw["n"]) == ((), None)


# As files and users have made them.
OTHERS = {
    "by a user": lambda x: jgrad.Blocks(x.codes, x.scale),
    "by names": lambda x: jgrad.Blocks(scale=x.scale, codes=x.codes),
    "of a sequence": lambda x: jgrad.Blocks._make(tuple(x)),
    "pickled": lambda x: pickle.loads(pickle.dumps(x)),
    "copied": copy.deepcopy,
    "replaced": lambda x: x._replace(codes=x.codes),
}


@pytest.mark.slow(one_in=8)
@pytest.mark.parametrize("made", OTHERS.values(), ids=OTHERS)
def test_a_state_of_a_user_is_the_state(made):
    """The same structure, the same program, the same next step, and a loop may carry it."""
    state = trained()
    other = rewritten(state, made)
    assert all(type(x) is jgrad.Blocks for x in (other.mw["w"], other.vw["w"]))
    assert jax.tree.structure(other) == jax.tree.structure(state)
    assert (other.mw["w"].codes.dtype, other.vw["w"].codes.dtype) == (jnp.int8, jnp.uint8)
    once = jax.jit(chex.assert_max_traces(tx.update, n=1))
    expected = once(G, state, W)
    assert_equal(once(G, jax.tree.map(jnp.asarray, other), W), expected)
    assert_equal(unquantized(other), unquantized(state))
    assert_equal(quantized(other, like=jax.eval_shape(tx.init, W)), state)
    body = lambda state, _: (tx.update(G, state, W)[1], None)
    found, _ = jax.jit(lambda s: jax.lax.scan(body, s, None, 1))(jax.tree.map(jnp.asarray, other))
    assert_equal(found, expected[1])


def test_moments_of_both_kinds_have_one_structure():
    """As always: what is computed of the codes of both, such as bytes."""
    state = trained()
    assert jax.tree.structure(state.mw) == jax.tree.structure(state.vw)
    held = jax.tree.map(lambda m, v: m.nbytes + v.nbytes, state.mw, state.vw)
    assert held["w"].codes == 2 * 64 * 64


def test_paths_and_names():
    state = trained()
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state.mw)]
    assert paths == ["['b']", "['w'].codes", "['w'].scale"]
    found = optax.tree.get_all_with_path(state, "scale")
    assert [x.shape for _, x in found] == [state.mw["w"].scale.shape] * 2
    again = serialization.from_bytes(tx.init(W), serialization.to_bytes(state))
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert_equal(again, state)
    codes, scale = state.mw["w"]
    assert (codes is state.mw["w"].codes, scale is state.mw["w"].scale) == (True, True)


def test_specs_and_placements_that_a_user_wrote():
    """Objects of other kinds have no dtype that could name a codec."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    state = trained()
    specs = rewritten(jax.tree.map(lambda _: P(), state), lambda x: jgrad.Blocks(*x))
    step = jax.shard_map(tx.update, mesh=mesh, in_specs=(P(), specs, P()), out_specs=(P(), specs))
    assert_equal(jax.jit(step)(G, state, W), update(G, state, W))
    device = jax.devices()[0]
    places = rewritten(jax.tree.map(lambda _: device, state), lambda x: jgrad.Blocks(*x))
    assert_equal(jax.device_put(state, places), state)


def test_codes_of_no_codec():
    state = trained()
    nameless = rewritten(state, lambda x: jgrad.Blocks(x.codes.astype(jnp.int32), x.scale))
    message = "carry_over: `old` at .mw['w']: an array of int32 and shape (64, 64) as `codes`, expected int8 or uint8."
    assert_error(TypeError, message, functools.partial(unquantized, nameless))
