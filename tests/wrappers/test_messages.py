"""What wrappers say of wrong inputs, to the letter."""

import jax
import jax.numpy as jnp
import pytest

import jgrad
from tests.cases import RATE, rank_two
from tests.support import messages
from tests.support.errors import assert_error
from tests.wrappers.test_every_wrapper import WRAPPERS
from tests.wrappers.test_hand_over import counting

X, SGD, ADAM, LAMB = jnp.ones(3), jgrad.gradient_descent(0.1), jgrad.adam(0.1), jgrad.lamb(0.1)
W = {"layer_3": {"w": jnp.ones((3, 2)), "b": X}}
HALF = jax.tree.map(jnp.bfloat16, W)
NUMBERS_ONLY = (
    "expected an array of numbers; put None in the place of other leaves, as `eqx.filter(model, "
    "eqx.is_inexact_array)` does."
)


def with_b(b):
    return {"layer_3": {"w": W["layer_3"]["w"], "b": b}}


def update(tx, g=W, w=W, state=None, **extra):
    """One call; the state is that of `W`."""
    return tx.update(g, tx.init(W) if state is None else state, w, **extra)


# ---- the same faults ---------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=str)
def test_each_wrapper(wrapper):
    """Clipping looks at its gradients alone."""
    tx, name = wrapper.around(ADAM), wrapper.name
    state = tx.init(W)
    says = lambda error, message, call: assert_error(error, f"{name}: {message}", call)
    if name != "clip_by_global_norm":
        for value, came in ((3, "3 of type int"), (None, "None")):
            message = f"`tx`: {came}, expected a transformation with `init` and `update`."
            says(TypeError, message, lambda value=value: wrapper.around(value))
    if name in ("clip_by_global_norm", "offload"):
        name = "adam"
    message = "`updates` does not match `params` at ['layer_3']['b']: shape (3, 1), expected (3,)."
    says(ValueError, message, lambda: tx.update(with_b(jnp.ones((3, 1))), state, W))
    message = "`updates` does not have the structure of `params`: only `params` has ['layer_3']."
    says(ValueError, message, lambda: tx.update({}, state, W))
    message = f"`params` at ['layer_3']['b']: 'abc' of type str, {NUMBERS_ONLY}"
    says(TypeError, message, lambda: tx.update(W, state, with_b("abc")))


weigh = jgrad.accumulate(SGD, 2, weighted=True)
keep_norm = jgrad.hyperball(SGD, RATE, leaves=rank_two)
# Of each number: how it is given, the interval that it is from, and what is just outside.
NUMBERS = {
    "accumulate: `weight`": (lambda x: weigh.update(X, weigh.init(X), X, weight=x), "[0, inf)", -1.0),
    "clip_by_global_norm: `max_norm`": (jgrad.clip_by_global_norm, "[0, inf)", -1.0),
    "average_params: `decay`": (lambda x: jgrad.average_params(SGD, x), "[0, 1)", 1.0),
    "hyperball: `hyperball_learning_rate`": (lambda x: keep_norm.update(W, keep_norm.init(W), W,
     hyperball_learning_rate=x), "[0, inf)", -1.0),
    "schedule_free: `beta`": (lambda x: jgrad.schedule_free(SGD, beta=x), "[0, 1)", 1.0),
    "skip_nonfinite: `loss_scale`": (lambda x: jgrad.skip_nonfinite(SGD, loss_scale=x), "[1, 2^125]", 2.0**126),
    "skip_spikes: `deviations`": (lambda x: jgrad.skip_spikes(SGD, deviations=x), "[0, inf)", -1.0),
}  # fmt: skip
INTEGERS = {
    "accumulate: `every`": (lambda n: jgrad.accumulate(SGD, n), 1),
    "average_params: `start`": (lambda n: jgrad.average_params(SGD, 0.9, start=n), 0),
    "pack_small: `max_size`": (lambda n: jgrad.pack_small(SGD, max_size=n), 0),
    "skip_nonfinite: `growth_interval`": (lambda n: jgrad.skip_nonfinite(SGD, loss_scale=2.0, growth_interval=n), 1),
    "skip_spikes: `window`": (lambda n: jgrad.skip_spikes(SGD, window=n), 4),
    "stochastic_rounding: `seed`": (lambda n: jgrad.stochastic_rounding(SGD, seed=n), 0),
    "watch: `every`": (lambda n: jgrad.watch(SGD, every=n), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_out_of_range(name):
    give, interval, outside = NUMBERS[name]
    of_range = f"expected a number in {interval}."
    for value in (outside, float("nan"), float("inf")):
        assert_error(ValueError, f"{name}: {value}, {of_range}", lambda x=value: give(x))
    for value, came in (("1", "'1' of type str"), (True, "True of type bool")):
        message = f"{name}: {came}, expected a real array or a number."
        assert_error(TypeError, message, lambda x=value: give(x))
    message = f"{name}: an array of float32 and shape (2,), expected one number."
    assert_error(ValueError, message, lambda: give(jnp.ones(2)))


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_out_of_range(name):
    give, first = INTEGERS[name]
    for value in (first - 1, -5):
        message = f"{name}: {value}, expected a number in [{first}, 2^31)."
        assert_error(ValueError, message, lambda n=value: give(n))
    for value, came in ((2.5, "2.5 of type float"), (True, "True of type bool")):
        assert_error(TypeError, f"{name}: {came}, expected an int.", lambda n=value: give(n))


# ---- faults of one -----------------------------------------------------------------------------


window = jgrad.accumulate(SGD, 2)
clip, averaged, half = (
    jgrad.clip_by_global_norm,
    jgrad.average_params(SGD, 0.9),
    jgrad.master_weights(SGD),
)
rounded, spikes, watched = jgrad.stochastic_rounding(SGD), jgrad.skip_spikes(SGD), jgrad.watch(ADAM)
free = jgrad.schedule_free
in_window = jgrad.skip_nonfinite(window)
STACKED = {"layer_3": {"w": None, "b": 0}}

# Parts of states that hold weights; and others of a leaf, of real parameters or of complex ones.
OTHERS = [
    (None, W, "None", "a real floating"),
    (X.astype("complex64"), W, "an array of complex64 and shape (3,)", "a real floating"),
    (jnp.arange(3), W, "an array of int32 and shape (3,)", "a real floating"),
    ("x", W, "'x' of type str", "a real floating"),
    (X, jax.tree.map(jnp.complex64, W), "an array of float32 and shape (3,)", "a complex"),
]


test_message = messages.test_of("wrappers", globals() | {"counting": counting})
