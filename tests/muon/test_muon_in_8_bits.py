"""Muon with `moment_dtype="8bit"`: momentum of every leaf, second moments of Adam's leaves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.support.choice import mostly_slow
from tests.support.eight_bits import quantized
from tests.support.errors import assert_error
from tests.support.loops import assert_equal, every_step, run

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
PACKINGS = {
    "plain": {},
    "matrices": {"matrices": MATRICES, "multiple_of": 2},
}


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


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("form", ["tree", "packed"])
def test_numbers_per_output_are_no_codes(form):
    """NorMuon's stay in float32 where there are 4096 of them, too, and all else in their buffer."""
    layers = {"embed": None, "stack": 0}
    w = {"embed": jnp.ones((64, 100)), "stack": jnp.ones((16, 8, 256))}
    w = jgrad.pack(w, layer_axes=layers) if form == "packed" else w
    tx = muon(rule="normuon", matrices={"embed": False, "stack": True}, layer_axes=layers)
    seconds = jgrad.unpack(tx.init(w)).vw
    assert seconds["stack"].shape == (16, 1, 256)
    assert seconds["stack"].dtype == jnp.float32
    assert isinstance(seconds["embed"], jgrad.Blocks) == (form == "tree")


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


@pytest.mark.slow
@pytest.mark.parametrize("packing", mostly_slow(PACKINGS, "matrices"))
def test_packed(packing):
    """The codes of the tree; small leaves are in 8 bits as their buffer is, so they differ."""
    packed = functools.partial(jgrad.pack, **PACKINGS[packing])
    found = every_step(muon(), packed(tree(0)), [packed(g) for g in GRADIENTS])
    expected = every_step(muon(), tree(0), GRADIENTS)
    assert {str(x.dtype) for x in jax.tree.leaves(found[0][1].vw)} == {"uint8", "float32"}
    for (w, state), (w_tree, of_tree) in zip(found, expected, strict=True):
        w, state = jgrad.unpack(w), jgrad.unpack(state)
        for name in ("embed", "up", "down"):
            # The products of a stack of one are summed in another order than those of several.
            np.testing.assert_allclose(w[name], w_tree[name], rtol=0, atol=1e-5)
        assert_equal(w["embed"], w_tree["embed"])
        assert_equal(state.vw["embed"], of_tree.vw["embed"])
        assert_equal(state.mw, of_tree.mw | {"bias": state.mw["bias"]})


@pytest.mark.slow
def test_a_state_of_another_recipe():
    """It is converted by `quantized`, and else an error."""
    w = tree(0)
    plain = muon(moment_dtype=None)
    _, state = plain.update(GRADIENTS[0], plain.init(w), w)
    mixed = muon().init(w)._replace(vw=state.vw)
    assert_error(
        TypeError,
        "muon: `state.vw` at ['embed']: an array of float32 and shape (64, 100), expected Blocks, 8 bits; "
        "make it by `carry_over(state, like=jax.eval_shape(tx.init, params))`.",
        lambda: muon().update(w, mixed, w),
    )
    like = jax.eval_shape(muon().init, w)
    updates, _ = muon().update(GRADIENTS[1], quantized(state, like=like), w)
    expected, _ = plain.update(GRADIENTS[1], state, w)
    # A code is within 6.25% of its number: of a quotient m / sqrt(v) that is at most 10%.
    np.testing.assert_allclose(updates["embed"], expected["embed"], rtol=0.1, atol=1e-3)


@pytest.mark.slow
def test_full_state_of_a_small_model():
    """Training keeps structure and dtypes, under one compilation."""
    tx = optax.chain(jgrad.clip_by_global_norm(1.0), muon(weight_decay=0.1))
    w, state = tree(0), None
    state = tx.init(w)
    traces = []

    @jax.jit
    def step(w, state, g):
        traces.append(1)
        updates, state = tx.update(g, state, w)
        return optax.apply_updates(w, updates), state

    for g in GRADIENTS:
        w, state = step(w, state, g)
    assert len(traces) == 1
