"""States in 8 bits as arrays, and back."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jgrad
from tests.support import draws, messages
from tests.support.eight_bits import quantized, unquantized
from tests.support.states import assert_same_bits

W = draws.normal({"w": (64, 128), "b": (7,)})
G = jax.tree.map(lambda x: x + 1, W)

plain, eight = jgrad.adam(1e-2), jgrad.adam(1e-2, moment_dtype="8bit")


def trained(tx, w=W, g=G):
    return tx.update(g, tx.init(w), w)[1]


def apart(w):
    return jgrad.pack(w, small_apart=True)


@pytest.mark.slow(always=["apart to tree", "packed to apart"])
@pytest.mark.parametrize(("of_old", "of_new", "change"),
    [(lambda w: w, jgrad.pack, "float32 to 8 bits"), (jgrad.pack, lambda w: w, "8 bits to float32"),
    (jgrad.pack, apart, "8 bits to float32"), (apart, lambda w: w, None)],
    ids=["tree to packed", "packed to tree", "packed to apart", "apart to tree"])  # fmt: skip
def test_the_account_of_small_leaves(of_old, of_new, change):
    """Small leaves are in 8 bits where their buffer is, and accounts say when that changes."""
    old = trained(eight, of_old(W), of_old(G))
    like = jax.eval_shape(eight.init, of_new(W))
    new, account = jgrad.carry_over(old, like=like, strict=True)
    assert account.converted == (() if change is None else ("mw/b", "vw/b"))
    assert str(account).count(f": {change}") == len(account.converted)
    found, expected = jgrad.unpack((new.mw, old.mw))
    assert_same_bits(
        (found["w"].codes, found["w"].scale), (expected["w"].codes, expected["w"].scale)
    )
    error = np.abs(found["b"] - expected["b"]).max()
    assert (error > 0) == (change == "float32 to 8 bits")
    assert jax.tree.structure(eight.update(of_new(G), new, of_new(W))[1]) == jax.tree.structure(new)


@pytest.mark.slow
def test_rounding_is_to_the_nearest():
    state = trained(plain)
    found = unquantized(quantized(state, like=eight.init(W)))
    smallest = state.vw["w"].max() * 2.0**-30  # a number below it is not rounded to 0
    np.testing.assert_allclose(found.vw["w"], state.vw["w"], rtol=2**-4, atol=smallest)
    error = np.abs(found.mw["w"] - state.mw["w"])
    assert (error <= np.maximum(np.abs(state.mw["w"]) * 2**-4, 2**-14 * 0.5)).all()
    assert error.max() > 0


def test_what_is_there_stays():
    state = trained(eight)
    assert quantized(state, like=state).mw["w"].codes is state.mw["w"].codes
    assert unquantized(state).mw["b"] is state.mw["b"]


@pytest.mark.slow
def test_e45_a_checkpoint_of_8_bits(tmp_path):
    """Training goes on with the same bits."""
    state = trained(eight)
    with ocp.StandardCheckpointer() as files:
        files.save(tmp_path / "state", state)
        files.wait_until_finished()
        restored = files.restore(tmp_path / "state", jax.eval_shape(eight.init, W))
    assert_same_bits(eight.update(G, restored, W), eight.update(G, state, W))


STATE = eight.init(W)


def with_w(**fields):
    return STATE._replace(vw=STATE.vw | {"w": STATE.vw["w"]._replace(**fields)})


test_e45_errors = messages.test_of("forms", globals())
