"""Packed trees: the same numbers in fewer arrays, under each of JAX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jgrad
from jgrad._packed import restored
from tests.support import messages
from tests.support.loops import assert_equal


def mixed(seed=0):
    """Several dtypes and ranks, a scalar, an empty array, None, and a stack of layers."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape))
    return {
        "w": draw(30, 20).astype(jnp.float32),
        "half": [draw(7).astype(jnp.bfloat16), draw(256).astype(jnp.float16)],
        "scalar": draw().astype(jnp.float32),
        "empty": jnp.zeros((3, 0)),
        "none": None,
        "complex": jax.lax.complex(draw(5), draw(5)),
        "stack": draw(4, 3, 100).astype(jnp.float32),
    }


AXES = {**dict.fromkeys(jax.eval_shape(mixed)), "stack": 1, "half": None}


# ---- round trip --------------------------------------------------------------------------------


@pytest.mark.slow(one_in=8)
@pytest.mark.parametrize("max_size", [None, 100])
@pytest.mark.parametrize("multiple_of", [8, 1])
@pytest.mark.parametrize("layer_axes", [None, AXES], ids=["leaves", "layers"])
def test_round_trip(layer_axes, multiple_of, max_size):
    """Bit for bit; buffers of whole rows, with zeros where nothing is."""
    tree = mixed()
    packed = jgrad.pack(tree, layer_axes=layer_axes, multiple_of=multiple_of, max_size=max_size)
    assert_equal(jgrad.unpack(packed), tree)
    alone = {name for name in packed.buffers if name.startswith("leaf")}
    assert len(alone) == (3 if max_size else 0)
    assert set(packed.buffers) - alone == {"float32", "bfloat16", "complex64"} | (
        set() if max_size else {"float16"}
    )
    for name, buffer in packed.buffers.items():
        if name in alone:
            continue
        assert buffer.dtype == name
        assert buffer.shape[1] == 256
        assert buffer.shape[0] % multiple_of == 0
    elements = sum(x.size for x in jax.tree.leaves(tree))
    assert sum(int(jnp.sum(x != 0)) for x in packed.buffers.values()) == elements
    assert_equal(jgrad.pack(jgrad.unpack(packed), like=packed), packed)


def test_leaves_without_elements_between_others():
    """They start where the next leaf does, whichever comes first in the tree."""
    shapes = {"a": (5,), "b": (0, 3), "c": (), "d": (2, 0), "e": (1, 7), "f": (0,)}
    tree = {name: jnp.ones(shape) for name, shape in shapes.items()}
    packed = jgrad.pack(tree)
    assert_equal(jgrad.unpack(packed), tree)
    assert packed.buffers["float32"].shape == (3, 256)
    tx = jgrad.lamb(0.1)
    updates, _state = jax.jit(tx.update)(packed, tx.init(packed), packed)
    assert jax.tree.map(jnp.shape, jgrad.unpack(updates)) == shapes


shapes = st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=6)


def test_one_trace_for_trees_that_are_alike():
    traces = []

    @jax.jit
    def f(packed):
        traces.append(1)
        return jax.tree.map(lambda x: 2 * x, packed)

    for seed in range(3):
        tree = mixed(seed)
        assert_equal(jgrad.unpack(f(jgrad.pack(tree))), jax.tree.map(lambda x: 2 * x, tree))
    assert len(traces) == 1


def test_a_part_of_a_larger_tree():
    tree = {"packed": jgrad.pack({"w": jnp.arange(3.0)}), "n": jnp.arange(2)}
    found = jgrad.unpack(tree)
    assert_equal(found, {"packed": {"w": jnp.arange(3.0)}, "n": jnp.arange(2)})
    assert_equal(jgrad.pack(found, like=tree), tree)


# ---- under JAX's transformations ---------------------------------------------------------------


def loss(tree):
    leaves = jax.tree.leaves(tree)
    return sum(jnp.sum(jnp.sin(x) * (i + 1)) + jnp.sum(x) ** 3 for i, x in enumerate(leaves))


def small(seed=0):
    return {k: mixed(seed)[k] for k in ("w", "scalar", "stack", "none")}


@pytest.mark.slow
def test_gradients_are_packed_gradients():
    """Of reverse mode, forward mode, and one over the other."""
    tree, v = small(), small(1)
    packed, direction = jgrad.pack(tree), jgrad.pack(v)
    of_packed = lambda packed: loss(jgrad.unpack(packed))
    found = jax.grad(of_packed)(packed)
    expected = jax.grad(loss)(tree)
    assert_equal(jgrad.unpack(found), expected)
    assert_equal(found, jgrad.pack(expected))  # with zeros behind each leaf
    _, along = jax.jvp(of_packed, (packed,), (direction,))
    np.testing.assert_allclose(along, jax.jvp(loss, (tree,), (v,))[1], rtol=1e-6)
    product = jgrad.hvp(of_packed, (packed,), (direction,))
    whole = jgrad.hvp(loss, (tree,), (v,))
    for a, b in zip(jax.tree.leaves(jgrad.unpack(product)), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_vmap_scan_and_eval_shape():
    tree = small()
    packed = jgrad.pack(tree)
    models = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), tree)
    many = jax.vmap(jgrad.pack)(models)
    assert_equal(jax.vmap(jgrad.unpack)(many), models)
    end, _ = jax.lax.scan(lambda p, _: (jax.tree.map(lambda x: 2 * x, p), None), packed, length=3)
    assert_equal(jgrad.unpack(end), jax.tree.map(lambda x: 8 * x, tree))
    struct = jax.eval_shape(jgrad.pack, tree)
    assert struct.layout == packed.layout
    shapes = jax.eval_shape(jgrad.unpack, packed)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, tree)


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("max_size", [None, 100])
def test_donation(max_size):
    """A step in place: buffers are handed over, and none is left behind."""
    packed = jgrad.pack(small(), max_size=max_size)
    step = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p), donate_argnums=0)
    new = step(packed)
    assert all(x.is_deleted() for x in jax.tree.leaves(packed))
    assert_equal(jgrad.unpack(new), jax.tree.map(lambda x: 2 * x, small()))


def test_leaves_without_elements_and_trees_without_leaves():
    for tree in ({}, {"a": None}, {"a": jnp.zeros((0, 3))}, jnp.ones(()), [jnp.zeros(0), None]):
        assert_equal(jgrad.unpack(jgrad.pack(tree)), tree)
        grads = jax.grad(lambda p: sum(map(jnp.sum, jax.tree.leaves(jgrad.unpack(p))), 0.0))
        assert_equal(jgrad.unpack(grads(jgrad.pack(tree))), jax.tree.map(jnp.ones_like, tree))


def test_numpy_and_numbers_are_arrays():
    packed = jgrad.pack({"a": np.ones(3, np.float32), "b": 2.0})
    assert_equal(jgrad.unpack(packed), {"a": jnp.ones(3), "b": jnp.asarray(2.0)})


# ---- errors ------------------------------------------------------------------------------------

OF_TWO = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
LIKE = jgrad.pack(OF_TWO)
# "a" stays as it is.
WHOLE = jgrad.pack({"a": jnp.ones(200), "b": jnp.ones(3)}, max_size=100)
MIXED = {"a": jnp.ones(3), "b": jnp.ones(4), "h": jnp.ones(3, jnp.bfloat16)}


def master_weights():
    """A state in which a buffer has none."""
    return jgrad.master_weights(jgrad.adam(0.1)).init(jgrad.pack(MIXED))


def test_a_buffer_of_parameters_without_state_is_none():
    """So are their leaves when it is unpacked, and the buffer when they are packed again."""
    state = master_weights()
    assert state.master.buffers["float32"] is None
    tree = jgrad.unpack(state)
    assert {k for k, x in tree.master.items() if x is None} == {"a", "b"}
    assert jax.tree.structure(jgrad.pack(tree, like=state)) == jax.tree.structure(state)


def test_the_layout_of_a_file_is_the_one_at_its_place():
    """Where buffers of two trees have one shape, keys say whose it is."""
    like = {
        "a": jgrad.pack({"x": jnp.ones(3), "y": jnp.ones(300)}),
        "b": jgrad.pack({"x": jnp.ones(300), "y": jnp.ones(3)}),
    }
    assert like["a"].buffers["float32"].shape == like["b"].buffers["float32"].shape
    for name, packed in like.items():
        path = (jax.tree_util.DictKey(name),)
        assert restored._layouts(packed.buffers, path, [like]) == [packed.layout]


test_what_does_not_fit_a_layout = messages.test_of("pack_like", globals())
