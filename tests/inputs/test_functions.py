"""Options that may be functions: what is called, and what is a tree of numbers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.support import messages

W = {"w": jnp.ones((3, 2)), "b": jnp.ones(3)}
G = jax.tree.map(lambda x: 0.5 * x, W)


def node(cls):
    """A dataclass whose fields are all children, as those of equinox's modules."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    return jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])


@node
class Schedule:
    """Stands for a module whose leaves are numbers."""

    start: Any

    def __call__(self, done):
        return self.start / (done + 1).astype(float)


@node
class Closure:
    """Stands for what optimistix and `eqx.filter_jit` make of a function: it is a leaf of theirs."""

    fn: Callable[..., Any]

    def __call__(self, *args):
        return self.fn(*args)


@node
class Model:
    """Stands for a model of equinox, which is callable; so is a tree of rates made of it."""

    w: Any
    b: Any

    def __call__(self, x):
        raise AssertionError("a tree of numbers was called")


MODEL = Model(**W)


def plain(done):
    return 0.2 / (done + 1).astype(float)


SCHEDULES = {
    "a module": Schedule(0.2),
    "a module of arrays": Schedule(jnp.asarray(0.2)),
    "a module of shape arrays": Schedule(jnp.full((3, 1), 0.2)[0]),
    "a closure": Closure(plain),
    "a Partial": jax.tree_util.Partial(lambda start, done: start / (done + 1).astype(float), 0.2),
    "a compiled function": jax.jit(plain),
    "a functools.partial": functools.partial(plain),
    "a module of modules": Closure(Schedule(0.2)),
}


def trained(tx, params=W, steps=3):
    """The parameters after some steps, in one compiled program a step."""
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(steps):
        updates, state = update(jax.tree.map(lambda x: 0.5 * x, params), state, params)
        params = optax.apply_updates(params, updates)
    return jax.tree.leaves(params), state


def assert_close(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("params", [W, MODEL], ids=["dict", "model"])
def test_a_schedule_that_is_a_tree_is_called(schedule, params):
    tx, state = jgrad.gradient_descent(schedule), jgrad.gradient_descent(0.1).init(params)
    for step, rate in enumerate((0.2, 0.1)):
        updates, _ = tx.update(params, state._replace(step=jnp.int32(step)), params)
        assert_close(updates, jax.tree.map(lambda x, rate=rate: -rate * x, params))


def test_a_schedule_for_one_call():
    """In the place of the rate of the factory, as a number would be."""
    tx = jgrad.gradient_descent(0.1)
    updates, _ = tx.update(G, tx.init(W), W, learning_rate=Schedule(0.2))
    assert_close(updates, jax.tree.map(lambda x: -0.2 * x, G))


def test_a_schedule_may_return_a_tree():
    rates = {"w": 0.2, "b": 0.0}
    found, _ = trained(jgrad.gradient_descent(Closure(lambda done: rates)))
    assert_close(found, trained(jgrad.gradient_descent(rates))[0])


def test_a_tree_of_rates_in_a_callable_model_is_not_called():
    tree = Model(w=0.2, b=0.1)
    assert_close(
        trained(jgrad.gradient_descent(tree), MODEL)[0],
        trained(jgrad.gradient_descent({"w": 0.2, "b": 0.1}))[0][::-1],
    )
    inner = {"layer": MODEL, "rest": jnp.ones(2)}
    prefix = {"layer": 0.2, "rest": 0.1}
    whole = {"layer": Model(0.2, 0.2), "rest": 0.1}
    assert_close(trained(jgrad.adam(whole), inner)[0], trained(jgrad.adam(prefix), inner)[0])


def test_a_tree_of_another_model_says_so():
    """One that is callable is called; what then goes wrong says why."""
    tx = jgrad.adam(Model(w=0.1, b=[0.1]))
    with pytest.raises(AssertionError) as failed:
        tx.update(MODEL, tx.init(MODEL), MODEL)
    assert failed.value.__notes__ == [
        "adam: `learning_rate` was called with the number of updates, since its structure is not "
        "a prefix of that of `params`."
    ]


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"weight_decay_mask": lambda p: p.ndim > 1}, "`weight_decay_mask` was called with the whole"),
        ({"weight_decay": lambda step: step["w"]}, "`weight_decay` was called with the number of"),
    ],
)  # fmt: skip
def test_a_function_that_fails_is_named(options, note):
    """What it raised stays as it was, with a note."""
    tx = jgrad.adam(0.1, **{"weight_decay": 0.1, **options})
    with pytest.raises((AttributeError, TypeError)) as failed:
        tx.update(G, tx.init(W), W)
    assert any(x.startswith(f"adam: {note} ") for x in failed.value.__notes__)


# ---- masks and decays --------------------------------------------------------------------------


def matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


@pytest.mark.parametrize(
    "true",
    [np.array(True), np.bool_(True), np.array([True]), jnp.array(True), jnp.array([[True]])],
    ids=["np.array", "np.bool_", "one of np", "jnp.array", "one of jnp"],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_bools_of_numpy(true, compiled):
    """From a function as well as in a tree."""
    mask = {"w": true, "b": np.logical_not(true)}
    tx = lambda mask: jgrad.adam(0.1, weight_decay=0.1, weight_decay_mask=mask)
    update = jax.jit(tx(mask).update) if compiled else tx(mask).update
    plain, _ = tx({"w": True, "b": False}).update(G, tx(None).init(W), W)
    assert_close(update(G, tx(None).init(W), W)[0], plain)
    assert_close(tx(lambda _: mask).update(G, tx(None).init(W), W)[0], plain)


@pytest.mark.parametrize(
    "decay",
    [Schedule(0.9), Closure(lambda done: 0.9 / (done + 1).astype(float))],
    ids=["module", "closure"],
)
@pytest.mark.parametrize("params", [W, MODEL], ids=["dict", "model"])
def test_decay_of_an_average(decay, params):
    tx = lambda decay: jgrad.average_params(jgrad.adam(0.1), decay)
    expected = trained(tx(lambda done: 0.9 / (done + 1).astype(float)), params)
    assert_close(trained(tx(decay), params), expected)


def updated(tx, params=MODEL):
    return tx.update(params, tx.init(params), params)


test_message = messages.test_of("functions", globals())
