"""The hand-over between wrappers: one of twenty lines, and those of other libraries between ours."""

import inspect
import pathlib
from typing import Any, NamedTuple

import chex
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.leafwise import apply
from jgrad._inputs import numbers
from jgrad._inputs.around import Commit
from jgrad._inputs.pair import pair
from jgrad._trees import trees
from jgrad._trees.told import telling
from jgrad._wrappers import inside, parameters
from jgrad._wrappers.hand_over import WrapperInputs
from tests.cases import gradients, params
from tests.support.loops import assert_equal, compiled, every_step, train

X = jnp.ones(3)
NAN = float("nan")


# ---- a wrapper of ours, as CONTRIBUTING.md says how to write it --------------------------------


class SlowState(NamedTuple):
    slow: Any
    inner: Any


def slowly(tx, beta):
    """Lookahead that looks at each step: w' = slow' = beta slow + (1 - beta) (w + tx(g, w))."""
    tx = inside.transformation("slowly", tx)

    def init(params):
        return SlowState(trees.map_leaves(numerics.wide, params), tx.init(params))

    def update(updates, state, params=None, **extra_args):
        inputs = WrapperInputs("slowly", updates, params, extra_args)
        inputs.require_params("the slow weights")
        steps, inner = inputs.hand_over(tx, updates, state.inner, params)
        old = inputs.moment("state.slow", state.slow)
        fast = trees.flatten(parameters.applied(params, steps))[0]
        some = inputs.updated()
        fast, slow = leafwise.at((fast, old), some.rows)
        part = numbers.beta("slowly", "beta", beta)
        new = inputs.kept(apply(rules.average, fast, slow, part.value, part.complement), slow)
        moved = apply(lambda s, p: s - numerics.wide(p), new, some.w)
        return some.directions(moved), SlowState(some.moments(new, old), inner)

    return pair(init, update, "slowly", SlowState)


def test_contributing_has_this_wrapper():
    text = (pathlib.Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    example = (
        text.partition("## To add a wrapper")[2].partition("```python\n")[2].partition("```")[0]
    )
    assert example == inspect.getsource(SlowState) + "\n\n" + inspect.getsource(slowly)


def by_hand(tx, beta, w, grads):
    """The same with optax's tools, on a tree of float32."""
    slow, state = w, tx.init(w)
    for g in grads:
        updates, state = tx.update(g, state, slow)
        slow = jax.tree.map(lambda s, u: s + (1 - beta) * u, slow, updates)
    return slow


def close(found, expected, tolerance=1e-6):
    chex.assert_trees_all_close(found, expected, rtol=tolerance, atol=tolerance)


def test_it_is_what_it_says():
    tx, w, grads = jgrad.adam(0.1), params(), gradients(4)
    close(train(slowly(tx, 0.25), w, grads)[0], by_hand(tx, 0.25, w, grads))


@pytest.mark.slow(always=["1", "2"])
@pytest.mark.parametrize("weighted", [None, 1, 2])
def test_what_it_makes_needs_no_look(weighted):
    """It speaks no word of `Commit`, and all that it makes is settled; so is what `accumulate` makes."""
    tx, w = slowly(jgrad.adam(0.1), 0.25), params()
    options = {}
    if weighted:
        tx, options = jgrad.accumulate(jgrad.adam(0.1), weighted, weighted=True), {"weight": 3.0}
    (g,), state = gradients(1), tx.init(w)
    commit = Commit(jnp.asarray(True), clips=True)
    said = {"commit": commit}
    if weighted:
        said = {"windows": commit, "finite": commit.flag}
    with telling(**said):
        steps, new = tx.update(g, state, w, **options)
    assert all(map(commit.has_settled, jax.tree.leaves(steps)))
    for n, o in zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True):
        assert commit.has_settled(n, o) or not jnp.issubdtype(n.dtype, jnp.inexact)


def test_what_is_inside_makes_nan_of_finite_gradients():
    """Then it is looked at, if this is asked for, without a word of the wrapper."""
    spoil = optax.stateless(lambda updates, params: jax.tree.map(jnp.log, updates))
    tx = jgrad.skip_nonfinite(slowly(spoil, 0.25), check_results=True)
    found, state = train(tx, X, [-X])
    assert_equal((found, state.inner), (X, tx.init(X).inner))
    assert int(state.skipped) == 1


@pytest.mark.slow
def test_under_everything():
    """Inside of three, around one: as if the bad mini-batch had not been there."""
    tx = slowly(jgrad.master_weights(jgrad.adam(0.1)), 0.5)
    whole = jgrad.skip_nonfinite(jgrad.accumulate(tx, 2), loss_scale=4.0)
    w, (a, b, c) = params(jnp.bfloat16), gradients(3, jnp.bfloat16)
    bad = jax.tree.map(lambda x: x * NAN, a)
    scaled = lambda g, s: jax.tree.map(lambda x: x * jnp.asarray(s, x.dtype), g)
    given = [scaled(a, 4), bad, scaled(b, 2), scaled(c, 2)]  # the scale halves
    found, state = train(whole, w, given)
    wide = lambda tree: jax.tree.map(numerics.wide, tree)
    mean = jax.tree.map(lambda x, y: (x + y) / 2, wide(b), wide(c))
    expected, alone = train(tx, w, [wide(a), mean])
    chex.assert_trees_all_equal_shapes_and_dtypes(state.inner.inner, alone)
    close(
        (wide(found), state.inner.inner),
        (wide(expected), alone),
        float(jnp.finfo(jnp.bfloat16).eps),
    )
    close(state.inner.inner.inner.master, alone.inner.master)
    assert (int(state.skipped), float(state.loss_scale)) == (1, 2)


# ---- transformations of other libraries between ours -------------------------------------------


class Counted(NamedTuple):
    calls: Any
    inside: Any


def counting(tx):
    """Counts its calls, changes nothing, and hands extra arguments on."""
    tx = optax.with_extra_args_support(tx)

    def update(g, state, w=None, **extra_args):
        steps, new = tx.update(g, state.inside, w, **extra_args)
        return steps, Counted(state.calls + 1, new)

    init = lambda w: Counted(jnp.zeros((), jnp.int32), tx.init(w))
    return optax.GradientTransformationExtraArgs(init, update)


def deaf(tx):
    """The same, and knows of no extra arguments."""
    around = counting(tx)
    return optax.GradientTransformation(around.init, lambda g, s, w=None: around.update(g, s, w))


def scaling(tx):
    """Makes other gradients, and other updates."""
    return optax.chain(optax.scale(0.5), optax.masked(tx, True), optax.scale(2.0))


def remembering(tx):
    """Keeps the last updates in its state."""
    keep = optax.GradientTransformation(lambda w: w, lambda g, state, w=None: (g, g))
    return optax.chain(tx, keep)


def storing_bytes(tx):
    """Its state is one vector, in which nobody finds the state inside."""

    def flat(state):
        return jax.flatten_util.ravel_pytree(state)[0]

    def update(g, state, w=None, **extra_args):
        _, back = jax.flatten_util.ravel_pytree(tx.init(w))
        steps, new = tx.update(g, back(state), w, **extra_args)
        return steps, flat(new)

    return optax.GradientTransformationExtraArgs(lambda w: flat(tx.init(w)), update)


OTHERS = [counting, deaf, scaling, remembering, optax.chain]
between = pytest.mark.parametrize("third_party", OTHERS, ids=lambda f: f.__name__)


@pytest.mark.slow(always=["copies-remembering"])
@between
@pytest.mark.parametrize(
    "wrap", [jgrad.master_weights, jgrad.stochastic_rounding], ids=["copies", "rounding"]
)
def test_means_arrive_unrounded(third_party, wrap):
    """Three gradients of 1 and one of 0.01: in bfloat16, the mean is off by a part in 500."""
    grads = [jnp.full(3, x, jnp.bfloat16) for x in (1, 1, 1, 0.01)]
    mean = np.mean([np.asarray(g, float) for g in grads], axis=0)
    inner = optax.trace(0.9)  # keeps what it sees
    tx = jgrad.accumulate(third_party(wrap(inner)), 4)
    _, state = train(tx, jnp.zeros(3, jnp.bfloat16), grads)
    scale = 0.5 if third_party is scaling else 1
    np.testing.assert_allclose(optax.tree.get(state, "trace"), scale * mean, rtol=1e-6)


def test_a_state_in_which_nobody_finds_the_window():
    """The bad call is as if it had not been: its window closes a call later, with the right mean."""
    tx = jgrad.skip_nonfinite(storing_bytes(jgrad.accumulate(jgrad.gradient_descent(1.0), 2)))
    with jax.numpy_dtype_promotion("standard"):
        found = every_step(tx, 0 * X, [X, NAN * X, 3 * X, X])
    assert [float(w[0]) for w, _ in found] == [0, 0, -2, -2]
    assert int(found[-1][1].skipped) == 1


@pytest.mark.slow(always=["adam-deaf"])
@pytest.mark.parametrize("third_party", [counting, deaf], ids=lambda f: f.__name__)
@pytest.mark.parametrize("before", [optax.trace(0.9), jgrad.scale_by_adam()], ids=["trace", "adam"])
def test_a_mini_batch_that_spoils_the_state_of_another(before, third_party):
    """It is left out of that state as well, and the window stays, also where it would close."""
    window = third_party(jgrad.accumulate(optax.scale(-1.0), 2))
    tx = jgrad.skip_nonfinite(optax.chain(before, window))
    found = every_step(tx, 0 * X, [X, NAN * X, X, X, X])
    expected = every_step(tx, 0 * X, [X, X, X, X])
    for i, j in (0, 0), (1, 0), (2, 1), (3, 2), (4, 3):
        assert_equal(found[i][0], expected[j][0])
    assert int(found[-1][1].skipped) == 1


def test_a_window_whose_update_overflows_elsewhere():
    """It is dropped where something else is in the state, too: kept, the next ones overflowed too."""
    window = counting(jgrad.accumulate(optax.scale(1e30), 2))
    tx = jgrad.skip_nonfinite(window, check_results=True)
    found = every_step(tx, 0 * X, [X * 1e20, X, X * 1e-30, X * 1e-30])
    assert [float(w[0]) for w, _ in found] == [0, 0, 0, 1]
    assert int(found[-1][1].skipped) == 1


def test_a_window_whose_update_overflows_saturates():
    """Where nobody looks at it, which is where gradients alone decide."""
    tx = jgrad.skip_nonfinite(counting(jgrad.accumulate(optax.scale(1e30), 2)))
    (w, state) = every_step(tx, 0 * X, [X * 1e20, X])[-1]
    np.testing.assert_array_equal(w, jnp.full(3, 2.0**102))
    assert int(state.skipped) == 0


def test_what_follows_a_window_sees_its_updates():
    """An average beside `accumulate` averages the step of a window that a bad mini-batch closes."""
    descent = jgrad.gradient_descent(1.0)
    average = jgrad.average_params(optax.identity(), 0.5)
    tx = jgrad.skip_nonfinite(optax.chain(jgrad.accumulate(descent, 2), average))
    (_, state), *_ = reversed(every_step(tx, 0 * X, [X, NAN * X]))
    np.testing.assert_array_equal(optax.tree.get(state, "average"), -0.5 * X)


def test_updates_that_another_keeps_in_its_state():
    """They are settled as updates; as a state, the last ones stay where a step is skipped."""
    tx = jgrad.skip_nonfinite(remembering(jgrad.gradient_descent(1.0)))
    _, state = train(tx, 0 * X, [X, NAN * X])
    np.testing.assert_array_equal(state.inner[1], -X)


def test_states_that_another_swaps():
    """Of two states inside, each is updated in turn: a skipped step swaps nothing."""
    tx = jgrad.average_params(optax.identity(), 0.5)

    def update(g, state, w=None, **extra_args):
        a, b = state
        g, new = tx.update(g, b, w, **extra_args)
        _, other = tx.update(g, a, w, **extra_args)
        return g, (new, other)

    both = optax.GradientTransformationExtraArgs(lambda w: (tx.init(w), tx.init(2 * w)), update)
    safe = jgrad.skip_nonfinite(optax.chain(jgrad.gradient_descent(1.0), both))
    state = safe.init(X)
    _, new = compiled(safe)(X, state, NAN * X)
    assert_equal(new.inner, state.inner)
