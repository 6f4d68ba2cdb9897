"""Matrices of Muon beside packed leaves: a buffer of their own each, and refused in one with others."""

import chex
import jax
import pytest

import jgrad
from tests.support import draws, messages
from tests.support.loops import assert_equal, train
from tests.support.packed_model import assert_close

SHAPES = {
    "a": {"w": (8, 40), "b": (8,)},
    "stack": {"w": (3, 8, 20), "b": (3, 20)},
    "embed": (12, 5),
}
MATRICES = {"a": {"w": True, "b": False}, "stack": {"w": True, "b": False}, "embed": False}
LAYERS = {"a": None, "stack": 0, "embed": None}


def muon(**options):
    own = {"matrices": MATRICES, "layer_axes": LAYERS, "adam_learning_rate": 0.01}
    return jgrad.muon(0.1, weight_decay=0.1, **own | options)


W, *GRADS = (draws.normal(SHAPES, seed) for seed in range(3))


@pytest.mark.slow(always=["layers-normuon"])
@pytest.mark.parametrize("rule", ["muon", "normuon"])
@pytest.mark.parametrize("how", ["plain", "layers", "pack_small"])
def test_numbers_of_the_tree(how, rule):
    """The unpacked state is that of the tree, and packs again."""
    tx = muon(rule=rule)
    expected, state = train(tx, W, GRADS)
    if how == "pack_small":
        found, packed_state = train(jgrad.pack_small(tx, max_size=200), W, GRADS)
    else:
        pack = lambda x: jgrad.pack(x, max_size=200, layer_axes=LAYERS if how == "layers" else None)
        found, packed_state = train(tx, pack(W), list(map(pack, GRADS)))
    assert_close(jgrad.unpack(found), expected, 1e-5)
    unpacked = jgrad.unpack(packed_state)
    chex.assert_trees_all_equal_shapes_and_dtypes(unpacked, state)
    assert_close(unpacked.vw, state.vw, 1e-4)
    assert_equal(jgrad.pack(unpacked, like=packed_state), packed_state)
    again, _ = jgrad.carry_over(state, like=jax.eval_shape(lambda: packed_state), strict=True)
    assert_equal(jgrad.unpack(again), state)


test_messages = messages.test_of("packed_matrices", globals())
