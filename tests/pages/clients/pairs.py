"""Optimizers of optax, and jgrad's of the same meaning; and what is compared of a run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgrad
from tests.pages.clients import swap

RATE = 0.01
SCHEDULE = optax.cosine_decay_schedule(RATE, 50)

# A regression.
X = jnp.linspace(-1, 1, 32).reshape(16, 2)
Y = jnp.sin(3 * X.sum(1))

# What a loop is given: (optax's, ours).
PAIRS = {
    "adam": lambda: (optax.adam(RATE), swap.adam(RATE)),
    "clip, adamw, schedule": lambda: (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE)),
     optax.chain(jgrad.clip_by_global_norm(1.0), swap.adamw(SCHEDULE))),
    "momentum": lambda: (optax.sgd(RATE, momentum=0.9), swap.sgd(RATE, momentum=0.9)),
    "lamb": lambda: (optax.lamb(RATE), swap.lamb(RATE)),
    "pack_small": lambda: (optax.adam(RATE), jgrad.pack_small(swap.adam(RATE))),
    "all wrappers": lambda: (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE)),
     swap.wrapped(optax.chain(jgrad.clip_by_global_norm(1.0), swap.adamw(SCHEDULE)))),
}  # fmt: skip


def repeated(step, carry, count):
    """The last carry, and the values of each step; `step` returns both."""
    values = []
    for _ in range(count):
        carry, value = step(carry)
        values.append(value)
    return carry, values


def both(pair, run, rtol=1e-5):
    """`run(tx)` of both, with finite results that are the same to rounding, and equal counts."""
    theirs, ours = (jax.tree.map(np.asarray, run(tx)) for tx in PAIRS[pair]())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=rtol, atol=rtol), theirs, ours)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(theirs))
    return theirs, ours


class Counted:
    """A function that counts its calls: under `jit`, how often it was traced."""

    def __init__(self, function):
        self.function, self.count = function, 0

    def __call__(self, *args, **kwargs):
        self.count += 1
        return self.function(*args, **kwargs)
