"""What the optimizers say about bad input, word for word."""

import chex
import jax
import jax.numpy as jnp
import pytest

import jgrad
from tests.support import messages
from tests.support.errors import assert_error

NAN = float("nan")
W = {"layer_3": {"w": jnp.ones((3, 2)), "b": jnp.ones(3)}}
G = jax.tree.map(lambda x: 0.5 * x, W)
Z = jax.tree.map(jnp.zeros_like, W)
X = jnp.ones(3)


def with_b(b):
    return {"layer_3": {"w": W["layer_3"]["w"], "b": b}}


def adam(w=W, g=G, lr=0.1, mw=Z, vw=Z, step=1, **kwargs):
    return jgrad.adam_update(w, g, lr, mw, vw, step, **kwargs)


def update(tx, g=G, w=W, state=None, **kwargs):
    return tx.update(g, tx.init(W) if state is None else state, w, **kwargs)


LARGE = {"layer": {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}}


def adam8(**options):
    return jgrad.adam(0.1, moment_dtype="8bit", **options)


def with_blocks(field, **parts):
    """An update whose state has other codes or scales of `w`."""
    state = adam8().init(LARGE)
    moment = getattr(state, field)["layer"]
    moment = {"layer": moment | {"w": moment["w"]._replace(**parts)}}
    return adam8().update(LARGE, state._replace(**{field: moment}), LARGE)


STATE = jgrad.adam(0.1).init({"a": X})


def test_the_switch_of_chex_turns_its_checks_off():
    """`chex.disable_asserts` is a user's own word; structures and kinds are checked all the same."""
    wide = with_b(jnp.ones((3, 1)))
    chex.disable_asserts()
    try:
        with jax.numpy_rank_promotion("allow"):
            assert jgrad.gradient_descent_update(W, wide, 0.1)["layer_3"]["b"].shape == (3, 3)
        with pytest.raises(ValueError, match="structure"):
            jgrad.gradient_descent_update(W, {}, 0.1)
    finally:
        chex.enable_asserts()


def test_e03_a_thousand_leaves_make_no_longer_message():
    w = {f"layer_{i}": X for i in range(1000)}
    g = {f"layer_{i}": X for i in range(1000) if i % 100 != 33}
    message = (
        "gradient_descent_update: `dcdw` does not have the structure of `w`: only `w` has ['layer_133']; only `w` "
        "has ['layer_233']; only `w` has ['layer_33'] (and 7 more)."
    )
    assert_error(ValueError, message, lambda: jgrad.gradient_descent_update(w, g, 0.1))


test_message = messages.test_of("transformations", globals())


test_state_of_another_kind = messages.test_of("states_of_another_kind", globals())
