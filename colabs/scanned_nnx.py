"""Trains a flax nnx model with batch statistics, each layer updated in the backward pass."""

import jax
import jax.numpy as jnp
from flax import nnx

import jgrad


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 16, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.relu(self.norm(self.linear(x))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.split_rngs(splits=3)(nnx.vmap(Block))(rngs)
        self.last = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        graphdef, layers, others = nnx.split(self.layers, nnx.Param, ...)

        def block(layer, x, others):
            layer = nnx.merge(graphdef, layer, others)
            return layer(x), nnx.state(layer, nnx.Not(nnx.Param))

        x, others = jgrad.scan_layers(block, layers, x, xs=others, has_ys=True)
        nnx.update(self.layers, others)
        return self.last(x)


def loss(model, x):
    return jnp.mean((model(x) - jnp.sin(x[:, :1])) ** 2)


@nnx.jit(donate_argnums=(0, 1))
def step(model, optimizer, x):
    graphdef, params, others = nnx.split(model, nnx.Param, ...)
    params, others, state = nnx.as_pure((params, others, optimizer.opt_state))

    def pure_loss(params, x):
        model = nnx.merge(graphdef, params, others)
        return loss(model, x), nnx.state(model, nnx.Not(nnx.Param))

    in_backward = jgrad.step_in_backward(optimizer.tx, pure_loss, has_aux=True)
    params, state, (value, others) = in_backward(params, state, x)
    nnx.update(model, params, others)
    nnx.update(optimizer.opt_state, nnx.state(state))
    optimizer.step[...] += 1
    return value


x = jax.random.normal(jax.random.key(0), (32, 16))
model = Model(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, jgrad.adam(1e-2), wrt=nnx.Param)
for _ in range(100):
    value = step(model, optimizer, x)
print(f"loss {value:.3f}")
