"""What holds for every tree, weight and gradient, searched for by hypothesis."""

import chex
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import jgrad
from tests.cases import CASES

# The first call of a shape compiles, so no deadline; the same examples in every run, so that a
# failure in CI is a failure anywhere.
searched = settings(deadline=None, max_examples=25, derandomize=True)

SHAPES = [(), (3,), (2, 3), (1, 2, 2)]

numbers = st.floats(0.125, 8, width=32)
signed = st.builds(lambda x, sign: sign * x, numbers, st.sampled_from([-1, 1]))
scales = st.sampled_from([1e-6, 1e-3, 0.3, 7.0, 1e3, 1e6])


def leaf(shape, elements=signed):
    return hnp.arrays(np.float32, shape, elements=elements).map(jnp.asarray)


@st.composite
def models(draw):
    """Lists of weights and of gradients, leaf by leaf of one shape."""
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5))
    return [draw(leaf(s)) for s in shapes], [draw(leaf(s)) for s in shapes]


@st.composite
def renamed(draw):
    """A model, and an order and nesting for its leaves."""
    w, g = draw(models())
    order = draw(st.permutations(range(len(w))))
    depths = draw(st.lists(st.integers(0, 2), min_size=len(w), max_size=len(w)))
    return w, g, order, depths


def steps(tx, w, g, count=2):
    """The last of a few updates."""
    state = tx.init(w)
    for _ in range(count):
        updates, state = tx.update(g, state, w)
    return updates


@pytest.mark.parametrize("case", [case.without_masks() for case in CASES], ids=str)
@searched
@given(model=renamed())
def test_names_and_order_of_leaves_mean_nothing(case, model):
    w, g, order, depths = model

    def rename(leaves):
        tree = {}
        for name, (i, depth) in enumerate(zip(order, depths, strict=True)):
            x = leaves[i]
            tree[f"{name}"] = [{"x": x}, (x,), x][depth]
        return tree

    found = steps(case.tx(), rename(w), rename(g))
    expected = rename(steps(case.tx(), w, g))
    chex.assert_trees_all_equal(found, expected)


@pytest.mark.parametrize("bias_correction", ["step_size", "moments", None])
@searched
@given(model=models(), scale=scales)
def test_adam_does_not_see_the_scale_of_gradients(bias_correction, model, scale):
    """Without an epsilon."""
    w, g = model
    tx = jgrad.adam(0.1, epsilon=0.0, bias_correction=bias_correction)
    scaled = [x * jnp.float32(scale) for x in g]
    chex.assert_trees_all_close(steps(tx, w, scaled), steps(tx, w, g), rtol=1e-5)


@pytest.mark.parametrize(
    "tx",
    [
        jgrad.lars(0.1),
        jgrad.lars(0.1, rule="ivy"),
        jgrad.lars(0.1, momentum=None),
        jgrad.lamb(0.1, max_trust_ratio=1e30),
        jgrad.lamb(0.1, max_trust_ratio=1e30, rule="ivy"),
    ],
    ids=["lars", "lars_ivy", "lars_plain", "lamb", "lamb_ivy"],
)
@searched
@given(model=models(), scale=scales)
def test_trusted_steps_are_proportional_to_the_weights(tx, model, scale):
    """Without decay, and within the clamp."""
    w, g = model
    found = steps(tx, [x * jnp.float32(scale) for x in w], g)
    expected = [x * jnp.float32(scale) for x in steps(tx, w, g)]
    chex.assert_trees_all_close(found, expected, rtol=1e-5)


@searched
@given(model=models(), scale=scales)
def test_trusted_steps_do_not_see_the_scale_of_gradients(model, scale):
    """The whole step of LARS without decay is trust_coefficient |w| long, times the rate."""
    w, g = model
    tx = jgrad.lars(0.1, momentum=None)
    for x, u in zip(w, steps(tx, w, [y * jnp.float32(scale) for y in g], count=1), strict=True):
        length = 0.1 * 0.001 * np.linalg.norm(np.ravel(x).astype(np.float64))
        np.testing.assert_allclose(np.linalg.norm(np.ravel(u)), length, rtol=1e-5)


@pytest.mark.parametrize(
    "case", [case.without_masks() for case in CASES if not case.decays], ids=str
)
@searched
@given(model=models())
def test_zero_gradients_move_nothing(case, model):
    w, g = model
    zeros = jax.tree.map(jnp.zeros_like, g)
    chex.assert_trees_all_equal(steps(case.tx(), w, zeros, count=3), zeros)


@searched
@given(w=leaf((3,)), g=leaf((3,)), rate=st.floats(-2, 2, width=32))
def test_descent_is_linear_in_the_rate(w, g, rate):
    """To the rounding of w - rate g, computed in double precision."""
    found = jgrad.gradient_descent_update(w, g, rate)
    expected = np.asarray(w, np.float64) - rate * np.asarray(g, np.float64)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=3e-6)
