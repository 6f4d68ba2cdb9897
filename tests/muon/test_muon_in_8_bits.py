"""Muon with `moment_dtype="8bit"`: momentum of every leaf, second moments of Adam's leaves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from tests.support.choice import mostly_slow
from tests.support.loops import assert_equal, run

SHAPES = {"embed": (64, 100), "up": (64, 256), "down": (256, 64), "bias": (64,)}
MATRICES = {"embed": False, "up": True, "down": True, "bias": False}
ADAM = {"beta1": 0.9, "beta2": 0.95}

muon = functools.partial(
    jgrad.muon, 0.02, matrices=MATRICES, adam_learning_rate=0.01, moment_dtype="8bit"
)


def tree(seed):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=shape), jnp.float32) for k, shape in SHAPES.items()}


GRADIENTS = [tree(seed) for seed in (1, 2, 3)]


def kinds(moments):
    """The dtype of each leaf; None where there is none."""
    return {k: None if x is None else str(x.dtype) for k, x in moments.items()}


def bytes_of(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def test_the_form_of_the_state():
    """In 8 bits where there is a number for each element of a large leaf."""
    state = muon().init(tree(0))
    eight = {"embed": "int8", "up": "int8", "down": "int8", "bias": "float32"}
    assert kinds({k: getattr(x, "codes", x) for k, x in state.mw.items()}) == eight
    second = {"embed": "uint8", "up": None, "down": None, "bias": "float32"}
    assert kinds({k: getattr(x, "codes", x) for k, x in state.vw.items()}) == second
    assert bytes_of(state.vw["embed"]) == 64 * 100 + 4 * 25
    per_output = muon(rule="normuon").init(tree(0)).vw
    assert per_output["up"].shape == (1, 256)
    assert per_output["up"].dtype == jnp.float32


@pytest.mark.slow
def test_numbers_per_output_are_no_codes():
    """NorMuon's stay in float32 where there are 4096 of them, too."""
    layers = {"embed": None, "stack": 0}
    w = {"embed": jnp.ones((64, 100)), "stack": jnp.ones((16, 8, 256))}
    tx = muon(rule="normuon", matrices={"embed": False, "stack": True}, layer_axes=layers)
    seconds = tx.init(w).vw
    assert seconds["stack"].shape == (16, 1, 256)
    assert seconds["stack"].dtype == jnp.float32
    assert isinstance(seconds["embed"], jgrad.Blocks)


def test_a_leaf_alone_has_a_state():
    """A matrix that is the whole tree has no second moments."""
    tx = muon(matrices=True)
    w = jnp.ones((64, 64))
    _, state = tx.update(w, tx.init(w), w)
    assert state.vw is None
    assert state.mw.codes.dtype == jnp.int8


@pytest.mark.slow
@pytest.mark.parametrize("skip", mostly_slow([False, True], False))
def test_leaves_of_adam_are_those_of_adam(skip):
    """Weights, codes and scales of an embedding, bit for bit."""
    wrap = jgrad.skip_nonfinite if skip else lambda tx: tx
    adam = jgrad.adam(0.01, epsilon=1e-8, bias_correction="moments", moment_dtype="8bit", **ADAM)
    grads = [*GRADIENTS, jax.tree.map(lambda x: x * jnp.nan, tree(4))] if skip else GRADIENTS
    ours, state = run(wrap(muon()), tree(0), grads)
    theirs, expected = run(wrap(adam), tree(0), grads)
    if skip:
        state, expected = state.inner, expected.inner
    for name in ("embed", "bias"):
        assert_equal(ours[-1][name], theirs[-1][name])
        assert_equal(state.mw[name], expected.mw[name])
        assert_equal(state.vw[name], expected.vw[name])
