"""Options that have no effect without another one: an error that names both, and what passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from jgrad._trees.forms import SMALLEST
from jgrad._trees.known_names import NEEDS
from tests.support.errors import assert_error

W = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
MASK = {"w": True, "b": False}
SGD = jgrad.gradient_descent(0.1)
MATRICES = {"matrices": MASK, "adam_learning_rate": 0.1}


@jgrad.optimizer_of_leaf
def sign_descent(g):
    """w' = w - learning_rate sign(g)."""
    return jnp.sign(g)


@jgrad.optimizer_of_leaf
def average_descent(g, mw, *, beta1=0.9):
    """w' = w - learning_rate m'."""
    mw = beta1.value * mw + beta1.complement * g
    return mw, mw


def rows_of(make, options, *rows):
    """One for each option: its value, what is said of it, and what makes it have an effect."""
    make = functools.partial(make, **options)
    return [(make, *row) for row in rows]


NO_DECAY, NO_MOMENTUM = (
    "without `weight_decay`: pass both, even if the decay is 0",
    "without `momentum`",
)
MASK_WITHOUT = f"{{'w': True, 'b': False}} of type dict, expected None {NO_DECAY}"
NO_BLOCKS = "True, expected None without `moment_dtype='8bit'`"
SMALL = f"True, expected False with a `max_size` below {SMALLEST}"
RATE = {"learning_rate": 0.1}
ROWS = [
    *(row for make in (jgrad.adam, jgrad.lion, jgrad.lamb, jgrad.adafactor,
     average_descent) for row in rows_of(make, RATE,
     ("weight_decay_mask", MASK, MASK_WITHOUT, {"weight_decay": 0.1}),
     ("weight_decay_rule", "cautious", f"'cautious', expected 'decoupled' {NO_DECAY}", {"weight_decay": 0.0}))),
    *rows_of(jgrad.gradient_descent, RATE,
     ("weight_decay_rule", "decoupled", f"'decoupled', expected 'coupled' {NO_DECAY}", {"weight_decay": 0.1}),
     ("nesterov", True, f"True, expected False {NO_MOMENTUM}", {"momentum": 0.9}),
     ("moment_dtype", "bfloat16", f"'bfloat16', expected None {NO_MOMENTUM}", {"momentum": 0.9}),
     ("moment_dtype", "8bit", f"'8bit', expected None {NO_MOMENTUM}", {"momentum": lambda n: 0.9})),
    *rows_of(jgrad.lars, RATE | {"momentum": None},
     ("rate_in_momentum", False, f"False, expected True {NO_MOMENTUM}", {"momentum": 0.9}),
     ("nesterov", True, f"True, expected False {NO_MOMENTUM}", {"momentum": 0.9})),
    *rows_of(jgrad.adafactor, RATE,
     ("moment_dtype", "8bit", f"'8bit', expected None {NO_MOMENTUM}", {"momentum": 0.9}),
     ("full_precision", True, NO_BLOCKS, {"momentum": 0.9, "moment_dtype": "8bit"})),
    *rows_of(jgrad.muon, RATE | MATRICES, ("weight_decay_mask", MASK, MASK_WITHOUT, {"adam_weight_decay": 0.1}),
     ("normuon_beta", 0.1, "0.1, expected 0.95 without `rule='normuon'`", {"rule": "normuon"}),
     ("error_decay", 0.1, "0.1, expected 0.95 without `fraction`", {"fraction": 0.5})),
    *rows_of(jgrad.muon, RATE | MATRICES | {"fraction": 0.5},
     ("nesterov", False, "False, expected True with `fraction`", {"fraction": None})),
    *rows_of(jgrad.scale_by_muon, {"matrices": MASK, "fraction": 1},
     ("error_decay", 0.1, "0.1, expected 0.95 without `fraction`", {"fraction": 0.5})),
    *rows_of(jgrad.scale_by_adam, {}, ("full_precision", True, NO_BLOCKS, {"moment_dtype": "8bit"})),
    *rows_of(jgrad.skip_nonfinite, {"tx": SGD},
     ("growth_interval", 3, "3, expected 2000 without `loss_scale`", {"loss_scale": 4.0})),
    *rows_of(jgrad.pack, {"tree": W, "max_size": 300}, ("small_apart", True, SMALL, {"max_size": None})),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "name", "value", "said", "met"), ROWS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_an_option_without_effect(make, name, value, said, met):
    message = f"{make.func.__name__}: `{name}`: {said}."
    assert_error(ValueError, message, lambda: make(**{name: value}))
    make(**{name: value} | met)


def test_every_need_has_a_row():
    assert {row[1] for row in ROWS} == NEEDS.keys()


def test_a_method_without_moments():
    message = "sign_descent: `moment_dtype`: '8bit', expected None without a moment."
    assert_error(ValueError, message, lambda: sign_descent(0.1, moment_dtype="8bit"))
    average_descent(0.1, moment_dtype="8bit")


def test_what_passes():
    """Defaults, said again; decays that are 0 in a sweep, or are not known yet; and arrays."""
    jgrad.muon(0.1, **MATRICES, normuon_beta=0.95, error_decay=0.95, weight_decay_rule="decoupled")
    for decay in (0, 0.0, np.float32(0), jnp.zeros(()), {"w": 0.0, "b": 0.0}, lambda done: 0.0):
        jgrad.adam(0.1, weight_decay=decay, weight_decay_mask=MASK, weight_decay_rule="cautious")
    jax.eval_shape(lambda x: jgrad.muon(0.1, **MATRICES, error_decay=x).init(W), 0.5)


def test_injected():
    """All numbers are arrays then, and a decay may be set in the state."""
    injected = optax.inject_hyperparams(jgrad.adam)(0.1, weight_decay_mask=MASK)
    assert float(injected.init(W).hyperparams["weight_decay"]) == 0
    static = ("matrices", "momentum")
    tx = optax.inject_hyperparams(jgrad.muon, static_args=static)(0.1, **MATRICES)
    jax.eval_shape(tx.init, W)
