"""Functions of the parameters in `optax.inject_hyperparams`, which calls them as schedules.

It calls every function with a count and makes an array of every number, so that a mask is lost
without a word, unless the factory says it.
"""

import functools
import inspect
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import jgrad
from tests.support import messages
from tests.support.errors import assert_error
from tests.support.loops import train

SHAPES = {"embed": (64, 96), "w": (96, 64), "b": (64,)}
W = {
    name: jnp.sin(jnp.arange(jnp.prod(jnp.array(s)), dtype=float)).reshape(s)
    for name, s in SHAPES.items()
}
G = [jax.tree.map(lambda x, t=t: jnp.cos(t + x), W) for t in range(2)]
X = jnp.arange(1.0, 4.0)


def rank_two(shapes):
    """A tree of bools; of a count, it is False."""
    return jax.tree.map(lambda x: len(x.shape) > 1, shapes)


class Row(NamedTuple):
    """A factory, an option that may be a function, and options beside it."""

    make: object
    name: str
    options: dict


ROWS = [
    Row(jgrad.gradient_descent, "weight_decay_mask", {"momentum": 0.9, "weight_decay": 0.1}),
    Row(jgrad.gradient_descent, "full_precision", {"momentum": 0.9, "moment_dtype": "8bit"}),
    Row(jgrad.adam, "weight_decay_mask", {"weight_decay": 0.1}),
    Row(jgrad.adam, "full_precision", {"moment_dtype": "8bit"}),
    Row(jgrad.lars, "weight_decay_mask", {"weight_decay": 0.1}),
    Row(jgrad.lars, "trust_ratio_mask", {}),
    Row(jgrad.lars, "full_precision", {"moment_dtype": "8bit"}),
    Row(jgrad.lamb, "weight_decay_mask", {"weight_decay": 0.1}),
    Row(jgrad.lamb, "trust_ratio_mask", {}),
    Row(jgrad.lamb, "full_precision", {"moment_dtype": "8bit"}),
    Row(jgrad.muon, "matrices", {"adam_learning_rate": 0.1}),
    Row(jgrad.muon, "weight_decay_mask", {"matrices": rank_two(W), "weight_decay": 0.1, "adam_learning_rate": 0.1}),
    Row(jgrad.muon, "full_precision", {"matrices": rank_two(W), "moment_dtype": "8bit", "adam_learning_rate": 0.1}),
]  # fmt: skip
# Those without a rate.
PARTS = [
    Row(jgrad.scale_by_adam, "full_precision", {"moment_dtype": "8bit"}),
    Row(jgrad.scale_by_muon, "matrices", {}),
    Row(jgrad.scale_by_trust_ratio, "trust_ratio_mask", {}),
]


def every(rows):
    names = [f"{row.make.__name__}-{row.name}" for row in rows]
    return pytest.mark.parametrize("row", rows, ids=names)


def message(row, came):
    return (
        f"{row.make.__name__}: `{row.name}`: {came}, expected a tree of bools, or a function of the parameters' shapes; "
        "`optax.inject_hyperparams` calls functions as schedules: name this one in `static_args`, or wrap the factory in "
        "a function of the numbers alone; where a bool is meant, give a tree of it."
    )


def numbers_of(row):
    """Arguments that are there for each factory with a rate."""
    return {} if row in PARTS else {"learning_rate": 0.1}


@every(ROWS + PARTS)
def test_a_function_that_is_lost(row):
    """With a choice of its own for any tree, and with one that answers True."""
    make = optax.inject_hyperparams(row.make)
    for mask, came in ((rank_two, "False"), (lambda _: True, "True")):
        tx = make(**numbers_of(row), **row.options, **{row.name: mask})
        assert_error(TypeError, message(row, f"{came} of type bool"), lambda tx=tx: tx.init(W))
    # What a partial has bound is an argument as any other.
    bound = functools.partial(row.make, **row.options, **{row.name: rank_two})
    tx = optax.inject_hyperparams(bound)(**numbers_of(row))
    assert_error(TypeError, message(row, "False of type bool"), lambda: tx.init(W))


@pytest.mark.slow
@every(ROWS)
def test_how_to_write_it(row):
    """Named in `static_args`, or in a factory of the numbers alone; a tree is no function."""
    options = row.options | {row.name: rank_two}
    expected, _ = train(row.make(0.1, **options), W, G)
    static = [name for name, x in options.items() if not isinstance(x, float)]
    ways = [
        optax.inject_hyperparams(row.make, static_args=static)(learning_rate=0.1, **options),
        optax.inject_hyperparams(lambda learning_rate: row.make(learning_rate, **options))(0.1),
        optax.inject_hyperparams(row.make)(0.1, **row.options, **{row.name: rank_two(W)}),
    ]
    for tx in ways:
        # 1 - beta2 of a traced float32 beta2 is right to 5e-5 only.
        chex.assert_trees_all_close(train(tx, W, G)[0], expected, rtol=1e-3, atol=1e-4)


@every(ROWS)
def test_some_numbers_are_static(row):
    """Whichever one is, the mask is lost all the same."""
    given = numbers_of(row) | row.options
    parameters = inspect.signature(row.make).parameters
    numeric = {name for name, x in (parameters | given).items() if is_number(x)}
    for name in numeric:
        static = [name] + ["moment_dtype"] * ("moment_dtype" in given)
        make = optax.inject_hyperparams(row.make, static_args=static)
        tx = make(**given, **{row.name: rank_two})
        assert_error(TypeError, message(row, "False of type bool"), lambda tx=tx: tx.init(W))


def is_number(x):
    return isinstance(getattr(x, "default", x), float)


def test_a_bool_of_a_user():
    """One bool for all leaves, beside numbers of which some are arrays; else as a tree."""
    for rate in (0.1, lambda step: 0.1, jnp.float32(0.1)):
        for make in (jgrad.adam, jgrad.lars, jgrad.lamb, jgrad.gradient_descent):
            make(rate, weight_decay=0.1, weight_decay_mask=False).init(W)
        jgrad.muon(rate, matrices=True, adam_learning_rate=rate).init({"w": W["w"]})
    for make in (jgrad.lars, jgrad.lamb):
        make(0.1, weight_decay=jnp.float32(0.1), trust_ratio_mask=False).init(W)
    trees = jax.tree.map(lambda _: True, W)
    injected = optax.inject_hyperparams(jgrad.adam)
    injected(0.1, weight_decay=0.1, weight_decay_mask=trees).init(W)


def test_numbers_that_are_all_arrays():
    """As under `vmap`, where a bool is what a user wrote."""

    def moved(numbers, mask):
        rate, momentum, decay = numbers
        options = {"momentum": momentum, "weight_decay": decay, "weight_decay_mask": mask}
        tx = jgrad.gradient_descent(rate, **options)
        return tx.update(X, tx.init(X), X)[0]

    numbers = jnp.array([[0.1, 0.9, 0.1], [0.2, 0.8, 0.3]])
    for mask, factor in ((True, 1 + numbers[:, 2]), (False, jnp.ones(2))):
        found = jax.jit(jax.vmap(lambda x, m=mask: moved(x, m)))(numbers)
        expected = -jnp.outer(numbers[:, 0] * factor, X)
        chex.assert_trees_all_close(found, expected, rtol=1e-5)


test_arrays_of_what_is_static = messages.test_of("injected", globals())


@pytest.mark.parametrize("moments", [None, jnp.bfloat16, "8bit"], ids=str)
def test_e48_dtypes_under_inject_hyperparams(moments, standard_promotion):
    """Float32 numbers make a bfloat16 moment of optax float32, so that `lax.cond` raises."""

    def skipped(tx):
        """A step in a branch, as trainers write who accumulate or skip."""

        def step(w, state):
            updates, state = tx.update(w, state, w)
            return optax.apply_updates(w, updates), state

        w = {"w": jnp.ones((64, 64), jnp.bfloat16)}
        return jax.eval_shape(
            lambda w, state: jax.lax.cond(True, step, lambda w, state: (w, state), w, state),
            w,
            tx.init(w),
        )

    injected = functools.partial(optax.inject_hyperparams, hyperparam_dtype=jnp.float32)
    with pytest.raises(TypeError, match="cond"):
        skipped(injected(optax.adamw)(1e-3))
    dtypes = lambda tree: [x.dtype for x in jax.tree.leaves(tree)]
    tx = injected(jgrad.adam, static_args=("moment_dtype",))(1e-3, moment_dtype=moments)
    _, state = skipped(tx)
    assert dtypes(state) == dtypes(tx.init({"w": jnp.ones((64, 64), jnp.bfloat16)}))
