"""The leaves of the models that are timed, and each optimizer with its peer."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgrad

Tree = dict[str, jax.Array]
Shapes = dict[str, tuple[int, ...]]


def one_leaf() -> Shapes:
    """One leaf of 32 M elements."""
    return {"w": (32 * 2**20,)}


def bert_base() -> Shapes:
    """The 197 leaves of BERT-base, 88 M elements; with a vocabulary of 4096."""
    width = 768
    shapes: Shapes = {"tokens": (4096, width), "positions": (512, width), "types": (2, width)}

    def dense(name: str, rows: int, columns: int) -> None:
        shapes.update({f"{name}/w": (rows, columns), f"{name}/b": (columns,)})

    def norm(name: str) -> None:
        shapes.update({f"{name}/scale": (width,), f"{name}/bias": (width,)})

    norm("embedding/norm")
    for i in range(12):
        for name in ("query", "key", "value", "output"):
            dense(f"{i}/{name}", width, width)
        dense(f"{i}/up", width, 4 * width)
        dense(f"{i}/down", 4 * width, width)
        norm(f"{i}/norm_1")
        norm(f"{i}/norm_2")
    return shapes


def many_leaves(count: int = 1000) -> Shapes:
    """Leaves of 32 x 32."""
    return {f"{i}": (32, 32) for i in range(count)}


WORKLOADS: dict[str, Shapes] = {
    "one leaf, 32 M": one_leaf(),
    "BERT-base, vocabulary 4096: 197 leaves, 88 M": bert_base(),
    "1000 leaves of 32 x 32": many_leaves(),
}


def tree(shapes: Shapes, seed: int) -> Tree:
    """Normal numbers in float32."""
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.standard_normal(shape, np.float32)) for name, shape in shapes.items()
    }


class Pair(NamedTuple):
    """The same method, ours and optax's, with options that make the numbers the same.

    All but LARS with decay, where the trust ratios differ, and the work does not.
    """

    jgrad: Callable[[], optax.GradientTransformation]
    optax: Callable[[], optax.GradientTransformation]


_RATE = 1e-3
_DECAY: dict[str, Any] = {"weight_decay": 0.01}
_MOMENTS: dict[str, Any] = {"bias_correction": "moments", "epsilon": 1e-8}

METHODS: dict[str, Pair] = {
    "momentum": Pair(
        functools.partial(jgrad.gradient_descent, _RATE, momentum=0.9),
        functools.partial(optax.sgd, _RATE, momentum=0.9),
    ),
    "Adam": Pair(
        functools.partial(jgrad.adam, _RATE, **_MOMENTS),
        functools.partial(optax.adam, _RATE, eps=1e-8),
    ),
    "LARS": Pair(
        functools.partial(jgrad.lars, _RATE, **_DECAY),
        functools.partial(optax.lars, _RATE, **_DECAY),
    ),
    "LAMB": Pair(
        functools.partial(jgrad.lamb, _RATE, **_DECAY, **_MOMENTS, max_trust_ratio=1e30),
        functools.partial(optax.lamb, _RATE, eps=1e-8, **_DECAY),
    ),
}
