"""Steps whose leaves in 8 bits are kernels, or two passes of XLA, beside the plain ones.

The betas, rates, decays and gradients here have so few bits that each product that meets a sum is
exact. So a processor that computes both with one rounding, where XLA lets it, has the same numbers:
two programs of the same operations agree bit for bit on every CPU.
"""

import functools
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgrad
from jgrad._kernels import leaf_step, platforms

FORMS = ("kernel", "two passes")
BETAS = {"beta1": 0.875, "beta2": 1 - 2.0**-5}


def rate(t):
    """A schedule."""
    return jnp.float32(2.0) ** (-6 - t.astype(jnp.float32))


ADAM = functools.partial(
    jgrad.adam, rate, weight_decay=0.125, epsilon=2.0**-20, moment_dtype="8bit", **BETAS
)
MOMENTUM = functools.partial(
    jgrad.gradient_descent, rate, momentum=0.875, weight_decay=0.125, moment_dtype="8bit"
)


class Run(NamedTuple):
    """What steps lead to.

    Attributes:
      w: the weights.
      state: of the transformation.
      leaves: how many leaves of the program have the form that was asked for.
    """

    w: Any
    state: Any
    leaves: int


def short(x):
    """Numbers of eight bits, as float32."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def normal(shapes, seed=0, dtype=jnp.float32):
    """A tree of numbers of several sizes."""
    rng = np.random.default_rng(seed)

    def one(shape):
        x = rng.normal(size=shape) * np.exp(rng.normal(size=shape))
        return short(jnp.asarray(x, jnp.float32)).astype(dtype)

    return jax.tree.map(one, shapes, is_leaf=lambda x: isinstance(x, tuple))


def with_update(tx, grads, state, w, **extra):
    """As training loops of optax have it."""
    updates, state = tx.update(grads, state, w, **extra)
    return optax.apply_updates(w, updates), state


def plain(tx, w, grads, state=None, step=with_update):
    """Steps as they are on a CPU."""
    return _run(functools.partial(step, tx), w, grads, tx.init(w) if state is None else state)


def steps(tx, w, grads, form, state=None, step=jgrad.apply_gradients):
    """Steps whose leaves have a form."""
    with (
        platforms.forced(form),
        mock.patch.object(leaf_step, "on_shards", wraps=leaf_step.on_shards) as kernels,
        mock.patch.object(platforms, "in_two_passes", wraps=platforms.in_two_passes) as passes,
    ):
        run = _run(functools.partial(step, tx), w, grads, tx.init(w) if state is None else state)
    others = passes if form == "kernel" else kernels
    assert not others.called
    return run._replace(leaves=kernels.call_count + passes.call_count)


def _run(step, w, grads, state):
    run = jax.jit(step)
    for g in grads:
        w, state = run(g, state, w)
    return Run(w, state, 0)
