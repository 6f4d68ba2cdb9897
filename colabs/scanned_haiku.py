"""Trains a convolutional network of Haiku, each scanned layer updated in the backward pass.

A stack without a name is called "__layer_stack_no_per_layer". With dropout, pass one key per layer:

    keys = jax.random.split(hk.next_rng_key(), 3)
    run = hk.transform(block).apply
    layers = hk.lift(dict, name="layers")()
    x = jgrad.scan_layers(lambda layer, x, key: run(layer, key, x), layers, x, xs=keys)
"""

import haiku as hk
import jax
import numpy as np
import optax

import jgrad


def norm(x):
    return hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)


def block(x):
    y = norm(x)
    for _ in range(2):
        y = jax.nn.gelu(hk.Conv1D(16, 3, padding=hk.pad.causal)(y))
    return x + y


def model(tokens):
    x = hk.Embed(32, 16)(tokens)
    if hk.running_init():
        x = hk.layer_stack(3, name="layers")(block)(x)
    else:
        run = hk.without_apply_rng(hk.transform(block)).apply
        x = jgrad.scan_layers(run, hk.lift(dict, name="layers")(), x)
    return hk.Linear(32)(norm(x))


init, apply = hk.without_apply_rng(hk.transform(model))


def loss(params, tokens):
    scores = apply(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()


tx = jgrad.adam(1e-2)
step = jax.jit(jgrad.step_in_backward(tx, loss), donate_argnums=(0, 1))
tokens = np.cumsum(np.arange(72).reshape(8, 9), axis=1) % 32
params = jax.jit(init)(jax.random.key(0), tokens)
state = tx.init(params)
for _ in range(100):
    params, state, value = step(params, state, tokens)
print(f"loss {value:.3f}")
