"""Packed trees: the same numbers in fewer arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jgrad
from tests.cases import CASES, gradients, params
from tests.loops import assert_equal, compiled

every_case = pytest.mark.parametrize("case", CASES, ids=str)


def floating(tree):
    """The tree with None for what is no floating array."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, tree)


def like(tree, other):
    """The leaves of a tree where the other has some."""
    return jax.tree.map(lambda x, y: None if y is None else x, tree, other, is_leaf=_is_none)


def _is_none(x):
    return x is None


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


AXES = {**dict.fromkeys(mixed()), "stack": 1, "half": None}


# ---- round trip --------------------------------------------------------------------------------


@pytest.mark.parametrize("multiple_of", [1, 8])
@pytest.mark.parametrize("layer_axes", [None, AXES], ids=["leaves", "layers"])
def test_round_trip(layer_axes, multiple_of):
    """Bit for bit; buffers of whole blocks, with zeros where nothing is."""
    tree = mixed()
    packed = jgrad.pack(tree, layer_axes=layer_axes, multiple_of=multiple_of)
    assert_equal(jgrad.unpack(packed), tree)
    assert set(packed.buffers) == {"float32", "bfloat16", "float16", "complex64"}
    for name, buffer in packed.buffers.items():
        assert buffer.dtype == name
        assert buffer.shape[1] == 256
        assert buffer.shape[0] % multiple_of == 0
    elements = sum(x.size for x in jax.tree.leaves(tree))
    assert sum(int(jnp.sum(x != 0)) for x in packed.buffers.values()) == elements
    assert_equal(jgrad.pack(jgrad.unpack(packed), like=packed), packed)


shapes = st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=6)


@given(shapes, st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_any_shapes(sizes, multiple_of, random):
    """Stacked over any axes or none."""
    rng = np.random.default_rng(0)
    tree = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in sizes]
    axes = [tuple(i for i in range(len(shape)) if random.random() < 0.5) for shape in sizes]
    packed = jgrad.pack(tree, layer_axes=axes, multiple_of=multiple_of)
    assert_equal(jgrad.unpack(packed), tree)


def test_layouts_are_equal_where_trees_are_alike():
    """One trace for all trees of the same shapes."""
    traces = []

    @jax.jit
    def f(packed):
        traces.append(1)
        return jax.tree.map(lambda x: 2 * x, packed)

    for seed in range(3):
        tree = mixed(seed)
        assert_equal(jgrad.unpack(f(jgrad.pack(tree))), jax.tree.map(lambda x: 2 * x, tree))
    assert len(traces) == 1
    a, b = jgrad.pack(mixed()).layout, jgrad.pack(mixed(1)).layout
    assert a == b
    assert hash(a) == hash(b)
    assert a != jgrad.pack(mixed(), layer_axes=AXES).layout
    assert a != jgrad.pack({"w": jnp.ones(3)}).layout


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


# ---- optimizers --------------------------------------------------------------------------------


@every_case
def test_optimizers(case):
    """The numbers of the tree: bit for bit, or to the rounding of a norm."""
    w = floating(params())
    grads = [like(g, w) for g in gradients(10)]
    tx = case.tx()
    packed, state, tree, whole = jgrad.pack(w), tx.init(jgrad.pack(w)), w, tx.init(w)
    for g in grads:
        packed, state = compiled(tx)(packed, state, jgrad.pack(g))
        tree, whole = compiled(tx)(tree, whole, g)
    found, expected = jgrad.unpack((packed, state)), (tree, whole)
    if case.elementwise:
        assert_equal(found, expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.max(np.abs(b), initial=0))
    assert_equal(jgrad.pack(found, like=jax.eval_shape(lambda: (packed, state))), (packed, state))
