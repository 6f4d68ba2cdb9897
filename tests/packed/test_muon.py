"""Muon on packed trees: the numbers of the tree, with whole matrices for each shard where asked for."""

import copy
import functools
import pickle

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from jgrad._packed import array_spec
from jgrad._packed.layouts import RowOrder, Segment
from tests.cases import rank_two
from tests.support.choice import mostly_slow
from tests.support.errors import assert_error
from tests.support.loops import assert_equal, train
from tests.support.packed_model import assert_close

# Matrices of three shapes between other leaves, in the order of a buffer: (8,) (8, 20) (10,) (20, 8)
# (20, 20), with padding behind those that do not fill blocks; a stack; and a second dtype.
SHAPES = {
    "a": {"w": (8, 20), "b": (8,)},
    "c": {"w": (20, 8), "b": (10,)},
    "d": [(20, 20), (16, 16), (16, 16)],
    "embed": (12, 5),
    "stack": {"w": (3, 8, 20), "b": (3, 20)},
    "half": {"w": (8, 20), "b": (40,)},
}
OF_KERNEL = {"w": True, "b": False}
OPTIONS = {
    "matrices": dict.fromkeys(SHAPES, OF_KERNEL) | {"d": True, "embed": False},
    "layer_axes": dict.fromkeys(SHAPES) | {"stack": 0},
    "split": dict.fromkeys(SHAPES) | {"c": {"w": 4, "b": None}, "d": [None, (8, 8), (8, 8)]},
}
MATRICES, LAYERS = OPTIONS["matrices"], OPTIONS["layer_axes"]


def normal(seed):
    rng = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    tree = jax.tree.map(draw, SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    tree["half"] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree["half"])
    return tree


# With four, no more than half of a buffer is padding for 8 shards.
def models(seed, count=4):
    """Some models in one tree."""
    return {f"{i}": normal(100 * seed + i) for i in range(count)}


def for_each(option, count=4):
    """An option of a model, for all of them."""
    return {f"{i}": option for i in range(count)}


def make(count=4, **options):
    """With options of each copy."""
    own = {name: for_each(option, count) for name, option in OPTIONS.items()}
    usual = {"adam_learning_rate": 0.01, "weight_decay": 0.1}
    return jgrad.muon(**{"learning_rate": 0.1} | own | usual | options)


def packing(shards=None, **options):
    """A function that packs: for shards, or for one device."""
    if shards is not None:
        own = {name: for_each(OPTIONS[name]) for name in ("layer_axes", "matrices")}
        options = own | {"multiple_of": shards}
    return jax.jit(functools.partial(jgrad.pack, **options))


PACKINGS = {
    "plain": packing(),
    "layers": packing(layer_axes=for_each(LAYERS, 1)),
    "in part": packing(max_size=200),
    "padded": packing(multiple_of=7),
    "2 shards": packing(2),
    "8 shards": packing(8),
}
pack8 = PACKINGS["8 shards"]


def assert_near(found, expected, tolerance=1e-5):
    """What is in bfloat16 to one rounding of 8 bits."""
    half = lambda tree: {name: model["half"] for name, model in tree.items()}
    rest = lambda tree: {
        name: {k: x for k, x in model.items() if k != "half"} for name, model in tree.items()
    }
    assert_close(half(found), half(expected), 0.01)
    assert_close(rest(found), rest(expected), tolerance)


# ---- the numbers of the tree -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule"), [("8 shards", "muon"), *((name, "normuon") for name in PACKINGS)]
)
def test_numbers_of_the_tree(name, rule):
    """With rates and masks of leaves; the unpacked state has the tree's shapes, and packs again."""
    count, pack = 4 if "shards" in name else 1, PACKINGS[name]
    rates = {f"{i}": 0.1 * (i + 1) for i in range(count)}
    w, grads = models(0, count), [models(seed, count) for seed in (1, 2, 3)]
    mask = jax.tree.map(lambda x: (x.ndim + x.size) % 3 > 0, w)
    adam = {"adam_learning_rate": rates, "adam_weight_decay": 0.3}
    tx = make(count, learning_rate=rates, rule=rule, weight_decay_mask=mask, **adam)
    expected, state = train(tx, w, grads)
    packed = pack(w)
    found, packed_state = train(tx, packed, list(map(pack, grads)))
    assert_near(jgrad.unpack(found), expected)
    unpacked = jgrad.unpack(packed_state)
    chex.assert_trees_all_equal_shapes_and_dtypes(unpacked, state)
    assert_close(unpacked.vw, state.vw, 1e-4)
    assert_equal(jgrad.pack(unpacked, like=packed_state), packed_state)
    assert_equal(jgrad.pack(state, like=jax.eval_shape(tx.init, packed)).step, state.step)


W, GRADS = normal(0), [normal(1), normal(2), normal(3)]
ALONE = jgrad.muon(0.1, **OPTIONS, adam_learning_rate=0.01, weight_decay=0.1)


@pytest.mark.slow
def test_pack_small():
    small = jgrad.pack_small(ALONE, max_size=300)
    found, state = train(small, W, GRADS)
    expected, of_tree = train(ALONE, W, GRADS)
    assert_close(found["stack"], expected["stack"], 1e-5)
    chex.assert_trees_all_equal_shapes_and_dtypes(jgrad.unpack(state), of_tree)


@pytest.mark.slow
def test_none_among_the_leaves():
    """As packed models have it in the place of functions, behind leaves that are matrices or not."""
    tree = lambda x: {"activation": None, "b": x["a"]["b"], "name": None, "w": x["a"]["w"]}
    tx = jgrad.muon(0.1, matrices=jgrad.hidden_matrices(), adam_learning_rate=0.01)
    expected, state = train(tx, tree(W), [tree(g) for g in GRADS])
    found, packed_state = train(tx, jgrad.pack(tree(W)), [jgrad.pack(tree(g)) for g in GRADS])
    assert_close(jgrad.unpack(found), expected, 1e-5)
    chex.assert_trees_all_equal_shapes_and_dtypes(jgrad.unpack(packed_state), state)


@pytest.mark.slow
def test_a_missing_gradient():
    """A small leaf without one keeps its moments, and so does a whole buffer."""
    tx = jgrad.pack_small(ALONE, max_size=300)
    w, state = train(tx, W, GRADS[:1])
    old = jgrad.unpack(jax.tree.map(jnp.copy, state))
    g = GRADS[1] | {"a": {"w": None, "b": GRADS[1]["a"]["b"]}, "embed": None}
    updates, after = jax.jit(tx.update)(g, state, w)
    assert not np.any(updates["a"]["w"])
    assert not np.any(updates["embed"])
    new = jgrad.unpack(after)
    assert_equal((new.mw["a"]["w"], new.mw["embed"]), (old.mw["a"]["w"], old.mw["embed"]))
    assert_equal(new.vw["embed"], old.vw["embed"])
    packed, g = jgrad.pack(W), jgrad.pack(GRADS[0])
    g.buffers["float32"] = None
    state = ALONE.init(packed)
    updates, new = ALONE.update(g, state, packed)
    assert not np.any(updates.buffers["float32"])
    assert_equal(new.vw.buffers["float32"], state.vw.buffers["float32"])
    assert np.any(updates.buffers["bfloat16"])


@pytest.mark.slow
def test_bytes_of_the_state():
    """Momentum for each element, padded as the parameters are; second moments of Adam's rows alone."""
    packed = jgrad.pack(W, layer_axes=LAYERS)
    state = ALONE.init(packed)
    rows = {name: shape[0] for name, shape in packed.layout.shapes}
    assert state.mw.buffers["float32"].size == 256 * rows["float32"]
    # a.b, c.b, embed and three layers of stack.b, each on a block of its own.
    assert state.vw.buffers["float32"].shape == (6, 256)
    assert state.vw.buffers["bfloat16"].shape == (1, 256)
    alone = jgrad.pack({"w": W["d"]})
    state = jgrad.muon(0.1, matrices=True, adam_learning_rate=0.1).init(alone)
    assert state.vw.buffers == {"float32": None}


@pytest.mark.slow
def test_layer_axes_have_to_agree():
    packed = jgrad.pack(W, layer_axes=LAYERS)
    of = lambda axes: jgrad.muon(0.1, matrices=MATRICES, layer_axes=axes, adam_learning_rate=0.01)
    with pytest.raises(
        ValueError, match=r"muon: `layer_axes` at \['stack'\]\['w'\]: \(1,\), expected "
    ):
        of(LAYERS | {"stack": {"w": 1, "b": 0}}).init(packed)
    assert_close(jgrad.unpack(of(None).init(packed)), jgrad.unpack(of(LAYERS).init(packed)))


def test_a_state_of_other_matrices():
    """Two choices of matrices have two states, and a message says which leaf differs."""
    packed = jgrad.pack(W)
    other = {"matrices": MATRICES | {"embed": True}, "layer_axes": LAYERS}
    other = jgrad.muon(0.1, **other, adam_learning_rate=0.1)
    with pytest.raises(ValueError, match=r"muon: `state\.vw` does not have the structure of"):
        other.update(packed, ALONE.init(packed), packed)
    with pytest.raises(TypeError, match=r"muon: `state\.vw` at \['embed'\]: an array of float32"):
        other.update(W, ALONE.init(W), W)


def test_programs_do_not_grow_with_the_leaves():
    """Hundreds of matrices of a shape are one part of a buffer."""

    def lines(count):
        w = jgrad.pack({f"{i:03}": jnp.ones((16, 16)) for i in range(count)})
        tx = jgrad.muon(0.1, matrices=True, adam_learning_rate=0.1)
        state = jax.eval_shape(tx.init, w)
        return len(jax.jit(tx.update).lower(w, state, w).as_text().splitlines())

    assert lines(512) == lines(256)


# ---- whole matrices for each shard ---------------------------------------------------------------


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
@pytest.mark.parametrize("shards", mostly_slow([1, 2, 3, 8], 3))
def test_unpack_is_the_tree(shards):
    """Bit for bit, and packed again like itself; and copies and pickles of its layout are equal."""
    tree = models(0)
    packed = packing(shards)(tree)
    assert_equal(jgrad.unpack(packed), tree)
    assert_equal(jgrad.pack(tree, like=packed), packed)
    assert copy.deepcopy(packed.layout) == packed.layout
    reduced = make().init(packed).vw.layout
    assert reduced != packed.layout
    assert copy.copy(reduced) == reduced
    plain = jgrad.pack({"w": [x["a"]["w"] for x in tree.values()]}, matrices=True, multiple_of=2)
    assert pickle.loads(pickle.dumps(plain.layout)) == plain.layout
    assert "padding" in repr(packed)


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("shards", [2, 8])
def test_each_shard_has_whole_matrices(shards):
    """As many of each shape in the same rows of each shard; the others are zeros."""
    packed = packing(shards)(jax.tree.map(jnp.ones_like, models(0)))
    (spec,) = (s for s in array_spec.specs(packed) if s.spans[0].buffer == "float32")
    buffer = packed.buffers["float32"].reshape(shards, -1, 256)
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


OTHERS = ("lars", "clip_by_global_norm", "lamb", "a rate for each element")


def other_methods():
    """Of which rows in another order have norms of layers, rates of leaves, and rates of elements."""
    w = models(0)
    options = {"weight_decay": 0.1, "trust_ratio_mask": jax.tree.map(lambda x: x.ndim > 1, w)}
    rates = jax.tree.map(lambda x: jnp.linspace(0, 1, x.size).reshape(x.shape), w)
    return {
        "lars": jgrad.lars(0.1, layer_axes=for_each(LAYERS), **options),
        "lamb": jgrad.lamb(0.1, layer_axes=for_each(LAYERS), **options),
        "clip_by_global_norm": jgrad.clip_by_global_norm(0.1),
        "a rate for each element": jgrad.gradient_descent(rates),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_methods(name):
    tx, w, g = other_methods()[name], models(0), models(1)
    expected, _ = jax.jit(tx.update)(g, tx.init(w), w)
    packed = pack8(w)
    found, _ = jax.jit(tx.update)(pack8(g), tx.init(packed), packed)
    assert_near(jgrad.unpack(found), expected)


def test_derivatives():
    """`pack` and `unpack` are linear, each the transpose of the other on what is no padding."""
    w, g = models(0), models(1)
    dot = lambda a, b: sum(
        jax.tree.leaves(jax.tree.map(lambda x, y: jnp.vdot(x.astype(float), y.astype(float)), a, b))
    )
    slope = jax.jit(jax.grad(lambda p: dot(jgrad.unpack(p), g)))(pack8(w))
    assert_equal(slope, pack8(g))


def test_a_function_of_shapes():
    tree = {"a": jnp.ones((16, 16)), "b": jnp.ones((16, 16)), "c": jnp.ones(16)}
    layout = lambda matrices: jgrad.pack(tree, matrices=matrices, multiple_of=2).layout
    assert layout(jgrad.hidden_matrices()) == layout({"a": True, "b": True, "c": False})


def of_muon(**options):
    """`init` of what was packed with two matrices."""
    tree = {"a": jnp.ones((16, 16)), "b": jnp.ones((16, 16)), "c": jnp.ones((16, 4))}
    packed = jgrad.pack(tree, matrices={"a": True, "b": True, "c": False}, multiple_of=2)
    return jgrad.muon(0.1, adam_learning_rate=0.1, **options).init(packed)


TREE = {"w": np.ones((32, 32), np.float32), "b": np.ones(3, np.float32)}
PACKED_AS = "expected the `matrices` with which `pack` was called."
WRONG = {
    "padding": (
        ValueError,
        "pack: `tree` at ['w']: 1 matrix of shape (32, 32) for 8 shards: 87% of the buffer would be "
        "padding, expected at most half; shard over a smaller mesh axis, with a smaller "
        "`multiple_of`.",
        lambda: jgrad.pack({"w": TREE["w"]}, matrices=True, multiple_of=8),
    ),
    "kind": (
        TypeError,
        "pack: `matrices` at ['w']: 1 of type int, expected a bool.",
        lambda: jgrad.pack(TREE, matrices={"w": 1, "b": False}),
    ),
    "like": (
        ValueError,
        "pack: `like`: it has a layout already, expected no other option with it.",
        lambda: jgrad.pack(TREE, like=jgrad.pack(TREE), matrices=True),
    ),
    # What was packed as a matrix is one, and its outputs are where those of its equals are.
    "an ordinary leaf": (
        ValueError,
        f"muon: `matrices` at ['b']: False, but it was packed as a matrix, {PACKED_AS}",
        lambda: of_muon(matrices={"a": True, "b": False, "c": False}),
    ),
    "a matrix": (
        ValueError,
        f"muon: `matrices` at ['c']: True, but it was packed as an ordinary leaf, {PACKED_AS}",
        lambda: of_muon(matrices=rank_two),
    ),
    "outputs": (
        ValueError,
        "muon: `matrices` at ['b']: another place of outputs than in ['a'], of equal shape, "
        "expected the same, as they share a part of the buffer.",
        lambda: of_muon(
            matrices={"a": True, "b": True, "c": False}, output_axes={"a": -1, "b": 0, "c": -1}
        ),
    ),
}


@pytest.mark.parametrize(("error", "message", "call"), WRONG.values(), ids=WRONG)
def test_messages(error, message, call):
    assert_error(error, message, call)


@pytest.mark.slow
def test_a_whole_model():
    """Of equinox: the leaf that is no array is named, whatever chooses the matrices."""
    model = eqx.nn.MLP(3, 3, 8, 2, key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"^pack: `tree` at \.activation: .* expected a floating"):
        jgrad.pack(model, matrices=jgrad.hidden_matrices())
