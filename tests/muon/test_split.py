"""`muon(split=)`: a fused leaf moves as its blocks do that are leaves of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from tests.support import messages
from tests.support.choice import mostly_slow
from tests.support.loops import train
from tests.support.packed_model import assert_close

pytestmark = pytest.mark.slow

# For each leaf its shape, outputs, layers and `split`.
LEAVES = {
    "b": ((40,), None, (), None),
    "gate_up": ((12, 40), -1, (), (20, 20)),
    "heads": ((24, 32), (-1,), (), 8),
    "qkv": ((24, 32), -1, (), (16, 8, 8)),
    "stack": ((3, 24, 32), -1, (0,), (16, 8, 8)),
}
MORE = {
    "apart": ((4, 24, 6), (0, 2), (), (10, 2, 2, 10)),
    "dense": ((24, 4, 8), (1, 2), (), 8),
    "experts": ((2, 24, 3, 32), -1, (0, 2), 16),
    "one": ((24, 8), -1, (), 8),
    "plain": ((24, 8), -1, (), None),
    "torch": ((32, 24), 0, (), (8, 16, 8)),
}
ALL = LEAVES | MORE
MODELS = {"kernels": LEAVES, "other axes": MORE}
models = pytest.mark.parametrize("leaves", mostly_slow(MODELS, "kernels"))


def normal(seed, leaves=LEAVES, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, (shape, *_) in leaves.items()}


def on_device(tree):
    return jax.tree.map(jnp.asarray, tree)


def muon(rate=0.1, **options):
    return jgrad.muon(rate, **{"adam_learning_rate": 0.01, "weight_decay": 0.1} | options)


def fused(leaves=LEAVES, **options):
    own = {
        "matrices": {name: x[1] is not None for name, x in leaves.items()},
        "output_axes": {name: -1 if x[1] is None else x[1] for name, x in leaves.items()},
        "layer_axes": {name: x[2] for name, x in leaves.items()},
        "split": {name: x[3] for name, x in leaves.items()},
    }
    return muon(**own | options)


def separate(leaves=LEAVES, **options):
    """For the leaves that `apart` makes."""
    layers = {name: tuple(range(len(x[2]))) for name, x in leaves.items()}
    matrices = {name: x[1] is not None for name, x in leaves.items()}
    return muon(matrices=matrices, layer_axes=layers, **options)


def apart(tree, of_inputs=None):
    """Each block as a leaf: layers first, outputs last. Of second moments the inputs are 1."""
    found = {}
    for name, x in tree.items():
        shape, outputs, layers, split = ALL[name]
        if outputs is None or x is None:
            found[name] = None if x is None else np.asarray(x)
            continue
        outputs = [axis % len(shape) for axis in np.atleast_1d(outputs)]
        inputs = [axis for axis in range(len(shape)) if axis not in (*outputs, *layers)]
        x = np.transpose(np.asarray(x), (*layers, *inputs, *outputs))
        x = x.reshape(*x.shape[: len(layers) + len(inputs)], -1)
        n = x.shape[-1]
        sizes = split if isinstance(split, tuple) else [split or n] * (n // (split or n))
        found[name] = np.split(x, np.cumsum(sizes)[:-1], axis=-1)
    for name, x in found.items():  # as `None` for a leaf that has no blocks of second moments
        found[name] = [None] * _count(name) if x is None and ALL[name][1] is not None else x
    return found


def _count(name):
    shape, outputs, _, split = ALL[name]
    n = np.prod([shape[axis] for axis in np.atleast_1d(outputs)])
    return len(split) if isinstance(split, tuple) else n // (split or n)


def assert_as_apart(found, expected, tolerance):
    """Weights and both moments."""
    (w, state), (w_apart, state_apart) = found, expected
    for x, y in [(w, w_apart), (state.mw, state_apart.mw), (state.vw, state_apart.vw)]:
        assert_close(apart(x), y, tolerance)


def assert_blocks_alone(w, grads, leaves, tolerance, **options):
    """Training of fused leaves is that of their blocks."""
    found = train(fused(leaves, **options), on_device(w), grads)
    expected = train(separate(leaves, **options), on_device(apart(w)), list(map(apart, grads)))
    assert_as_apart(found, expected, tolerance)


# ---- the numbers -------------------------------------------------------------------------------


@pytest.mark.slow(always=["muon-original-other axes"])
@models
@pytest.mark.parametrize("scale", ["original", "spectral", "match_rms_adamw", None])
@pytest.mark.parametrize("rule", ["muon", "normuon"])
def test_a_fused_leaf_is_its_blocks(rule, scale, leaves):
    w, *grads = (normal(i, MODELS[leaves]) for i in range(3))
    assert_blocks_alone(w, grads, MODELS[leaves], 1e-4, rule=rule, scale=scale)


@pytest.mark.slow(always=True)
def test_zeros_and_blocks_of_any_size():
    """A block of zeros stays; one of 1e18 changes no other by a bit, nor does one of 1e-18."""
    leaves = {"qkv": ALL["qkv"]}
    tx, w = fused(leaves, rule="normuon", weight_decay=0.0), {"qkv": jnp.zeros((24, 32))}
    g = normal(1, leaves)["qkv"]
    update = lambda factors: np.asarray(
        jax.jit(tx.update)({"qkv": g * np.repeat(factors, [16, 8, 8])}, tx.init(w), w)[0]["qkv"]
    )
    plain, found = update(np.float32([1, 1, 1])), update(np.float32([1e18, 0, 1e-18]))
    assert not found[:, 16:24].any()
    np.testing.assert_allclose(found[:, :16], plain[:, :16], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found[:, 24:], plain[:, 24:], rtol=1e-4, atol=1e-6)


def test_scales_and_pieces():
    """`scale` is called with the sizes of blocks, once for each shape; `scale_by_muon` has blocks too."""
    seen = []
    scale = lambda outputs, inputs: seen.append((outputs, inputs)) or outputs + 0.0
    leaves = {name: ALL[name] for name in ("gate_up", "qkv")}
    options = {"scale": scale, "split": {"gate_up": (20, 20), "qkv": (16, 8, 8)}}
    tx, w = fused(leaves, weight_decay=0.0, **options), on_device(normal(0, leaves))
    expected, _ = tx.update(w, tx.init(w), w)
    assert sorted(seen) == [(8, 24), (16, 24), (20, 12)]
    piece = jgrad.scale_by_muon(matrices=True, **options)
    found, _ = piece.update(w, piece.init(w), w)
    assert_close(jax.tree.map(lambda x: -0.1 * x, found), expected)


def test_moments_in_8_bits():
    """The first update is that in float32, and the state has the form that it has without."""
    leaves = {"qkv": ALL["qkv"]}
    w, g, h = (on_device(normal(i, leaves)) for i in range(3))
    make = lambda **options: fused(leaves, rule="normuon", **options)
    tx, exact = make(moment_dtype="8bit"), make()
    plain = make(moment_dtype="8bit", split=None)
    updates, state = jax.jit(tx.update)(g, tx.init(w), w)
    of_exact, exact_state = jax.jit(exact.update)(g, exact.init(w), w)
    assert_close(updates, of_exact, 1e-5)
    form = lambda state: jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert form(state) == form(jax.jit(plain.update)(g, plain.init(w), w)[1])
    updates, _ = jax.jit(tx.update)(h, state, w)
    of_exact, _ = jax.jit(exact.update)(h, exact_state, w)
    for name, x in of_exact.items():
        assert np.linalg.norm(updates[name] - x) < 0.05 * np.linalg.norm(x)


# ---- loops, the state --------------------------------------------------------------------------


@pytest.mark.slow(always=True)
def test_a_state_goes_on_with_another_split():
    leaves = {"qkv": ALL["qkv"]}
    w, g, h = (on_device(normal(i, leaves)) for i in range(3))
    plain, tx = fused(leaves, rule="normuon", split=None), fused(leaves, rule="normuon")
    form = jax.eval_shape(tx.init, w)
    assert form == jax.eval_shape(plain.init, w)
    _, state = train(plain, w, [g])
    updates, state = jax.jit(tx.update)(h, state, w)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, form)
    others, _ = jax.jit(plain.update)(h, train(plain, w, [g])[1], w)
    assert not np.allclose(updates["qkv"], others["qkv"], rtol=1e-2)


# ---- programs ----------------------------------------------------------------------------------


def lines(split, outputs=64, count=4):
    w = {f"{i}": jnp.ones((16, outputs)) for i in range(count)}
    tx = muon(matrices=True, split=split)
    return len(jax.jit(tx.update).lower(w, tx.init(w), w).as_text().splitlines())


@pytest.mark.slow(always=True)
def test_heads_are_one_reshape():
    """A program does not grow with the heads, and equal blocks are heads."""
    assert lines(4) == lines(8)
    assert lines(16) == lines((16,) * 4)
    assert lines(64) == lines((64,)) == lines(None)


@pytest.mark.slow(always=True)
def test_one_iteration_for_each_shape():
    """Blocks join the leaves of their shape, and tall ones the wide."""
    w = {"qkv": jnp.ones((16, 48)), "out": jnp.ones((16, 16)), "up": jnp.ones((8, 32))}
    split = {"qkv": (16, 16, 16), "out": None, "up": (16, 16)}
    tx = muon(matrices=True, split=split)
    text = jax.jit(tx.update).lower(w, tx.init(w), w).as_text()
    found = {
        line.split("tensor<")[-1] for line in text.splitlines() if "call @orthogonalized" in line
    }
    assert found == {"4x16x16xf32>", "2x8x16xf32>"}


# ---- what users give ---------------------------------------------------------------------------

W = {"qkv": jnp.ones((8, 16)), "mlp": {"w": jnp.ones((8, 12)), "b": jnp.ones(12)}, "none": None}
MATRICES = {"qkv": True, "mlp": {"w": True, "b": False}, "none": True}


@pytest.mark.slow(always=True)
def test_empty_matrices():
    w = {"a": jnp.ones((4, 0)), "b": jnp.ones((0, 8)), "c": jnp.ones((0, 4, 8))}
    tx = muon(matrices=True, split=8, layer_axes={"a": None, "b": None, "c": 0}, rule="normuon")
    updates, _ = jax.jit(tx.update)(w, tx.init(w), w)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, w)


test_messages = pytest.mark.slow(always=True)(messages.test_of("split", globals()))
