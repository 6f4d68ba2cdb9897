"""Error messages about arguments that do not fit a packed tree."""

import jax
import jax.numpy as jnp

import jgrad
from tests.support import messages

OF_TWO = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
OTHER = {"a": jnp.ones(3), "b": jnp.ones((2, 3))}
PACKED = jgrad.pack(OF_TWO)


def update(updates, params, made_for=PACKED):
    tx = jgrad.adam(0.1)
    return tx.update(updates, tx.init(made_for), params)


def functional(w, g, m):
    return jgrad.adam_update(w, g, 0.1, m, m, 1)


def adam_update(lr=0.1, **options):
    return jgrad.adam_update(PACKED, PACKED, lr, PACKED, PACKED, 1, **options)


# Options are those of the tree, one number per leaf, and named by its leaves.


NONE, ROW = {"a": 0.1, "b": None}, {"a": jnp.ones(2), "b": 0.1}


def mapped(tx):
    """An update of the packed trees of two models at once."""
    many = jax.tree.map(lambda x: jnp.stack([x, x]), PACKED)
    return tx.update(many, tx.init(many), many)


def test_buffers_mapped_over():
    """Only what needs a number per row is an error."""
    assert mapped(jgrad.adam(0.1))[0].buffers["float32"].shape == (2, 2, 256)


test_packed_beside_other_trees = messages.test_of("packed", globals())


test_options = messages.test_of("packed_options", globals())
