"""What a transformation is told of a loss that was multiplied by a loss scale.

The truth is the ordinary step, which divides the value by the scale before it hands it on.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import jgrad
from tests.backward import models
from tests.backward.test_gradients import both_forms
from tests.support.private import forced, inner_equations

INTERVAL = 2  # after so many steps the scale doubles


def scaled(tx=None):
    """The scale, far above the losses."""
    tx = jgrad.gradient_descent(1e-4) if tx is None else tx
    return jgrad.skip_nonfinite(tx, loss_scale=8.0, growth_interval=INTERVAL)


def plateau():
    return optax.contrib.reduce_on_plateau(0.5, patience=3, rtol=1e-6)


TX = {
    "skip_spikes": lambda: jgrad.skip_spikes(scaled(), window=8),
    "reduce_on_plateau": lambda: optax.chain(scaled(), plateau()),
    "inside": lambda: scaled(jgrad.skip_spikes(jgrad.gradient_descent(1e-4), window=8)),
    "beside a wrapper without one": lambda: jgrad.skip_spikes(scaled(jgrad.skip_nonfinite(jgrad.gradient_descent(1e-4))), window=8),
    "one for each group": lambda: jgrad.skip_spikes(
        optax.partition({"a": scaled(), "b": scaled()}, {"first": "a", "layers": "a", "last": "b"}),
        window=8,
    ),
}  # fmt: skip


def scale_of(state):
    """That of the first group."""
    scales = optax.tree.get_all_with_path(state, "loss_scale")
    return max(float(x) for _, x in scales)


def loss(params, x, scale):
    return scale * models.loss(params, x)


def run(step, tx, steps=8, scale_of=scale_of):
    params, x = models.params(), models.batch()
    state, values = tx.init(params), []
    for _ in range(steps):
        params, state, value = step(params, state, x, scale_of(state))
        values.append(float(value))
    return params, state, values


def ordinary(tx):
    """A step as a user writes it."""

    @jax.jit
    def step(params, state, x, scale):
        value, grads = jax.value_and_grad(loss)(params, x, scale)
        said = {"loss": value / scale, "value": value / scale}
        return *jgrad.apply_gradients(tx, grads, state, params, **said), value

    return step


@pytest.mark.slow(always=["skip_spikes-ordinary", "reduce_on_plateau-backward"])
@both_forms
@pytest.mark.parametrize("name", TX)
def test_the_scale_is_not_in_the_loss(name, is_forced, standard_promotion):
    """It doubles four times, and no step is skipped; what is returned is what the loss returned."""
    tx = TX[name]()
    with forced(is_forced):
        step = jax.jit(jgrad.step_in_backward(tx, loss, first_pass=True, elementwise=True))
        found, expected = run(step, tx), run(ordinary(tx), tx)
    models.assert_equal(found[:2], expected[:2], 8)
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-6)
    assert scale_of(found[1]) == 8.0 * 2 ** (len(found[2]) // INTERVAL)
    assert found[2][-1] > 4 * found[2][0]
    if name != "reduce_on_plateau":
        assert jgrad.report(found[1])["spikes"] == 0


def seen(dtype):
    """A transformation that keeps what it is told."""

    def update(updates, state, params=None, *, loss, value, **extra):
        return updates, tuple(jnp.asarray(x, state[0].dtype) for x in (loss, value))

    zeros = lambda params: (jnp.zeros((), dtype),) * 2
    return optax.GradientTransformationExtraArgs(zeros, update)


@both_forms
def test_what_both_keywords_say(x64, is_forced):
    """The value, in its own precision; and what a call gives stands in its place."""
    params, x = models.params(jnp.float64), models.batch(0, jnp.float64)

    def wide(params, x, scale):
        x = jgrad.scan_layers(models.block, params["layers"], x)
        return scale * jnp.mean(jnp.square(x @ params["last"]))

    tx = optax.chain(scaled(), seen(jnp.float64))
    expected = wide(params, x, 8.0) / 8.0
    with forced(is_forced):
        step = jgrad.step_in_backward(tx, wide, first_pass=True, elementwise=True)
        given = params, tx.init(params), x, 8.0
        told = jax.jit(step)(*given)[1][1]
        own = jax.jit(lambda *args: step(*args, value=3.0))(*given)[1][1]
    np.testing.assert_allclose(told, [expected] * 2, rtol=1e-12)
    np.testing.assert_allclose(own, [expected, 3.0], rtol=1e-12)


@pytest.mark.not_in_jax_0_8("host memory")
@both_forms
def test_a_scale_in_host_memory(is_forced):
    """One computes with it on the device alone."""
    tx = jgrad.offload(TX["skip_spikes"]())
    with forced(is_forced):
        step = jgrad.step_in_backward(tx, loss, first_pass=True)
        given = models.params(), tx.init(models.params()), models.batch(), 8.0
        program = jax.make_jaxpr(step)(*given).jaxpr
        _, state, _ = run(jax.jit(step), tx)
    divisions = [x for x in inner_equations(program.eqns) if x.primitive.name == "div"]
    spaces = {x.aval.memory_space for eqn in divisions for x in eqn.invars}
    assert spaces == {jax.memory.Space.Device}
    assert scale_of(state) > 8.0
    assert jgrad.report(state)["spikes"] == 0
