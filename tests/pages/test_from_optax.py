"""The rows of docs/from_optax.md: optax's line and ours train to the same numbers."""

import functools
import inspect
import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.support.loops import run

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "from_optax.md").read_text()
TABLE = re.findall(r"^\| `(optax\..+?)` \| `(jgrad\..+?)`", TEXT, re.MULTILINE)
ROWS = {theirs: (theirs, ours) for theirs, ours in TABLE if not theirs.startswith("optax.tree.")}
NAMES = {
    "optax": optax,
    "jgrad": jgrad,
    "jnp": jnp,
    "mask": lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
}
RTOL, ATOL = 1e-6, 2e-8  # two rows keep numbers in float32, and agree to 5e-8 and 3e-9


def trees(count):
    """Leaves of which each shows an option: an epsilon, a mask, a clamp of the trust ratio."""
    rng = np.random.default_rng(0)
    shapes = {
        "kernel": (4, 3),
        "bias": (3,),
        "small": (2, 2),
        "low": (3,),
        "large": {"scale": (5,)},
    }
    make = lambda shape: jnp.asarray(rng.normal(size=shape))
    is_shape = lambda x: isinstance(x, tuple)
    return [jax.tree.map(make, shapes, is_leaf=is_shape) for _ in range(count)]


def updates_of(expression, lr):
    """The first updates, by a line of the table."""
    tx = eval(expression, NAMES | {"lr": lr})
    w, *grads = trees(5)
    w["large"]["scale"] *= 100.0  # where LAMB's ratio is above 10
    state, found = tx.init(w), []
    update = jax.jit(tx.update)
    for g in grads:
        for name in ("small", "low"):  # where epsilon matters, of a matrix and of Adam
            g[name] *= 1e-6
        updates, state = update(g, state, w)
        w = optax.apply_updates(w, updates)
        found.append(updates)
    return found


def assert_same(ours, theirs, lr):
    """In double precision: in single precision optax's bias correction is wrong by up to 6e-5."""
    chex.assert_trees_all_close(updates_of(ours, lr), updates_of(theirs, lr), rtol=RTOL, atol=ATOL)


def test_the_table():
    assert len(TABLE) >= 18


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_same_numbers(name, x64, standard_promotion):
    theirs, ours = ROWS[name]
    for lr in (0.05, optax.linear_schedule(0.05, 0.0, 20)):
        assert_same(ours, theirs, lr)


@pytest.mark.slow(always=["optax.adamw(lr, mask=mask)"])
@pytest.mark.parametrize("name", ROWS)
def test_each_option_is_needed(name, x64, standard_promotion):
    """Without an option of our column the numbers are others; but moments are float32 anyway."""
    theirs, ours = ROWS[name]
    for option in re.findall(r", (\w+=(?:\"\w+\"|[\w.-]+))", ours):
        if option == "moment_dtype=jnp.float32":
            continue
        with pytest.raises((AssertionError, TypeError, ValueError)):
            assert_same(ours.replace(f", {option}", ""), theirs, 0.05)


def test_norm(x64, standard_promotion):
    (grads,) = trees(1)
    np.testing.assert_allclose(jgrad.global_norm(grads), optax.tree.norm(grads), rtol=1e-13)


# ---- wrappers ----------------------------------------------------------------------------------

# optax's wrappers, their states, and what else is read of one.
WRAPPERS = {
    "MultiSteps": (optax.MultiSteps, optax.MultiStepsState, {"has_updated"}),
    "apply_if_finite": (optax.apply_if_finite, optax.ApplyIfFiniteState, set()),
}
OF_WRAPPERS = (ROOT / "benchmarks" / "notes" / "wrappers_of_optax.md").read_text()
EQUALS = re.findall(r"^\| `(\w+)`: (.+?) \| (.+) \|$", OF_WRAPPERS, re.MULTILINE)


@pytest.mark.parametrize("name", WRAPPERS)
def test_each_option_and_field_of_a_wrapper_has_an_answer(name):
    """Once each: an equal, or that there is none."""
    wrapper, state, more = WRAPPERS[name]
    found = [x for row in EQUALS if row[0] == name for x in re.findall(r"`(\w+)[`(]", row[1])]
    assert len(set(found)) == len(found)
    own = {*inspect.signature(wrapper).parameters, *state._fields, *more}
    # Option of newer releases than the oldest that is supported.
    assert own <= {*found} <= own | {"accumulator_dtype"}


def test_what_stands_for_them_is_there():
    """Options are of the wrapper that is named first, fields of its state."""
    w = {"w": jnp.ones(3)}
    states = {
        "MultiSteps": jgrad.accumulate(jgrad.adam(0.1), 2).init(w),
        "apply_if_finite": jgrad.skip_nonfinite(jgrad.adam(0.1)).init(w),
    }
    assert {name for name, _, _ in EQUALS} == states.keys()
    for name, _, ours in EQUALS:
        for field in re.findall(r"`state\.(\w+)`", ours):
            assert hasattr(states[name], field)
        for function, options in re.findall(r"`(\w+)\(([\w, =]+)\)`", ours):
            known = inspect.signature(getattr(jgrad, function)).parameters
            assert set(re.findall(r"\w+", options)) <= known.keys()


def test_steps_that_are_left_out_by_the_caller(standard_promotion):
    """`finite=` in the place of `should_skip_update_fn`, where a step left out is no mini-step."""
    bound = 4.0
    skip = functools.partial(optax.skip_large_updates, max_squared_norm=bound)
    theirs = optax.MultiSteps(optax.sgd(0.1), 2, should_skip_update_fn=skip)
    ours = jgrad.accumulate(jgrad.gradient_descent(0.1), 2)
    w = {"w": jnp.ones(2)}
    small, large = ({"w": jnp.full(2, x)} for x in (1.0, 9.0))
    expected, found = theirs.init(w), ours.init(w)
    for g, emit in ((small, False), (large, False), (small, True)):
        their_updates, expected = theirs.update(g, expected, w)
        fits = jgrad.global_norm(g) ** 2 < bound
        updates, found = ours.update(g, found, w, finite=fits, emit=emit)
    chex.assert_trees_all_close(updates, their_updates, rtol=1e-6)
    assert (int(found.skipped), int(found.gradient_step)) == (1, 1)


@pytest.mark.slow
def test_lookahead_around_ours(x64, standard_promotion):
    w, *grads = trees(6)
    w = optax.LookaheadParams.init_synced(w)
    found = [
        run(optax.lookahead(make(0.1), 2, 0.5), w, grads)[0] for make in (jgrad.adam, optax.adam)
    ]
    chex.assert_trees_all_close(*found, rtol=RTOL, atol=ATOL)
