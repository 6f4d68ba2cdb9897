"""Muon against its author's code, and against steps of torch."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from tests.cases import rank_two
from tests.reference import optimizers as reference
from tests.support.choice import mostly_slow
from tests.support.eight_bits import unquantized
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


def trajectory(w, grads, **options):
    """By the reference, leaf by leaf: each has axes of its own."""
    found = []
    for name in ("matrices", "others"):
        for key, x in sorted(w[name].items()):
            _, output_axes, layer_axes = PLACES.get(key, (None, -1, None))
            leaf = reference.muon(
                [x], 0.05, matrices=[name == "matrices"], output_axes=output_axes,
                layer_axes=layer_axes, **options,
            )  # fmt: skip
            steps = reference.trajectory(leaf, [[g[name][key]] for g in grads])
            found.append([w for (w,) in steps])
    return found


@pytest.mark.slow(always=["normuon-None"])
@pytest.mark.parametrize(
    "scale", mostly_slow(["original", "match_rms_adamw", "spectral", None, max], "original")
)
@pytest.mark.parametrize("rule", mostly_slow(["muon", "normuon"], "normuon"))
def test_places_and_scales(scale, rule, x64):
    """50 steps are the author's, wherever matrices are in a leaf."""
    w, grads = model(), [model(seed) for seed in range(1, 51)]
    options = {"scale": scale, "rule": rule, "adam_learning_rate": 0.01, "weight_decay": 0.1}
    tx = jgrad.muon(0.05, matrices=OF_MODEL, output_axes=places(1), layer_axes=places(2), **options)
    found, _ = run(tx, w, grads)
    expected = trajectory(w, grads, **options)
    for t in (0, 1, 49):
        for a, steps in zip(jax.tree.leaves(found[t]), expected, strict=True):
            np.testing.assert_allclose(a, steps[t], rtol=0, atol=1e-12 * np.abs(steps[t]).max())


@pytest.mark.parametrize("coefficients", mostly_slow(COEFFICIENTS, "polar_express"), ids=str)
@pytest.mark.parametrize("nesterov", mostly_slow([True, False], False))
def test_coefficients(coefficients, nesterov, x64):
    w, grads = model(), [model(seed) for seed in range(1, 51)]
    options = {
        "coefficients": coefficients,
        "nesterov": nesterov,
        "momentum": lambda t: t / (t + 1.0),
    }
    tx = jgrad.muon(
        0.05, matrices=OF_MODEL, output_axes=places(1), layer_axes=places(2),
        adam_learning_rate=0.01, **options | {"momentum": lambda t: t / (t + jnp.float64(1.0))},
    )  # fmt: skip
    with jax.numpy_dtype_promotion("standard"):
        found, _ = run(tx, w, grads)
    expected = trajectory(w, grads, adam_learning_rate=0.01, **options)
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


def test_overrides_for_one_call():
    """Each kind has its own; without one, the rate of Muon is that of Adam, too."""
    w, g = model(dtype=np.float32), model(1, np.float32)
    both = jgrad.muon(0.1, matrices=OF_MODEL, adam_learning_rate=0.01, output_axes=places(1))
    other = jgrad.muon(0.3, matrices=OF_MODEL, adam_learning_rate=0.02, output_axes=places(1))
    update = jax.jit(both.update)
    rates = {"learning_rate": jnp.float32(0.3), "adam_learning_rate": jnp.float32(0.02)}
    found, _ = update(g, both.init(w), w, **rates)
    assert_close(found, jax.jit(other.update)(g, other.init(w), w)[0])
    found, _ = update(g, both.init(w), w, learning_rate=jnp.float32(0.3))
    expected, _ = update(g, both.init(w), w)
    assert_close(found["others"], expected["others"])
    one = jgrad.muon(0.1, matrices=True, scale="match_rms_adamw")
    w, g = w["others"]["embed"], g["others"]["embed"]
    found, _ = one.update(g, one.init(w), w, learning_rate=0.2)
    expected, _ = one.update(g, one.init(w), w)
    assert_close(found, 2 * expected)


def test_both_rates_may_be_schedules(x64):
    w, grads = model(), [model(seed) for seed in range(1, 6)]
    falling, rising = lambda t: 0.1 / (1 + t), lambda t: 0.01 * (1 + t)
    tx = jgrad.muon(
        lambda t: falling(t.astype(float)), matrices=OF_MODEL, output_axes=places(1),
        layer_axes=places(2), adam_learning_rate=lambda t: rising(t.astype(float)),
    )  # fmt: skip
    found, _ = run(tx, w, grads)
    for key in ("wide", "scan"):
        _, output_axes, layer_axes = PLACES[key]
        leaf = reference.muon(
            [w["matrices"][key]],
            falling,
            matrices=[True],
            output_axes=output_axes,
            layer_axes=layer_axes,
        )
        *_, ((expected),) = reference.trajectory(leaf, [[g["matrices"][key]] for g in grads])
        np.testing.assert_allclose(found[-1]["matrices"][key], expected, rtol=0, atol=1e-12)
    leaf = reference.muon([w["others"]["bias"]], 0.0, matrices=[False], adam_learning_rate=rising)
    *_, ((expected),) = reference.trajectory(leaf, [[g["others"]["bias"]] for g in grads])
    np.testing.assert_allclose(found[-1]["others"]["bias"], expected, rtol=0, atol=1e-12)


def test_traced_momentum_compiles_once():
    w, g = model(dtype=np.float32)["matrices"]["wide"], model(1, np.float32)["matrices"]["wide"]

    @jax.jit
    def update(momentum):
        tx = jgrad.muon(0.1, matrices=True, adam_learning_rate=0.0, momentum=momentum)
        state = tx.init(w)
        for _ in range(2):
            u, state = tx.update(g + state.mw, state, w)
        return u

    for momentum in (0.0, 0.5, 0.9):
        tx = jgrad.muon(0.1, matrices=True, adam_learning_rate=0.0, momentum=momentum)
        state = tx.init(w)
        for _ in range(2):
            u, state = tx.update(g + state.mw, state, w)
        np.testing.assert_allclose(update(jnp.float32(momentum)), u, rtol=1e-4, atol=1e-6)
    assert update._cache_size() == 1


# ---- the state ---------------------------------------------------------------------------------


@pytest.mark.slow(one_in=2)
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
def test_the_tree_of_the_state_depends_on_the_matrices_and_the_rule_alone():
    w = model(dtype=np.float32)
    make = functools.partial(jgrad.muon, matrices=OF_MODEL, output_axes=places(1))
    first = make(0.1, adam_learning_rate=0.1).init(w)
    others = [
        make(lambda t: 0.1, adam_learning_rate=lambda t: 0.1, momentum=lambda t: 0.9),
        make({"matrices": 0.1, "others": 0.2}, scale="match_rms_adamw", weight_decay=0.1),
        make(0.1, adam_learning_rate=0.1, coefficients="you", nesterov=False, momentum=0.5),
    ]
    for tx in others:
        assert_equal(tx.init(w), first)


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


@pytest.mark.slow(always=True)
def test_chosen_by_a_function():
    w = model(dtype=np.float32)["others"]
    tx = jgrad.muon(0.1, matrices=rank_two, adam_learning_rate=0.1)
    assert jax.tree.map(jnp.shape, tx.init(w).vw) == {"bias": (5,), "embed": None}


@pytest.mark.parametrize("rule", mostly_slow({"muon": "muon", "normuon": "normuon"}, "muon"))
def test_full_precision_beside_8_bits(rule):
    """Leaves that are kept train as in float32, whatever their neighbours are stored in."""
    draw = lambda seed: jax.random.normal(jax.random.key(seed), (16, 256))
    w = {"kept": draw(0), "coded": draw(1), "embed": draw(2)}
    matrices = {"kept": True, "coded": True, "embed": False}
    grads = [jax.tree.map(lambda x, i=i: jnp.sin(3 * x + i), w) for i in range(3)]
    make = functools.partial(jgrad.muon, 0.1, matrices=matrices, adam_learning_rate=0.1, rule=rule)
    kept = {"kept": True, "coded": False, "embed": False}
    found, state = train(make(moment_dtype="8bit", full_precision=kept), w, grads)
    expected, exact = train(make(), w, grads)
    assert {name: x.dtype for name, x in state.mw.items()} == {
        "kept": "float32", "coded": "int8", "embed": "int8"
    }  # fmt: skip
    assert state.vw["embed"].dtype == "uint8"
    full = make(moment_dtype="8bit", full_precision=True).init(w)
    assert not any(isinstance(x, jgrad.Blocks) for x in (*full.mw.values(), *full.vw.values()))
    assert_close(found["kept"], expected["kept"])
    for name in ("coded", "embed"):
        far = jnp.linalg.norm(found[name] - expected[name])
        assert 0 < far < 0.1 * jnp.linalg.norm(expected[name] - w[name])
    assert jax.tree.structure(unquantized(state)) == jax.tree.structure(exact)
