"""Decoders as users of flax have them, for the peak of a train step.

16 layers of width 1024 with attention and 4096 hidden channels, and a vocabulary of 32,768: 268
million parameters, a quarter of them in the embedding and the head. Layers are stacked.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jgrad

LAYERS, WIDTH, HIDDEN, HEADS, VOCABULARY, LENGTH = 16, 1024, 4096, 8, 32768, 512
SLICES = 16


class Model(NamedTuple):
    """A decoder.

    Attributes:
      params: shapes and dtypes of the parameters.
      loss: (params, tokens) -> the cross-entropy of each token given those before it.
    """

    params: Any
    loss: Callable[[Any, jax.Array], jax.Array]


# ---- the loss ------------------------------------------------------------------------------------


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over all tokens, in float32."""
    each = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return each.mean()


def in_slices(head: jax.Array, x: jax.Array, targets: jax.Array) -> jax.Array:
    """The same of `x @ head`, where the head is (slices, width, tokens of a slice).

    No more than the logits of one slice are there at a time, and in the backward pass the gradient
    of one.
    """

    def block(head: Any, carry: Any, first: Any) -> Any:
        top, total, chosen = carry
        logits = (x @ head).astype(jnp.float32)
        higher = jax.lax.stop_gradient(jnp.maximum(top, logits.max(-1)))
        total = total * jnp.exp(top - higher) + jnp.exp(logits - higher[..., None]).sum(-1)
        i = targets - first
        own = jnp.take_along_axis(logits, jnp.clip(i, 0, head.shape[-1] - 1)[..., None], -1)
        chosen = jnp.where((i >= 0) & (i < head.shape[-1]), own[..., 0], chosen)
        return higher, total, chosen

    zeros = jnp.zeros(targets.shape, jnp.float32)
    firsts = jnp.arange(len(head)) * head.shape[-1]
    top, total, chosen = jgrad.scan_layers(block, head, (zeros - jnp.inf, zeros, zeros), xs=firsts)
    return (top + jnp.log(total) - chosen).mean()


# ---- linen ---------------------------------------------------------------------------------------


class _LinenBlock(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtypes: dict[str, Any] = {"param_dtype": self.dtype, "dtype": jnp.bfloat16}
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        h = nn.RMSNorm(**dtypes)(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, use_bias=False, **dtypes)(h, h, mask=mask)
        h = nn.Dense(HIDDEN, use_bias=False, **dtypes)(nn.RMSNorm(**dtypes)(x))
        return x + nn.Dense(WIDTH, use_bias=False, **dtypes)(nn.gelu(h))


class _Linen(nn.Module):
    dtype: Any
    head: str

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        dtypes: dict[str, Any] = {"param_dtype": self.dtype, "dtype": jnp.bfloat16}
        embed = nn.Embed(VOCABULARY, WIDTH, **dtypes)
        x, block = embed(tokens[:, :-1]), _LinenBlock(self.dtype, parent=None)

        def init(key: jax.Array) -> Any:
            keys = jax.random.split(key, LAYERS)
            return jax.vmap(lambda key: block.init(key, x)["params"])(keys)

        layers = self.param("layers", init)
        x = jgrad.scan_layers(lambda layer, x: block.apply({"params": layer}, x), layers, x)
        x = nn.RMSNorm(**dtypes)(x)
        if self.head == "in slices":
            shape = (SLICES, WIDTH, VOCABULARY // SLICES)
            head = self.param("head", nn.initializers.lecun_normal(), shape, self.dtype)
            return in_slices(head, x, tokens[:, 1:])
        logits = nn.Dense(VOCABULARY, use_bias=False, **dtypes) if self.head else embed.attend
        return cross_entropy(logits(x), tokens[:, 1:])


def linen(dtype: Any, head: str = "untied") -> Model:
    """A decoder in linen; its head is "untied", "in slices", or "" for the embedding."""
    module = _Linen(dtype, head)
    tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    params = jax.eval_shape(module.init, jax.random.key(0), tokens)["params"]
    return Model(params, lambda params, tokens: module.apply({"params": params}, tokens))


# ---- nnx -----------------------------------------------------------------------------------------


class _NnxBlock(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        dtypes: dict[str, Any] = {"param_dtype": dtype, "dtype": jnp.bfloat16, "rngs": rngs}
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, **dtypes) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, use_bias=False, decode=False, **dtypes
        )
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, **dtypes)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.norms[0](x)
        x = x + self.attention(h, mask=nnx.make_causal_mask(jnp.ones(x.shape[:2])))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class _Nnx(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        dtypes: dict[str, Any] = {"param_dtype": dtype, "dtype": jnp.bfloat16, "rngs": rngs}
        self.embed = nnx.Embed(VOCABULARY, WIDTH, **dtypes)
        make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(functools.partial(_NnxBlock, dtype)))
        self.layers = make(rngs)
        self.norm = nnx.RMSNorm(WIDTH, **dtypes)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, **dtypes)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        layers, blocks = nnx.split(self.layers)

        def block(layer: Any, x: jax.Array) -> jax.Array:
            of_layer: Any = nnx.merge(layers, layer)
            return of_layer(x)

        x = jgrad.scan_layers(block, blocks, self.embed(tokens[:, :-1]))
        return cross_entropy(self.head(self.norm(x)), tokens[:, 1:])


def in_nnx(dtype: Any) -> Model:
    """The same in nnx, with a head of its own."""
    model = nnx.eval_shape(lambda: _Nnx(dtype, nnx.Rngs(0)))
    rest, params = nnx.split(model)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        of_params: Any = nnx.merge(rest, params)
        return of_params(tokens)

    as_pure = getattr(nnx, "as_pure", None) or nnx.pure  # by its name in flax 0.12.1
    return Model(as_pure(params), loss)
