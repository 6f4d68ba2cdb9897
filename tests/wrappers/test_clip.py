"""Clipping by the global norm, and the norm itself, at every scale."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.cases import gradients

NAN, INF = float("nan"), float("inf")
LARGEST = float(np.finfo(np.float32).max)


def clip(g, max_norm=1.0, params=None, **options):
    tx = jgrad.clip_by_global_norm(max_norm, **options)
    return tx.update(g, tx.init(g), params)[0]


compiled_clip = jax.jit(clip)
compiled_norm = jax.jit(jgrad.global_norm)
eager_or_compiled = pytest.mark.parametrize(
    ("clip", "norm"),
    [(clip, jgrad.global_norm), (compiled_clip, compiled_norm)],
    ids=["eager", "compiled"],
)


def true_norm(tree):
    """In extended precision, whose exponents float64's squares do not exhaust."""
    leaves = [np.asarray(x).astype(np.clongdouble) for x in jax.tree.leaves(tree)]
    return np.sqrt(sum(np.sum(np.square(np.abs(x))) for x in leaves))


def reference(tree, max_norm):
    """min(1, max_norm / norm) x for each leaf, in extended precision."""
    norm = true_norm(tree)
    factor = max_norm / norm if norm > max_norm else 1.0
    return [factor * np.asarray(x).astype(np.clongdouble) for x in jax.tree.leaves(tree)]


def assert_reference(found, g, max_norm, rtol=1e-6):
    for a, b in zip(jax.tree.leaves(found), reference(g, max_norm), strict=True):
        np.testing.assert_allclose(np.asarray(a).astype(np.clongdouble), b, rtol=rtol)


# ---- the numbers -------------------------------------------------------------------------------


@pytest.mark.slow(one_in=12)
@pytest.mark.parametrize("max_norm", [0.0, 0.01, 1.0, 1e6])
@pytest.mark.parametrize(
    ("dtype", "rtol"), [("float64", 1e-14), ("complex128", 1e-14), ("float32", 1e-6)]
)
def test_reference(dtype, rtol, max_norm, x64):
    """Below the bound bit for bit what came, above it the textbook in NumPy."""
    for g in gradients(3, dtype):
        found = compiled_clip(g, max_norm)
        assert_reference(found, g, max_norm, rtol)
        np.testing.assert_allclose(jgrad.global_norm(g), float(true_norm(g)), rtol=rtol)
        if max_norm == 1e6:
            chex.assert_trees_all_equal(found, g)


def trees_of(scale):
    """Leaves of a scale: alone, several, and beside leaves of other scales."""
    rng = np.random.default_rng(0)
    odd, other = (jnp.asarray(scale * rng.uniform(0.1, 0.3, s), "float32") for s in ((3, 4), (5,)))
    plain = jnp.asarray(rng.normal(size=7), jnp.float32)
    return [[odd], [odd, other], [plain, odd, plain * 1e-3], [odd, plain * 1e25]]


SCALES = [0, 1e-30, 1e-23, 1e-19, 1e-10, 1, 1e10, 1e19, 1e30, 3e37, 3e38]


@pytest.mark.slow(one_in=24)
@eager_or_compiled
@pytest.mark.parametrize("scale", SCALES)
def test_scales(scale, clip, norm):
    """Neither overflow nor underflow, in the norm and in what is clipped."""
    for g in trees_of(scale):
        np.testing.assert_allclose(norm(g), float(true_norm(g)), rtol=1e-6)
        for bound in (1e-6, 1.0, 1e10):
            found = clip(g, jnp.float32(bound))
            # Between 1e25 and 1e-30 lies more than float32 has: such leaves become 0.
            for a, b in zip(found, reference(g, bound), strict=True):
                np.testing.assert_allclose(np.asarray(a), b.real.astype(float), 2e-6, atol=1e-37)


@pytest.mark.slow(one_in=6)
@pytest.mark.parametrize(
    "shapes", [[(100,)], [(10, 10), (50,)], [(1,)] * 40], ids=["one", "two", "forty"]
)
@eager_or_compiled
def test_a_norm_beyond_the_largest_number(shapes, clip, norm):
    """Of finite leaves: the norm is infinite, and what is clipped is right all the same."""
    g = [jnp.full(shape, LARGEST) for shape in shapes]
    assert norm(g) == INF
    for bound in (1e-6, 1.0, 1e30):
        assert_reference(clip(g, jnp.float32(bound)), g, bound)


@pytest.mark.parametrize("max_norm", [1e-15, 1e-20, 1e-30, 1e-37])
def test_small_bounds_and_large_norms(max_norm):
    """A factor below the smallest number is no reason to lose the product."""
    for scale in (1e-10, 1.0, 1e19, 1e30, 1e37):
        g = [jnp.asarray([0.6 * scale, 0.8 * scale], jnp.float32)]
        assert_reference(clip(g, max_norm), g, max_norm)


def test_e16_half_precision():
    """100 gradients of 300 in float16: their squares are infinite, and optax makes them zeros."""
    g = {"a": jnp.full((10, 10), 300, jnp.float16)}
    assert jgrad.global_norm(g) == 3000
    assert jgrad.global_norm(g).dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(clip(g)["a"], float), 0.1, rtol=1e-3)
    tx = optax.clip_by_global_norm(1.0)
    assert not tx.update(g, tx.init(g))[0]["a"].any()


def test_double_precision(x64):
    """A leaf of float64 makes the norm one, beyond the range of the leaves beside it."""
    g = [jnp.full(3, 1e30, jnp.float32), jnp.full(3, 1e200, jnp.float64)]
    norm = jgrad.global_norm(g)
    assert norm.dtype == jnp.float64
    np.testing.assert_allclose(norm, np.sqrt(3) * 1e200, rtol=1e-14)
    assert jgrad.global_norm(g[:1]).dtype == jnp.float32
    np.testing.assert_allclose(clip(g[1:], 1e180)[0], 1e180 / np.sqrt(3), rtol=1e-14)


@pytest.mark.parametrize(
    ("single", "double"), [(1e25, 1.0), (1e-30, 0.0), (1e-25, 1e-30), (1.0, 1e200), (1e30, 1e-200)]
)
def test_each_precision_has_its_scale(single, double, x64):
    """Squares in float32 overflow and vanish whatever a sum in float64 says."""
    g = [jnp.full(4, single, jnp.float32), jnp.full(4, double, jnp.float64)]
    expected = np.sqrt(4 * single**2 + 4 * double**2) if double < 1e150 else 2 * double
    np.testing.assert_allclose(jgrad.global_norm(g), expected, rtol=1e-6)
    found = clip(g, 0.5 * expected)
    np.testing.assert_allclose(found[0].astype(float), 0.5 * single, rtol=1e-6)
    np.testing.assert_allclose(found[1], 0.5 * double, rtol=1e-6)


@pytest.mark.slow(always=["0.0-0.0-float32"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("value", "max_norm"), [(0.0, 0.0), (0.0, 1.0), (2.0, 0.0)])
def test_e17_zero(value, max_norm, dtype):
    """A bound of 0, gradients of 0, and both, give 0 and not NaN; optax divides 0 by 0."""
    g = {"a": jnp.full(3, value, dtype), "b": jnp.zeros((2, 2), dtype)}
    for run in (clip, compiled_clip):
        chex.assert_trees_all_equal(run(g, max_norm), jax.tree.map(jnp.zeros_like, g))


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, 1e30])
def test_what_is_not_finite_is_everywhere(bad, max_norm, dtype):
    """One such element, and every floating update is NaN: `skip_nonfinite` sees it."""
    g = {"a": jnp.ones(3, dtype).at[1].set(bad), "b": jnp.zeros(2), "n": jnp.arange(2)}
    for run in (clip, compiled_clip):
        found = run(g, max_norm)
        assert jnp.isnan(found["a"]).all()
        assert jnp.isnan(found["b"]).all()
        chex.assert_trees_all_equal(found["n"], g["n"])
    assert not jnp.isfinite(jgrad.global_norm(g))


# ---- leaves ------------------------------------------------------------------------------------


def test_leaves_that_are_not_floating_pass():
    """None, integers and bools, and what `jax.grad` gives to them: untouched and not counted."""
    others = {"none": None, "n": jnp.arange(3), "flag": jnp.array(True)}
    others["zero"] = np.zeros(2, jax.dtypes.float0)
    g = {"a": jnp.array([3.0, 4.0])}
    found = clip(g | others)
    np.testing.assert_allclose(found.pop("a"), [0.6, 0.8], rtol=1e-6)
    chex.assert_trees_all_equal(found, others)
    assert jgrad.global_norm(g | others) == 5
    chex.assert_trees_all_equal(clip(others), others)


@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_dtypes_are_kept(max_norm):
    """Those of the updates, whatever the parameters have."""
    kinds = ["float16", "bfloat16", "float32", "complex64"]
    g = {k: jnp.full(3, 2, k) for k in kinds}
    for dtype in (jnp.float32, jnp.bfloat16):
        found = clip(g, max_norm, {k: jnp.zeros(3, dtype) for k in kinds})
        assert {k: x.dtype for k, x in found.items()} == {k: jnp.dtype(k) for k in kinds}
        np.testing.assert_allclose(found["float32"], min(1, max_norm / 48**0.5) * 2, rtol=1e-6)


@pytest.mark.parametrize("empty", [{}, [], None, {"a": None}, {"a": jnp.zeros((0, 3))}])
def test_empty_trees(empty):
    chex.assert_trees_all_equal(clip(empty), empty)
    assert jgrad.global_norm(empty) == 0


# ---- derivatives, and the program --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_derivative_at_zero(max_norm):
    """Finite: that of the identity, below the bound as at it; the norm has 0."""
    c = jnp.array([1.0, 2.0])
    slope = jax.grad(lambda g: jnp.dot(clip([g], max_norm)[0], c))(jnp.zeros(2))
    np.testing.assert_array_equal(slope, c)
    np.testing.assert_array_equal(jax.grad(jgrad.global_norm)(jnp.zeros(2)), [0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_derivative(max_norm, x64):
    """Above the bound and below it, that of the NumPy reference by central differences."""
    x = np.random.default_rng(0).normal(size=5)

    def split(x):
        return [x[:2], x[2:]]

    def difference(f):
        rows = 1e-6 * np.eye(5)
        return np.stack([(f(x + h) - f(x - h)) / 2e-6 for h in rows], axis=-1)

    found = jax.jacobian(lambda x: jnp.concatenate(clip(split(x), max_norm)))(jnp.asarray(x))
    expected = difference(lambda x: np.concatenate(reference(split(x), max_norm)))
    np.testing.assert_allclose(found, expected.real.astype(float), atol=1e-8)
    slope = jax.grad(lambda x: jgrad.global_norm(split(x)))(jnp.asarray(x))
    np.testing.assert_allclose(slope, difference(true_norm).real.astype(float), atol=1e-8)


def test_derivative_by_the_bound():
    found = jax.grad(lambda bound: clip([jnp.array([3.0, 4.0])], bound)[0][1])(2.0)
    np.testing.assert_allclose(found, 0.8, rtol=1e-6)


def test_vmap_and_one_trace():
    """A batch of models is clipped one by one; a new bound is no new trace."""
    g = {"a": jnp.array([[3.0, 4.0], [0.3, 0.4], [3e30, 4e30]]), "b": jnp.zeros((3, 2))}
    run = jax.jit(jax.vmap(chex.assert_max_traces(clip, n=1), in_axes=(0, None)))
    for bound in (1.0, 2.0):
        found = run(g, jnp.float32(bound))
        expected = [[0.6 * bound, 0.8 * bound], [0.3, 0.4], [0.6 * bound, 0.8 * bound]]
        np.testing.assert_allclose(found["a"], expected, rtol=1e-6)


# ---- by the norm of the step before ------------------------------------------------------------


def previous_in_numpy(steps, bound):
    """Each gradient times min(1, bound / the last finite norm before it)."""
    norm = 0.0
    for g in steps:
        yield g * (min(1.0, bound / norm) if norm else 1.0)
        if np.isfinite(g).all():
            norm = np.sqrt(np.sum(np.square(g)))


@pytest.mark.parametrize("scan", [False, True])
def test_by_the_previous_norm(scan):
    rng = np.random.default_rng(0)
    steps = rng.normal(size=(8, 5)) * np.array([1, 9, 0.1, 4, np.inf, 0.2, 0, 3])[:, None]
    tx = jgrad.clip_by_global_norm(1.5, of="previous")

    def step(state, g):
        updates, state = tx.update({"w": g, "none": None}, state)
        return state, updates["w"]

    state, given = tx.init({"w": jnp.zeros(5), "none": None}), jnp.asarray(steps, jnp.float32)
    if scan:
        _, found = jax.jit(lambda state: jax.lax.scan(step, state, given))(state)
    else:
        found = []
        for g in given:
            state, clipped = step(state, g)
            found.append(clipped)
    expected = np.stack(list(previous_in_numpy(steps, 1.5)))
    np.testing.assert_allclose(np.stack(found), expected, rtol=2e-6)


def test_a_skipped_step_leaves_the_previous_norm():
    """One whose gradients are finite: it is another wrapper that leaves it out."""
    tx = jgrad.skip_spikes(jgrad.clip_by_global_norm(1.0, of="previous"), window=4)
    state, update = tx.init({"w": jnp.zeros(2)}), jax.jit(tx.update)
    for loss, size in [(1.0, 1.0)] * 4 + [(9.0, 50.0)]:
        _, state = update({"w": jnp.full(2, size)}, state, loss=loss)
    assert int(state.skipped) == 1
    assert float(state.inner.norm) == pytest.approx(2**0.5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_where_it_is(bad):
    """By the previous norm, which it leaves alone; a wrapper around sees it and skips the step."""
    tx = jgrad.clip_by_global_norm(1.0, of="previous")
    first = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
    g = {"a": jnp.array([bad, 10.0]), "b": jnp.ones(1)}
    _, state = tx.update(first, tx.init(first))
    updates, new = tx.update(g, state)
    chex.assert_trees_all_close(updates, {"a": jnp.array([bad, 2.0]), "b": jnp.full(1, 0.2)})
    assert float(new.norm) == float(state.norm) == 5
    for skip in (jgrad.skip_nonfinite, lambda tx: optax.apply_if_finite(tx, 9)):
        around = skip(optax.chain(tx, optax.scale(-1.0)))
        _, state = around.update(first, around.init(first), first)
        updates, _ = around.update(g, state, first)
        chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, g))
    current, _ = jgrad.clip_by_global_norm(1.0).update(g, optax.EmptyState())
    assert all(bool(jnp.all(jnp.isnan(x))) for x in jax.tree.leaves(current))


def test_the_largest_norm():
    """A norm above the largest number is that number, and clips what follows."""
    tx = jgrad.clip_by_global_norm(1.0, of="previous")
    huge = {"w": jnp.full(4, 3e38)}
    _, state = tx.update(huge, tx.init(huge))
    assert float(state.norm) == float(jnp.finfo(jnp.float32).max)


@pytest.mark.slow
def test_e51_frozen_leaves_are_not_in_the_norm(standard_promotion):
    """A gradient of None is in no norm, and its leaf stays; so is a leaf outside of a partition.

    optax's Adam has no gradients of None. Where zeros, or all gradients, are clipped and frozen
    behind that, the frozen leaf's norm makes the step of the others 100 times shorter.
    """
    w = {"backbone": jnp.ones(4), "head": jnp.ones(2)}
    g = {"backbone": jnp.full(4, 50.0), "head": jnp.asarray([0.6, 0.8])}
    labels = {"backbone": "frozen", "head": "trained"}

    def freeze(tx):
        return optax.partition({"frozen": optax.set_to_zero(), "trained": tx}, labels)

    def step(tx, g):
        return optax.apply_updates(w, tx.update(g, tx.init(w), w)[0])

    sgd = jgrad.gradient_descent(0.1)
    expected = {"backbone": w["backbone"], "head": w["head"] - 0.1 * g["head"]}  # of norm 1
    for make in (jgrad.clip_by_global_norm, optax.clip_by_global_norm):
        outside = step(optax.chain(make(1.0), freeze(sgd)), g)
        np.testing.assert_allclose(outside["head"], 1 - 0.001 * g["head"], rtol=1e-6)
        inside = step(freeze(optax.chain(make(1.0), sgd)), g)
        chex.assert_trees_all_close(inside, expected, rtol=3e-7)
    given = g | {"backbone": None}
    found = step(optax.chain(jgrad.clip_by_global_norm(1.0), sgd), given)
    chex.assert_trees_all_close(found, expected, rtol=3e-7)
    found = step(optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.adam(0.1)), given)
    np.testing.assert_array_equal(found["backbone"], w["backbone"])
    with pytest.raises((ValueError, TypeError)):  # of one optax in `update`, of another behind it
        step(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), given)
