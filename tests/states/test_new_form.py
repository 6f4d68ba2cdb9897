"""A storage format that the library does not have, in one file: float8 with a scale for each row.

Users choose it by `moment_dtype`. Whoever adds another one begins with the class here.
"""

from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jgrad
from jgrad._forms.chosen import ChosenForm
from jgrad._trees import forms
from tests.backward import models
from tests.multi_device.meshes import mesh_of
from tests.support import compiler, draws, messages
from tests.support.memory import kinds
from tests.support.private import forced

FLOAT8 = jnp.float8_e4m3fn
LARGEST = float(jnp.finfo(FLOAT8).max)
NAME = "float8_rows"


class ScaledRows(NamedTuple):
    """element = values scale"""

    values: Any
    scale: Any  # float32, one for each row

    @property
    def shape(self):
        return self.values.shape

    @property
    def dtype(self):
        return self.values.dtype


def encoded(x):
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    scale = jnp.where(largest > 0, largest / LARGEST, 1.0).astype(jnp.float32)
    return ScaledRows((x / scale).astype(FLOAT8), scale)


class Float8Rows(ChosenForm):
    kind, name, words, precision = ScaledRows, NAME, "float8", 2.0**-4

    def array(self, x):
        return x.values.astype(jnp.float32) * x.scale

    def check(self, arg, i, x, like, *, real, remedy):
        if x.scale.shape != (*x.shape[:-1], 1):
            arg.fail(i, ValueError, f"`scale` of shape {x.scale.shape}; {remedy}")

    def zeros(self, p, like, layout, zeros, real):
        return encoded(jnp.zeros_like(p, jnp.float32))

    def write(self, moment, rule, args):
        moment.new = exact = rule(*args)
        if moment.has_form:
            new, flag = encoded(exact), moment.flag
            keep = lambda n, o: n if flag is None else jnp.where(flag, n, o)
            moment.new = jax.tree.map(keep, new, moment.old)
        return exact

    def is_made_of(self, values, scale):
        return getattr(values, "dtype", None) == FLOAT8

    def made_of(self, arg, i, like, x):
        return x if isinstance(x, ScaledRows) else encoded(x.astype(jnp.float32))


@pytest.fixture(autouse=True)
def entered(monkeypatch):
    """In the table, as long as a test runs."""
    form = Float8Rows()
    monkeypatch.setitem(forms.BY_KIND, ScaledRows, form)
    monkeypatch.setitem(forms._BY_NAME, NAME, form)
    return form


W = draws.normal({"w": (64, 128), "b": (7,)})


def gradient(i, w=W):
    return jax.tree.map(
        lambda x: jnp.sin(3 * x + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) + i), w
    )


GRADIENTS = [gradient(i) for i in range(3)]


def adam(**options):
    return jgrad.adam(1e-2, moment_dtype=NAME, **options)


def trained(tx, params=W, gradients=GRADIENTS):
    # As users have it: in JAX 0.8, programs that are not optimized round twice.
    options = compiler.as_users_have()
    step = jax.jit(jgrad.apply_gradients, static_argnums=0, compiler_options=options)
    state = tx.init(params)
    for g in gradients:
        params, state = step(tx, g, state, params)
    return params, state


def rounded(x):
    """In float64 NumPy, by the nearest number of three bits behind the leading one."""
    scale = np.max(np.abs(x), axis=-1, keepdims=True).astype(np.float32) / np.float32(LARGEST)
    numbers = x / scale
    unit = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(numbers), 1e-9))), -6) - 3)
    return np.round(numbers / unit) * unit * scale


def test_adam():
    """Beside its equation in float64, whose moments are rounded after each step."""
    w, m, v = (np.asarray(x, np.float64) for x in (W["w"], 0 * W["w"], 0 * W["w"]))
    for t, g in enumerate(GRADIENTS, 1):
        g = np.asarray(g["w"], np.float64)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        w -= 1e-2 * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        m, v = rounded(m), rounded(v)
    params, state = trained(adam())
    assert isinstance(state.mw["w"], ScaledRows)
    assert isinstance(state.vw["w"], ScaledRows)
    assert state.mw["b"].dtype == jnp.float32  # too small
    # Where a number is half-way in float32, it may be rounded the other way: one in a thousand.
    assert np.mean(np.abs(params["w"] - w) > 1e-6) < 5e-3
    np.testing.assert_allclose(params["w"], w, atol=2e-2 * 2**-4)


def test_a_skipped_step_leaves_it_alone():
    tx = jgrad.skip_nonfinite(adam())
    params, state = trained(tx)
    bad = jax.tree.map(lambda x: x.at[0].set(jnp.nan), GRADIENTS[0])
    new_params, new = jax.jit(jgrad.apply_gradients, static_argnums=0)(tx, bad, state, params)
    jax.tree.map(np.testing.assert_array_equal, new_params, params)
    jax.tree.map(np.testing.assert_array_equal, new.inner, state.inner)


@pytest.mark.slow(always=["True"])
@pytest.mark.parametrize("in_backward", [True, False])
def test_in_the_backward_pass(in_backward):
    """The step of each layer is the ordinary one, within the rounding of one gradient."""
    params, tx = models.params(width=32, hidden=256), adam()
    step = jgrad.step_in_backward(tx, models.loss)
    with forced(in_backward):
        found, state, _ = models.run(step, params, tx.init(params), [models.batch(0)])
    assert isinstance(state.mw["layers"]["up"], ScaledRows)
    g = jax.grad(models.loss)(params, models.batch(0))
    expected, ordinary = jgrad.apply_gradients(tx, g, tx.init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)
    for a, b in zip(jax.tree.leaves(state.mw), jax.tree.leaves(ordinary.mw), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=2**-3 + 1e-4, atol=1e-9)  # a neighbour


@pytest.mark.not_in_jax_0_8("host memory")
def test_offload():
    w = {"w": jnp.ones((512, 256))}
    g = [gradient(i, w) for i in range(2)]
    tx = jgrad.offload(adam())
    expected, inside = trained(adam(), w, g)
    found, state = trained(tx, w, g)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    state = jax.device_put(state, jax.memory.Space.Device)
    jax.tree.map(np.testing.assert_array_equal, state.mw, inside.mw)
    wide = tx.init({"w": jnp.ones((512, 256, 2))}).mw["w"]  # bytes stay, scales go
    assert kinds(wide) == ["device", "pinned_host"]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shardings(kind):
    """Codes as the parameter, scales along its rows; a step under `jit` keeps both."""
    mesh = mesh_of(kind, data=2, model=2)
    sharding = NamedSharding(mesh, P("data", "model"))
    w = jax.device_put({"w": W["w"]}, sharding)
    tx = adam()
    shardings = jgrad.state_shardings(tx, w)
    assert shardings.mw["w"].values.is_equivalent_to(sharding, 2)
    assert shardings.mw["w"].scale.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
    state = jax.jit(tx.init, out_shardings=shardings)(w)
    jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or 1 / 0, state, shardings)


def test_carry_over():
    """From float32 and back, within half of the distance of neighbours."""
    _, old = trained(jgrad.adam(1e-2))
    like = jax.eval_shape(adam().init, W)
    new, account = jgrad.carry_over(old, like=like)
    assert account.converted == ("mw/w", "vw/w")
    assert "float32 to float8" in str(account)
    again, account = jgrad.carry_over(new, like=jax.eval_shape(jgrad.adam(1e-2).init, W))
    assert "float8 to float32" in str(account)
    top = np.abs(old.mw["w"]).max(axis=-1, keepdims=True)
    np.testing.assert_allclose(
        again.mw["w"], old.mw["w"], rtol=2**-4, atol=float(top.max()) * 2**-9
    )
    same, account = jgrad.carry_over(new, like=like)
    assert account.converted == ()
    jax.tree.map(np.testing.assert_array_equal, same, new)


@pytest.mark.parametrize("by", ["flax", "orbax", "orbax without a target"])
def test_checkpoints(by, tmp_path):
    _, state = trained(adam())
    if by == "flax":
        target = jax.tree.map(jnp.zeros_like, state)
        found = flax.serialization.from_bytes(target, flax.serialization.to_bytes(state))
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", state)
            checkpointer.wait_until_finished()
            shapes = jax.eval_shape(lambda: state)
            found = checkpointer.restore(tmp_path / "state", *([shapes] if by == "orbax" else []))
        if by != "orbax":
            found, _ = jgrad.carry_over(found, like=shapes, strict=True)
    assert isinstance(found.mw["w"], ScaledRows)
    jax.tree.map(np.testing.assert_array_equal, found, state)


test_messages = messages.test_of("new_form", globals())
