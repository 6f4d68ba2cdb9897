"""The rows of docs/from_optax.md: optax's line and ours train to the same numbers."""

import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.choice import mostly_slow

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "from_optax.md").read_text()
TABLE = re.findall(r"^\| `(optax\..+?)` \| `(jgrad\..+?)`", TEXT, re.MULTILINE)
ROWS = {theirs: (theirs, ours) for theirs, ours in TABLE if not theirs.startswith("optax.tree.")}
NAMES = {
    "optax": optax,
    "jgrad": jgrad,
    "jnp": jnp,
    "mask": lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
}


def trees(count):
    rng = np.random.default_rng(0)
    shapes = {"kernel": (4, 3), "bias": (3,), "deep": {"scale": (5,)}}
    make = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    is_shape = lambda x: isinstance(x, tuple)
    return [jax.tree.map(make, shapes, is_leaf=is_shape) for _ in range(count)]


def train(expression, lr):
    tx = eval(expression, NAMES | {"lr": lr})
    w, *grads = trees(9)
    state = tx.init(w)

    @jax.jit
    def step(w, state, g):
        updates, state = tx.update(g, state, w)
        return optax.apply_updates(w, updates), state

    for g in grads:
        w, state = step(w, state, g)
    return w


def test_the_table():
    assert len(TABLE) >= 18


@pytest.mark.parametrize("name", mostly_slow(ROWS, "optax.adamw(lr, mask=mask)"))
def test_same_numbers(name, standard_promotion):
    theirs, ours = ROWS[name]
    # The second figure is what optax's bias correction is wrong by.
    for lr in (0.05, optax.linear_schedule(0.05, 0.0, 20)):
        chex.assert_trees_all_close(train(ours, lr), train(theirs, lr), rtol=1e-5, atol=1e-5)


def test_norm(standard_promotion):
    (grads,) = trees(1)
    np.testing.assert_allclose(jgrad.global_norm(grads), optax.tree.norm(grads), rtol=1e-6)


def test_a_checkpoint_goes_on(standard_promotion):
    """The state of optax's Adam, as the guide says."""
    w, *grads = trees(4)
    theirs = optax.scale_by_adam()
    ours = jgrad.scale_by_adam(epsilon=1e-8, bias_correction="moments")
    s = theirs.init(w)
    for g in grads[:2]:
        _, s = theirs.update(g, s)
    found, _ = ours.update(grads[2], jgrad.OptState(s.count, s.mu, s.nu))
    chex.assert_trees_all_close(found, theirs.update(grads[2], s)[0], rtol=1e-5)
