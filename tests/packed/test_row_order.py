"""`pack(matrices=...)`: whole matrices for each shard, and trees that come back bit for bit."""

import copy
import functools
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from jgrad._packed import array_spec
from jgrad._packed.row_order import RowOrder, Segment
from tests.cases import rank_two
from tests.packed.test_muon import LAYERS, MATRICES, W, normal
from tests.support.choice import mostly_slow
from tests.support.errors import assert_error
from tests.support.loops import assert_equal, train
from tests.support.packed_model import assert_close

SHARDS = (1, 2, 3, 8)


def pack(tree, shards, **options):
    options = {"layer_axes": LAYERS, "matrices": MATRICES} | options
    return jgrad.pack(tree, multiple_of=shards, **options)


# Enough matrices that no more than half is padding for 8 shards.
def many(seed=0):
    trees = [normal(100 * seed + i) for i in range(4)]
    return {f"{i}": tree for i, tree in enumerate(trees)}


MANY = {f"{i}": MATRICES for i in range(4)}
MANY_LAYERS = {f"{i}": LAYERS for i in range(4)}


def pack_many(tree, shards=8):
    return compiled_pack(tree, shards)


@functools.partial(jax.jit, static_argnums=1)
def compiled_pack(tree, shards):
    return jgrad.pack(tree, layer_axes=MANY_LAYERS, matrices=MANY, multiple_of=shards)


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_segments_there_and_back(shards):
    """Of NumPy's arrays and of JAX's, with a number per row or more."""
    row_order = RowOrder(shards, (Segment(3, 1), Segment(4, 2), Segment(2)))
    for shape in ((9 * shards,), (9 * shards, 5)):
        x = np.arange(np.prod(shape)).reshape(shape)
        for form in (x, jnp.asarray(x)):
            there = row_order.to_leaf_order(form)
            assert type(there) is type(form)
            np.testing.assert_array_equal(row_order.to_shard_order(there), x)
        each = x.reshape(shards, 9, *shape[1:])
        parts = (each[:, :3], each[:, 3:7], each[:, 7:])
        expected = np.concatenate([part.reshape(-1, *shape[1:]) for part in parts])
        np.testing.assert_array_equal(row_order.to_leaf_order(x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("shards", mostly_slow(SHARDS, 3))
def test_unpack_is_the_tree(shards):
    """Bit for bit, and packed again like itself; and copies and pickles of its layout are equal."""
    tree = many()
    packed = pack_many(tree, shards)
    assert_equal(jgrad.unpack(packed), tree)
    assert_equal(jgrad.pack(tree, like=packed), packed)
    assert copy.deepcopy(packed.layout) == packed.layout
    reduced = make_many().init(packed).vw.layout
    assert reduced != packed.layout
    assert copy.copy(reduced) == reduced
    plain = jgrad.pack({"w": [x["a"]["w"] for x in tree.values()]}, matrices=True, multiple_of=2)
    assert pickle.loads(pickle.dumps(plain.layout)) == plain.layout
    assert "padding" in repr(packed)


def make_many(**options):
    options = {"layer_axes": MANY_LAYERS, "adam_learning_rate": 0.01, "weight_decay": 0.1} | options
    return jgrad.muon(0.1, matrices=MANY, **options)


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("shards", [2, 8])
def test_each_shard_has_whole_matrices(shards):
    """As many of each shape in the same rows of each shard; the others are zeros."""
    tree = jax.tree.map(jnp.ones_like, many())
    (spec,) = (
        s for s in array_spec.specs(pack_many(tree, shards)) if s.spans[0].buffer == "float32"
    )
    buffer = pack_many(tree, shards).buffers["float32"].reshape(shards, -1, 256)
    assert buffer.shape[1] == spec.row_order.rows_per_shard
    row = 0
    for segment in spec.row_order.segments:
        part = np.asarray(buffer[:, row : row + segment.rows])
        row += segment.rows
        if segment.capacity:  # ones, as many as a matrix has elements, and zeros behind them
            items = part.reshape(shards * segment.capacity, -1)
            full = items.sum(axis=1)
            assert set(full) <= {0, full.max()}
            assert full.max() in (8 * 20, 16 * 16, 20 * 20)
            np.testing.assert_array_equal(items[full > 0][:, : int(full.max())], 1)


@pytest.mark.slow
@pytest.mark.parametrize("shards", mostly_slow([2, 8], 8))
@pytest.mark.parametrize("rule", mostly_slow(["muon", "normuon"], "normuon"))
def test_numbers_of_the_tree(shards, rule):
    """With rates and masks of leaves, which follow the order of the rows."""
    rates = {f"{i}": 0.1 * (i + 1) for i in range(4)}
    mask = {f"{i}": jax.tree.map(lambda x, i=i: (x.ndim + i) % 2 == 0, W) for i in range(4)}
    tx = make_many(rule=rule, weight_decay_mask=mask, adam_learning_rate=rates)
    w, grads = many(), [many(1), many(2)]
    expected, state = train(tx, w, grads)
    found, packed_state = train(tx, pack_many(w, shards), [pack_many(g, shards) for g in grads])
    found = jgrad.unpack(found)
    for name in w:
        assert_close(found[name].pop("half"), expected[name].pop("half"), 0.01)
    assert_close(found, expected, 1e-5)
    unpacked = jgrad.unpack(packed_state)
    assert jax.tree.map(jnp.shape, unpacked) == jax.tree.map(jnp.shape, state)
    assert_close(unpacked.vw, state.vw, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(["lars", "lamb", "clip_by_global_norm"], "lamb"))
def test_norms_of_layers(name):
    """Of rows in another order, with a mask and a rate per layer."""
    w, g = many(), many(1)
    mask = jax.tree.map(lambda x: x.ndim > 1, w)
    if name == "clip_by_global_norm":
        tx = jgrad.clip_by_global_norm(0.1)
    else:
        tx = getattr(jgrad, name)(
            0.1, weight_decay=0.1, trust_ratio_mask=mask, layer_axes=MANY_LAYERS
        )
    expected, _ = jax.jit(tx.update)(g, tx.init(w), w)
    packed = pack_many(w)
    found, _ = jax.jit(tx.update)(pack_many(g), tx.init(packed), packed)
    found = jgrad.unpack(found)
    for key in w:
        assert_close(found[key].pop("half"), expected[key].pop("half"), 0.01)
    assert_close(found, expected, 1e-5)


@pytest.mark.slow
def test_a_rate_for_each_element():
    w, g = many(), many(1)
    rates = jax.tree.map(lambda x: jnp.linspace(0, 1, x.size).reshape(x.shape), w)
    tx = jgrad.gradient_descent(rates)
    expected, _ = jax.jit(tx.update)(g, tx.init(w), w)
    packed = pack_many(w)
    found, _ = jax.jit(tx.update)(pack_many(g), tx.init(packed), packed)
    assert_close(jgrad.unpack(found), expected)


def test_derivatives():
    """`pack` and `unpack` are linear, each the transpose of the other on what is no padding."""
    w, g = many(), many(1)
    packed = pack_many(w)
    dot = lambda a, b: sum(
        jax.tree.leaves(jax.tree.map(lambda x, y: jnp.vdot(x.astype(float), y.astype(float)), a, b))
    )
    slope = jax.jit(jax.grad(lambda p: dot(jgrad.unpack(p), g)))(packed)
    assert_equal(slope, pack_many(g))


def test_a_function_of_shapes():
    tree = {"a": jnp.ones((16, 16)), "b": jnp.ones((16, 16)), "c": jnp.ones(16)}
    chosen = jgrad.pack(tree, matrices=jgrad.hidden_matrices(), multiple_of=2)
    assert (
        chosen.layout
        == jgrad.pack(tree, matrices={"a": True, "b": True, "c": False}, multiple_of=2).layout
    )


def test_messages():
    tree = {"w": jnp.ones((32, 32)), "b": jnp.ones(3)}
    assert_error(
        ValueError,
        "pack: `tree` at ['w']: 1 matrix of shape (32, 32) for 8 shards: 87% of the buffer would be "
        "padding, expected at most half; shard over a smaller mesh axis, with a smaller "
        "`multiple_of`.",
        lambda: (
            jgrad.pack(tree["w"], matrices=True, multiple_of=8) and None
            if False
            else jgrad.pack({"w": tree["w"]}, matrices=True, multiple_of=8)
        ),
    )
    assert_error(
        TypeError,
        "pack: `matrices` at ['w']: 1 of type int, expected a bool.",
        lambda: jgrad.pack(tree, matrices={"w": 1, "b": False}),
    )
    assert_error(
        ValueError,
        "pack: `like`: it has a layout already, expected no other option with it.",
        lambda: jgrad.pack(tree, like=jgrad.pack(tree), matrices=True),
    )


@pytest.mark.slow
def test_a_whole_model():
    """Of equinox: the leaf that is no array is named, whatever chooses the matrices."""
    model = eqx.nn.MLP(3, 3, 8, 2, key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"^pack: `tree` at \.activation: .* expected a floating"):
        jgrad.pack(model, matrices=jgrad.hidden_matrices())


def test_muon_of_other_matrices():
    """What was packed as a matrix is one, and its outputs are where those of its equals are."""
    tree = {"a": jnp.ones((16, 16)), "b": jnp.ones((16, 16)), "c": jnp.ones((16, 4))}
    packed = jgrad.pack(tree, matrices={"a": True, "b": True, "c": False}, multiple_of=2)
    init = lambda **options: jgrad.muon(0.1, adam_learning_rate=0.1, **options).init(packed)
    assert_error(
        ValueError,
        "muon: `matrices` at ['b']: False, but it was packed as a matrix, expected the `matrices` "
        "with which `pack` was called.",
        lambda: init(matrices={"a": True, "b": False, "c": False}),
    )
    assert_error(
        ValueError,
        "muon: `matrices` at ['c']: True, but it was packed as an ordinary leaf, expected the "
        "`matrices` with which `pack` was called.",
        lambda: init(matrices=rank_two),
    )
    assert_error(
        ValueError,
        "muon: `matrices` at ['b']: another place of outputs than in ['a'], of equal shape, "
        "expected the same, as they share a part of the buffer.",
        lambda: init(
            matrices={"a": True, "b": True, "c": False}, output_axes={"a": -1, "b": 0, "c": -1}
        ),
    )
