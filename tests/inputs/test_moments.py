"""The method of CONTRIBUTING's recipe: Lion, in each form of moments; and what goes around the door."""

import pathlib
import re
import textwrap

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from jgrad._arithmetic.leafwise import apply
from jgrad._inputs.transformation import MomentOptions, transformation
from jgrad._optimizers import adam
from tests.support import messages
from tests.support.eight_bits import unquantized
from tests.support.loops import train

RATE, STEPS = 0.01, 4
W = {"w": jnp.linspace(-1.0, 1.0, 8192).reshape(32, 256), "b": jnp.ones(3)}
GRADS = [
    jax.tree.map(lambda x, t=t: jnp.cos(3 * x + t) + 0.1 * jnp.sin(40 * x), W) for t in range(STEPS)
]


PAGE = (pathlib.Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
RECIPE = textwrap.dedent(re.search(r"   ```python\n(.*?)   ```\n", PAGE, re.DOTALL)[1])
WRITE = "mw.write(rules.average, "


def lion(moment_dtype=None, write=WRITE):
    """The pair of CONTRIBUTING.md, or what becomes of it where moments are written otherwise.

    It has the imports of `adam.py`.
    """
    names = {**vars(adam), "apply": apply}
    assert RECIPE.count(WRITE) == 1
    exec(compile(RECIPE.replace(WRITE, write), "CONTRIBUTING.md", "exec"), names)
    return names["lion"](RATE, moment_dtype=moment_dtype)


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


@pytest.mark.slow(one_in=6)
@pytest.mark.parametrize("packed", [False, True], ids=["tree", "packed"])
@pytest.mark.parametrize("moment_dtype", [None, jnp.bfloat16, "8bit"])
def test_lion(moment_dtype, packed):
    """The form is that of the recipe, and a skipped step keeps it; and `jgrad.lion` is the recipe."""
    put = jgrad.pack if packed else lambda tree: tree
    tx = jgrad.skip_nonfinite(lion(moment_dtype))
    bad = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), W)
    given = [*GRADS[:2], bad, *GRADS[2:]]
    w, state = train(tx, put(W), [put(g) for g in given])
    mw = jgrad.unpack(state.inner.mw)
    assert isinstance(mw["w"], jgrad.Blocks) == (moment_dtype == "8bit")
    if moment_dtype is not None and moment_dtype != "8bit":
        assert {x.dtype for x in jax.tree.leaves(mw)} == {jnp.dtype(moment_dtype)}
    ours = jgrad.skip_nonfinite(jgrad.lion(RATE, moment_dtype=moment_dtype))
    chex.assert_trees_all_equal(train(ours, put(W), [put(g) for g in given]), (w, state))
    found, numbers = jgrad.unpack(w), unquantized(mw)
    weights, moments, largest = expected()
    # One rounding a step, to a neighbour: of 24 bits, 8, or 4 in 8 bits.
    gap = STEPS * {None: 2.0**-20, jnp.bfloat16: 2.0**-7, "8bit": 2.0**-3}[moment_dtype]
    for k, m in moments.items():
        assert np.abs(np.asarray(numbers[k], np.float64) - m).max() <= gap * largest[k]
        # The rounding of a moment near 0 turns the sign of a step.
        assert np.mean(np.abs(found[k] - weights[k]) > 1e-6) < (0.002 if gap < 1e-3 else 0.05)


@pytest.mark.parametrize("moment_dtype", [None, jnp.bfloat16, "8bit"])
def test_moments_that_go_around_the_door(moment_dtype):
    """A moment that a method computes and does not write would be lost."""
    tx = lion(moment_dtype, "rules.average(")
    with pytest.raises(TypeError, match="jgrad: a function of one leaf wrote no new moment"):
        tx.update(GRADS[0], tx.init(W), W)


def updated(compute, *moments, moment_dtype=None):
    """A step of a method that has these moments."""
    tx = transformation("none", compute, has=moments, moments=MomentOptions(moment_dtype))
    return tx.update(GRADS[0], tx.init(W), W)


test_moments_that_nobody_wrote = messages.test_of("moments", globals())


def test_integer_leaves_without_parameters():
    """They have no moment, and stay; a step of Adam's is as long as the rate."""
    w = {"w": jnp.ones(3), "seen": jnp.arange(2)}
    tx = jgrad.adam(0.1)
    for seen in (None, jnp.ones(2, jnp.int32)):
        updates, _ = tx.update({"w": jnp.ones(3), "seen": seen}, tx.init(w))
        np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-6)
        assert seen is None or not updates["seen"].any()
