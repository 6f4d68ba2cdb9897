"""What a model may do with a stack before its call, and beside it.

Groups of layers in a block, as models have that alternate two kinds of layers; heads in axes of their
own; calls that are not differentiated, as AlphaFold's cycles but the last, or a teacher. The truth is
the ordinary step, in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.backward.models import ordinary
from tests.backward.test_gradients import unit
from tests.backward.test_xs import (
    LAYERS,
    ROWS,
    SCAN,
    TX,
    WIDTH,
    array,
    assert_as_ordinary,
    block,
    difference,
    in_float32,
    jitted,
    of_value,
)
from tests.support.private import forced

GROUP = 2


def params(dtype=None):
    """A flat stack, whose layers are two and two in a group, and one with a layer for each group."""
    p = {
        "local": {"up": array(GROUP * LAYERS, WIDTH, 6), "down": array(6, GROUP * LAYERS, WIDTH)},
        "all": {"up": array(LAYERS, WIDTH, 6), "down": array(LAYERS, 6, WIDTH)},
        "last": array(WIDTH, WIDTH),
    }
    return p if dtype is None else jax.tree.map(lambda x: x.astype(dtype), p)


AXES = {"local": {"up": 0, "down": 1}, "all": 0, "last": None}


def grouped(p, x):
    """The groups are made of whole leaves, with a cast and a transpose on the way."""
    local = {"up": 1.5 * p["local"]["up"], "down": jnp.moveaxis(p["local"]["down"], 1, 0)}
    groups = jax.tree.map(lambda w: w.reshape(-1, GROUP, *w.shape[1:]), local)

    def turn(layers, x):
        x = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, layers["local"])[0]
        return block(layers["all"], x)

    return of_value(p, SCAN(turn, {"local": groups, "all": p["all"]}, x))


RATES = {
    "local": {
        "up": 0.1 + jnp.arange(6.0).reshape(6, 1, 1),
        "down": 0.1 + jnp.arange(6.0).reshape(6, 1),
    },
    "all": 0.1,
    "last": 0.1,
}
SIDES = {"min_side": 2, "layer_axes": AXES}
OF_GROUPS = {
    "descent": (lambda: TX, {}),
    "rates": (lambda: jgrad.gradient_descent(RATES), {}),
    "lamb": (lambda: jgrad.lamb(1e-2, layer_axes=AXES), {}),
    "adafactor": (lambda: jgrad.adafactor(1e-2, **SIDES), {}),
    "clip": (lambda: optax.chain(jgrad.clip_by_global_norm(0.01), TX), {"first_pass": True}),
    "optax": (lambda: optax.chain(optax.trace(0.9), optax.scale(-0.1)), {"elementwise": True}),
}


@pytest.mark.slow(always=["rates"])
@pytest.mark.parametrize("name", OF_GROUPS)
def test_groups_of_layers(x64, name):
    make, options = OF_GROUPS[name]
    assert_as_ordinary(grouped, params(), array(ROWS, WIDTH), tx=make(), **options)


def test_norms_of_groups(x64):
    """A method knows the layers of a group, and the user's function sees a group in both forms."""
    given = params(), TX.init(params()), array(ROWS, WIDTH)
    results = []
    for is_forced in (True, False):
        with forced(is_forced):
            step = jgrad.step_in_backward(TX, grouped, gradients=unit)
            results.append(jitted(step)(*given))
    assert difference(*results) < 1e-11
    moved = np.asarray(given[0]["local"]["up"] - results[0][0]["local"]["up"])
    assert len({*np.round(np.linalg.norm(moved, axis=(1, 2)), 9)}) == GROUP * LAYERS

    lamb = jgrad.lamb(1e-2, layer_axes=AXES)
    found = jitted(jgrad.step_in_backward(jgrad.lamb(1e-2), grouped))(*_begun(lamb))
    assert difference(found, jitted(ordinary(lamb, grouped))(*_begun(lamb))) < 1e-11


def _begun(tx):
    return params(), tx.init(params()), array(ROWS, WIDTH)


def test_random_bits_of_groups():
    """Those of the stack."""
    tx = jgrad.stochastic_rounding(jgrad.gradient_descent(1e-2))
    p = params(jnp.bfloat16)
    given = p, tx.init(p), array(ROWS, WIDTH).astype(jnp.bfloat16)
    loss = in_float32(grouped)
    expected, found = (
        jitted(step)(*given)[0] for step in (ordinary(tx, loss), jgrad.step_in_backward(tx, loss))
    )
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.mean(np.asarray(a != b)) < 0.1


def test_axes_within_a_layer(x64):
    """Heads are stored in the axis of the width."""

    def loss(p, x):
        heads = p["all"]["up"].reshape(LAYERS, WIDTH, 2, 3)
        turn = lambda w, x: (
            x + jnp.einsum("bd,dhk,hkd->bd", x, w["heads"], w["down"].reshape(2, 3, -1))
        )
        return of_value(p, SCAN(turn, {"heads": heads, "down": p["all"]["down"]}, x))

    assert_as_ordinary(loss, params() | {"local": None}, array(ROWS, WIDTH))


# ---- calls that are not differentiated -----------------------------------------------------------


def recycled(p, x):
    """The last of two cycles is differentiated."""
    y = jax.lax.stop_gradient(SCAN(block, p["all"], x))
    return of_value(p, SCAN(block, p["all"], x + y))


def recycled_in_a_loop(p, x):
    cycle = lambda _, y: SCAN(block, p["all"], x + y)
    y = jax.lax.stop_gradient(jax.lax.fori_loop(0, 3, cycle, jnp.zeros_like(x)))
    return of_value(p, SCAN(block, p["all"], x + y))


def recycled_by_hand(p, x):
    """What is differentiated is no call, and its stack is no stack."""
    y = x + jax.lax.stop_gradient(SCAN(block, p["all"], x))
    for i in range(LAYERS):
        y = block(jax.tree.map(lambda w, i=i: w[i], p["all"]), y)
    return of_value(p, SCAN(block, p["other"], y))


def taught(p, x, teacher):
    """By a model of older weights, and by itself."""
    goal = jax.lax.stop_gradient(
        SCAN(block, teacher, x) + SCAN(block, jax.tree.map(jnp.flip, p["all"]), x)
    )
    return jnp.mean(jnp.square(SCAN(block, p["all"], x) - goal)) + of_value(p, x)


def logged(p, x):
    """The same stack on other data, and the norm of its gradient."""

    def value(p, x):
        return of_value(p, SCAN(block, p["all"], x))

    return value(p, x), {"other": value(p, 2 * x), "norm": optax.tree.norm(jax.grad(value)(p, x))}


def frozen(p, x):
    """Features that nobody trains: their stack still has layers."""
    features = SCAN(block, jax.lax.stop_gradient(p["other"]), x)
    return of_value(p, SCAN(block, p["all"], features))


AXES_OF_BOTH = {"all": 0, "other": 0, "last": None}
BESIDE = {
    "recycled": (recycled, {}),
    "recycled in a loop": (recycled_in_a_loop, {}),
    "recycled by hand": (recycled_by_hand, {}),
    "taught": (taught, {}),
    "logged": (logged, {"has_aux": True}),
    "frozen": (frozen, {}),
}


@pytest.mark.slow(always=["recycled"])
@pytest.mark.parametrize("name", BESIDE)
def test_calls_that_are_not_differentiated(x64, name):
    loss, options = BESIDE[name]
    p = {name: x for name, x in params().items() if name != "local"}
    p["other"] = jax.tree.map(jnp.sin, p["all"])
    more = (jax.tree.map(jnp.cos, p["all"]),) if name == "taught" else ()
    tx = jgrad.lamb(1e-2, weight_decay=0.1, layer_axes=AXES_OF_BOTH)
    assert_as_ordinary(loss, p, array(ROWS, WIDTH), *more, tx=tx, **options)


def test_a_frozen_stack_has_layers(x64):
    """LAMB needs no `layer_axes` for it."""
    p = {"all": params()["all"], "other": params()["all"], "last": array(WIDTH, WIDTH)}
    expected, found = jgrad.lamb(1e-2, layer_axes=AXES_OF_BOTH), jgrad.lamb(1e-2)
    before = expected.init(p)._replace(mw=jax.tree.map(lambda x: jnp.sin(9 * x), p))
    given = p, before, array(ROWS, WIDTH)
    results = ordinary(expected, frozen), jgrad.step_in_backward(found, frozen)
    assert difference(*(jitted(step)(*given) for step in results)) < 1e-11
