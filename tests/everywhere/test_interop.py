"""Optimizers inside the combinators of optax, and models of equinox.

Training by flax is in `test_nnx.py` and `test_linen.py`, by other libraries in `tests/clients/`.
"""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.cases import RATE, every_case, gradients, params
from tests.support.loops import step_of, told


def close(found, expected, rtol=1e-6, atol=1e-6):
    chex.assert_trees_all_close(found, expected, rtol=rtol, atol=atol)


def apply(tx, w, grads, **extra):
    """Some jitted steps, in one trace."""
    step, state = jax.jit(step_of(told(tx, **extra))), tx.init(w)
    for g in grads:
        w, state = step(w, state, g)
    assert step._cache_size() == 1
    return w, state


# ---- optax -------------------------------------------------------------------------------------


@every_case(())
def test_chain(case, standard_promotion):
    """Clipping before and nothing after is the optimizer on clipped gradients."""
    w, grads = params(), gradients(3)
    tx = optax.chain(optax.clip(0.01), case.tx())
    clipped = [jax.tree.map(lambda g: jnp.clip(g, -0.01, 0.01), g) for g in grads]
    close(apply(tx, w, grads)[0], apply(case.tx(), w, clipped)[0])


def test_trust_ratio_masks_and_missing_gradients():
    w = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([6.0, 8.0]), "n": jnp.arange(2)}
    u = {"a": jnp.array([1.0, 0.0]), "b": jnp.array([1.0, 0.0]), "n": None}
    tx = jgrad.scale_by_trust_ratio(trust_ratio_mask={"a": True, "b": False, "n": True})
    found, state = tx.update(u, tx.init(w), w)
    close(found, {"a": 5 * u["a"], "b": u["b"], "n": jnp.zeros(2, int)})
    assert state == optax.EmptyState()


@every_case(())
@pytest.mark.parametrize(
    "partition", [optax.partition, pytest.param(optax.multi_transform, marks=pytest.mark.slow)]
)
def test_partition(case, partition, standard_promotion):
    case = case.without_masks()
    w, grads = params(), gradients(3)
    tx = partition({"fast": case.tx(0.1), "slow": case.tx(0.01)}, {"layer": "fast", "rest": "slow"})
    found, _ = apply(tx, w, grads)
    for key, rate in (("layer", 0.1), ("rest", 0.01)):
        expected, _ = apply(case.tx(rate), w[key], [g[key] for g in grads])
        close(found[key], expected)


@every_case(())
def test_multi_steps(case, standard_promotion):
    """Two halves make one step."""
    w, grads = params(), gradients(4)
    means = [jax.tree.map(lambda a, b: (a + b) / 2, *pair) for pair in (grads[:2], grads[2:])]
    found, _ = apply(optax.MultiSteps(case.tx(), every_k_schedule=2), w, grads)
    # atol: Adam's first steps divide by the gradient, whose mean is rounded in another order.
    close(found, apply(case.tx(), w, means)[0], rtol=1e-5, atol=1e-5)


@every_case(("momentum",))
def test_apply_if_finite(case, standard_promotion):
    w, grads = params(), gradients(3)
    poisoned = [*grads[:2], jax.tree.map(lambda g: g * jnp.nan, grads[0]), grads[2]]
    tx = optax.apply_if_finite(case.tx(), max_consecutive_errors=5)
    close(apply(tx, w, poisoned)[0], apply(case.tx(), w, grads)[0])


@every_case()
def test_tree_get(case, standard_promotion):
    """State is found by name, inside of whatever stands around it."""
    w = params()
    tx = optax.chain(optax.clip(1.0), optax.masked(case.without_masks().tx(), True))
    state = tx.init(w)
    assert optax.tree.get(state, "step") == 0
    for name in case.state:
        expected = getattr(case.without_masks().tx().init(w), name)
        chex.assert_trees_all_equal(optax.tree.get(state, name), expected)
    changed = optax.tree.set(state, step=jnp.int32(7))
    assert optax.tree.get(changed, "step") == 7


def test_optax_names():
    """`count`, `mu` and `nu` read what optax's state has there; fields are those of the format."""
    state = jgrad.adam(RATE).init(params())
    assert state.count is state.step
    assert state.mu is state.mw
    assert state.nu is state.vw
    assert state._fields[:3] == ("step", "mw", "vw")
    assert optax.tree.get(state, "count") is None  # as the docs say: fields only


@every_case()
def test_tree_map_params(case):
    """optax knows which parts of the state are like the parameters."""
    tx, w = case.tx(), params()
    marked = optax.tree_map_params(
        tx, lambda _: "moment", tx.init(w), transform_non_params=lambda _: "other"
    )
    assert marked.step == "other"
    for name in case.state:
        assert set(jax.tree.leaves(getattr(marked, name))) == {"moment"}


# ---- equinox -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_equinox_whole_model(standard_promotion):
    """`watch` and 8 bits, with the model itself as the parameters: the numbers of its arrays alone."""
    model = eqx.nn.MLP(64, 8, 96, 1, activation=jnp.tanh, key=jax.random.key(0))
    tx, x = jgrad.watch(jgrad.adam(1e-2, moment_dtype="8bit")), jnp.ones((4, 64))
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    state = tx.init(arrays)

    def step(params, state, whole):
        grads = eqx.filter_grad(lambda m: jnp.sum(jax.vmap(m)(x) ** 2))(whole(params))
        updates, state = tx.update(grads, state, params)
        return eqx.apply_updates(params, updates), state

    jitted = eqx.filter_jit(functools.partial(step, whole=lambda m: m))
    found = jitted(*jitted(model, state))
    of_arrays = jax.jit(functools.partial(step, whole=lambda w: eqx.combine(w, rest)))
    expected = of_arrays(*of_arrays(arrays, state))
    assert "grad_norm/layers/0/weight" in found[1].report
    assert found[1].inner.mw.layers[0].weight.codes.dtype == jnp.int8
    pairs = zip(*map(jax.tree.leaves, (eqx.filter(found, eqx.is_array), expected)), strict=True)
    for a, b in pairs:
        np.testing.assert_array_equal(a, b)
