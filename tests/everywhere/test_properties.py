"""What holds for every tree, weight and gradient: hypothesis searches for counter-examples.

`tests/conftest.py` says how many examples: a few by default, more with `--all`.
"""

import chex
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import jgrad
from tests.cases import every_case

pytestmark = pytest.mark.slow

# Each list of shapes compiles, so there are few: one leaf, equal and different ones, and many.
SHAPES = [
    [(3,)],
    [(), (2, 3)],
    [(2, 3), (2, 3), (3,)],
    [(1, 2, 2), (), (3,), (), (2, 3)],
]

numbers = st.floats(0.125, 8, width=32)
signed = st.builds(lambda x, sign: sign * x, numbers, st.sampled_from([-1, 1]))
scales = st.sampled_from([1e-6, 1e-3, 0.3, 7.0, 1e3, 1e6])


def leaf(shape, elements=signed):
    return hnp.arrays(np.float32, shape, elements=elements).map(jnp.asarray)


@st.composite
def models(draw):
    """Lists of weights and of gradients, leaf by leaf of one shape."""
    shapes = draw(st.sampled_from(SHAPES))
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


@every_case(("lars_masked",))
@given(model=renamed())
def test_names_and_order_of_leaves_mean_nothing(case, model):
    w, g, order, depths = model
    case = case.without_masks()

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
@given(model=models(), scale=scales)
def test_trusted_steps_are_proportional_to_the_weights(tx, model, scale):
    """Without decay, and within the clamp."""
    w, g = model
    found = steps(tx, [x * jnp.float32(scale) for x in w], g)
    expected = [x * jnp.float32(scale) for x in steps(tx, w, g)]
    chex.assert_trees_all_close(found, expected, rtol=1e-5)


@given(model=models(), scale=scales)
def test_trusted_steps_do_not_see_the_scale_of_gradients(model, scale):
    """The whole step of LARS without decay is trust_coefficient |w| long, times the rate."""
    w, g = model
    tx = jgrad.lars(0.1, momentum=None)
    for x, u in zip(w, steps(tx, w, [y * jnp.float32(scale) for y in g], count=1), strict=True):
        length = 0.1 * 0.001 * np.linalg.norm(np.ravel(x).astype(np.float64))
        np.testing.assert_allclose(np.linalg.norm(np.ravel(u)), length, rtol=1e-5)


@pytest.mark.slow(one_in=2)
@every_case(("adam_moments", "lamb_ivy"), lambda case: not case.decays)
@given(model=models())
def test_zero_gradients_move_nothing(case, model):
    w, g = model
    zeros = jax.tree.map(jnp.zeros_like, g)
    case = case.without_masks()
    chex.assert_trees_all_equal(steps(case.tx(), w, zeros, count=3), zeros)
