"""The sources of Python's own library, byte by byte, and a transformer that models them.

Every Python ships the text, and another version of Python has another text: losses of two versions
are not comparable, and differences between optimizers are.
"""

import argparse
import ast
import difflib
import inspect
import shutil
import statistics
import tarfile
import textwrap
import threading
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCABULARY = 128  # ASCII
TRAINING = (argparse, ast, inspect, shutil, statistics, tarfile, threading, typing)
TEST = (difflib, textwrap)

Params = dict[str, Any]


class Text:
    """Bytes, and the windows of one length to cut from them."""

    def __init__(self, modules: tuple[Any, ...]) -> None:
        joined = "\n".join(inspect.getsource(module) for module in modules)
        codes = np.frombuffer(joined.encode("ascii", errors="replace"), np.uint8)
        self.codes = codes.astype(np.int32)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Integers of shape `(*starts.shape, length)`."""
        return self.codes[starts[..., None] + np.arange(length)]

    def batches(
        self, number: int, rng: np.random.Generator, *, windows: int = 16, length: int = 33
    ) -> np.ndarray:
        """Windows from anywhere, of shape (number, windows, length)."""
        starts = rng.integers(len(self.codes) - length + 1, size=(number, windows))
        return self.windows(starts, length)

    def all(self, length: int = 33, *, at_most: int = 1024) -> np.ndarray:
        """Windows at equal distances over the whole text, of shape (windows, length)."""
        return self.windows(np.arange(0, len(self.codes) - length + 1, length)[:at_most], length)


def init(key: jax.Array, *, layers: int = 2, width: int = 64) -> Params:
    """The parameters: `embedding`, and `layer_0` and so on."""
    first, *keys = jax.random.split(key, 1 + layers)

    def layer(key: jax.Array) -> Params:
        keys = iter(jax.random.split(key, 4))

        def dense(rows: int, columns: int, scale: float = 1.0) -> Params:
            w = jax.random.normal(next(keys), (rows, columns)) * scale / rows**0.5
            return {"w": w, "b": jnp.zeros(columns)}

        norm = {"scale": jnp.ones(width), "bias": jnp.zeros(width)}
        small = (2 * layers) ** -0.5  # as many are added up
        return {
            "norm_1": norm,
            "attention": dense(width, 3 * width),
            "output": dense(width, width, small),
            "norm_2": norm,
            "up": dense(width, 4 * width),
            "down": dense(4 * width, width, small),
        }

    embedding = jax.random.normal(first, (VOCABULARY, width)) / width
    return {"embedding": embedding, **{f"layer_{i}": layer(key) for i, key in enumerate(keys)}}


def loss(params: Params, codes: jax.Array, *, heads: int = 4) -> jax.Array:
    """Cross-entropy of each byte given those before it, in nats, the mean over a batch."""
    given, wanted = codes[:, :-1], codes[:, 1:]
    width = params["embedding"].shape[1]
    x = width * params["embedding"][given] + _positions(given.shape[1], width)
    for name in sorted(params.keys() - {"embedding"}):
        layer = params[name]
        x = x + _attention(layer, _norm(layer["norm_1"], x), heads)
        x = x + _dense(layer["down"], jax.nn.gelu(_dense(layer["up"], _norm(layer["norm_2"], x))))
    scores = jax.nn.standardize(x) @ params["embedding"].T
    return optax.losses.softmax_cross_entropy_with_integer_labels(scores, wanted).mean()


def _dense(p: Params, x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"]


def _norm(p: Params, x: jax.Array) -> jax.Array:
    return p["scale"] * jax.nn.standardize(x) + p["bias"]


def _attention(p: Params, x: jax.Array, heads: int) -> jax.Array:
    """Of each byte to itself and to those before it."""
    rows, length, width = x.shape
    q, k, v = jnp.moveaxis(
        _dense(p["attention"], x).reshape(rows, length, 3, heads, width // heads), 2, 0
    )
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return _dense(p["output"], mixed.reshape(x.shape))


def _positions(length: int, width: int) -> np.ndarray:
    """Sines and cosines of wavelengths from 2 pi to 2 pi 10,000."""
    angles = np.arange(length)[:, None] / 10_000 ** np.linspace(0, 1, width // 2)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1, dtype=np.float32)
