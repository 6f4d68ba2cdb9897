"""Trains a decoder of Equinox with dropout, each scanned layer updated in the backward pass."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgrad


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, 16, dropout_p=0.1, key=keys[0])
        self.mlp = eqx.nn.MLP(16, 16, width_size=64, depth=1, key=keys[1])

    def __call__(self, x, key):
        x = x + self.attention(x, x, x, mask=jnp.tri(len(x), dtype=bool), key=key)
        return x + jax.vmap(self.mlp)(x)


class Decoder(eqx.Module):
    embedding: eqx.nn.Embedding
    layers: Block

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.embedding = eqx.nn.Embedding(32, 16, key=keys[0])
        self.layers = eqx.filter_vmap(Block)(keys[1:])

    def __call__(self, tokens, key):
        x, keys = jax.vmap(self.embedding)(tokens), jax.random.split(key, 3)
        layers, static = eqx.partition(self.layers, eqx.is_array)
        block = lambda layer, x, key: eqx.combine(layer, static)(x, key)
        x = jgrad.scan_layers(block, layers, x, xs=keys)
        return x @ self.embedding.weight.T


def loss(model, tokens, key):
    scores = jax.vmap(model)(tokens[:, :-1], jax.random.split(key, len(tokens)))
    return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()


@eqx.filter_jit(donate="all")
def step(model, state, tokens, key):
    params, static = eqx.partition(model, eqx.is_inexact_array)
    pure_loss = lambda params, *args: loss(eqx.combine(params, static), *args)
    params, state, value = jgrad.step_in_backward(tx, pure_loss)(params, state, tokens, key)
    return eqx.combine(params, static), state, value


tokens = np.cumsum(np.arange(72).reshape(8, 9), axis=1) % 32
model, tx = eqx.filter_jit(Decoder)(jax.random.key(0)), jgrad.adam(1e-2)
state = tx.init(eqx.filter(model, eqx.is_inexact_array))
for key in jax.random.split(jax.random.key(1), 100):
    model, state, value = step(model, state, tokens, key)
print(f"loss {value:.3f}")
