"""Trains a decoder of flax linen, each scanned layer updated in the backward pass.

With dropout and batch statistics, write the `else` branch like this. Masks differ from those of
`nn.scan`, which splits keys in its own way.

    def block(layer, x, given):
        stats, key = given
        variables = {"params": layer, "batch_stats": stats}
        options = {"rngs": {"dropout": key}, "mutable": ["batch_stats"]}
        (x, _), new = Block(parent=None).apply(variables, x, None, **options)
        return x, new["batch_stats"]

    layers, stats = (self.variables[name]["layers"] for name in ("params", "batch_stats"))
    keys = jax.random.split(self.make_rng("dropout"), 3)
    x, stats = jgrad.scan_layers(block, layers, x, xs=(stats, keys), has_ys=True)
    self.put_variable("batch_stats", "layers", stats)

The boxes of `nn.with_partitioning` also name the axis of layers, which a single layer does not
have. Where flax uses these names, on a mesh, pass the following as `layers`, with the name that you
gave to `nn.scan`:

    nn.meta.remove_axis(self.variables["params"]["layers"], 0, {nn.PARTITION_NAME: None})
"""

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState

import jgrad


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        attention = nn.MultiHeadDotProductAttention(2, use_bias=False)
        mask = nn.make_causal_mask(x[..., 0])
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        hidden = nn.gelu(nn.Dense(64, kernel_init=init)(nn.LayerNorm()(x)))
        return x + nn.Dense(16)(hidden), None


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        layers = nn.scan(
            Block,
            length=3,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            metadata_params={nn.PARTITION_NAME: None},
        )(name="layers")
        x = nn.Embed(32, 16)(tokens)
        if self.is_initializing():
            x, _ = layers(x, None)
        else:
            block = lambda layer, x: Block(parent=None).apply({"params": layer}, x, None)[0]
            x = jgrad.scan_layers(block, self.variables["params"]["layers"], x)
        return nn.Dense(32)(nn.LayerNorm()(x))


def loss(params, tokens):
    scores = Decoder().apply(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()


def step(state, tokens):
    in_backward = jgrad.step_in_backward(state.tx, loss)
    params, opt_state, value = in_backward(state.params, state.opt_state, tokens)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state), value


step = jax.jit(step, donate_argnums=0)
tokens = np.cumsum(np.arange(72).reshape(8, 9), axis=1) % 32
params = jax.jit(Decoder().init)(jax.random.key(0), tokens)
state = TrainState.create(apply_fn=None, params=params, tx=jgrad.adam(1e-2))
for _ in range(100):
    state, value = step(state, tokens)
print(f"loss {value:.3f}")
