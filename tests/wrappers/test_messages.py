"""What wrappers say of wrong inputs, to the letter."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jgrad
from tests.cases import RATE, rank_two
from tests.support.errors import assert_error
from tests.wrappers.test_every_wrapper import WRAPPERS
from tests.wrappers.test_hand_over import counting

X, SGD, ADAM, LAMB = jnp.ones(3), jgrad.gradient_descent(0.1), jgrad.adam(0.1), jgrad.lamb(0.1)
W = {"layer_3": {"w": jnp.ones((3, 2)), "b": X}}
HALF = jax.tree.map(jnp.bfloat16, W)
AXES = "expected None, an axis name, a tuple of names, or a PartitionSpec."
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
    if wrapper.shares:
        message = f"`mesh_axes`: 3 of type int, {AXES}"
        says(TypeError, message, lambda: wrapper.around(ADAM, mesh_axes=3))
    if name in ("clip_by_global_norm", "offload"):
        name = "adam"
    message = "`updates` does not match `params` at ['layer_3']['b']: shape (3, 1), expected (3,)."
    says(ValueError, message, lambda: tx.update(with_b(jnp.ones((3, 1))), state, W))
    message = "`updates` does not have the structure of `params`: only `params` has ['layer_3']."
    says(ValueError, message, lambda: tx.update({}, state, W))
    message = f"`params` at ['layer_3']['b']: 'abc' of type str, {NUMBERS_ONLY}"
    says(TypeError, message, lambda: tx.update(W, state, with_b("abc")))


NEEDS = {
    "average_params": (jgrad.average_params(SGD, 0.9), "the average"),
    "lamb": (jgrad.skip_nonfinite(LAMB), "the trust ratio"),
    "master_weights": (jgrad.master_weights(SGD), "the master copy"),
    "schedule_free": (jgrad.schedule_free(SGD), "the average"),
    "stochastic_rounding": (jgrad.stochastic_rounding(SGD), "the rounding of new weights"),
    "watch": (jgrad.watch(SGD), "the norm of the parameters"),
}


@pytest.mark.parametrize("name", NEEDS)
def test_what_needs_the_parameters(name):
    tx, what = NEEDS[name]
    message = f"{name}: {what} needs the parameters: call `update(updates, state, params)`."
    assert_error(ValueError, message, lambda: update(tx, w=None))


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

LOSS = "expected a real scalar; call `update(updates, state, params, loss=value)`."
MISSING = "missing, expected one with `weighted=True`; call `update(updates, state, params, weight=tokens)`."
INIT = "call `init` with parameters of the dtypes that `update` gets."
BITS = "expected bfloat16, or 32 bits or more; use `master_weights` for"
FITS = "`init` made this state for other parameters or options."
POWER = "expected a number in [0, 4], with which weights have ratios in float32."

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
COPIES = [
    ("average_params: `state.average`", averaged, "average"),
    ("schedule_free: `state.z`", free(SGD), "z"),
    ("schedule_free: `state.average`", free(SGD), "average"),
]
OTHERS = [
    (None, W, "None", "a real floating"),
    (X.astype("complex64"), W, "an array of complex64 and shape (3,)", "a real floating"),
    (jnp.arange(3), W, "an array of int32 and shape (3,)", "a real floating"),
    ("x", W, "'x' of type str", "a real floating"),
    (X, jax.tree.map(jnp.complex64, W), "an array of float32 and shape (3,)", "a complex"),
]

MESSAGES = [
    (ValueError, "accumulate: `every`: a function, expected an int, since no state inside counts its updates, "
     "as the states of jgrad's optimizers do.", lambda: jgrad.accumulate(optax.sgd(0.1), lambda n: 2).init(X)),
    (AttributeError, "AccumulateState: `gradient_step`: no state inside counts its updates, expected one of a method of "
     "jgrad, or of a schedule.", lambda: jgrad.accumulate(optax.sgd(0.1), 2).init(X).gradient_step),
    (ValueError, "accumulate: `every`: 0, expected a number in [1, 2^31).",
     lambda: jgrad.accumulate(SGD, lambda n: 0).init(X)),
    (ValueError, "accumulate: `every`: -1, expected a number in [1, 2^31).",
     lambda: jgrad.accumulate(SGD, lambda n: n - 1).init(X)),
    (ValueError, "accumulate: `state.total` does not have the structure of `params`: only `state.total` has ['a']; "
     "only `params` has ['layer_3'].", lambda: update(window, state=window.init({"a": X}))),
    (ValueError, "lamb: the trust ratio needs the parameters: call `update(updates, state, params)`.",
     lambda: update(jgrad.accumulate(LAMB, 2), w=None, emit=True)),
    (ValueError, "accumulate: `weight`: 3.0 of type float, expected None without `weighted=True`.",
     lambda: update(window, weight=3.0)),
    (TypeError, "accumulate: `every`: an array of int32 and shape (), expected an int.",
     lambda: jgrad.accumulate(SGD, jnp.int32(2))),
    (TypeError, "accumulate: `every`: a function that returns an array of float32 and shape (), expected an int.",
     lambda: jgrad.accumulate(SGD, lambda n: jnp.float32(2)).init(X)),
    (TypeError, "accumulate: `emit`: 1 of type int, expected None or one bool.", lambda: update(window, emit=1)),
    (TypeError, "accumulate: `finite`: an array of float32 and shape (3,), expected None or one bool.",
     lambda: update(window, finite=X)),
    (TypeError, f"accumulate: `weight`: {MISSING}", lambda: update(weigh)),
    (TypeError, f"accumulate: `weight`: {MISSING}", lambda: update(weigh, emit=False, tokens=3)),
    (TypeError, "accumulate: `update` got the keyword `weights`, expected `weight`.",
     lambda: update(weigh, weights=3)),
    (TypeError, "accumulate: `weight`: an array of complex64 and shape (), expected a real array or a number.",
     lambda: update(weigh, weight=jnp.complex64(1))),
    (TypeError, "accumulate: `state`: AccumulateState, expected the WeightedAccumulateState that this `accumulate` "
     "made with `init`.", lambda: update(weigh, state=window.init(W))),
    (TypeError, "accumulate: `state`: WeightedAccumulateState, expected the AccumulateState that this `accumulate` "
     "made with `init`.", lambda: update(window, state=weigh.init(W))),
    (ValueError, "clip_by_global_norm: `mesh_axes` at ['layer_3']['b']: no axis 'data' here; `mesh_axes` is for "
     "`shard_map` and `pmap`; under `jit` leaves are whole.", lambda: update(clip(1.0, mesh_axes="data"))),
    (ValueError, "clip_by_global_norm: `mesh_axes` does not have the structure of `updates`: only `mesh_axes` has "
     "['a']; only `updates` has ['layer_3'].", lambda: update(clip(1.0, mesh_axes={"a": None}))),
    (TypeError, "clip_by_global_norm: `updates` at ['layer_3']['b']: 'abc' of type str, expected an array or a "
     "number.", lambda: update(clip(1.0), with_b("abc"))),
    (ValueError, "clip_by_global_norm: `of`: 'last' of type str, expected one of 'current', 'previous'.",
     lambda: clip(1.0, of="last")),
    (TypeError, "clip_by_global_norm: `state`: EmptyState, expected the ClipState that this `clip_by_global_norm` made "
     "with `init`.", lambda: update(clip(1.0, of="previous"), state=clip(1.0).init(W))),
    (TypeError, f"clip_by_global_norm: `mesh_axes` at ['a']: 3 of type int, {AXES}",
     lambda: clip(1.0, mesh_axes={"a": 3})),
    (ValueError, "average_params: `debias`: True, expected False where `decay` is a function.",
     lambda: jgrad.average_params(SGD, lambda done: 0.9, debias=True)),
    (ValueError, "average_params: `decay`: 1.5, expected a number in [0, 1).", lambda: update(jgrad.average_params(SGD, lambda done: 1.5))),
    (ValueError, "average_params: `state.average` does not have the structure of `params`: only `params` has ['layer_3'].",
     lambda: update(averaged, state=averaged.init({}))),
    (ValueError, "average_params: `state.average` does not match `params` at ['layer_3']['b']: shape (2,), expected (3,).",
     lambda: update(averaged, state=averaged.init(with_b(jnp.ones(2))))),
    *((TypeError, f"{name} at ['layer_3']['b']: {came}, expected an array of {kind} dtype.",
       lambda tx=tx, field=field, x=x, w=w: update(tx, w, w, tx.init(w)._replace(**{field: with_b(x)})))
      for name, tx, field in COPIES for x, w, came, kind in OTHERS),
    (ValueError, "average_params: `updates` does not match `params` at ['layer_3']['b']: shape (3, 1), expected (3,).",
     lambda: update(averaged, with_b(jnp.ones((3, 1))))),
    (TypeError, "average_params: `decay`: None, expected a real array or a number.", lambda: jgrad.average_params(SGD, None)),
    (TypeError, "average_params: `decay`: 'x' of type str, expected a real array or a number.",
     lambda: update(jgrad.average_params(SGD, lambda done: "x"))),
    (TypeError, f"average_params: `params` at ['layer_3']['b']: 'abc' of type str, {NUMBERS_ONLY}",
     lambda: update(averaged, w=with_b("abc"))),
    (TypeError, "global_norm: `tree` at [0]: 3 of type int, expected an array or a float.",
     lambda: jgrad.global_norm([3, 4])),
    (TypeError, "clip_by_global_norm: `updates` at [1]: 4 of type int, expected an array or a float.",
     lambda: clip(1.0).update([3.0, 4], optax.EmptyState())),
    (TypeError, f"global_norm: `mesh_axes`: 3 of type int, {AXES}", lambda: jgrad.global_norm(W, mesh_axes=3)),
    (TypeError, "global_norm: `tree` at ['layer_3']['b']: 'abc' of type str, expected an array or a number.",
     lambda: jgrad.global_norm(with_b("abc"))),
    (TypeError, "global_norm: `tree` at ['k']: an array of key<fry> and shape (), expected an array or a number.",
     lambda: jgrad.global_norm({"k": jax.random.key(0)})),
    (ValueError, "master_weights: `state.master` at ['layer_3']['b']: an array of float32 and shape (3,), expected "
     f"None for a parameter that needs no copy; {INIT}", lambda: update(half, state=half.init(HALF))),
    (ValueError, "master_weights: `state.master` at ['layer_3']['b']: None, expected a float32 copy of a parameter "
     f"of bfloat16; {INIT}", lambda: update(half, HALF, HALF)),
    *((ValueError, f"master_weights: `state.master` at ['layer_3']['b']: {came}, expected a float32 copy of a "
       f"parameter of bfloat16; {INIT}", lambda x=x: update(half, HALF, HALF, half.init(HALF)._replace(master=with_b(x))))
      for x, w, came, _ in OTHERS[1:] if w is W),
    (ValueError, "master_weights: `state.master` does not match `params` at ['layer_3']['b']: shape (3, 1), "
     "expected (3,).", lambda: update(half, HALF, HALF, half.init(jax.tree.map(lambda x: x[..., None], HALF)))),
    (ValueError, "master_weights: `state.master` does not have the structure of `params`: only `params` has "
     "['layer_3'].", lambda: update(half, state=half.init({}))),
    (TypeError, "master_weights: `updates` at ['layer_3']['b']: an array of int32 and shape (3,), expected a real "
     "floating dtype for a parameter of float32.", lambda: update(half, with_b(jnp.arange(3)))),
    (TypeError, "report: `state`: OptState, which has nothing to report, expected one that holds the state of `watch`, "
     "or of a wrapper that counts.", lambda: jgrad.report(SGD.init(W))),
    (ValueError, f"schedule_free: `weight_power`: 4.5, {POWER}", lambda: free(ADAM, weight_power=4.5)),
    (ValueError, f"schedule_free: `step_power`: 4.5, {POWER}", lambda: free(ADAM, step_power=4.5)),
    (ValueError, "skip_nonfinite: `branch`: True, expected False around `accumulate`.",
     lambda: update(jgrad.skip_nonfinite(window, branch=True))),
    (ValueError, "skip_nonfinite: `branch`: True, expected False around `accumulate`.",
     lambda: update(jgrad.skip_nonfinite(counting(window), branch=True))),
    (TypeError, "skip_nonfinite: `finite`: 1 of type int, expected None or one bool.",
     lambda: update(in_window, finite=1)),
    (TypeError, "skip_nonfinite: `finite`: an array of float32 and shape (3,), expected None or one bool.",
     lambda: update(in_window, finite=X)),
    (ValueError, "skip_spikes: `state.losses`: shape (8,), expected (128,), as `window` says.",
     lambda: update(spikes, state=jgrad.skip_spikes(SGD, window=8).init(W), loss=1.0)),
    (TypeError, "skip_spikes: `finite`: 1 of type int, expected None or one bool.",
     lambda: update(jgrad.skip_spikes(window), loss=1.0, finite=1)),
    (TypeError, f"skip_spikes: `loss`: missing, {LOSS}", lambda: update(spikes)),
    (TypeError, f"skip_spikes: `loss`: 'high' of type str, {LOSS}", lambda: update(spikes, loss="high")),
    (TypeError, f"skip_spikes: `loss`: True of type bool, {LOSS}", lambda: update(spikes, loss=True)),
    (TypeError, f"skip_spikes: `loss`: an array of float32 and shape (3,), {LOSS}", lambda: update(spikes, loss=X)),
    (TypeError, f"skip_spikes: `loss`: an array of complex64 and shape (), {LOSS}",
     lambda: update(spikes, loss=jnp.complex64(1))),
    (TypeError, f"skip_spikes: `loss`: an array of bool and shape (), {LOSS}",
     lambda: update(spikes, loss=jnp.asarray(True))),
    (ValueError, "stochastic_rounding: `state.done`: shape (3,), expected (); map `update` over the models, as "
     "you did `init`.", lambda: update(rounded, state=jgrad.StochasticState(jnp.zeros(3, jnp.int32), SGD.init(W)))),
    (TypeError, f"stochastic_rounding: `params` at ['layer_3']['b']: an array of float16 and shape (3,), {BITS} "
     "float16.", lambda: rounded.init(with_b(jnp.ones(3, jnp.float16)))),
    (TypeError, f"stochastic_rounding: `params` at ['layer_3']['b']: an array of float16 and shape (3,), {BITS} "
     "float16.", lambda: update(rounded, w=with_b(jnp.ones(3, jnp.float16)))),
    (TypeError, "stochastic_rounding: `params` at ['layer_3']['b']: an array of float8_e4m3fn and shape (3,), "
     f"{BITS} float8_e4m3fn.", lambda: rounded.init(with_b(jnp.ones(3, jnp.float8_e4m3fn)))),
    (ValueError, f"watch: `state.report` at ['grad_norm/a']: missing, expected shape (); {FITS}",
     lambda: update(watched, {"a": X}, {"a": X}, watched.init(W)._replace(inner=ADAM.init({"a": X})))),
    (ValueError, f"watch: `state.report` at ['grad_norm/layer_3/b']: of shape (), expected shape (3,); {FITS}",
     lambda: update(jgrad.watch(ADAM, layer_axes=STACKED), state=watched.init(W))),
    (TypeError, "watch: `layer_axes` at ['a']: 'x' of type str, expected None, an int, or a tuple of ints.",
     lambda: jgrad.watch(ADAM, layer_axes={"a": "x"})),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "call"), MESSAGES)
def test_message(error, message, call):
    assert_error(error, message, call)
