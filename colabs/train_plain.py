"""A training loop to copy: a model, a loss, `jgrad.adam`, and a compiled step.

    python colabs/train_plain.py

A perceptron learns a function of two numbers, from 256 random points in each step.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jgrad

STEPS = 500
RATE = optax.cosine_decay_schedule(0.03, STEPS)

Params = dict[str, jax.Array]


def init(key: jax.Array) -> Params:
    first, second = jax.random.split(key)
    w1, w2 = jax.random.normal(first, (2, 64)), jax.random.normal(second, (64, 1)) / 8
    return {"w1": w1, "b1": jnp.zeros(64), "w2": w2, "b2": jnp.zeros(1)}


def model(params: Params, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((model(params, x) - y) ** 2)


def train(tx: optax.GradientTransformation) -> list[float]:
    """Prints and returns the loss of each hundredth step."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))  # new arrays take the memory of the old
    def step(params: Params, state: Any, key: jax.Array) -> tuple[Params, Any, jax.Array]:
        x = jax.random.uniform(key, (256, 2), minval=-1.0)
        y = jnp.sin(3 * x[:, :1]) * x[:, 1:]
        value, grads = jgrad.value_and_grad(loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params, losses = init(jax.random.key(0)), []
    state = tx.init(params)
    for i in range(1, STEPS + 1):
        params, state, value = step(params, state, jax.random.key(i))
        if i % 100 == 0:
            losses.append(float(value))
            print(f"step {i}: loss {value:.6f}")
    return losses


if __name__ == "__main__":
    train(jgrad.adam(RATE, weight_decay=1e-4))
