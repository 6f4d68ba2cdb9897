"""A model with two stacks of layers, and a step of it in both forms.

It has what a step in the backward pass has to get right: an embedding that is tied to the head, so
that its gradient comes from both ends; an array of parameters that blocks read beside their layer;
leaves that are no floating arrays or have no gradient; and something computed between two stacks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jgrad

WIDTH, HIDDEN, TOKENS = 16, 32, 6
LAYERS = {"first": 3, "second": 2}


def params(dtype=jnp.float32, width=WIDTH, hidden=HIDDEN):
    rng = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), dtype)

    def stack(count):
        return {"up": array(count, width, hidden), "down": array(count, hidden, width)}

    return {
        "embedding": array(TOKENS, width),
        "gate": array(1, width),
        **{name: stack(count) for name, count in LAYERS.items()},
        "unused": array(2, 3),
    }


def batch(seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, TOKENS, size=(2, 5)), jnp.int32)


def block(layer, x, gate):
    return x + jnp.tanh(x @ layer["up"]) @ layer["down"] * gate


def loss(params, tokens, *, remat=True):
    """Of the next token, by the embedding itself."""
    gate = jnp.broadcast_to(jax.nn.sigmoid(params["gate"]), (5, params["gate"].shape[1]))
    layer = functools.partial(block, gate=gate)
    x = jax.vmap(lambda row: params["embedding"][row])(tokens)

    def both(layer_of, x):
        return jax.vmap(lambda row: layer(layer_of, row))(x)

    x = jgrad.scan_layers(both, params["first"], x, remat=remat)
    x = x / jnp.asarray(2.0, x.dtype)
    x = jgrad.scan_layers(both, params["second"], x, remat=remat)
    logits = (x @ params["embedding"].T).astype(jnp.float32)
    of_next = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1)
    return -jnp.mean(of_next)


def ordinary(tx, loss=loss, has_aux=False, **options):
    """The step that a user has otherwise: the truth."""

    def step(params, state, *args, **extra):
        result, grads = jax.value_and_grad(loss, has_aux=has_aux, allow_int=True)(params, *args)
        extra = {"loss": result[0] if has_aux else result} | extra
        return *jgrad.apply_gradients(tx, grads, state, params, **options, **extra), result

    return step


def run(step, params, state, batches, **extra):
    """Parameters, state and losses of some steps."""
    step, values = jax.jit(step), []
    for tokens in batches:
        params, state, value = step(params, state, tokens, **extra)
        values.append(value)
    return params, state, values
