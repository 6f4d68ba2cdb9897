"""`muon(fraction=)`: Dion2, and Dion3 with NorMuon, beside their reference; which rows are taken."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.muon.test_split import LEAVES, fused, normal, on_device
from tests.reference import optimizers as reference
from tests.support import messages
from tests.support.choice import mostly_slow
from tests.support.loops import train
from tests.support.packed_model import assert_close

# A shape, its outputs and its layers.
MATRICES = {
    "wide": ((6, 20), -1, None),
    "tall": ((20, 6), -1, None),
    "square": ((8, 8), -1, None),
    "square of torch": ((8, 8), 0, None),
    "stack": ((3, 6, 20), -1, 0),
    "convolution": ((5, 3, 4, 16), -1, None),
    "heads": ((12, 4, 6), (1, 2), None),
    "experts": ((2, 6, 3, 8), -1, (0, 2)),
}
SHORT = "muon", "normuon"
both_rules = pytest.mark.parametrize("rule", SHORT)


def muon(rate=0.1, **options):
    return jgrad.muon(rate, **{"matrices": True, "adam_learning_rate": 0.01} | options)


def draw(shape, count, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(dtype) for _ in range(count)]


def one_update(g, **options):
    tx = muon(1.0, scale=None, **options)
    return jax.jit(tx.update)(g, tx.init(g), g)


def taken(g, **options):
    """The rows of a wide matrix of which nothing is left in the sum, without the directions."""
    tx, g = muon(1.0, error_decay=0.0, **options), jnp.asarray(g).T
    mw = jax.jit(lambda g: tx.update(g, tx.init(g), g)[1].mw)(g)
    return np.flatnonzero(np.all(mw == 0, axis=0)).tolist()


# ---- the method ----------------------------------------------------------------------------------


@pytest.mark.slow(
    always=["muon-0.25-wide", "muon-0.5-heads", "normuon-0.25-heads", "normuon-0.01-wide"]
)
@pytest.mark.parametrize("name", mostly_slow(MATRICES, "wide", "heads"))
@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.01])
@both_rules
def test_reference(rule, fraction, name):
    shape, outputs, layers = MATRICES[name]
    axes = {"output_axes": outputs, "layer_axes": layers}
    options = {"rule": rule, "fraction": fraction, "error_decay": 0.8, "weight_decay": 0.1}
    w, *grads = draw(shape, 6)
    tx = muon(**options, **axes)
    found, state = jnp.asarray(w), tx.init(jnp.asarray(w))
    of = reference.muon([w], 0.1, matrices=[True], **options, **axes)
    truth = reference.trajectory(of, [[g] for g in grads])
    for g, expected in zip(grads, truth, strict=True):
        updates, state = jax.jit(tx.update)(jnp.asarray(g), state, found)
        found = optax.apply_updates(found, updates)
        np.testing.assert_allclose(found, expected[0], atol=5e-6)


def test_all_rows_are_the_program_of_muon():
    w = {"a": jnp.ones((4, 8)), "b": jnp.ones(3)}
    options = {"matrices": {"a": True, "b": False}}
    programs = set()
    for own in {}, {"fraction": None}, {"fraction": 1.0}, {"fraction": 1}:
        tx = muon(**options, **own)
        programs.add(str(jax.make_jaxpr(tx.update)(w, tx.init(w), w)))
    assert len(programs) == 1


@pytest.mark.slow
@both_rules
def test_blocks_are_leaves_of_their_own(rule):
    """Fused leaves choose rows of each block; in 8 bits they choose the same."""
    options = {"fraction": 0.4, "rule": rule}
    tx = fused(**options)
    w, grads = on_device(normal(0)), [on_device(normal(i)) for i in (1, 2, 3)]
    found, _ = train(tx, w, grads)
    apart = {"q": slice(16), "k": slice(16, 24), "v": slice(24, 32)}
    cut = lambda x: {name: x["qkv"][:, own] for name, own in apart.items()}
    alone, _ = train(muon(weight_decay=0.1, **options), cut(w), [cut(g) for g in grads])
    assert_close(cut(found), alone, 1e-5)
    # A block of a scale has elements of several rows, and those that wait do not move either.
    rounded, _ = train(fused(moment_dtype="8bit", **options), w, grads[:1])
    moved, _ = train(tx, w, grads[:1])
    assert_close(rounded, moved, 1e-6)
    assert LEAVES.keys() == found.keys()


@pytest.mark.slow
def test_rows_of_zeros_and_of_nothing():
    """The first rows of zeros; an empty matrix has none."""
    w = {"none": jnp.ones((0, 4)), "w": jnp.ones((4, 6))}
    g = jax.tree.map(jnp.zeros_like, w)
    for rule in SHORT:
        updates, state = one_update(g, fraction=0.5, rule=rule)
        assert not np.any(updates["w"])
        assert not np.any(state.mw["w"])


def test_what_is_not_finite_is_skipped():
    tx = jgrad.skip_nonfinite(muon(fraction=0.5))
    w, g, bad = (jnp.asarray(x) for x in draw((4, 6), 3))
    _, state = jax.jit(tx.update)(g, tx.init(w), w)
    updates, after = jax.jit(tx.update)(bad.at[2, 3].set(jnp.nan), state, w)
    assert not np.any(updates)
    np.testing.assert_array_equal(after.inner.mw, state.inner.mw)


# ---- which rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e-36, 1e30, 3e38])
def test_the_largest_rows_at_every_scale(scale):
    """Of elements whose sum overflows, and of small ones, those whose 1-norms are larger."""
    g = scale * np.array([[0.3] * 8, [1.0, *[0.0] * 7], [0.9] * 8, [0.5] * 8])
    g = np.maximum(g, 1e-37).astype(np.float32)
    assert taken(g, fraction=0.5) == [2, 3]
    assert taken(g, fraction=0.25) == [2]


def test_a_huge_row_beside_small_ones():
    """Its norm is infinite in float32; the next is found among numbers that it does not hide."""
    g = np.array([[1e-3] * 8, [2e-3] * 8, [3e38] * 8, [1e-4] * 8], np.float32)
    assert taken(g, fraction=0.5) == [1, 2]


@pytest.mark.parametrize("fraction", [0.5, 0.75])
def test_the_first_of_equal_rows(fraction):
    g = np.tile(np.array([[1.0, -1.0, 1.0, -1.0, 1.0]], np.float32), (4, 1))
    g[1:] *= np.array([[1.0], [-1.0], [1.0]])
    assert taken(g, fraction=fraction) == list(range(int(4 * fraction)))


def test_rows_wait_until_they_are_the_largest():
    """Of two rows the second has three times the gradient: it is taken until its sum is not larger."""
    g = jnp.asarray([[1.0, 0, 0], [0, 3.0, 0]]).T
    tx = muon(1.0, fraction=0.5, error_decay=0.0)
    state, order = tx.init(g), []
    summed = jax.jit(lambda state: tx.update(g, state, g)[1])
    for _ in range(6):
        state = summed(state)
        order += np.flatnonzero(np.all(state.mw == 0, axis=0)).tolist()
    assert order == [1, 1, 0, 1, 1, 0]


# ---- what is said of wrong inputs -----------------------------------------------------------------


def alone(**options):
    return jgrad.scale_by_muon(matrices=True, **options)


def called(**numbers):
    """A step of half the rows with numbers of this call."""
    tx, w = muon(fraction=0.5), jnp.ones((2, 3))
    return tx.update(w, tx.init(w), w, **numbers)


test_messages = messages.test_of("fractions", globals())


@pytest.mark.parametrize(
    ("side", "fraction", "count"), [(25, 0.28, 7), (25, 0.281, 8), (6, 5 / 6, 5), (6, 1e-12, 1)]
)
def test_how_many(side, fraction, count):
    """ceil(fraction side), though 0.28 * 25 is 7.000000000000001 for a computer."""
    assert len(taken(*draw((side, 30), 1), fraction=fraction)) == count


def test_the_decay_of_a_call():
    state = called(error_decay=0.5)[1]
    assert sorted(np.unique(state.mw)) == [0.5, 1.0]


@pytest.mark.slow
def test_injected():
    """The defaults become arrays, and `fraction` none; given, it stays a number of Python."""
    w = {"w": jnp.ones((2, 3))}
    options = {"matrices": {"w": True}, "adam_learning_rate": 0.01}
    for own in {}, {"fraction": 0.5}:
        static = ("matrices", *own)
        tx = optax.inject_hyperparams(jgrad.muon, static_args=static)(0.1, **options, **own)
        found, _ = jax.jit(tx.update)(w, tx.init(w), w)
        plain = muon(0.1, **own)
        assert_close(found, plain.update(w, plain.init(w), w)[0], 1e-6)
