"""A scan by itself: values and derivatives are those of a Python loop over the layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from tests.backward import models
from tests.support import messages

LAYERS = models.params()["layers"]
X = models.batch()


def by_hand(layers, x, shift):
    for i in range(models.LAYERS):
        x = models.block(jax.tree.map(lambda w, i=i: w[i], layers), x) + shift
    return x


def scanned(layers, x, shift, remat):
    return jgrad.scan_layers(
        lambda layer, x: models.block(layer, x) + shift, layers, x, remat=remat
    )


REMAT = [True, False, jax.checkpoint_policies.dots_saveable]


@pytest.mark.slow(always=["False"])
@pytest.mark.parametrize("remat", REMAT, ids=["True", "False", "policy"])
def test_values_and_derivatives(remat):
    """In reverse and in forward mode, also by an array that blocks read beside their layer."""
    shift = jnp.full(X.shape, 0.1)

    def derivatives(f, *options):
        def loss(layers, x, shift):
            return jnp.sum(jnp.sin(f(layers, x, shift, *options)))

        args = LAYERS, X, shift
        return jax.jit(lambda: (f(*args, *options), jax.grad(loss, (0, 1, 2))(*args)))()

    found, expected = derivatives(scanned, remat), derivatives(by_hand)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)
    tangents = jax.tree.map(jnp.ones_like, (LAYERS, X, shift))
    slopes = [
        jax.jvp(lambda *args, f=f: f(*args), (LAYERS, X, shift), tangents)[1]
        for f in (lambda *args: scanned(*args, remat), by_hand)
    ]
    np.testing.assert_allclose(*slopes, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("remat", "stored"), [(True, 1), (False, 3)])
def test_what_the_backward_pass_reads(remat, stored):
    """With recomputation the carries of all layers alone, beside the weights."""

    def pull(layers, x):
        return jax.vjp(lambda w, x: scanned(w, x, jnp.zeros(()), remat), layers, x)[1]

    arrays = len(jax.tree.leaves(jax.eval_shape(pull, LAYERS, X)))
    assert arrays == len(LAYERS) + stored


TWO = {"a": jnp.ones((3, 2)), "b": jnp.ones((3, 2))}


test_messages = messages.test_of("scan_layers", globals())
