"""Leaves that no stack has: each is updated as soon as its own gradient is known, or at the end."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.backward import models
from tests.backward.recipes import FIRST, adam, clipped
from tests.support.private import forced


def params(dtype=jnp.float64):
    rng = np.random.default_rng(0)
    one = models.params(dtype)
    return {
        "embed": one["first"],
        "lower": models.stack(rng, 2, models.WIDTH, models.HIDDEN, dtype),
        "between": models.array(rng, models.WIDTH, models.WIDTH, dtype=dtype),
        "upper": one["layers"],
        "scale": jnp.ones((1, models.WIDTH), dtype),
        "head": one["last"],
    }


def loss(params, x):
    """What is read before both stacks, between them, behind them, and in more than one place."""
    x = jgrad.scan_layers(models.block, params["lower"], x @ params["embed"])
    x = params["scale"] * jnp.tanh(x @ params["between"])
    x = jgrad.scan_layers(models.block, params["upper"], x)
    return jnp.mean(jnp.square((params["scale"] * x) @ params["head"]))


def updates(tx, **options):
    """The operations that make new leaves, in the order of a program, with the leaves' names."""
    given = params(), tx.init(params()), models.batch(0, jnp.float64)
    with forced():
        step = jgrad.step_in_backward(tx, loss, **options)
        program, results = jax.make_jaxpr(step, return_shape=True)(*given)
    names = [path[0].key for path, _ in jax.tree_util.tree_leaves_with_path(results[0])]
    name_of = dict(zip(program.jaxpr.outvars, names, strict=False))
    made = [(eqn, {name_of[x] for x in eqn.outvars if x in name_of}) for eqn in program.jaxpr.eqns]
    return {name: eqn for eqn, names in made for name in sorted(names)}


def test_the_order_of_updates(x64):
    assert [*updates(adam())] == ["head", "upper", "between", "scale", "lower", "embed"]


def test_the_loop_waits_for_the_update(x64):
    """Else XLA may move it behind the loop, and keep a gradient or the logits meanwhile."""
    made = updates(adam())
    assert made["head"].primitive.name == "optimization_barrier"
    assert any(x is y for x in made["head"].outvars for y in made["upper"].invars)


def some(tx):
    """One transformation for leaves in no stack, another one for the rest."""
    labels = dict.fromkeys(params(), "some") | {"lower": "rest", "upper": "rest", "embed": "rest"}
    return optax.partition({"rest": adam(), "some": tx}, labels)


def of_optax():
    return optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(1e-1))


def norm(tree):
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))


def unit():
    """Gradients that are handed on as they are, and a rate that another library makes of them."""

    def update(g, state, params=None):
        return jgrad.gradient_descent(0.1 / norm(g)).update(g, state, params)

    return optax.GradientTransformation(jgrad.gradient_descent(1.0).init, update)


def recorded():
    """A number of some leaves in a state that is there where these leaves are."""
    masks = {name: name in ("between", "scale", "head") for name in params()}
    make = lambda p: {"norm": jnp.zeros(())} if jax.tree.leaves(p) else {}
    update = lambda g, state, p=None: (g, {"norm": norm(g)} if state else {})
    return optax.chain(optax.masked(optax.GradientTransformation(make, update), masks), adam())


def slower():
    """Steps that are shorter the longer the gradients were, by a number that is always there."""

    def update(g, state, params=None):
        state = 0.9 * state + norm(g)
        return jax.tree.map(lambda x: -0.1 * x / (1.0 + state), g), state

    return optax.GradientTransformation(lambda params: jnp.zeros(()), update)


# Whether leaves wait for the end, since their update needs the gradients of others.
CASES = {
    "a rate made of several gradients": (lambda: some(unit()), {}, True),
    "a number of several gradients in the state": (recorded, {}, True),
    "a method with a number of several leaves": (
        lambda: some(slower()),
        {"elementwise": True},
        True,
    ),
    "another library's norm of some": (lambda: some(of_optax()), {"elementwise": True}, True),
    "a norm of some": (lambda: some(clipped(adam())), {}, True),
    "a norm of some, computed first": (lambda: some(clipped(adam())), FIRST, False),
}


@pytest.mark.slow(always=["a rate made of several gradients", "a norm of some",
    "a number of several gradients in the state"])  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_what_needs_several_gradients(x64, name):
    make, options, waits = CASES[name]
    given = params(), (tx := make()).init(params()), models.batch(0, jnp.float64)
    step = jgrad.step_in_backward(tx, loss, **options)
    with forced():
        found = jax.jit(step)(*given)
    expected = jax.jit(models.ordinary(tx, loss))(*given)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-14)
    order = [*updates(tx, **options)]
    assert (order.index("head") > order.index("lower")) == waits
