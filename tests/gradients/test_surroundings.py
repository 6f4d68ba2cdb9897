"""Derivatives where training steps take them: beside JAX's own, in the same surroundings.

In `shard_map`, on meshes, under `pmap`, `vmap`, `scan` and `checkpoint` types say more than shapes
and dtypes: over which axes of a mesh an array varies or is sharded.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jgrad
from tests.multi_device.meshes import mesh_of, place, varying
from tests.support import oldest

W = {"w": jnp.linspace(-1.0, 1.0, 24).reshape(3, 8), "b": jnp.linspace(0.0, 1.0, 8)}
X = jnp.sin(jnp.arange(48.0)).reshape(16, 3)


def outputs(w, x):
    return jnp.tanh(x @ w["w"] + jnp.expand_dims(w["b"], 0))


def loss(w, x):
    return jnp.mean(outputs(w, x) ** 2)


def sums(w, x):
    """As many as `w["b"]` has elements: less than the elements of `w`."""
    return {"sum": jnp.sum(outputs(w, x), axis=0)}


def many(w, x):
    """More than the elements of `w["b"]`."""
    return outputs({"w": jax.lax.stop_gradient(w["w"]), "b": w["b"]}, x)


def along(w):
    return jax.tree.map(lambda p: 1 + 0 * p, w)


def at(w, x, f):
    return lambda w: f(w, x)


def execute(w, x):
    """Two outputs, of which one is the same on all devices."""
    f = lambda w: {"loss": loss(w, x), "sum": jnp.sum(w["w"] ** 2)}
    return jgrad.execute_with_gradients(f, w, ret_grad_idxs=None, retain_grads=True)


def execute_by_hand(w, x):
    others = {"loss": loss, "sum": lambda w, x: jnp.sum(w["w"] ** 2)}
    values = {name: f(w, x) for name, f in others.items()}
    return values, {name: jax.grad(f)(w, x) for name, f in others.items()}


FUNCTIONS = {
    "grad": (jgrad.grad(loss), jax.grad(loss)),
    "value_and_grad": (jgrad.value_and_grad(loss), jax.value_and_grad(loss)),
    "with aux": (jgrad.grad(lambda w, x: (loss(w, x), sums(w, x)), has_aux=True),
     jax.grad(lambda w, x: (loss(w, x), sums(w, x)), has_aux=True)),
    "grad of grad": (lambda w, x: jgrad.grad(jgrad.grad(lambda b: loss(w | {"b": b}, x)))(w["b"]),
     lambda w, x: jax.grad(lambda b: jnp.sum(jax.grad(lambda b: loss(w | {"b": b}, x))(b)))(w["b"])),
    "jac": (jgrad.jac(sums), jax.jacrev(sums)),
    "jac, reverse": (jgrad.jac(sums, mode="reverse"), jax.jacrev(sums)),
    "jac, forward": (jgrad.jac(sums, mode="forward"), jax.jacfwd(sums)),
    "jac, transposed": (lambda w, x: jgrad.jac(lambda b: many(w | {"b": b}, x))(w["b"]),
     lambda w, x: jax.jacfwd(lambda b: many(w | {"b": b}, x))(w["b"])),
    "value_and_jac": (jgrad.value_and_jac(sums), lambda w, x: (sums(w, x), jax.jacrev(sums)(w, x))),
    "hvp": (lambda w, x: jgrad.hvp(at(w, x, loss), (w,), (along(w),)),
     lambda w, x: jax.jvp(jax.grad(at(w, x, loss)), (w,), (along(w),))[1]),
    "hvp along constants": (lambda w, x: jgrad.hvp(at(w, x, loss), (w,), (jax.tree.map(jnp.ones_like, W),)),
     lambda w, x: jax.jvp(jax.grad(at(w, x, loss)), (w,), (along(w),))[1]),
    "execute_with_gradients": (execute, execute_by_hand),
}  # fmt: skip
every_function = pytest.mark.parametrize("name", FUNCTIONS)
every_mesh = pytest.mark.parametrize(
    "axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)


def assert_alike(name, run):
    """What `run` makes of our function and of JAX's, to a few roundings of the largest element."""
    found, expected = (jax.device_get(run(f)) for f in FUNCTIONS[name])
    if name != "execute_with_gradients":  # it returns lists and dicts of its own
        chex.assert_trees_all_equal_structs(found, expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.max(np.abs(b)))


@pytest.mark.slow(always=["unchecked-auto-grad", "w on all devices-auto-value_and_grad",
    "w of each device-auto-with aux", "w on all devices-auto-jac"])  # fmt: skip
@every_function
@every_mesh
@pytest.mark.parametrize("kind", ["unchecked", "w on all devices", "w of each device"])
def test_shard_map(name, axis_type, kind):
    """The usual data-parallel step: each device has a part of the batch, so its loss varies."""
    if kind == "w on all devices" and "jac" in name:
        oldest.skip("sums that vary")
    mesh = mesh_of(axis_type, data=8)

    def run(f):
        def local(w, x):
            if kind == "w of each device":
                w = jax.tree.map(lambda p: varying(p, "data"), w)
            return jax.tree.map(lambda y: jnp.expand_dims(y, 0), f(w, x))

        inside = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P("data"),
            check_vma=kind != "unchecked",
        )
        return jax.jit(inside)(place(W, mesh, dict.fromkeys(W, P())), place(X, mesh, P("data")))

    assert_alike(name, run)


SHARDED = {
    "data": ({"w": P(), "b": P()}, P("data")),
    "outputs": ({"w": P(None, "data"), "b": P("data")}, P()),
}


@pytest.mark.slow(one_in=32)
@every_function
@every_mesh
@pytest.mark.parametrize("where", SHARDED)
def test_jit(name, axis_type, where):
    """On sharded arrays."""
    mesh = mesh_of(axis_type, data=8)
    args = tuple(
        place(tree, mesh, specs) for tree, specs in zip((W, X), SHARDED[where], strict=True)
    )
    assert_alike(name, lambda f: jax.jit(f)(*args))


@pytest.mark.slow
@every_function
def test_pmap_and_vmap(name):
    """With the mean over the axis inside of the loss, and the batch of each device."""
    parts = X.reshape(8, 2, 3)
    for over in (jax.pmap, jax.vmap):
        assert_alike(name, lambda f, over=over: over(lambda x: f(W, x), axis_name="data")(parts))


@pytest.mark.slow(one_in=12)
@every_function
def test_scan_and_checkpoint(name):
    step = lambda f: lambda w, x: (w, f(w, x))
    assert_alike(name, lambda f: jax.lax.scan(step(f), W, X.reshape(8, 2, 3))[1])
    assert_alike(name, lambda f: jax.jit(jax.checkpoint(f))(W, X))


@pytest.mark.slow(one_in=12)
@every_function
def test_a_derivative_of_it(name):
    """As in learning an option: reverse mode through what was found."""

    def run(f):
        total = lambda w: sum(jnp.sum(y**2) for y in jax.tree.leaves(f(w, X)))
        return jax.jit(jax.grad(total))(W)

    assert_alike(name, run)
