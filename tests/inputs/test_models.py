"""Whole models as parameters, with leaves that are no arrays; and variables in place of arrays."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.inputs.test_functions import assert_close, node
from tests.multi_device.meshes import mesh_of
from tests.support.choice import mostly_slow


@node
class Model:
    """Stands for a model of equinox, whose fields are all leaves."""

    w: Any
    b: Any
    activation: Any = jax.nn.relu
    name: Any = "model"
    flag: Any = True
    scale: Any = 2.0
    count: Any = 3
    key: Any = dataclasses.field(default_factory=lambda: jax.random.key(0))
    nothing: Any = None
    index: Any = dataclasses.field(default_factory=lambda: jnp.arange(3))


def is_inexact(x):
    """`eqx.is_inexact_array`"""
    return isinstance(x, (jax.Array, np.ndarray)) and jnp.issubdtype(x.dtype, jnp.inexact)


def filtered(model, keep=is_inexact):
    """`eqx.filter`"""
    return jax.tree.map(lambda x: x if keep(x) else None, model, is_leaf=lambda x: x is None)


def applied(model, updates):
    """`eqx.apply_updates`"""
    add = lambda u, p: p if u is None else p + u
    return jax.tree.map(add, updates, model, is_leaf=lambda x: x is None)


def model(dtype=jnp.float32):
    return Model(jnp.full((3, 2), 0.5, dtype), jnp.ones(3, dtype))


def gradient(model):
    """As `eqx.filter_grad` has it: None beside what is no floating array."""
    return jax.tree.map(lambda x: None if x is None else 0.5 * x, filtered(model), is_leaf=None)


RECIPES = {
    "gradient_descent": lambda: jgrad.gradient_descent(0.1),
    "momentum": lambda: jgrad.gradient_descent(0.1, momentum=0.9),
    "adamw": lambda: jgrad.adam(0.1, weight_decay=0.1, weight_decay_mask=matrices),
    "rates": lambda: jgrad.adam(filtered(Model(w=jnp.asarray(0.1), b=jnp.asarray(0.2)))),
    "lars": lambda: jgrad.lars(0.1, trust_ratio_mask=matrices),
    "lamb": lambda: jgrad.lamb(0.1),
    "clip": lambda: optax.chain(jgrad.clip_by_global_norm(0.1), jgrad.adam(0.1)),
    "ema": lambda: jgrad.average_params(jgrad.adam(0.1), 0.9),
    "master_weights": lambda: jgrad.master_weights(jgrad.adam(0.1)),
    "accumulate": lambda: jgrad.accumulate(jgrad.adam(0.1), 2),
    "skip_nonfinite": lambda: jgrad.skip_nonfinite(jgrad.adam(0.1)),
    "pack_small": lambda: jgrad.pack_small(jgrad.lamb(0.1)),
    "all": lambda: jgrad.skip_nonfinite(
        jgrad.accumulate(
            jgrad.master_weights(
                jgrad.pack_small(
                    jgrad.average_params(
                        optax.chain(jgrad.clip_by_global_norm(0.1), jgrad.lamb(0.1)), lambda _: 0.9
                    )
                )
            ),
            2,
        )
    ),
}
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def trained(tx, model, state, steps=3):
    """As a loop of equinox: arrays are traced, all else is static. The model, and the traces."""
    traces = []

    @functools.partial(jax.jit, static_argnums=2)
    def step(arrays, state, static):
        traces.append(static)
        leaves, structure = static
        own = [x if s is ARRAY else s for x, s in zip(arrays, leaves, strict=True)]
        whole = structure.unflatten(own)
        updates, state = tx.update(gradient(whole), state, whole)
        assert all(getattr(updates, name) is None for name in (*REST, "key"))
        return jax.tree.map(lambda x: x if is_array(x) else None, applied(whole, updates)), state

    for _ in range(steps):
        leaves, structure = jax.tree.flatten(model, is_leaf=lambda x: x is None)
        static = (tuple(ARRAY if is_array(x) else x for x in leaves), structure)
        arrays = [x if is_array(x) else None for x in leaves]
        new, state = step(arrays, state, static)
        both = zip(jax.tree.leaves(new, is_leaf=lambda x: x is None), leaves, strict=True)
        model = structure.unflatten([y if x is None else x for x, y in both])
    return model, state, len(traces)


ARRAY = object()
REST = ("activation", "name", "flag", "scale", "count", "nothing")


def is_array(x):
    return isinstance(x, jax.Array)


@pytest.mark.slow(
    always=[
        "init of arrays-bfloat16-adamw",
        "init of all-bfloat16-adamw",
        "init of arrays-float32-pack_small",
        "init of arrays-bfloat16-ema",
    ]
)
@pytest.mark.parametrize("recipe", mostly_slow(RECIPES, "adamw", "ema", "pack_small", "all"))
@pytest.mark.parametrize("dtype", mostly_slow(DTYPES, "bfloat16"))
@pytest.mark.parametrize("whole", [False, True], ids=["init of arrays", "init of all"])
def test_whole_models(recipe, dtype, whole):
    """The same numbers as for the arrays alone; the rest is what it was, and nothing is retraced."""
    tx, start = RECIPES[recipe](), model(DTYPES[dtype])
    found, _, traces = trained(tx, start, tx.init(start if whole else filtered(start)))
    assert traces == 1
    assert type(found.scale) is float
    assert type(found.count) is int
    assert all(getattr(found, name) is getattr(start, name) for name in REST)
    assert jnp.array_equal(found.index, start.index)
    assert found.index.dtype == start.index.dtype
    arrays = filtered(start)
    state, update = tx.init(arrays), jax.jit(tx.update)
    for _ in range(3):
        updates, state = update(gradient(arrays), state, arrays)
        arrays = optax.apply_updates(arrays, updates)
    # Packed or not, when `pack_small` packed at `init` what has no gradient: one rounding apart.
    rtol = float(jnp.finfo(DTYPES[dtype]).eps) if recipe in ("pack_small", "all") and whole else 0.0
    chex.assert_trees_all_close(filtered(found), arrays, rtol=rtol)


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("recipe", mostly_slow(RECIPES, "lamb", "all"))
def test_parts_of_a_model(recipe):
    """`init` of what is trained, `update` with all: what is frozen has no state and stays."""
    tx, start = RECIPES[recipe](), dataclasses.replace(model(), b=jnp.ones(3, jnp.bfloat16))
    without = dataclasses.replace(start, b=None)
    state = tx.init(filtered(without))
    g = gradient(without)
    for _ in range(2):
        updates, state = tx.update(g, state, start)
        assert updates.w is not None
        assert not np.any(updates.b)
        assert updates.b.dtype == jnp.bfloat16


def test_gradients_of_python_floats():
    """`jax.grad` has them; `init` reckons with them, and `update` returns an array."""
    tx = jgrad.adam(0.1)
    updates, _ = tx.update({"w": jnp.asarray(0.5)}, tx.init({"w": 2.0}), {"w": 2.0})
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-5)


def test_shardings_of_the_state_of_a_whole_model():
    device = jax.sharding.NamedSharding(mesh_of(x=1), jax.sharding.PartitionSpec())
    start = jax.device_put(filtered(model()), device)
    start = dataclasses.replace(start, activation=jax.nn.relu, name="model")
    found = jgrad.state_shardings(jgrad.adam(0.1), start)
    assert found.mw.w.is_equivalent_to(device, 2)
    assert found.mw.activation is found.mw.name is None


# ---- variables ---------------------------------------------------------------------------------


class Variable:
    """Stands for a variable of flax's nnx in hijax mode: a leaf, and no array."""

    def __init__(self, value):
        self.value = value

    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)

    def __jax_array__(self):
        return self.value

    def __call__(self, *args):  # as nnx has it
        return self.value(*args)


W = {"w": jnp.full((3, 2), 0.5), "b": jnp.ones(3)}
G = jax.tree.map(lambda x: 0.5 * x, W)


def variables(tree):
    return jax.tree.map(Variable, tree)


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize(
    "recipe", mostly_slow([x for x in RECIPES if x != "rates"], "momentum", "ema", "all")
)
def test_variables(recipe):
    """In `init` and in `update`, as parameters, gradients and state."""
    tx = RECIPES[recipe]()
    state = tx.init(variables(W))
    chex.assert_trees_all_equal(state, tx.init(W))
    expected = tx.update(G, state, W)
    chex.assert_trees_all_equal(tx.update(G, state, variables(W)), expected)
    everything = variables(G), variables(state), variables(W)
    chex.assert_trees_all_equal(tx.update(*everything), expected)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(expected))


def test_variables_of_functional_updates():
    zeros = jax.tree.map(jnp.zeros_like, W)
    expected = jgrad.adam_update(W, G, 0.1, zeros, zeros, 1)
    given = (variables(W), variables(G), Variable(jnp.asarray(0.1)), variables(zeros))
    found = jgrad.adam_update(*given, variables(zeros), 1, beta1=Variable(jnp.asarray(0.9)))
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y)
    packed = jgrad.pack(variables(W))
    chex.assert_trees_all_equal(jgrad.unpack(packed), W)
    chex.assert_trees_all_equal(jgrad.pack(variables(W), like=packed), packed)
    assert jgrad.global_norm(variables(W)) == jgrad.global_norm(W)


def test_variables_as_numbers():
    """An array as ever, though it can be called."""
    tx = jgrad.gradient_descent(Variable(jnp.asarray(0.2)), momentum=Variable(jnp.asarray(0.9)))
    updates, _ = tx.update(G, tx.init(W), W)
    assert_close(updates, jax.tree.map(lambda x: -0.2 * x, G))
    average = jgrad.average_params(optax.identity(), Variable(jnp.asarray(0.9)))
    average.update(G, average.init(W), W)


def test_a_model_from_a_third_party():
    """One that hands on whole models, inside a wrapper, which makes arrays of them outside of it."""
    adam, whole = jgrad.adam(0.1), model()

    def update(updates, state, params=None):
        del params
        return adam.update(updates, state, whole)

    third_party = optax.GradientTransformation(lambda _: adam.init(whole), update)
    found = [
        tx.update(gradient(whole), tx.init(whole), whole)[0]
        for tx in (third_party, jgrad.watch(third_party))
    ]
    assert_close(*found)
