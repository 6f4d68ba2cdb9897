"""Schedule-free training against the authors' code."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.cases import gradients, params
from tests.reference import schedule_free as reference
from tests.support.choice import mostly_slow
from tests.support.errors import assert_error
from tests.support.loops import assert_equal, every_step, step_of, train

WARMUP = 5
RATES = {
    "constant": (0.01, 0.01),
    "warm-up": (
        lambda done: jnp.minimum(1.0, (done + 1) / WARMUP) * 0.01,
        lambda k: min(1.0, (k + 1) / WARMUP) * 0.01,
    ),
    "from zero": (optax.linear_schedule(0.0, 0.01, WARMUP), lambda k: 0.01 * min(k / WARMUP, 1.0)),
    "falling": (optax.linear_schedule(0.01, 0.0, 60), lambda k: 0.01 * (1 - min(k / 60, 1.0))),
}


def adamw(rate, weight_decay=0.1, **options):
    inner = jgrad.adam(
        rate, beta1=0.0, beta2=0.99, epsilon=1e-8, bias_correction="moments",
        weight_decay=weight_decay,
    )  # fmt: skip
    return jgrad.schedule_free(inner, learning_rate=rate, **options)


def expected_steps(w, grads, rate, **options):
    steps = reference.adamw(
        jax.tree.leaves(w), rate, **{"beta2": 0.99, "weight_decay": 0.1} | options
    )
    next(steps)
    return [steps.send(jax.tree.leaves(g)) for g in grads]


def assert_steps(found, expected, rtol):
    for (w, state), (y, x) in zip(found, expected, strict=True):
        for tree, leaves in ((w, y), (optax.tree.get(state, "average"), x)):
            for a, b in zip(jax.tree.leaves(tree), leaves, strict=True):
                np.testing.assert_allclose(a, b, rtol, rtol * np.max(np.abs(b)))


OPTIONS = [{"beta": 0.5}, {"step_power": 1.0}, {"weight_power": 0.0}]
STEPS = [*((rate, {}) for rate in RATES), *(("warm-up", options) for options in OPTIONS)]


@pytest.mark.slow(always=["float64-warm-up-options5"])
@pytest.mark.parametrize(("rate", "options"), STEPS)
@pytest.mark.parametrize("dtype", mostly_slow(["float64", "float32", "complex128"], "float64"))
def test_reference(rate, options, dtype, x64, standard_promotion):
    """50 steps, parameters and average, with a rate that rises, or not, or falls; and each option."""
    w, grads = params(dtype), gradients(50, dtype)
    given, same = RATES[rate]
    names = {"step_power": "r", "weight_power": "power"}
    renamed = {names.get(name, name): value for name, value in options.items()}
    assert_steps(
        every_step(adamw(given, **options), w, grads),
        expected_steps(w, grads, same, **renamed),
        # Schedules are float32 in any case.
        3e-6 if dtype == "float32" or rate != "constant" else 1e-12,
    )


RATES_OF_A_CALL = {
    "number": lambda x: x,
    "tree": lambda x: {"layer": x, "rest": 0.5 * x},
    "rules": lambda x: jgrad.by_path({"layer/*": x}, rest=0.5 * x),
}


@pytest.mark.slow(always=["rules-False"])
@pytest.mark.parametrize("packed", mostly_slow([False, True], False))
@pytest.mark.parametrize("form", RATES_OF_A_CALL)
def test_the_rate_of_each_call(form, packed, standard_promotion):
    """A warm-up by `update(..., learning_rate=)`: the average is that of a schedule.

    Rates of leaves that are in proportion have one average: only ratios of weights matter.
    """
    w, grads, rates = params(), gradients(12), RATES_OF_A_CALL[form]
    _, same = RATES["warm-up"]
    rest = same if form == "number" else lambda k: 0.5 * same(k)
    layer, others = (
        expected_steps(w[key], [g[key] for g in grads], rate)
        for key, rate in (("layer", same), ("rest", rest))
    )
    expected = [
        (y + own_y, x + own_x) for (y, x), (own_y, own_x) in zip(layer, others, strict=True)
    ]
    form_of, tree_of = (jgrad.pack, jgrad.unpack) if packed else (lambda x: x,) * 2
    tx, found = adamw(1.0), []
    step = jax.jit(lambda w, s, g, x: step_of(tx)(w, s, g, learning_rate=rates(x)))
    w, state = form_of(w), tx.init(form_of(w))
    for k, g in enumerate(grads):
        w, state = step(w, state, form_of(g), jnp.float32(same(k)))
        found.append((tree_of(w), {"average": tree_of(state.average)}))
    assert_steps(found, expected, 5e-6)


def test_equal_weights_are_the_mean():
    """With one rate the average is that of all z, at each step; optax's in bfloat16 stops at 256."""
    w = jnp.zeros(4, jnp.bfloat16)
    tx = jgrad.schedule_free(jgrad.gradient_descent(1.0), beta=0.0)

    def body(carry, g):
        w, state = step_of(tx)(*carry, jnp.full(4, g, jnp.bfloat16))
        return (w, state), state.average[0]

    steps = np.ones(1000)
    (w, state), averages = jax.jit(lambda w: jax.lax.scan(body, (w, tx.init(w)), steps))(w)
    np.testing.assert_allclose(averages, -(np.arange(1000) + 2) / 2, rtol=1e-4)
    assert float(state.weight_sum) == 1000
    assert state.average.dtype == state.z.dtype == jnp.float32
    np.testing.assert_allclose(w.astype(jnp.float32), state.z, rtol=2**-8)


def test_a_leaf_without_a_gradient_stays():
    """So do its z and its average, bit for bit."""
    w, tx = {"a": jnp.ones(3), "b": jnp.full(2, 2.0)}, adamw(0.01)
    w, state = train(tx, w, [w, w])
    updates, new = tx.update(w | {"b": None}, state, w)
    assert_equal((new.z["b"], new.average["b"]), (state.z["b"], state.average["b"]))
    assert not np.any(updates["b"])


def test_double_precision(x64):
    """Scalars of the state are float64 beside float64 parameters, or what they were in a file."""
    w, tx = {"a": jnp.ones(3), "b": jnp.ones(2, jnp.bfloat16), "n": jnp.arange(2)}, adamw(0.01)
    g = w | {"n": None}
    new = tx.init(w)
    old = new._replace(
        weight_sum=new.weight_sum.astype(jnp.float32),
        largest_rate=new.largest_rate.astype(jnp.float32),
    )
    for state, dtype in ((new, jnp.float64), (old, jnp.float32)):
        body = lambda carry, _: (step_of(tx)(*carry, g), None)
        (_, end), _ = jax.jit(lambda c, body=body: jax.lax.scan(body, c, length=3))((w, state))
        assert end.weight_sum.dtype == end.largest_rate.dtype == dtype
        rate = dtype(0.01)
        np.testing.assert_allclose(end.weight_sum, 3 * rate**2, rtol=3 * np.finfo(dtype).eps)
    assert tx.init({"b": w["b"], "n": w["n"]}).weight_sum.dtype == jnp.float32


@pytest.mark.slow(always=["['float64', 'float64']-float32", "['float64', 'float64']-float64",
    "['float32', 'float64']-float32", "['float32', 'float64']-float64"])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "rates", [["float32"] * 2, ["float64"] * 2, ["float32", "float64"]], ids=str
)
def test_dtypes_of_the_rates_of_a_call(rates, dtype, x64):
    """The largest of all leaves, in the dtype of the state, whatever theirs are."""
    w = {name: jnp.ones(3, dtype) for name in "ab"}
    given = {"a": jnp.asarray(0.25, rates[0]), "b": jnp.asarray(0.5, rates[1])}
    tx = jgrad.schedule_free(optax.identity())
    for x in given["b"], given:
        _, state = tx.update(w, tx.init(w), w, learning_rate=x)
        assert state.largest_rate == 0.5
        assert state.largest_rate.dtype == dtype


EXTREMES = {
    "tiny rate": {"learning_rate": 1e-30},
    "huge rate": {"learning_rate": 1e30},
    "huge rate, powers": {"learning_rate": 1e30, "weight_power": 4.0, "step_power": 4.0},
    "tiny rate, powers": {"learning_rate": 1e-30, "weight_power": 4.0, "step_power": 4.0},
    "traced power": {"step_power": jnp.float32(1e30)},
    "traced powers": {"step_power": jnp.float32(1e30), "weight_power": jnp.float32(1e30)},
}


@pytest.mark.parametrize("options", EXTREMES.values(), ids=EXTREMES)
def test_weights_that_float32_cannot_hold(options):
    """The average moves, and stays within the z that it is of."""
    tx, w = jgrad.schedule_free(jgrad.gradient_descent(0.1), **options), jnp.ones(())
    w, state = train(tx, w, [jnp.ones(())] * 30)
    assert -2.01 < float(state.z) < float(state.average) < 0.9
    assert 0 < float(state.weight_sum) < np.inf


def test_a_rate_of_zero_has_no_weight():
    """Unless rates do not count."""
    for power, expected in (2.0, 1.0), (0.0, 0.45):
        tx = jgrad.schedule_free(
            jgrad.gradient_descent(0.1), learning_rate=0.0, weight_power=power, beta=0.0
        )
        _, state = train(tx, jnp.ones(()), [jnp.ones(())] * 10)
        np.testing.assert_allclose(state.average, expected, rtol=1e-5)


def test_large_powers_have_their_ratios():
    """A mean with weights k^4 over 3000 steps, in float64."""
    steps = 3000
    tx = jgrad.schedule_free(jgrad.gradient_descent(1.0), step_power=4.0, beta=0.0)
    body = lambda carry, g: (step_of(tx)(*carry, g), None)
    w = jnp.zeros(())
    (_, state), _ = jax.jit(lambda w: jax.lax.scan(body, (w, tx.init(w)), jnp.ones(steps)))(w)
    k = np.arange(1.0, steps + 1)
    np.testing.assert_allclose(-state.average, np.sum(k * k**4) / np.sum(k**4), rtol=1e-4)


# ---- from optax, and back ----------------------------------------------------------------------

W = {"b": jnp.linspace(-1, 1, 3), "w": jnp.linspace(-2, 3, 8).reshape(4, 2)}


def test_from_optax_and_back(standard_promotion):
    """Moments go on; z and the average, which optax does not store, begin as the parameters."""
    theirs = optax.contrib.schedule_free_adamw(0.01)
    ours = jgrad.schedule_free(jgrad.adam(0.01, beta1=0.0), learning_rate=0.01)
    old = theirs.update(W, theirs.init(W), W)[1]
    state, account = jgrad.carry_over(old, like=jax.eval_shape(ours.init, W), params=W)
    assert_equal((state.z, state.average, state.inner.vw), (W, W, optax.tree.get(old, "nu")))
    assert {"b1", "z/b", "z/w"} <= {*account.dropped}
    back, account = jgrad.carry_over(state, like=theirs.init(W))
    assert_equal((back.b1, back.step_count, back.z), (jnp.float32(0.9), jnp.asarray(1), W))
    assert {"b1", "step_count", "z/b", "z/w"} <= {*account.from_like}
    assert_error(
        ValueError,
        "carry_over: `like` at .b1: the shape of a part that `old` does not have, and that starts at "
        "unknown numbers, expected arrays: `like=tx.init(params)`.",
        lambda: jgrad.carry_over(state, like=jax.eval_shape(theirs.init, W), params=W),
    )
