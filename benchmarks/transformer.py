"""A small transformer that models language, in plain JAX, and a language for it to learn.

    params = init(jax.random.key(0))
    loss(params, next(batches(seed=0)))

12 layers, 193 leaves and 0.6 M parameters in a nested dict: small enough that the leaves cost more
than the arithmetic.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LAYERS = 12
WIDTH = 64
HEADS = 4
VOCABULARY = 64
SUCCESSORS = 4

Params = dict[str, Any]


def init(key: jax.Array) -> Params:
    """The parameters: `embedding`, and `layer_0` to `layer_11`."""
    first, *keys = jax.random.split(key, 1 + LAYERS)
    layers = {f"layer_{i}": _init_layer(key) for i, key in enumerate(keys)}
    return {"embedding": jax.random.normal(first, (VOCABULARY, WIDTH)) / WIDTH, **layers}


def _init_layer(key: jax.Array) -> Params:
    keys = iter(jax.random.split(key, 6))

    def dense(rows: int, columns: int, scale: float = 1.0) -> Params:
        w = jax.random.normal(next(keys), (rows, columns)) * scale / rows**0.5
        return {"w": w, "b": jnp.zeros(columns)}

    norm = {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}
    small = (2 * LAYERS) ** -0.5  # as many are added up
    return {
        "norm_1": norm,
        **{name: dense(WIDTH, WIDTH) for name in ("query", "key", "value")},
        "output": dense(WIDTH, WIDTH, small),
        "norm_2": norm,
        "up": dense(WIDTH, 4 * WIDTH),
        "down": dense(4 * WIDTH, WIDTH, small),
    }


def loss(params: Params, tokens: jax.Array) -> jax.Array:
    """Cross-entropy of each token given those before it, in nats, the mean over a batch.

    Args:
      params: what `init` returned.
      tokens: integers of shape (sequences, length).
    """
    scores = logits(params, tokens[:, :-1])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), tokens[:, 1:, None], axis=-1)
    return -jnp.mean(chosen)


def logits(params: Params, tokens: jax.Array) -> jax.Array:
    """Scores of the token that comes next, of shape (sequences, length, vocabulary)."""
    x = WIDTH * params["embedding"][tokens] + _positions(tokens.shape[1])
    for i in range(LAYERS):
        layer = params[f"layer_{i}"]
        x = x + _attention(layer, _norm(x, **layer["norm_1"]))
        hidden = jax.nn.gelu(_dense(layer["up"], _norm(x, **layer["norm_2"])))
        x = x + _dense(layer["down"], hidden)
    return _norm(x) @ params["embedding"].T


def _dense(params: Params, x: jax.Array) -> jax.Array:
    return x @ params["w"] + params["b"]


def _norm(x: jax.Array, scale: Any = 1.0, bias: Any = 0.0) -> jax.Array:
    return scale * jax.nn.standardize(x) + bias


def _attention(params: Params, x: jax.Array) -> jax.Array:
    """Of each token to itself and to those before it."""
    heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
    q, k, v = (_dense(params[name], x).reshape(heads) for name in ("query", "key", "value"))
    return _dense(
        params["output"], jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
    )


def _positions(length: int) -> np.ndarray:
    """Sines and cosines of wavelengths from 2 pi to 2 pi 10,000."""
    angles = np.arange(length)[:, None] / 10_000 ** np.linspace(0, 1, WIDTH // 2)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1, dtype=np.float32)


def batches(seed: int, sequences: int = 4, length: int = 16) -> Iterator[np.ndarray]:
    """Sentences of a language in which each word has four others that may follow it.

    All four are equally likely: no model gets below log 4 = 1.39 nats, and one that knows nothing
    is at log 64 = 4.16.
    """
    after = np.random.default_rng(0).random((VOCABULARY, VOCABULARY)).argsort()[:, :SUCCESSORS]
    rng = np.random.default_rng(seed)
    while True:
        tokens = np.empty((sequences, length), np.int32)
        tokens[:, 0] = rng.integers(VOCABULARY, size=sequences)
        for i in range(1, length):
            tokens[:, i] = after[tokens[:, i - 1], rng.integers(SUCCESSORS, size=sequences)]
        yield tokens
