"""Where `optax.contrib.muon` cuts its users, and what `muon` does there: a test of both sides.

A test that fails because optax has changed is a promise that is no longer worth its line. Its side
stands under `standard_promotion`, without which it does not run.
"""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.cases import rank_two
from tests.reference import optimizers as reference
from tests.support import messages
from tests.support.choice import mostly_slow

pytestmark = pytest.mark.skipif(
    "adam_learning_rate" not in inspect.signature(optax.contrib.muon).parameters,
    reason="What optax does here is that of optax 0.2.8.",
)

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def same_numbers_in_any_order():
    """Each test draws the same numbers, whichever ran before it."""
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.normal(size=shape), dtype)


def muon(rate=1.0, matrices=rank_two, adam_learning_rate=1.0, **options):
    return jgrad.muon(rate, matrices=matrices, adam_learning_rate=adam_learning_rate, **options)


def first_update(tx, w, g):
    return jax.jit(tx.update)(g, tx.init(w), w)[0]


# ---- 1, 2: which leaves are matrices -----------------------------------------------------------


def test_m02_embeddings_and_heads(standard_promotion):
    """Every leaf of two axes is a matrix to optax; here somebody has to say so."""
    w = {"embed": normal(30, 4), "hidden": normal(4, 5), "lm_head": normal(4, 30)}
    state = optax.contrib.muon(1.0).init(w)
    second = optax.tree.get(state, "nu")
    assert all(isinstance(x, optax.MaskedNode) for x in second.values())
    state = muon(matrices=jgrad.hidden_matrices()).init(w)
    assert {name for name, x in state.vw.items() if x is None} == {"hidden"}
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'matrices'"):
        jgrad.muon(0.1, adam_learning_rate=0.1)


# ---- 4: scales ---------------------------------------------------------------------------------


@pytest.mark.slow(always=["muon-float32-scales0"])
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [("float32", [1e-32, 1e-30, 1e-12, 1e18, 1e30, 1e37]), ("float16", [3e-6, 1e-4, 300.0, 1e4])],
)
@pytest.mark.parametrize("rule", ["muon", "normuon"])
def test_m04_gradients_of_every_size(dtype, scales, rule, standard_promotion):
    """The same orthogonal update. optax has 0 at 1e18, a fraction at 1e-12, and NaN in float16."""
    g, w = RNG.normal(size=(16, 24)), jnp.zeros((16, 24), dtype)
    tx = muon(rule=rule, nesterov=rule == "muon")
    update = jax.jit(lambda g: tx.update(g, tx.init(w), w))
    for scale in scales:
        x = jnp.asarray(scale * g, dtype)
        exact = reference.newton_schulz(np.asarray(x, np.float64).T).T * (24 / 16) ** 0.5
        updates, state = update(x)
        np.testing.assert_allclose(state.mw, 0.05 * np.asarray(x, np.float64), rtol=1e-3)
        found = -np.asarray(updates, np.float64)
        if rule == "muon":
            error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
            assert error < (1e-5 if dtype == "float32" else 1e-3), scale
        else:
            assert np.linalg.norm(found) == pytest.approx(np.linalg.norm(exact), rel=1e-3)
    theirs = optax.contrib.muon(1.0)
    for scale in scales[-2:] if dtype == "float16" else [1e18]:
        x = jnp.asarray(scale * g, dtype)
        assert not np.any(np.nan_to_num(first_update(theirs, {"w": w}, {"w": x})["w"]))


# ---- 5: one iteration for each shape -----------------------------------------------------------


@pytest.mark.slow(always=["100"])
@pytest.mark.parametrize("count", mostly_slow([100, 1000], 100))
def test_m05_a_thousand_matrices_of_three_shapes(count):
    """Three loops over steps, and as many over chunks; products of square matrices share one."""
    shapes = [(8, 8), (8, 16), (16, 8), (4, 12)]  # the second and the third are one shape
    w = {f"{i:04}": jax.ShapeDtypeStruct(shapes[i % 4], jnp.float32) for i in range(count)}
    tx = muon()
    text = jax.jit(tx.update).lower(w, jax.eval_shape(tx.init, w), w).compile().as_text()
    assert len(re.findall(r" while\(", text)) <= 6


# ---- 12: bad input, and leaves of all kinds ----------------------------------------------------

X = {"w": jnp.ones((3, 4)), "b": jnp.ones(3)}
MATRIX = {"w": True, "b": False}


def one_step(tx):
    return tx.update(X, tx.init(X), X)


@pytest.mark.parametrize("matrices", [True, {"w": True}])
def test_m12_no_rate_for_no_leaves(matrices):
    """Where all leaves are matrices, nothing is asked for the others."""
    w = {"w": jnp.arange(6.0).reshape(2, 3)}
    asked = jgrad.muon(0.1, matrices=matrices, adam_learning_rate=1.0)
    for tx in (jgrad.muon(0.1, matrices=matrices), asked):
        updates, _ = tx.update(w, tx.init(w), w)
        assert 0.04 < float(jnp.max(jnp.abs(updates["w"]))) < 0.15


test_m12_messages = messages.test_of("muon", globals())
