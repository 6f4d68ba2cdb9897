"""`pack_small`: the numbers of the transformation inside, tree in and tree out.

Updates are added to the weights outside of what is compiled: together with the tree form XLA may
do both in one operation that rounds once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.core import FrozenDict

import jgrad
from tests.cases import every_case
from tests.support import messages
from tests.support.errors import assert_error
from tests.support.loops import assert_equal
from tests.support.packed_model import SMALL, assert_close, gradients, normal


def train(tx, w, grads):
    """The last weights and state."""
    update, state = jax.jit(tx.update), tx.init(w)
    for g in grads:
        updates, state = update(g, state, w)
        w = optax.apply_updates(w, updates)
    return w, state


@pytest.mark.slow
@pytest.mark.bits
@every_case(("adamw", "lamb_decayed"))
def test_every_optimizer(case):
    """Weights are those of the tree, and `unpack` makes the state that of the tree."""
    w, grads = normal(0), gradients()
    found = train(jgrad.pack_small(case.tx(), max_size=SMALL), w, grads)
    expected = train(case.tx(), w, grads)
    (assert_equal if case.elementwise else assert_close)(jgrad.unpack(found), expected)


def test_what_is_packed():
    """Leaves of up to `max_size` elements, of each dtype; others stay as they are."""
    w = {"a": jnp.ones(300), "b": jnp.ones(301), "n": jnp.arange(3), "h": jnp.ones(3, jnp.bfloat16)}
    state = jgrad.pack_small(jgrad.adam(0.1), max_size=300).init(w)
    assert set(state.mw.buffers) == {"leaf 1", "leaf 3", "bfloat16", "float32"}
    assert state.mw.buffers["float32"].shape == (2, 256)
    assert state.mw.buffers["leaf 3"] is None
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.mw))
    everything = jgrad.pack_small(jgrad.adam(0.1), max_size=0).init(w)
    assert len(everything.mw.buffers) == 4
    apart = jgrad.pack_small(jgrad.adam(0.1), max_size=4096).init(w)
    assert set(apart.mw.buffers) == {"leaf 3", "bfloat16 small", "float32 small"}
    of_numpy = jgrad.pack_small(jgrad.adam(0.1), max_size=np.int64(300)).init(w)
    assert of_numpy.mw.layout == state.mw.layout


@pytest.mark.slow(one_in=3)
@pytest.mark.bits
@pytest.mark.parametrize("zero", [None, "float0", "integers"])
def test_leaves_that_do_not_change(zero):
    """Integers, None and a missing gradient, also in a step between others: as with the method alone."""
    w = {"a": jnp.ones(3), "b": jnp.ones(4), "n": jnp.arange(3), "none": None}
    n = {
        None: None,
        "float0": np.zeros(3, jax.dtypes.float0),
        "integers": jnp.zeros(3, jnp.int32),
    }[zero]
    g = {"a": jnp.ones(3), "b": jnp.full(4, 2.0), "n": n, "none": None}
    tx, grads = jgrad.adam(0.1, weight_decay=0.1), [g, g | {"b": None}, g]
    found = train(jgrad.pack_small(tx), w, grads)
    assert_equal(jgrad.unpack(found), train(tx, w, grads))


@pytest.mark.bits
def test_gradients_of_several_dtypes():
    """For parameters of one."""
    w = {"a": jnp.ones(30), "b": jnp.ones(30)}
    g = {"a": jnp.ones(30, jnp.bfloat16), "b": jnp.ones(30)}
    tx = jgrad.adam(0.1)
    assert_equal(jgrad.unpack(train(jgrad.pack_small(tx), w, [g])), train(tx, w, [g]))


# ---- errors ------------------------------------------------------------------------------------


ADAM, SMALL_ADAM = jgrad.adam(0.1), jgrad.pack_small(jgrad.adam(0.1))
OF_4, OF_5 = ({"a": jnp.ones(3), "b": jnp.ones(n)} for n in (4, 5))


def with_b(b):
    w = normal(0)
    return w | {"layer": w["layer"] | {"b": b}}


test_message = messages.test_of("pack_small", globals())


IN = {
    "a dict": lambda w: w,
    "FrozenDict": FrozenDict,
    "variables": lambda w: jax.tree.map(nnx.Param, w),
}


@pytest.mark.parametrize("now", ["a dict", "FrozenDict"])
@pytest.mark.parametrize("was", IN)
def test_other_containers(was, now):
    """The leaves have the same names: nnx shows variables to `init` alone. A state keeps its form."""
    w, g = {"a": jnp.ones(3), "b": {"c": jnp.ones(2)}}, {"a": jnp.ones(3), "b": {"c": -jnp.ones(2)}}
    tx = jgrad.pack_small(jgrad.adam(0.1))
    state, (w_now, g_now) = tx.init(IN[was](w)), map(IN[now], (w, g))
    expected = jax.tree.leaves(jgrad.adam(0.1).update(g, jgrad.adam(0.1).init(w), w)[0])
    for params in (w_now, None):
        updates, new = tx.update(g_now, state, params)
        assert jax.tree.structure(updates) == jax.tree.structure(w_now)
        assert_equal(jax.tree.leaves(updates), expected)
        assert jax.tree.structure(new) == jax.tree.structure(state)


def test_the_state_of_a_tree_is_packed():
    state = jgrad.pack(ADAM.init(OF_4), like=jax.eval_shape(SMALL_ADAM.init, OF_4))
    found, expected = SMALL_ADAM.update(OF_4, state, OF_4), ADAM.update(OF_4, ADAM.init(OF_4), OF_4)
    assert_equal(found[0], expected[0])


# ---- state that others read and save ------------------------------------------------------------

SAVED = {"pack_small": (jgrad.pack_small, lambda w: w), "packed": (lambda tx: tx, jgrad.pack)}


@pytest.mark.slow
@pytest.mark.parametrize("form", SAVED)
def test_flax_saves_the_tree(form):
    """The file is that of the state of a tree, and fits both."""
    around, packed = SAVED[form]
    make = lambda: jgrad.master_weights(jgrad.adam(0.1))
    tree = {"a": jnp.ones(3), "h": jnp.ones((2, 3), jnp.bfloat16), "none": None}
    ones = jax.tree.map(jnp.ones_like, tree)
    w, tx = packed(tree), around(make())
    _, state = tx.update(packed(ones), tx.init(w), w)
    _, alone = make().update(ones, make().init(tree), tree)
    saved = serialization.to_bytes(state)
    assert saved == serialization.to_bytes(alone)
    for like in (tx.init(w), jax.eval_shape(tx.init, w)):
        again = serialization.from_bytes(like, saved)
        assert jax.tree.structure(again) == jax.tree.structure(state)
        assert_equal(again, state)


@pytest.mark.parametrize("tree", [{}, {"a": None}], ids=["no leaf", "None"])
@pytest.mark.parametrize("make", [jgrad.adam, jgrad.gradient_descent])
def test_nothing_to_pack(make, tree):
    small = jgrad.pack_small(make(0.1))
    state = small.init(tree)
    assert jax.tree.structure(state) == jax.tree.structure(make(0.1).init(tree))
    updates, again = small.update(tree, state, tree)
    assert updates == tree
    assert jax.tree.structure(again) == jax.tree.structure(state)


def test_optax_maps_what_is_like_the_parameters():
    w = {"a": jnp.ones(3), "big": jnp.ones((3, 2000)), "n": jnp.arange(2)}
    tx = jgrad.pack_small(optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.adam(0.1)))
    state = tx.init(w)
    marked = optax.tree_map_params(tx, jnp.shape, state, transform_non_params=lambda _: "other")
    adam = marked[1]
    assert adam.step == "other"
    assert adam.mw.buffers == {"float32": (1, 256), "leaf 1": (3, 2000), "leaf 2": None}
    # With a tree beside it: as the docstring says.
    inner = optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.adam(0.1))
    named = optax.tree_map_params(
        inner,
        lambda _, name: name,
        jgrad.unpack(state),
        {"a": "A", "big": "B", "n": "N"},
        is_leaf=lambda x: x is None,
    )
    assert named[1].vw == {"a": "A", "big": "B", "n": "N"}


def test_packed_parameters_of_nnx():
    """`nnx.Optimizer` takes the state apart, whatever the optimizer: the message says what to do."""

    class Model(nnx.Module):
        def __init__(self, w):
            self.w = nnx.Param(w)

    loss = lambda model: jgrad.unpack(model.w.get_value())["a"].sum()

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(loss)(model))

    model = Model(jgrad.pack({"a": jnp.ones(3)}))
    optimizer = nnx.Optimizer(model, jgrad.adam(0.1), wrt=nnx.Param)
    step(model, optimizer)
    message = (
        "adam: `state.mw` does not have the structure of `params`: `state.mw` has a State at ['w'] where "
        "`params` has a Packed; pack a restored state by `pack(state, like=jax.eval_shape(tx.init, "
        "params))`; flax's `nnx.Optimizer` takes packed states apart: give it `pack_small(tx)` and "
        "parameters as a tree, or call `tx.update` yourself."
    )
    assert_error(ValueError, message, lambda: step(model, optimizer))
