"""Derivatives through steps of training: by each number of an optimizer, and of every order and way."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.cases import CASES, RATE, every_case
from tests.support.loops import step_of
from tests.wrappers.test_every_wrapper import WRAPPERS

STEPS = 20
FEW = 2  # steps of the matrix below


def start(dtype=float):
    """Weights of a small model; no gradient ever reaches `unused`."""
    rng = np.random.default_rng(0)
    tree = {"w": rng.normal(size=(3, 2)), "b": 0.1 * rng.normal(size=2), "unused": np.ones(2)}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def loss(w, x):
    h = jnp.tanh(x @ w["w"] + jnp.expand_dims(w["b"], 0))
    return jnp.mean((jnp.sum(h, axis=1) - jnp.sin(x[:, 0])) ** 2)


def inputs(dtype=float):
    return jnp.asarray(np.random.default_rng(1).normal(size=(8, 3)), dtype)


def numbers(case):
    """Every float among the options, and those that are usually left at their defaults.

    But not `fraction`, which stands for a number of rows.
    """
    floats = {k: v for k, v in case.options.items() if type(v) is float and k != "fraction"}
    found = {"learning_rate": 0.02} | floats
    if case.make is jgrad.adafactor:
        found = {"beta2_decay": 0.8} | found
    elif "vw" in case.state:
        of_adam = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-3}
        found = {case.of_adam(k): v for k, v in of_adam.items()} | found
    if case.make in (jgrad.lars, jgrad.lamb):
        found = {"weight_decay": 0.01} | found
    return {k: v for k, v in found.items() if v != 0}


def trained(case, hyper, w, x, loss=loss):
    """The loss after training: a function of numbers and of the first weights."""
    fixed = {k: v for k, v in case.without_masks().options.items() if k not in hyper}
    tx = case.make(**fixed, **hyper)

    def body(carry, _):
        w, state = carry
        updates, state = tx.update(jax.grad(loss)(w, x), state, w)
        return (optax.apply_updates(w, updates), state), None

    (w, _), _ = jax.lax.scan(body, (w, tx.init(w)), length=STEPS)
    return loss(w, x)


@pytest.mark.slow
@every_case((), lambda case: case.has_all_slopes)
def test_e08_slopes_are_those_of_finite_differences(case, x64):
    """By each number alone, and by the first weights along a random direction."""
    hyper = {k: jnp.asarray(v) for k, v in numbers(case).items()}
    w, x = start(), inputs()
    value = jax.jit(lambda hyper, w: trained(case, hyper, w, x))
    slopes, by_weights = jax.jit(jax.grad(value, argnums=(0, 1)))(hyper, w)

    def difference(f, h):
        return (8 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12 * h)

    # Of the loss, about 1: rounding leaves 1e-16 / h of a difference, here 1e-11. Where the sign of
    # a step changes, cautious decay and Lion jump: steps so short that no sign does leave 1e-8.
    # Adafactor's slopes jump where its clipping begins.
    cautious = case.options.get("weight_decay_rule") == "cautious"
    jumps = cautious or case.make in (jgrad.lion, jgrad.adafactor)
    shorter, left = (1e-3, 1e-7) if jumps else (1.0, 1e-9)
    for name, at in numbers(case).items():
        moved = lambda h, name=name: value(hyper | {name: hyper[name] + h}, w)
        # Between beta2 = 0.999 and 1 there is room for no more.
        h = 1e-5 if name == case.of_adam("beta2") else 1e-3 * at
        np.testing.assert_allclose(
            slopes[name], difference(moved, h * shorter), rtol=1e-5, atol=left
        )
    rng = np.random.default_rng(2)
    v = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape)), w)
    moved = lambda h: value(hyper, jax.tree.map(lambda p, d: p + h * d, w, v))
    along = sum(
        jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(by_weights), jax.tree.leaves(v), strict=True)
    )
    np.testing.assert_allclose(along, difference(moved, 1e-4 * shorter), rtol=1e-5, atol=left)
    assert slopes["learning_rate"] != 0


@every_case(())
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_e08_slopes_at_zero_gradients_are_finite(case, dtype, x64):
    """A loss that is constant to first order in all weights, from the first step to the last."""
    hyper = {k: jnp.asarray(v, dtype) for k, v in numbers(case).items()}
    w, x = start(dtype), inputs(dtype)
    flat = lambda w, x: 0 * loss(w, x)
    zeros = jax.tree.map(jnp.zeros_like, w)
    slopes = jax.jit(jax.grad(lambda hyper, w: trained(case, hyper, w, x, flat), argnums=(0, 1)))
    for at in (w, zeros):
        for found in jax.tree.leaves(slopes(hyper, at)):
            assert np.all(np.isfinite(found))


@pytest.mark.slow(always=["0.0-1.0"])
@pytest.mark.parametrize("scale", [1e-35, 1e-25, 1e-19, 1e-10, 1.0, 1e10])
@pytest.mark.parametrize("largest", [10.0, 0.0, None])
def test_e08_slopes_of_trust_ratios(largest, scale):
    """Of directions as small as numbers are: clamped, or in proportion to 1 / |u|."""
    w = jnp.asarray([3.0, 4.0])
    tx = jgrad.scale_by_trust_ratio(max_trust_ratio=largest)
    u = scale * jnp.asarray([0.6, 0.8])
    if largest is None:  # 1 / |u| itself is to be a number
        w, scale = scale * w, 1.0
    update = lambda u: tx.update(u, tx.init(w), w)[0]
    if largest is not None and largest * scale <= 5:
        expected = largest * np.eye(2)
    else:
        expected = 5 / scale * np.asarray([[0.64, -0.48], [-0.48, 0.36]])
    for jacobian in (jax.jacrev, jax.jacfwd):
        found = np.asarray(jacobian(update)(u))
        atol = 1e-5 * np.max(np.abs(expected))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("make", [jgrad.lars, jgrad.lamb])
def test_e08_slopes_of_ratios_by_the_decay(make, x64):
    """It is in both norms, or in the divisor alone."""
    w, g, h = jnp.asarray([3.0, 4.0]), jnp.asarray([1.0, -2.0]), 1e-6

    def moved(decay):
        tx = make(0.1, weight_decay=decay)
        return jnp.vdot(tx.update(g, tx.init(w), w)[0], w)

    difference = (moved(0.1 + h) - moved(0.1 - h)) / (2 * h)
    np.testing.assert_allclose(jax.grad(moved)(0.1), difference, rtol=1e-6)


# ---- every method and wrapper, in every way ----------------------------------------------------


class Subject(NamedTuple):
    """What trains.

    Attributes:
      name: shown by pytest.
      init: the state for weights.
      step: (rate, weights, state, gradients) -> (new weights, new state).
    """

    name: str
    init: Callable[[Any], Any]
    step: Callable[..., Any]

    def __str__(self):
        return self.name


def pair(name, make):
    step = lambda rate, *given: step_of(make(rate))(*given)
    return Subject(name, lambda w: make(RATE).init(w), step)


def functional(case):
    case = dataclasses.replace(case, update=case.update | {"stop_gradients": False})

    def init(w):
        return {name: jax.tree.map(jnp.zeros_like, w) for name in case.state}, jnp.asarray(1)

    def step(rate, w, state, g):
        moments, t = state
        w, moments = case.step(w, g, rate, moments, t)
        return w, (moments, t + 1)

    return Subject(f"{case.make.__name__}_update-{case}", init, step)


def trust_ratio(rate):
    return optax.chain(jgrad.scale_by_trust_ratio(), optax.scale_by_learning_rate(rate))


def subjects():
    yield pair("scale_by_trust_ratio", trust_ratio)
    for case in (case.without_masks() for case in CASES):
        yield pair(case.name, case.tx)
        if case.update is not None:
            yield functional(case)
    for i, wrapper in enumerate(WRAPPERS):
        around = lambda rate, own=wrapper: own.around(jgrad.adam(rate, epsilon=1e-3))
        yield pair(wrapper.name + "-scaled" * (i == 3), around)
    yield pair("pack_small", lambda rate: jgrad.pack_small(jgrad.lamb(rate), max_size=8))


def turned_loss(w, x):
    """The gradient of `w` is a transposed product."""
    h = jnp.tanh(w["w"] @ x[:, :2].T + jnp.expand_dims(w["b"], 1))
    return jnp.mean((jnp.sum(h, axis=0) - jnp.sin(x[:, 0])) ** 2)


def after_a_few_steps(subject, looped, w, rate):
    """A number that depends on all weights; leaves begin at zero, or have no gradient."""
    x, loss = inputs(), turned_loss

    def body(carry, _):
        return subject.step(rate, *carry, jax.grad(loss)(carry[0], x)), None

    w = w | {"b": jnp.zeros(3), "unused": jnp.ones_like(w["w"])}
    carry = w, subject.init(w)
    if looped:
        carry, _ = jax.lax.scan(body, carry, length=FEW)
    else:
        for _ in range(FEW):
            carry, _ = body(carry, None)
    return loss(carry[0], x) + sum(jnp.vdot(p, p + 3) for p in jax.tree.leaves(carry[0])) / 9


def in_every_way(value):
    """The slope of a function of one number, forward and in reverse, and the slope of the slope."""

    def found(rate):
        one = jnp.ones_like(rate)
        reverse, second = jax.jvp(jax.grad(value), (rate,), (one,))
        return jax.jvp(value, (rate,), (one,))[1], reverse, second

    return found


def may_loop(subject):
    """JAX makes no zeros in host memory, from which the slopes of a loop's carry start."""
    return subject.name != "offload"


@functools.cache
def expected_of(subject):
    """The first and the second slope, by differences of values and of slopes.

    At five rates at once, and of weights that are an argument.
    """
    h = 5e-4 * RATE
    rates = RATE + h * np.arange(-2, 3)
    value = functools.partial(after_a_few_steps, subject, may_loop(subject))
    slope = jax.value_and_grad(value, argnums=1)
    program = jax.jit(jax.vmap(slope, in_axes=(None, 0)))
    values, slopes = map(np.asarray, program(start(), rates))
    first, second = ((8 * (f[3] - f[1]) - (f[4] - f[0])) / (12 * h) for f in (values, slopes))
    np.testing.assert_allclose(slopes[2], first, rtol=1e-7, atol=1e-9)
    return first, second


SUBJECTS = list(subjects())


@pytest.mark.slow
@pytest.mark.parametrize("looped", [False, True], ids=["unrolled", "scan"])
@pytest.mark.parametrize("closed_over", [True, False], ids=["closed over", "arguments"])
@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_e08_slopes_of_every_order(subject, closed_over, looped, x64):
    """As by finite differences, for weights that are constants of the program, too."""
    if looped and not may_loop(subject):
        pytest.skip("JAX makes no zeros in host memory")
    first, second = expected_of(subject)
    w, steps = start(), functools.partial(after_a_few_steps, subject, looped)
    if closed_over:
        found = jax.jit(in_every_way(functools.partial(steps, w)))(RATE)
    else:
        found = jax.jit(lambda w, rate: in_every_way(functools.partial(steps, w))(rate))(w, RATE)
    np.testing.assert_allclose(found, [first, first, second], rtol=1e-7, atol=1e-8)
    assert abs(first) > 1e-3 or subject.name == "hyperball"  # which has a rate of its own
