"""A byte-level transformer with stacked layers, and a sampler.

Root-mean-square norms before attention and perceptron, rotary positions, no biases. The embedding
is also the head: 256 rows are as good for both, and so every leaf but one is of the layers. All is
computed in float32: recipes differ in what is stored, and CPUs have no bfloat16.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgrad
from text import VOCABULARY

Params = dict[str, Any]

LAYER_AXES = {
    "embedding": None,
    "layers": 0,
    "norm": None,
}  # for jgrad: over which layers are stacked
WAVELENGTH = 10_000.0  # of the slowest rotation, divided by 2 pi


def init(key: jax.Array, *, layers: int = 2, width: int = 64) -> Params:
    """The parameters: `embedding`, `layers`, whose leaves have a row per layer, and `norm`."""
    shapes = {
        "query": (width, width),
        "key": (width, width),
        "value": (width, width),
        "output": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    first, *keys = jax.random.split(key, 1 + len(shapes))
    stacked = {"norm_1": jnp.ones((layers, width)), "norm_2": jnp.ones((layers, width))}
    for name, own in zip(shapes, keys, strict=True):
        scale = shapes[name][0] ** -0.5
        if name in ("output", "down"):
            scale *= (2 * layers) ** -0.5  # as many are added up
        stacked[name] = scale * jax.random.normal(own, (layers, *shapes[name]))
    embedding = jax.random.normal(first, (VOCABULARY, width)) / width
    return {"embedding": embedding, "layers": stacked, "norm": jnp.ones(width)}


def loss(params: Params, codes: jax.Array, *, heads: int = 4) -> jax.Array:
    """Cross-entropy of each byte given those before it, in nats, the mean over a batch."""
    scores = logits(params, codes[:, :-1], heads=heads)
    return optax.losses.softmax_cross_entropy_with_integer_labels(scores, codes[:, 1:]).mean()


def logits(params: Params, codes: jax.Array, *, heads: int = 4) -> jax.Array:
    """Scores of the byte after each, of shape (windows, length, 256)."""
    embedding, norm = _wide((params["embedding"], params["norm"]))

    def layer(p: Params, x: jax.Array) -> jax.Array:
        p = _wide(p)  # one layer at a time, for `scan_layers` is given what is stored
        x = x + _attention(p, _norm(p["norm_1"], x), heads)
        return x + jax.nn.gelu(_norm(p["norm_2"], x) @ p["up"]) @ p["down"]

    x = embedding.shape[1] * embedding[codes]
    x = jgrad.scan_layers(layer, params["layers"], x)
    return _norm(norm, x) @ embedding.T


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + 1e-6) * scale[None, None]


def _attention(p: Params, x: jax.Array, heads: int) -> jax.Array:
    """Of each byte to itself and to those before it."""
    q, k, v = ((x @ p[name]).reshape(*x.shape[:2], heads, -1) for name in ("query", "key", "value"))
    mixed = jax.nn.dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
    return mixed.reshape(x.shape) @ p["output"]


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary positions: pairs of elements turned by angles in proportion to the position."""
    half = x.shape[3] // 2
    angles = np.arange(x.shape[1])[:, None] * WAVELENGTH ** -np.linspace(0, 1, half, endpoint=False)
    cos, sin = (jnp.asarray(f(angles), x.dtype)[None, :, None] for f in (np.cos, np.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=3)


@functools.partial(jax.jit, static_argnames=("number", "length", "heads"))
def sample(
    params: Params,
    prompt: jax.Array,
    key: jax.Array,
    *,
    number: int,
    length: int,
    heads: int = 4,
    temperature: float = 0.8,
) -> jax.Array:
    """A prompt and as many bytes after it, each drawn given the `length` bytes before it."""
    text = jnp.concatenate([prompt, jnp.zeros(number, prompt.dtype)])
    length = min(length, len(text))

    def add(text: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        start = jnp.maximum(i - length, 0)
        window = jax.lax.dynamic_slice(text, (start,), (length,))
        scores = logits(params, window[None], heads=heads)[0, i - start - 1]
        byte = jax.random.categorical(jax.random.fold_in(key, i), scores / temperature)
        return text.at[i].set(byte.astype(text.dtype)), None

    return jax.lax.scan(add, text, jnp.arange(len(prompt), len(text)))[0]
