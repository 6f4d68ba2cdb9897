"""Larger than the device.

A decoder whose weights and moments lie in host memory, of which one layer at a time is on the
device. It is made layer by layer, trained on sequences that count in steps, and asked to continue
one. The same lines train a model of 34 billion parameters on a device of 16 GB.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgrad

LAYERS, WIDTH, VOCABULARY, LENGTH = 4, 256, 512, 16
HOST = jax.memory.Space.Host


def make_layer(key):
    """The parameters of one layer, in host memory."""
    shapes = {"mix": (LENGTH, LENGTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    keys = dict(zip(shapes, jax.random.split(key, 3), strict=True))
    layer = {k: jax.random.normal(keys[k], s) / s[0] ** 0.5 for k, s in shapes.items()}
    return jax.device_put(layer, HOST)


@jax.jit
def make(key):
    """All parameters: each layer goes to the host before the next one is made."""
    embedding = jax.random.normal(key, (VOCABULARY, WIDTH)) / WIDTH**0.5
    layers = jax.lax.map(make_layer, jax.random.split(key, LAYERS))
    return {"embedding": jax.device_put(embedding, HOST), "layers": layers}


def block(layer, x):
    """Mixes tokens with those before them, and then channels."""
    x = x + jnp.tril(layer["mix"]) @ x
    x = x / (1e-3 + jnp.sqrt(jnp.mean(x**2, -1, keepdims=True)))
    return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]


def scores(params, tokens):
    """Of the next token. `scan_layers` fetches a layer for its turn."""
    embedding = jax.device_put(params["embedding"], jax.memory.Space.Device)
    x = jgrad.scan_layers(block, params["layers"], embedding[tokens])
    return x @ embedding.T


def loss(params, tokens):
    logits = scores(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def batch(rng):
    """Sequences that count in steps of 1 to 4."""
    start, by = rng.integers(0, VOCABULARY, (32, 1)), rng.integers(1, 5, (32, 1))
    return jnp.asarray((start + by * np.arange(LENGTH + 1)) % VOCABULARY, jnp.int32)


params = make(jax.random.key(0))
tx = jgrad.offload(jgrad.adam(3e-3))
state = tx.init(params)
step = jax.jit(jgrad.step_in_backward(tx, loss), donate_argnums=(0, 1))

rng = np.random.default_rng(0)
for i in range(101):
    params, state, value = step(params, state, batch(rng))
    if i % 50 == 0:
        print(f"step {i}: loss {value:.3f}")

for path, x in jax.tree_util.tree_leaves_with_path((params, state.mw)):
    kind = "host" if x.sharding.memory_kind == "pinned_host" else "device"
    print(f"{jax.tree_util.keystr(path)}: {x.nbytes / 2**20:.2f} MB on the {kind}")

tokens = batch(rng)[:1, :-1]
following = jax.jit(scores)(params, tokens)[0, -1].argmax()
print(f"{tokens[0, -4:].tolist()} is continued by {following}")
