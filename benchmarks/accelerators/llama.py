"""A decoder with grouped-query attention and gated layers, as Llama has them, in plain JAX.

Its layers are stacked, and computed once more in the backward pass. `MODELS` has the widths and the
numbers of layers of published models.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

import jgrad


class Decoder(NamedTuple):
    """The shape of a model.

    Attributes:
      layers: how many.
      width: of the residual stream.
      hidden: of gated layers.
      heads: of queries.
      groups: heads of keys and values.
      channels: of a head.
      vocabulary: tokens.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    groups: int = 8
    channels: int = 128
    vocabulary: int = 131072


# Widths and layers of published models, each with the vocabulary of Llama 2.
_SMALL = {"vocabulary": 32000}
FAMILY = {
    "Qwen 1.5 0.5B": Decoder(24, 1024, 2816, 16, 16, 64, **_SMALL),
    "Danube 3 500M": Decoder(16, 1536, 4096, 16, 8, 96, **_SMALL),
    "TinyLlama 1.1B": Decoder(22, 2048, 5632, 32, 4, 64, **_SMALL),
    "SmolLM2 1.7B": Decoder(24, 2048, 8192, 32, 32, 64, **_SMALL),
    "Granite 3 2B": Decoder(40, 2048, 8192, 32, 8, 64, **_SMALL),
    "Llama 3.2 3B": Decoder(28, 3072, 8192, 24, 8, 128, **_SMALL),
    "Phi-3 mini": Decoder(32, 3072, 8192, 32, 32, 96, **_SMALL),
    "Yi 1.5 6B": Decoder(32, 4096, 11008, 32, 4, 128, **_SMALL),
    "Llama 2 7B": Decoder(32, 4096, 11008, 32, 32, 128, **_SMALL),
    "Llama 3 8B": Decoder(32, 4096, 14336, 32, 8, 128, **_SMALL),
    "Falcon 3 10B": Decoder(40, 3072, 23040, 12, 4, 256, **_SMALL),
    "Solar 10.7B": Decoder(48, 4096, 14336, 32, 8, 128, **_SMALL),
    "Llama 2 13B": Decoder(40, 5120, 13824, 40, 40, 128, **_SMALL),
    "Qwen 2.5 14B": Decoder(48, 5120, 13824, 40, 8, 128, **_SMALL),
    "InternLM2 20B": Decoder(48, 6144, 16384, 48, 8, 128, **_SMALL),
    "Mistral Small 24B": Decoder(40, 5120, 32768, 32, 8, 128, **_SMALL),
    "Qwen 2.5 32B": Decoder(64, 5120, 27648, 40, 8, 128, **_SMALL),
    "Code Llama 34B": Decoder(48, 8192, 22016, 64, 8, 128, **_SMALL),
    "Llama 2 70B": Decoder(80, 8192, 28672, 64, 8, 128, **_SMALL),
}

MODELS = {
    "8 B": Decoder(layers=32, width=4096, hidden=14336, heads=32),
    "70 B": Decoder(layers=80, width=8192, hidden=28672, heads=64),
}

# For `remat`: what the backward pass starts from in each layer lies in host memory until then.
INPUTS_ON_HOST = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["input"],
    offload_src="device",
    offload_dst="pinned_host",
)

# Leaves below "layers" are stacks of layers.
LAYER_AXES = {"embedding": None, "head": None, "norm": None, "layers": 0}


def shapes(model: Decoder, dtype: Any) -> dict[str, Any]:
    """Of all leaves."""
    layers, width, hidden = model.layers, model.width, model.hidden
    found = {
        "embedding": (model.vocabulary, width),
        "head": (width, model.vocabulary),
        "norm": (width,),
        "layers": {
            "queries": (layers, width, model.heads * model.channels),
            "keys_values": (layers, width, 2 * model.groups * model.channels),
            "out": (layers, model.heads * model.channels, width),
            "gate": (layers, width, hidden),
            "up": (layers, width, hidden),
            "down": (layers, hidden, width),
            "norm_1": (layers, width),
            "norm_2": (layers, width),
        },
    }
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype),
        found,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def size(model: Decoder) -> int:
    """The number of parameters."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes(model, jnp.float32)))


def loss(
    model: Decoder,
    params: Any,
    tokens: jax.Array,
    over: NamedSharding | None = None,
    *,
    remat: Any = True,
) -> jax.Array:
    """Cross-entropy of each token given those before it; products in bfloat16.

    Args:
      model: its shape.
      params: its leaves.
      tokens: integers of shape (sequences, length).
      over: how sequences are spread over chips; None on one device.
      remat: of `scan_layers`; a policy knows the input of a layer as "input".
    """

    def spread(x: jax.Array) -> jax.Array:
        return x if over is None else jax.lax.with_sharding_constraint(x, over)

    def times(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return x @ matrix.astype(jnp.bfloat16)

    def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
        square = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
        return x * jax.lax.rsqrt(square + 1e-6).astype(x.dtype) * scale.astype(x.dtype)

    def attention(x: jax.Array, layer: Any) -> jax.Array:
        heads = (*x.shape[:2], -1, model.channels)
        q = times(x, layer["queries"]).reshape(heads)
        k, v = jnp.split(times(x, layer["keys_values"]).reshape(heads), 2, axis=2)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return times(mixed.reshape(*x.shape[:2], -1), layer["out"])

    def block(layer: Any, x: jax.Array) -> jax.Array:
        x = checkpoint_name(x, "input")
        x = x + attention(normed(x, layer["norm_1"]), layer)
        h = normed(x, layer["norm_2"])
        gated = jax.nn.silu(times(h, layer["gate"])) * times(h, layer["up"])
        return spread(x + times(gated, layer["down"]))

    x = spread(params["embedding"].astype(jnp.bfloat16)[tokens])
    x = jgrad.scan_layers(block, params["layers"], x, remat=remat)
    logits = times(normed(x, params["norm"]), params["head"]).astype(jnp.float32)
    each = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return each.mean()
