"""`Blocks` as a node of a tree: what is static in it, files of earlier versions, `Blocks` of a user."""

import copy
import functools
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from jax.sharding import PartitionSpec as P

import jgrad
from jgrad._quantized.codec import SIGNED, UNSIGNED, Codec, codec_of, of_moments
from jgrad._trees.forms import Form
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


def body(x):
    """The pickle of an object, without the mark of its protocol and the stop."""
    return pickle.dumps(x, 2)[2:-1]


def pickled_up_to_0_6(x, protocol):
    """The bytes that a NamedTuple `jgrad.Blocks(codes, scale)` was."""
    arrays = body(np.asarray(x.codes)) + body(np.asarray(x.scale)) + b"\x86"  # a pair
    if protocol == 2:
        return b"\x80\x02cjgrad\nBlocks\n" + arrays + b"\x81."  # Blocks.__new__(Blocks, *pair)
    parts = b"cjgrad\nBlocks\nc__builtin__\ntuple\n" + arrays
    return b"\x80\x02ccopy_reg\n_reconstructor\n" + parts + b"\x87R."  # tuple.__new__(Blocks, pair)


# As files and users have made them, who name no codec.
OTHERS = {
    "by a user": lambda x: jgrad.Blocks(x.codes, x.scale),
    "by names": lambda x: jgrad.Blocks(scale=x.scale, codes=x.codes),
    "of a sequence": lambda x: jgrad.Blocks._make(tuple(x)),
    "pickled by 0.6": lambda x: pickle.loads(pickled_up_to_0_6(x, 2)),
    "pickled by 0.6, protocol 0": lambda x: pickle.loads(pickled_up_to_0_6(x, 0)),
    "pickled": lambda x: pickle.loads(pickle.dumps(x)),
    "copied": copy.deepcopy,
    "replaced": lambda x: x._replace(codes=x.codes),
}


@pytest.mark.slow(one_in=8)
@pytest.mark.parametrize("made", OTHERS.values(), ids=OTHERS)
def test_a_state_without_a_codec_is_the_state(made):
    """The same structure, the same program, the same next step, and a loop may carry it."""
    state = trained()
    other = rewritten(state, made)
    assert all(type(x) is jgrad.Blocks for x in (other.mw["w"], other.vw["w"]))
    assert jax.tree.structure(other) == jax.tree.structure(state)
    assert (codec_of(other.mw["w"]), codec_of(other.vw["w"])) == (SIGNED, UNSIGNED)
    once = jax.jit(chex.assert_max_traces(tx.update, n=1))
    expected = once(G, state, W)
    assert_equal(once(G, jax.tree.map(jnp.asarray, other), W), expected)
    assert_equal(unquantized(other), unquantized(state))
    assert_equal(quantized(other, like=jax.eval_shape(tx.init, W)), state)
    body = lambda state, _: (tx.update(G, state, W)[1], None)
    found, _ = jax.jit(lambda s: jax.lax.scan(body, s, None, 1))(jax.tree.map(jnp.asarray, other))
    assert_equal(found, expected[1])


def test_what_is_static_in_a_state():
    """The codec, of moments in the order in which one place says so; and through any update."""
    for state in (tx.init(W), trained(), jax.eval_shape(tx.init, W)):
        assert state.mw["w"].form is of_moments(second=False)
        assert state.vw["w"].form is of_moments(second=True)
    assert state.mw["w"].form.codec is SIGNED
    assert "signed 8 bits, blocks of 256" in str(jax.tree.structure(state))
    kept = jax.tree.map(lambda x: None, state)
    assert kept.mw["w"].form is state.mw["w"].form


def test_moments_of_both_kinds_have_one_structure():
    """As always: what is computed of the codes of both, such as bytes."""
    state = trained()
    assert jax.tree.structure(state.mw) == jax.tree.structure(state.vw)
    held = jax.tree.map(lambda m, v: m.nbytes + v.nbytes, state.mw, state.vw)
    assert held["w"].codes == 2 * 64 * 64
    wrong = state._replace(vw=jax.tree.map(lambda m, v: v, state.mw, state.vw))
    assert_error(  # the codes of one, and the codec of the other
        TypeError,
        "carry_over: `old` at .vw['w']: an array of uint8 and shape (64, 64) as `codes`, expected "
        "int8.",
        lambda: unquantized(wrong),
    )


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


OTHER = Codec("another one", 8, True, SIGNED.encode, SIGNED.decode)


@pytest.mark.parametrize("form", [Form(OTHER), Form(SIGNED, axis=-2), Form(SIGNED, size=128)])
def test_what_no_dtype_says_is_told_apart(form):
    """Compiled functions, and files, do not take one for the other."""
    x = trained().mw["w"]
    other = jgrad.Blocks(*x, form)
    assert jax.tree.structure(other) != jax.tree.structure(x)
    names = jax.jit(lambda x: jnp.asarray(x.form == form))
    assert (bool(names(x)), bool(names(other))) == (False, True)
    again = pickle.loads(pickle.dumps(form)) if form.codec is SIGNED else form
    assert again == form != Form(SIGNED)
    assert jax.tree.map(lambda x: x, other).form is form
    assert other._replace(codes=0).form is form


def test_a_state_of_another_codec():
    state = trained()
    other = state._replace(mw=rewritten(state.mw, lambda x: jgrad.Blocks(*x, Form(OTHER))))
    message = "adam: `state.mw` at ['w']: codes of another one, expected signed 8 bits."
    assert_error(TypeError, message, lambda: tx.update(G, other, W))
    message = "carry_over: `old` at .mw['w']: Blocks of int8 and shape (64, 64), expected a floating array, or Blocks of another one."
    assert_error(TypeError, message, lambda: quantized(state, like=other))
    nameless = rewritten(state, lambda x: jgrad.Blocks(x.codes.astype(jnp.int32), x.scale))
    message = "carry_over: `old` at .mw['w']: an array of int32 and shape (64, 64) as `codes`, expected int8 or uint8."
    assert_error(TypeError, message, functools.partial(unquantized, nameless))
