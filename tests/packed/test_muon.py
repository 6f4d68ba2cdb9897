"""Muon on packed trees: the numbers of the tree, and a state with the shapes of the tree's."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from tests.support.choice import mostly_slow
from tests.support.loops import assert_equal, run, train
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
MATRICES = {
    "a": {"w": True, "b": False},
    "c": {"w": True, "b": False},
    "d": True,
    "embed": False,
    "stack": {"w": True, "b": False},
    "half": {"w": True, "b": False},
}
LAYERS = {"a": None, "c": None, "d": None, "embed": None, "stack": 0, "half": None}


def normal(seed):
    rng = np.random.default_rng(seed)
    is_shape = lambda x: isinstance(x, tuple)
    tree = jax.tree.map(
        lambda s: jnp.asarray(rng.normal(size=s), jnp.float32), SHAPES, is_leaf=is_shape
    )
    tree["half"] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree["half"])
    return tree


def make(rule="muon", **options):
    options = {"layer_axes": LAYERS, "adam_learning_rate": 0.01, "weight_decay": 0.1} | options
    return jgrad.muon(0.1, matrices=MATRICES, rule=rule, **options)


W, GRADS = normal(0), [normal(1), normal(2), normal(3)]
PACKINGS = {
    "plain": {},
    "layers": {"layer_axes": LAYERS},
    "in part": {"max_size": 200},
    "padded": {"multiple_of": 7},
}


@pytest.mark.slow
@pytest.mark.parametrize("packing", mostly_slow(PACKINGS, "in part"))
@pytest.mark.parametrize("rule", mostly_slow(["muon", "normuon"], "normuon"))
def test_numbers_of_the_tree(packing, rule):
    """And the unpacked state has the tree's shapes, None for None; and packs again."""
    tx = make(rule)
    expected, state = train(tx, W, GRADS)
    pack = lambda tree: jgrad.pack(tree, **PACKINGS[packing])
    packed = pack(W)
    found, packed_state = train(tx, packed, [pack(g) for g in GRADS])
    assert_close(jgrad.unpack(found)["half"], expected["half"], 0.01)  # one rounding of 8 bits
    rest = lambda tree: {k: x for k, x in tree.items() if k != "half"}
    assert_close(rest(jgrad.unpack(found)), rest(expected), 1e-5)
    unpacked = jgrad.unpack(packed_state)
    chex.assert_trees_all_equal_shapes_and_dtypes(unpacked, state)
    assert_close(unpacked.vw, state.vw, 1e-4)
    assert_equal(jgrad.pack(unpacked, like=packed_state), packed_state)
    assert_equal(jgrad.pack(state, like=jax.eval_shape(tx.init, packed)).step, state.step)


@pytest.mark.slow
def test_pack_small():
    tx = make()
    small = jgrad.pack_small(tx, max_size=300)
    found, state = train(small, W, GRADS)
    expected, of_tree = train(tx, W, GRADS)
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
    small, _ = train(jgrad.pack_small(tx), tree(W), [tree(g) for g in GRADS])
    assert_close(small, expected, 1e-5)


@pytest.mark.slow
def test_a_missing_gradient():
    """A small leaf without one keeps its moments, and so does a whole buffer."""
    tx = jgrad.pack_small(make(), max_size=300)
    (w, state), (_, before) = train(tx, W, GRADS[:1]), train(tx, W, GRADS[:1])
    g = GRADS[1] | {"a": {"w": None, "b": GRADS[1]["a"]["b"]}, "embed": None}
    updates, after = jax.jit(tx.update)(g, state, w)
    assert not np.any(updates["a"]["w"])
    assert not np.any(updates["embed"])
    old, new = jgrad.unpack(before), jgrad.unpack(after)
    assert_equal((new.mw["a"]["w"], new.mw["embed"]), (old.mw["a"]["w"], old.mw["embed"]))
    assert_equal(new.vw["embed"], old.vw["embed"])
    packed = jgrad.pack(W)
    tx = make()
    g = jgrad.pack(GRADS[0])
    g.buffers["float32"] = None
    state = tx.init(packed)
    updates, new = tx.update(g, state, packed)
    assert not np.any(updates.buffers["float32"])
    assert_equal(new.vw.buffers["float32"], state.vw.buffers["float32"])
    assert np.any(updates.buffers["bfloat16"])


@pytest.mark.slow
def test_bytes_of_the_state():
    """Momentum for each element, padded as the parameters are; second moments of Adam's rows alone."""
    packed = jgrad.pack(W, layer_axes=LAYERS)
    state = make().init(packed)
    rows = {name: shape[0] for name, shape in packed.layout.shapes}
    assert state.mw.buffers["float32"].size == 256 * rows["float32"]
    # a.b, c.b, embed and three layers of stack.b, each on a block of its own.
    assert state.vw.buffers["float32"].shape == (6, 256)
    assert state.vw.buffers["bfloat16"].shape == (1, 256)
    alone = jgrad.pack({"w": W["d"]})
    state = jgrad.muon(0.1, matrices=True, adam_learning_rate=0.1).init(alone)
    assert state.vw.buffers == {"float32": None}


@pytest.mark.slow
def test_rates_decays_and_masks_of_each_leaf():
    """Given for the tree, as columns of a buffer."""
    rates = jax.tree.map(lambda x: 0.1 * (1 + len(x.shape)), W)
    adam_rates = {name: 0.01 * i for i, name in enumerate(W)}
    options = {
        "adam_learning_rate": adam_rates,
        "adam_weight_decay": 0.3,
        "weight_decay_mask": MATRICES | {"embed": True, "d": [True, False, True]},
    }
    tx = jgrad.muon(rates, matrices=MATRICES, layer_axes=LAYERS, weight_decay=0.1, **options)
    (expected, *_), _ = run(tx, W, GRADS[:1])
    (found, *_), _ = run(tx, jgrad.pack(W), [jgrad.pack(GRADS[0])])
    found = jgrad.unpack(found)
    assert_close(found.pop("half"), expected.pop("half"), 0.01)
    assert_close(found, expected, 1e-5)


@pytest.mark.slow
def test_layer_axes_have_to_agree():
    packed = jgrad.pack(W, layer_axes=LAYERS)
    with pytest.raises(
        ValueError, match=r"muon: `layer_axes` at \['stack'\]\['w'\]: \(1,\), expected "
    ):
        make(layer_axes=LAYERS | {"stack": {"w": 1, "b": 0}}).init(packed)
    assert_close(
        jgrad.unpack(make(layer_axes=None).init(packed)), jgrad.unpack(make().init(packed))
    )


def test_a_state_of_other_matrices():
    """Two choices of matrices have two states, and a message says which leaf differs."""
    packed = jgrad.pack(W)
    state = make().init(packed)
    other = jgrad.muon(
        0.1, matrices=MATRICES | {"embed": True}, layer_axes=LAYERS, adam_learning_rate=0.1
    )
    with pytest.raises(ValueError, match=r"muon: `state\.vw` does not have the structure of"):
        other.update(packed, state, packed)
    with pytest.raises(TypeError, match=r"muon: `state\.vw` at \['embed'\]: an array of float32"):
        other.update(W, make().init(W), W)


def test_programs_do_not_grow_with_the_leaves():
    """Hundreds of matrices of a shape are one part of a buffer."""

    def lines(count):
        w = jgrad.pack({f"{i:03}": jnp.ones((16, 16)) for i in range(count)})
        tx = jgrad.muon(0.1, matrices=True, adam_learning_rate=0.1)
        state = jax.eval_shape(tx.init, w)
        return len(jax.jit(tx.update).lower(w, state, w).as_text().splitlines())

    assert lines(512) == lines(256)
