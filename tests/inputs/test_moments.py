"""A method as CONTRIBUTING tells to write one: Lion, in each form of moments; and what goes around."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from jgrad._arithmetic import leafwise, rules
from jgrad._arithmetic.apply import apply, calls
from jgrad._arithmetic.leafwise import on_leaf
from jgrad._inputs.moments import MomentOptions
from jgrad._inputs.transformation import transformation
from tests.support.errors import assert_error
from tests.support.loops import train

RATE, STEPS = 0.01, 4
W = {"w": jnp.linspace(-1.0, 1.0, 8192).reshape(32, 256), "b": jnp.ones(3)}
GRADS = [
    jax.tree.map(lambda x, t=t: jnp.cos(3 * x + t) + 0.1 * jnp.sin(40 * x), W) for t in range(STEPS)
]


@on_leaf(arrays=2)
def average(g, mw, beta):
    return beta * mw + (1 - beta) * g


@on_leaf(arrays=2)
def sign(g, mw, beta):
    return jnp.sign(beta * mw + (1 - beta) * g)


def by_store(inputs, new, old):
    return inputs.store(new, old).written


def lion(moment_dtype=None, write=by_store):
    def compute(inputs, state, rates):
        direction = apply(sign, inputs.g, state.mw, jnp.asarray(0.9))
        mw = write(inputs, calls(average, inputs.g, state.mw, jnp.asarray(0.99)), state.mw)
        return apply(rules.descent, direction, rates), mw, None

    moments = MomentOptions(moment_dtype)
    return transformation("lion", compute, learning_rate=RATE, mw=True, moments=moments)


def expected():
    """Weights, moments, and the largest moment of the run, in float64, from the paper."""
    w = {k: np.asarray(x, np.float64) for k, x in W.items()}
    m = {k: np.zeros_like(x) for k, x in w.items()}
    largest = dict.fromkeys(w, 0.0)
    for grads in GRADS:
        for k, g in grads.items():
            g = np.asarray(g, np.float64)
            w[k] = w[k] - RATE * np.sign(0.9 * m[k] + 0.1 * g)
            m[k] = 0.99 * m[k] + 0.01 * g
            largest[k] = max(largest[k], np.abs(m[k]).max())
    return w, m, largest


@pytest.mark.parametrize("packed", [False, True], ids=["tree", "packed"])
@pytest.mark.parametrize("moment_dtype", [None, jnp.bfloat16, "8bit"])
def test_lion(moment_dtype, packed):
    """The form is that of the recipe, and a skipped step keeps it."""
    put = jgrad.pack if packed else lambda tree: tree
    tx = jgrad.skip_nonfinite(lion(moment_dtype))
    bad = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), W)
    w, state = train(tx, put(W), [put(g) for g in (*GRADS[:2], bad, *GRADS[2:])])
    mw = jgrad.unpack(state.inner.mw)
    assert isinstance(mw["w"], jgrad.Blocks) == (moment_dtype == "8bit")
    if moment_dtype is not None and moment_dtype != "8bit":
        assert {x.dtype for x in jax.tree.leaves(mw)} == {jnp.dtype(moment_dtype)}
    found, numbers = jgrad.unpack(w), jgrad.unquantized(mw)
    weights, moments, largest = expected()
    # One rounding a step, to a neighbour: of 24 bits, 8, or 4 in 8 bits.
    gap = STEPS * {None: 2.0**-20, jnp.bfloat16: 2.0**-7, "8bit": 2.0**-3}[moment_dtype]
    for k, m in moments.items():
        assert np.abs(np.asarray(numbers[k], np.float64) - m).max() <= gap * largest[k]
        # The rounding of a moment near 0 turns the sign of a step.
        assert np.mean(np.abs(found[k] - weights[k]) > 1e-6) < (0.002 if gap < 1e-3 else 0.05)


AROUND = {
    "kept": lambda inputs, new, old: inputs.kept(leafwise.run(new), old),
    "as it is": lambda inputs, new, old: leafwise.run(new),
}


@pytest.mark.parametrize("write", AROUND.values(), ids=AROUND)
def test_an_array_in_the_place_of_codes(write):
    """Cast to int8 it would be numbers of nothing."""
    tx = lion("8bit", write)
    assert_error(
        TypeError,
        "lion: a moment in 8 bits: an array of float32 and shape (32, 256), expected Blocks, as "
        "`inputs.store(calls(rule, ...), old)` makes them.",
        lambda: tx.update(GRADS[0], tx.init(W), W),
    )
