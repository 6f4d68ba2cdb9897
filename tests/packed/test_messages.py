"""Error messages about arguments that do not fit a packed tree."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jgrad
from tests.support.errors import assert_error

OF_TWO = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
OTHER = {"a": jnp.ones(3), "b": jnp.ones((2, 3))}
PACKED = jgrad.pack(OF_TWO)


def update(updates, params, made_for=PACKED):
    tx = jgrad.adam(0.1)
    return tx.update(updates, tx.init(made_for), params)


def functional(w, g, m):
    return jgrad.adam_update(w, g, 0.1, m, m, 1)


A_TREE = "a dict where `{}` has a Packed"
NOT_PACKED = (
    "; pack a restored state by `pack(state, like=jax.eval_shape(tx.init, params))`; flax's "
    "`nnx.Optimizer` takes packed states apart: give it `pack_small(tx)` and parameters as a tree, "
    "or call `tx.update` yourself"
)
OTHER_LAYOUT = (
    "{} has packed float32 of shape (2, 3) at ['b'] where {} has packed float32 of shape (2, 2)"
)
MIXED = {
    "a tree as gradient": (lambda: update(OF_TWO, PACKED), "adam: `updates` does not have the structure of `params`: `updates` has " + A_TREE.format("params")),
    "a tree as parameters": (lambda: update(PACKED, OF_TWO), "adam: `updates` does not have the structure of `params`: `updates` has a Packed where `params` has a dict"),
    "a tree as state": (lambda: update(PACKED, PACKED, OF_TWO), "adam: `state.mw` does not have the structure of `params`: `state.mw` has " + A_TREE.format("params") + NOT_PACKED),
    "another layout": (lambda: update(jgrad.pack(OTHER), PACKED), "adam: `updates` does not have the structure of `params`: " + OTHER_LAYOUT.format("`updates`", "`params`")),
    "a state of another layout": (lambda: update(PACKED, PACKED, jgrad.pack(OTHER)), "adam: `state.mw` does not have the structure of `params`: " + OTHER_LAYOUT.format("`state.mw`", "`params`")),
    "a tree as functional gradient": (lambda: functional(PACKED, OF_TWO, PACKED), "adam_update: `dcdw` does not have the structure of `w`: `dcdw` has " + A_TREE.format("w")),
    "a number as moment": (lambda: functional(PACKED, PACKED, 0.0), "adam_update: `mw_tm1` does not have the structure of `w`: `mw_tm1` has a leaf where `w` has a Packed"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), MIXED.values(), ids=MIXED)
def test_packed_beside_other_trees(call, message):
    assert_error(ValueError, f"{message}.", call)


def adam_update(lr=0.1, **options):
    return jgrad.adam_update(PACKED, PACKED, lr, PACKED, PACKED, 1, **options)


NONE, ROW = {"a": 0.1, "b": None}, {"a": jnp.ones(2), "b": 0.1}
BROADCASTS = "at ['a']: shape (2,), expected (3,) or one that broadcasts to it"
# Options are those of the tree, one number per leaf, and named by its leaves.
OPTIONS = {
    **{f"None as {name}": (TypeError, f"adam_update: `{name}` at ['b']: None, expected an array or a number.",
     functools.partial(adam_update, **{name: NONE})) for name in ("lr", "epsilon", "beta1")},
    "a packed number": (ValueError,
     "adam_update: `epsilon` at .buffers['float32']: shape (2, 256), expected one element.",
     functools.partial(adam_update, epsilon=PACKED)),
    "a rate": (ValueError, f"adam: `learning_rate` does not broadcast to `params` {BROADCASTS}.",
     lambda: jgrad.adam(ROW).update(PACKED, jgrad.adam(ROW).init(PACKED), PACKED)),
    "a functional rate": (ValueError, f"gradient_descent_update: `lr` does not broadcast to `w` {BROADCASTS}.",
     lambda: jgrad.gradient_descent_update(PACKED, PACKED, ROW)),
    # Its buffers would be taken for leaves, and LARS and LAMB would take one for a layer.
    "packed twice": (TypeError,
     "pack: `tree` at ['a'][1]: packed already, expected a tree of arrays; `unpack` it first.",
     lambda: jgrad.pack({"a": [jnp.ones(3), PACKED]})),
}  # fmt: skip


@pytest.mark.parametrize(("error", "message", "call"), OPTIONS.values(), ids=OPTIONS)
def test_options(error, message, call):
    assert_error(error, message, call)


def test_buffers_mapped_over():
    """Only what needs a number per row is an error."""
    many = jax.tree.map(lambda x: jnp.stack([x, x]), PACKED)
    needing = {
        "lars": jgrad.lars(0.1),
        "gradient_descent": jgrad.gradient_descent({"a": 0.1, "b": 0.2}),
    }
    for name, tx in needing.items():
        message = (
            f"{name}: `params` at .buffers['float32']: shape (2, 2, 256), expected (2, 256) as in "
            "its layout; inside `vmap`, call `pack` there, or map `update` too; inside `shard_map` or `pmap`, "
            "use `zero`, which knows the rows of each device."
        )
        assert_error(ValueError, message, lambda tx=tx: tx.update(many, tx.init(many), many))
    tx = jgrad.adam(0.1)
    assert tx.update(many, tx.init(many), many)[0].buffers["float32"].shape == (2, 2, 256)
