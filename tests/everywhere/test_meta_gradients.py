"""Derivatives through 20 steps of training, by each number that an optimizer has."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.cases import every_case

STEPS = 20


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
    """Every float among the options, and those that are usually left at their defaults."""
    found = {"learning_rate": 0.02} | {k: v for k, v in case.options.items() if type(v) is float}
    if "vw" in case.state:
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


@every_case(("lars_masked",))
def test_e08_slopes_are_those_of_finite_differences(case, x64):
    """By each number alone, and by the first weights along a random direction."""
    hyper = {k: jnp.asarray(v) for k, v in numbers(case).items()}
    w, x = start(), inputs()
    value = jax.jit(lambda hyper, w: trained(case, hyper, w, x))
    slopes, by_weights = jax.jit(jax.grad(value, argnums=(0, 1)))(hyper, w)

    def difference(f, h):
        return (8 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12 * h)

    # Of the loss, about 1: rounding leaves 1e-16 / h of a difference, here 1e-11. Where the sign of
    # a step changes, cautious decay jumps: steps so short that no sign does leave 1e-8.
    cautious = case.options.get("weight_decay_rule") == "cautious"
    shorter, left = (1e-3, 1e-7) if cautious else (1.0, 1e-9)
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
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("scale", [1e-35, 1e-25, 1e-19, 1e-10, 1.0, 1e10])
@pytest.mark.parametrize("largest", [10.0, None])
def test_e08_slopes_of_trust_ratios(largest, scale):
    """Of directions as small as numbers are: clamped, or in proportion to 1 / |u|."""
    w = jnp.asarray([3.0, 4.0])
    tx = jgrad.scale_by_trust_ratio(max_trust_ratio=largest)
    u = scale * jnp.asarray([0.6, 0.8])
    if largest is None:  # 1 / |u| itself is to be a number
        w, scale = scale * w, 1.0
    found = np.asarray(jax.jacrev(lambda u: tx.update(u, tx.init(w), w)[0])(u))
    if largest and scale <= 0.5:
        expected = 10 * np.eye(2)
    else:
        expected = 5 / scale * np.asarray([[0.64, -0.48], [-0.48, 0.36]])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.max(np.abs(expected)))


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [0.1, 10.0])
def test_e08_slopes_through_clipping(max_norm, x64):
    """Clipped and not clipped; at zero gradients in `wrappers/test_clip.py`."""
    w, x = start(), inputs()

    def value(rate, bound):
        tx = optax.chain(jgrad.clip_by_global_norm(bound), jgrad.adam(rate, epsilon=1e-3))

        def body(carry, _):
            w, state = carry
            updates, state = tx.update(jax.grad(loss)(w, x), state, w)
            return (optax.apply_updates(w, updates), state), None

        (end, _), _ = jax.lax.scan(body, (w, tx.init(w)), length=STEPS)
        return loss(end, x)

    value = jax.jit(value)
    for i, slope in enumerate(jax.grad(value, argnums=(0, 1))(0.02, max_norm)):
        at, h = np.array([0.02, max_norm]), np.zeros(2)
        h[i] = 1e-5
        expected = (value(*(at + h)) - value(*(at - h))) / 2e-5
        np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-9)
