"""Packed states with buffers that are None, from states of trees and back."""

import jax
import jax.numpy as jnp
import pytest

import jgrad
from tests.support.states import assert_same_bits, filled

W = {"w": jnp.ones((16, 8)), "b": jnp.ones(3), "scale": jnp.ones(4)}
MIXED = {**W, "w": W["w"].astype(jnp.bfloat16)}
WITH_COUNTER = {**W, "seen": jnp.asarray([1, 2])}
ADAM, MASTER = jgrad.adam(0.1), jgrad.master_weights(jgrad.adam(0.1))
IS_MATRIX = {"w": True, "b": False, "scale": False}
MUON = jgrad.muon(0.1, matrices=IS_MATRIX, adam_learning_rate=0.1)

# The parameters, the recipe of the old state, that of the new one on a tree, and how it is packed.
CASES = {
    "an integer leaf": (WITH_COUNTER, ADAM, ADAM, "pack_small"),
    "a large matrix of muon": (W, MUON, MUON, "large"),
    "a large matrix, from adam": (W, ADAM, MUON, "large"),
    "copies beside a float32 scale, inside": (MIXED, MASTER, MASTER, "pack_small"),
    "copies beside a float32 scale": (MIXED, MASTER, MASTER, "packed"),
    "new copies beside a float32 scale": (MIXED, ADAM, MASTER, "packed"),
    "no copies at all": (W, MASTER, MASTER, "packed"),
    "no copies, from adam": (W, ADAM, MASTER, "pack_small"),
}


def likes(tx, w, how):
    """The shapes of the state, packed in one of three ways."""
    if how == "packed":
        return jax.eval_shape(lambda: tx.init(jgrad.pack(w)))
    packed = jgrad.pack_small(tx, max_size=8 if how == "large" else 2048)
    return jax.eval_shape(lambda: packed.init(w))


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name):
    """The numbers are those of the way on trees; nothing is lost where nothing is on trees."""
    w, first, second, how = CASES[name]
    old = filled(jax.eval_shape(lambda: first.init(w)), 0)
    tree = jax.eval_shape(lambda: second.init(w))
    expected, account = jgrad.carry_over(old, like=tree, params=w, momentum="keep")
    is_whole = first is second
    found, packed_account = jgrad.carry_over(
        old, like=likes(second, w, how), params=w, strict=is_whole, momentum="keep"
    )
    assert_same_bits(jgrad.unpack(found), expected)
    assert packed_account == account
    back, _ = jgrad.carry_over(found, like=tree, strict=True)
    assert_same_bits(back, expected)
    again, _ = jgrad.carry_over(found, like=found, strict=True)
    assert_same_bits(again, found)
