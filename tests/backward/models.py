"""Models with stacks of layers, and the ordinary step, which is the truth for that in backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jgrad
from tests.support import compiler

WIDTH, HIDDEN, LAYERS, ROWS = 16, 32, 3, 4


def array(rng, *shape, dtype=jnp.float32):
    return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), dtype)


def stack(rng, layers, width, hidden, dtype):
    return {
        "up": array(rng, layers, width, hidden, dtype=dtype),
        "down": array(rng, layers, hidden, width, dtype=dtype),
    }


def block(layer, x):
    return x + jnp.tanh(x @ layer["up"]) @ layer["down"]


# ---- one stack between two matrices ------------------------------------------------------------

AXES = {"first": None, "layers": 0, "last": None}


def params(dtype=jnp.float32, width=WIDTH, hidden=HIDDEN):
    rng = np.random.default_rng(0)
    return {
        "first": array(rng, WIDTH, width, dtype=dtype),
        "layers": stack(rng, LAYERS, width, hidden, dtype),
        "last": array(rng, width, WIDTH, dtype=dtype),
    }


def batch(seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(ROWS, WIDTH)), dtype)


def loss(params, x, *, remat=True):
    x = jnp.tanh(x @ params["first"])
    x = jgrad.scan_layers(block, params["layers"], x, remat=remat)
    return jnp.mean(jnp.square((x @ params["last"]).astype(jnp.float32)))


# ---- two stacks, and all that a step in the backward pass has to get right -----------------------

TOKENS = 6


def tied_params():
    """A leaf without a gradient, one that is no floating array, and one that blocks read, too."""
    rng = np.random.default_rng(0)
    return {
        "embedding": array(rng, TOKENS, WIDTH),
        "gate": array(rng, 1, WIDTH),
        "encoder": {**stack(rng, 3, WIDTH, HIDDEN, jnp.float32), "id": jnp.arange(3)},
        "decoder": stack(rng, 2, WIDTH, HIDDEN, jnp.float32),
        "unused": array(rng, 2, 3),
        "nothing": None,
    }


def tokens(seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, TOKENS, size=(2, 5)), jnp.int32)


def tied_loss(params, tokens, *, remat=True):
    """Of the next token: the embedding is the head, too, and its gradient comes from both ends."""
    gate = jnp.broadcast_to(jax.nn.sigmoid(params["gate"]), (5, WIDTH))

    def gated(layer, x):
        return jax.vmap(lambda row: row + gate * (block(layer, row) - row))(x)

    def between(x):
        return x * jnp.asarray(0.5, x.dtype)

    x = jax.vmap(lambda row: params["embedding"][row])(tokens)
    run = functools.partial(jgrad.scan_layers, gated, remat=remat)
    x = run(params["decoder"], between(run(params["encoder"], x)))
    logits = x @ params["embedding"].T
    of_next = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1)
    return -jnp.mean(of_next)


# ---- steps -------------------------------------------------------------------------------------


def ordinary(tx, loss=loss, has_aux=False, **options):
    """The step that a user has otherwise."""

    def step(params, state, *args, **extra):
        result, grads = jax.value_and_grad(loss, has_aux=has_aux, allow_int=True)(params, *args)
        extra = {"loss": result[0] if has_aux else result} | extra
        return *jgrad.apply_gradients(tx, grads, state, params, **options, **extra), result

    return step


def run(step, params, state, batches, *, exact=False, **extra):
    """Parameters, state and results of some steps; `exact` if their bits are compared."""
    step, results = jax.jit(step, compiler_options=compiler.exact() if exact else None), []
    for x in batches:
        params, state, result = step(params, state, x, **extra)
        results.append(result)
    return params, state, results


def assert_equal(found, expected, roundings=0, few=0.0):
    """Leaf by leaf, to so many units in the last place of the largest element.

    With `few`, that share of elements may differ by more: where numbers are rounded at random, a
    difference in the last place of float32 takes one in thousands to its other neighbour.
    """
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    leaves = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True)
    for (path, y), x in leaves:
        name = jax.tree_util.keystr(path)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        x, y = (np.asarray(a, np.float64 if a.dtype != bool else None) for a in (x, y))
        unit = float(jnp.finfo(jnp.float32).eps) * (np.abs(y).max(initial=0) or 1)
        differ = ~(np.abs(x - y) <= roundings * unit) & (x != y)
        assert differ.sum() <= few * differ.size, (name, differ.sum(), np.abs(x - y).max())
