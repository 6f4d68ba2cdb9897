"""Numbers of one call: `update(..., learning_rate=, weight_decay=, beta1=, ...)`."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.cases import gradients, params
from tests.support import messages
from tests.support.loops import assert_equal, train

NEW = {
    "learning_rate": 0.02,
    "weight_decay": 0.3,
    "beta1": 0.7,
    "beta2": 0.8,
    "epsilon": 0.1,
    "momentum": 0.4,
}
MUON = {
    "matrices": lambda w: jax.tree.map(lambda x: len(x.shape) > 1, w),
    "adam_learning_rate": 0.1,
}
ROWS = [
    (jgrad.gradient_descent, {"momentum": 0.9}, ("learning_rate", "weight_decay", "momentum")),
    (jgrad.adam, {}, ("learning_rate", "weight_decay", "beta1", "beta2", "epsilon")),
    (jgrad.lars, {}, ("learning_rate", "weight_decay", "epsilon", "momentum")),
    (jgrad.lamb, {}, ("learning_rate", "weight_decay", "beta1", "beta2", "epsilon")),
    (jgrad.muon, MUON, ("learning_rate", "weight_decay", "momentum", "adam_learning_rate",
                        "adam_beta1", "adam_beta2", "adam_epsilon", "adam_weight_decay")),
]  # fmt: skip
FORMS = ("tree", "packed", "wrapped")
QUICK = {("adam", "beta1", "packed"), ("lamb", "beta2", "wrapped")}


def cells():
    """Each number of each method on a tree; few in other forms, unless asked for."""
    for make, options, names in ROWS:
        for i, name in enumerate(names):
            for form in FORMS:
                if form == "packed" and make is jgrad.muon:
                    continue  # it has matrices
                key = make.__name__, name, form
                is_quick = key in QUICK or (form == "tree" and i % 2 == 0)
                marks = () if is_quick else pytest.mark.slow
                yield pytest.param(make, options, name, form, id="-".join(key), marks=marks)


def wrapped(tx):
    """With clipping, float32 copies, windows of one mini-batch, and skipping."""
    tx = jgrad.master_weights(optax.chain(jgrad.clip_by_global_norm(1e9), tx))
    return jgrad.skip_nonfinite(jgrad.accumulate(tx, 1))


def own_state(state):
    """The OptState somewhere in a state."""
    is_own = lambda x: isinstance(x, jgrad.OptState)
    return next(x for x in jax.tree.leaves(state, is_leaf=is_own) if is_own(x))


@pytest.mark.slow(one_in=20)
@pytest.mark.parametrize(("make", "options", "name", "form"), list(cells()))
def test_as_another_factory(make, options, name, form):
    """The second step with a number of its own is that of an optimizer that always has it."""
    value = NEW[name.removeprefix("adam_")]
    (first, second), w = gradients(2), params()
    if form == "packed":
        w, first, second = jgrad.pack(w), jgrad.pack(first), jgrad.pack(second)
    plain, other = (
        make(**({"learning_rate": 0.05} | options)),
        make(**({"learning_rate": 0.05} | options | {name: value})),
    )
    if form == "wrapped":
        plain, other = wrapped(plain), wrapped(other)
    w, state = train(plain, w, [first])
    expected = jax.jit(other.update)(second, state, w)
    unchanged = jax.jit(plain.update)(second, state, w)[0]
    assert any(
        (np.asarray(a) != b).any()
        for a, b in zip(*map(jax.tree.leaves, (expected[0], unchanged)), strict=True)
    )
    step = jax.jit(lambda g, s, w, x: plain.update(g, s, w, **{name: x}))
    found = step(second, state, w, jnp.float32(value))
    chex.assert_trees_all_close(found, expected, rtol=2e-5, atol=1e-7)
    assert_equal(*(own_state(s).step for s in (found[1], expected[1])))


def test_values_are_not_traced():
    """A sweep of numbers, of arrays, and of trees is one program each."""
    tx, w, g = jgrad.adam(0.1), params(), gradients(1)[0]
    state = tx.init(w)
    numbers = ("learning_rate", "weight_decay", "beta1", "beta2", "epsilon")
    counted = jax.jit(chex.assert_max_traces(lambda x: tx.update(g, state, w, **x), n=1))
    for x in (0.1, 0.2, 0.3):
        counted(dict.fromkeys(numbers, x))
    eager = [tx.update(g, state, w, beta1=x)[1].mw["layer"]["w"] for x in (0.5, 0.75)]
    np.testing.assert_allclose(eager[0], 2 * eager[1], rtol=1e-6)


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "beta2"])
def test_trees_and_rules(name):
    """A tree of numbers for one call, and rules by path."""
    w, g = params(), gradients(1)[0]
    tx = jgrad.adam(0.1)
    rules = jgrad.by_path({"layer/*": 0.5}, rest=0.25)
    found = [
        tx.update(g, tx.init(w), w, **{name: x})
        for x in (rules, rules(w), {"layer": 0.5, "rest": 0.25})
    ]
    assert_equal(found[0], found[1])
    assert_equal(found[0], found[2])
    expected = jgrad.adam(**({"learning_rate": 0.1} | {name: rules}))
    assert_equal(found[0], expected.update(g, tx.init(w), w))


def test_schedules_of_decay_and_betas():
    """Each value of a schedule in its step; 0 at the first."""
    w, grads = params(), gradients(4)
    schedules = {
        "weight_decay": optax.linear_schedule(0.0, 0.3, 3),
        "beta1": lambda done: 0.9 - 0.1 * done.astype(float),
        "epsilon": optax.linear_schedule(1e-3, 1e-1, 3),
    }
    tx, plain = jgrad.adam(0.1, **schedules), jgrad.adam(0.1)
    found, other = (w, tx.init(w)), (w, plain.init(w))
    for i, g in enumerate(grads):
        values = {name: jnp.float32(f(jnp.int32(i))) for name, f in schedules.items()}
        updates, state = tx.update(g, found[1], found[0])
        found = optax.apply_updates(found[0], updates), state
        updates, state = plain.update(g, other[1], other[0], **values)
        other = optax.apply_updates(other[0], updates), state
    chex.assert_trees_all_close(found, other, rtol=1e-5, atol=1e-7)


def update(tx, **numbers):
    w, g = params(), gradients(1)[0]
    return tx.update(g, tx.init(w), w, **numbers)


test_message = pytest.mark.slow(one_in=3)(messages.test_of("numbers_of_a_call", globals()))
