"""The handwritten digits, and a perceptron that tells them apart: what the examples train.

1797 real digits, 8 x 8 pixels each, that scikit-learn ships in its wheel.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

Params = Any


class Digits(NamedTuple):
    """Images as rows of 64 numbers in [0, 1], and labels from 0 to 9."""

    images: np.ndarray
    labels: np.ndarray

    def batches(self, size: int, rng: np.random.Generator) -> Iterator["Digits"]:
        """All digits in a new order, in batches of one size; what is left over is left out."""
        order = rng.permutation(len(self.labels))
        for start in range(0, len(order) - size + 1, size):
            chosen = order[start : start + size]
            yield Digits(self.images[chosen], self.labels[chosen])


def load() -> tuple[Digits, Digits]:
    """A training and a test set, four digits to one."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    split = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    return Digits(split[0], split[2]), Digits(split[1], split[3])


def init(key: jax.Array, *, hidden: int) -> Params:
    """The weights of a perceptron with two hidden layers."""
    he = jax.nn.initializers.he_normal()
    shapes = itertools.pairwise((64, hidden, hidden, 10))
    layers = zip(jax.random.split(key, 3), shapes, strict=True)
    return {
        f"layer_{i}": {"w": he(key, shape), "b": jnp.zeros(shape[1])}
        for i, (key, shape) in enumerate(layers)
    }


def logits(params: Params, images: jax.Array) -> jax.Array:
    """Scores of shape (batch, 10)."""
    *hidden, last = (params[name] for name in sorted(params))
    for layer in hidden:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    return images @ last["w"] + last["b"]


def loss(params: Params, batch: Digits) -> jax.Array:
    """Cross-entropy, averaged over the batch."""
    scores = logits(params, batch.images)
    return optax.losses.softmax_cross_entropy_with_integer_labels(scores, batch.labels).mean()


@jax.jit
def accuracy(params: Params, digits: Digits) -> jax.Array:
    """The share of digits that are named rightly."""
    return jnp.mean(logits(params, digits.images).argmax(axis=1) == digits.labels)
