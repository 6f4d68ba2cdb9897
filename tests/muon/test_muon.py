"""Muon against its author's code, and against steps of torch."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from tests.reference import optimizers as reference
from tests.support.choice import mostly_slow
from tests.support.loops import assert_equal, run, train
from tests.support.packed_model import assert_close

pytestmark = pytest.mark.slow

TORCH = pathlib.Path(__file__).parents[1] / "data" / "torch_muon.npz"
COEFFICIENTS = ("jordan", "you", "polar_express", "deepseek_v4", ((2.0, -1.5, 0.5), (1.5, -0.5, 0)))
# Leaves, and where their matrices are: (shape, output_axes, layer_axes).
PLACES = {
    "wide": ((4, 7), -1, None),
    "tall": ((7, 4), -1, None),
    "torch": ((4, 7), 0, None),
    "conv": ((2, 2, 3, 5), -1, None),
    "conv of torch": ((5, 3, 2, 2), 0, None),
    "scan": ((3, 4, 5), -1, 0),
    "experts": ((2, 3, 5, 4), 3, (0, 1)),
    "layers last": ((4, 5, 3), 1, -1),
    "heads together": ((6, 2, 3), (-2, -1), None),
    "each head": ((6, 2, 3), -1, 1),
    "square": ((4, 4), 0, None),
    "row": ((1, 6), -1, None),
}


def model(seed=0, dtype=np.float64):
    """A leaf for each place, and two of Adam's."""
    rng = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), dtype)
    matrices = {name: draw(shape) for name, (shape, *_) in PLACES.items()}
    return {"matrices": matrices, "others": {"bias": draw((5,)), "embed": draw((6, 3))}}


def places(i):
    axes = {name: place[i] for name, place in PLACES.items()}
    return {"matrices": axes, "others": None if i == 2 else -1}


OF_MODEL = {"matrices": True, "others": False}


def trajectory(w, grads, learning_rate, **options):
    """By the reference, leaf by leaf: each has axes of its own."""
    found = []
    for name in ("matrices", "others"):
        for key, x in sorted(w[name].items()):
            _, output_axes, layer_axes = PLACES.get(key, (None, -1, None))
            leaf = reference.muon(
                [x], learning_rate, matrices=[name == "matrices"], output_axes=output_axes,
                layer_axes=layer_axes, **options,
            )  # fmt: skip
            steps = reference.trajectory(leaf, [[g[name][key]] for g in grads])
            found.append([w for (w,) in steps])
    return found


FALLING = {
    "learning_rate": lambda t: 0.1 / (1 + t),
    "adam_learning_rate": lambda t: 0.01 * (1 + t),
    "momentum": lambda t: t / (t + 1.0),
}
OPTIONS = {
    f"{rule}-{scale}": {"rule": rule, "scale": scale, "weight_decay": 0.1}
    for rule in ("muon", "normuon")
    for scale in ("original", "match_rms_adamw", "spectral", None, max)
}
OPTIONS |= {
    f"{coefficients}-{nesterov}": {"coefficients": coefficients, "nesterov": nesterov} | FALLING
    for coefficients in COEFFICIENTS
    for nesterov in (True, False)
}


@pytest.mark.slow(always=["normuon-None"])
@pytest.mark.parametrize("name", mostly_slow(OPTIONS, "normuon-original", "polar_express-False"))
def test_author(name, x64):
    """50 steps are the author's, wherever matrices are in a leaf; rates and momentum are schedules."""
    w, grads = model(), [model(seed) for seed in range(1, 51)]
    options = {"learning_rate": 0.05, "adam_learning_rate": 0.01} | OPTIONS[name]
    of_arrays = {
        k: (lambda t, f=x: f(t.astype(float))) if k in FALLING and callable(x) else x
        for k, x in options.items()
    }
    tx = jgrad.muon(matrices=OF_MODEL, output_axes=places(1), layer_axes=places(2), **of_arrays)
    found, _ = run(tx, w, grads)
    expected = trajectory(w, grads, **options)
    for t in (0, 1, 49):
        for a, steps in zip(jax.tree.leaves(found[t]), expected, strict=True):
            np.testing.assert_allclose(a, steps[t], rtol=0, atol=1e-12 * np.abs(steps[t]).max())


@pytest.mark.slow(one_in=12)
@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 64)])
@pytest.mark.parametrize("coefficients", COEFFICIENTS[:4])
def test_single_precision(shape, coefficients):
    """One float32 update is that of double precision to 2e-5 of its norm."""
    g = np.random.default_rng(0).normal(size=shape)
    found = jgrad.orthogonalize(jnp.asarray(g, jnp.float32), coefficients=coefficients)
    expected = reference.newton_schulz(g.astype(np.float32).astype(np.float64), coefficients)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < 2e-5


@pytest.mark.slow(always=True)
def test_bfloat16_products():
    """Factors are rounded to 8 bits and sums are not: what is left is some per cent."""
    g = np.random.default_rng(0).normal(size=(64, 256))
    x = jnp.asarray(g, jnp.float32)
    found = np.asarray(jgrad.orthogonalize(x, compute_dtype=jnp.bfloat16), np.float64)
    expected = reference.newton_schulz(g)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert 1e-4 < error < 0.05
    text = jax.jit(lambda x: jgrad.orthogonalize(x, compute_dtype=jnp.bfloat16)).lower(x).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products
    assert all("bf16" in line and line.rstrip().endswith("f32>") for line in products)


def torch_cases():
    with np.load(TORCH) as data:
        return [(name, data[name]) for name in data.files]


@pytest.mark.slow(one_in=12)
@pytest.mark.parametrize(("index", "name"), list(enumerate(n for n, _ in torch_cases())))
def test_steps_of_torch(index, name):
    """torch.optim.Muon 2.13, whose products are bfloat16 throughout: cosine 0.999 of each change."""
    cases = torch_cases()
    draws = np.random.RandomState(12)
    for _, weights in cases[: index + 1]:
        shape = weights.shape[1:]
        w = (draws.randn(*shape) * 0.1).astype(np.float32)
        mean = draws.randn(*shape)
        grads = [(mean * 0.5 + draws.randn(*shape)).astype(np.float32) for _ in range(10)]
    tx = jgrad.muon(
        0.02, matrices=True, weight_decay=0.1, output_axes=0, nesterov="nesterov" in name,
        scale=name.split("_", 3)[3], adam_learning_rate=0.0, compute_dtype=jnp.bfloat16,
    )  # fmt: skip
    found, _ = run(tx, w, grads)
    before = np.asarray(w)
    for t, expected in zip((1, 2, 10), cases[index][1], strict=True):
        ours, theirs = np.asarray(found[t - 1]) - before, expected - before
        cosine = np.sum(ours * theirs) / np.linalg.norm(ours) / np.linalg.norm(theirs)
        assert cosine > 0.999
        assert np.linalg.norm(ours) / np.linalg.norm(theirs) == pytest.approx(1, abs=0.01)


# ---- orthogonalize, scale_by_muon --------------------------------------------------------------


def test_orthogonalize_trees():
    """Each leaf in its dtype, whatever group it is in; None stays."""
    w = model(dtype=np.float32)["matrices"]
    axes = {"output_axes": places(1)["matrices"], "layer_axes": places(2)["matrices"]}
    found = jgrad.orthogonalize(w, **axes)
    for name, (shape, output_axes, layer_axes) in PLACES.items():
        stack = reference.as_matrices(np.asarray(w[name], np.float64), output_axes, layer_axes)
        expected = np.stack([reference.newton_schulz(x) for x in stack])
        expected = reference.from_matrices(expected, shape, output_axes, layer_axes)
        np.testing.assert_allclose(found[name], expected, atol=1e-5)
    x = {"a": jnp.ones((2, 3), jnp.bfloat16), "b": None, "c": jnp.ones((3, 2), jnp.complex64)}
    found = jgrad.orthogonalize(x)
    assert found["b"] is None
    assert (found["a"].dtype, found["c"].dtype) == (jnp.bfloat16, jnp.complex64)


@pytest.mark.slow(always=True)
def test_complex_matrices(x64):
    """A = X X^H: singular values go where those of real matrices go."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 6)) + 1j * rng.normal(size=(4, 6))
    found = jgrad.orthogonalize(jnp.asarray(x))
    np.testing.assert_allclose(found, reference.newton_schulz(x), rtol=1e-12)
    half = jgrad.orthogonalize(jnp.asarray(x, jnp.complex64), compute_dtype=jnp.bfloat16)
    half = np.asarray(half)
    assert np.linalg.norm(half - np.asarray(found)) < 0.05 * np.linalg.norm(found)


def test_scale_by_muon():
    """Muon without rate, sign and decay."""
    w, grads = model(dtype=np.float32), [model(seed, np.float32) for seed in (1, 2)]
    options = {"matrices": OF_MODEL, "output_axes": places(1), "layer_axes": places(2)}
    whole = jgrad.muon(1.0, adam_learning_rate=1.0, **options)
    piece = jgrad.scale_by_muon(**options)
    a, b = whole.init(w), piece.init(w)
    assert_equal(a, b)
    of_whole, of_piece = jax.jit(whole.update), jax.jit(piece.update)
    for g in grads:
        (u, a), (v, b) = of_whole(g, a, w), of_piece(g, b)
        assert_equal((u, a), (jax.tree.map(jnp.negative, v), b))


# ---- rates -------------------------------------------------------------------------------------


def test_a_rate_for_one_call():
    """That of Muon is not that of Adam where Adam has its own, and else it is."""
    w, g = model(dtype=np.float32), model(1, np.float32)
    tx = jgrad.muon(0.1, matrices=OF_MODEL, adam_learning_rate=0.01, output_axes=places(1))
    update = jax.jit(tx.update)
    found, _ = update(g, tx.init(w), w, learning_rate=jnp.float32(0.3))
    expected, _ = update(g, tx.init(w), w)
    assert_close(found["others"], expected["others"])
    one = jgrad.muon(0.1, matrices=True, scale="match_rms_adamw")
    w, g = w["others"]["embed"], g["others"]["embed"]
    found, _ = one.update(g, one.init(w), w, learning_rate=0.2)
    assert_close(found, jax.tree.map(lambda x: 2 * x, one.update(g, one.init(w), w)[0]))


# ---- the state ---------------------------------------------------------------------------------


@pytest.mark.slow(always=["muon"])
@pytest.mark.parametrize("rule", ["muon", "normuon"])
def test_second_moments_of_some_leaves_alone(rule):
    """None for matrices, or a number per output of each; for Adam's leaves as ever."""
    w = model(dtype=np.float32)
    tx = jgrad.muon(
        0.1, matrices=OF_MODEL, adam_learning_rate=0.0, rule=rule,
        output_axes=places(1), layer_axes=places(2),
    )  # fmt: skip
    state = tx.init(w)
    assert jax.tree.map(jnp.shape, state.vw["others"]) == {"bias": (5,), "embed": (6, 3)}
    if rule == "muon":
        assert all(x is None for x in state.vw["matrices"].values())
        return
    assert {name: x.shape for name, x in state.vw["matrices"].items()} == {
        "wide": (1, 7), "tall": (1, 4), "torch": (4, 1), "conv": (1, 1, 1, 5),
        "conv of torch": (5, 1, 1, 1), "scan": (3, 1, 5), "experts": (2, 3, 1, 4),
        "layers last": (1, 5, 3), "heads together": (1, 2, 3), "each head": (1, 2, 3),
        "square": (4, 1), "row": (1, 6),
    }  # fmt: skip


@pytest.mark.slow(always=True)
def test_moments_in_8_bits():
    """Where there is a number for each element of a large leaf: NorMuon has one for each output."""
    w = {"embed": jnp.ones((64, 100)), "up": jnp.ones((64, 256)), "bias": jnp.ones(64)}
    matrices = {name: name == "up" for name in w}
    for rule, of_up in ("muon", None), ("normuon", "float32"):
        tx = jgrad.muon(
            0.1, matrices=matrices, adam_learning_rate=0.1, rule=rule, moment_dtype="8bit"
        )
        state = tx.init(w)
        kinds = lambda x: {
            k: y if y is None else str(getattr(y, "codes", y).dtype) for k, y in x.items()
        }
        assert kinds(state.mw) == {"embed": "int8", "up": "int8", "bias": "float32"}
        assert kinds(state.vw) == {"embed": "uint8", "up": of_up, "bias": "float32"}


def test_bfloat16_momentum():
    """The step is computed from the momentum before it is rounded, to a neighbour in bfloat16."""
    w, grads = jnp.zeros((4, 6)), [model(s, np.float32)["matrices"]["wide"][:, :6] for s in (1, 2)]
    tx = jgrad.muon(
        1.0, matrices=True, adam_learning_rate=0.0, nesterov=False, moment_dtype=jnp.bfloat16
    )
    before, state = train(tx, w, grads[:1])
    found, new = train(tx, w, grads)
    assert new.mw.dtype == jnp.bfloat16
    m = jnp.float32(0.95) * state.mw.astype(jnp.float32) + jnp.float32(0.05) * grads[1]
    np.testing.assert_allclose(before - found, jgrad.orthogonalize(m) * np.sqrt(6 / 4), atol=1e-6)
    np.testing.assert_allclose(new.mw.astype(jnp.float32), m, rtol=2**-7)
