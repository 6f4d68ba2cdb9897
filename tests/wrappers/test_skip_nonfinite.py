"""Steps that are not finite are left out, and the loss is scaled for float16."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from jgrad._inputs.transformation import transformation
from jgrad._wrappers import decisions
from tests.cases import CASES, every_case, gradients, params
from tests.support.loops import assert_equal, compiled, every_step, step_of

NAN, INF = float("nan"), float("inf")
X = jnp.ones(3)
# One of each method and rule; the others share their arithmetic.
TRANSFORMATIONS = {
    str(case): case.tx()
    for case in CASES
    if str(case) in ("gradient_descent", "nesterov", "adamw", "lars_masked", "lamb_decayed")
} | {"optax.adam": optax.adam(0.05)}


@functools.cache
def skipping(name):
    return jgrad.skip_nonfinite(TRANSFORMATIONS[name])


def poisoned(g, rng):
    """With one to all elements of one leaf that are not finite."""
    leaves, structure = jax.tree.flatten(g)
    i = rng.integers(len(leaves))
    bad = rng.choice([NAN, INF, -INF])
    where = np.asarray(rng.random(leaves[i].shape) < rng.choice([0.0, 0.5, 1.0]))
    where.flat[rng.integers(where.size)] = True
    leaves[i] = jnp.where(where, jnp.asarray(bad, leaves[i].dtype), leaves[i])
    return structure.unflatten(leaves)


def sequence(tx, w, values):
    """Eager steps with scalar gradients: the weights and the states."""
    state, found = tx.init(w), []
    for g in values:
        w, state = step_of(tx)(w, state, jnp.full_like(w, g))
        found.append((w, state))
    return found


def jitted(tx):
    """In a program of its own, in which nobody is told what the wrappers around say."""
    return optax.GradientTransformation(tx.init, jax.jit(tx.update))


# ---- skipping ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in TRANSFORMATIONS),
    ("adamw", "bfloat16"), ("nesterov", "float16")])  # fmt: skip
def test_e24_as_if_the_bad_steps_had_not_been(name, dtype, standard_promotion):
    """NaN and infinity at random among 30 steps: bit for bit the run without them."""
    rng, w, grads = np.random.default_rng(0), params(dtype), gradients(30, dtype)
    bad = rng.random(30) < 0.4
    tx, safe = TRANSFORMATIONS[name], skipping(name)
    found = expected = w, safe.init(w)
    plain = w, tx.init(w)
    for g, is_bad in zip(grads, bad, strict=True):
        before = found
        found = compiled(safe)(*found, poisoned(g, rng) if is_bad else g)
        chex.assert_tree_all_finite(found)
        if is_bad:
            assert_equal((found[0], found[1].inner), (before[0], before[1].inner))
        else:
            expected, plain = compiled(safe)(*expected, g), compiled(tx)(*plain, g)
    assert (int(found[1].skipped), int(expected[1].skipped)) == (bad.sum(), 0)
    assert int(expected[1].streak) == 30 - bad.sum()
    assert_equal((found[0], found[1].inner), (expected[0], expected[1].inner))
    # Compiled apart, that is the transformation inside, up to fusion.
    tolerance = 1e-5 if dtype == "float32" else 4 * float(jnp.finfo(dtype).eps)
    wide = lambda tree: jax.tree.map(lambda x: np.asarray(x, float), tree)
    for a, b in zip(jax.tree.leaves(wide(found[0])), jax.tree.leaves(wide(plain[0])), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * max(1, np.max(np.abs(b))))


@pytest.mark.parametrize("loss_scale", [None, 1.0])
def test_a_parameter_that_would_overflow(loss_scale):
    """60000 and a step of 10000 are finite in float16, and their sum is not."""
    tx = jgrad.skip_nonfinite(jgrad.gradient_descent(1.0), loss_scale=loss_scale)
    found = sequence(tx, jnp.asarray(60000, jnp.float16), [-10000, -2048, 9984])
    assert [float(w) for w, _ in found] == [60000, 62048, 52064]
    assert [int(state.skipped) for _, state in found] == [1, 1, 1]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_step_that_would_overflow(dtype):
    """It is clipped to what can be added to any parameter: the gradients alone decide."""
    largest = 2.0**102 if dtype == jnp.float32 else 2.0**118
    tx = jgrad.skip_nonfinite(jgrad.gradient_descent(1e10, momentum=0.5))
    found = sequence(tx, jnp.asarray(1, dtype), [1e30, -3e30])
    assert [float(w) for w, _ in found] == [-largest, 0]
    assert [int(state.skipped) for _, state in found] == [0, 0]
    np.testing.assert_allclose(found[-1][1].inner.mw, -2.5e30, rtol=1e-2)


@pytest.mark.slow(always=["float32-lars_masked"])
@every_case(("momentum", "adamw", "lars_masked", "lamb_decayed"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_finite_gradients_make_nothing_that_is_not(case, dtype):
    """Of any size and sign, at a rate of 1e10, and whatever the step before has left."""
    info = jnp.finfo(dtype)
    tx, w = jgrad.skip_nonfinite(case.tx(1e10)), params(dtype)
    state = tx.init(w)
    sizes = [info.max, -info.max, 0, info.tiny, info.smallest_subnormal, 1.0, 2.0**64, info.max]
    for size in sizes:
        g = jax.tree.map(lambda x, size=size: jnp.full_like(x, size), w)
        w, state = compiled(tx)(w, state, g)
        chex.assert_tree_all_finite((w, state))
    assert int(state.skipped) == 0


@pytest.mark.parametrize("loss_scale", [None, 1.0])
def test_moments_that_would_overflow(loss_scale):
    """3e38 and 0.9 times 3e38 is too much for a plain momentum."""
    options = {"loss_scale": loss_scale, "check_results": True}
    tx = jgrad.skip_nonfinite(optax.sgd(1e-30, momentum=0.9), **options)
    found = sequence(tx, jnp.float32(1), [3e38, 3e38, -1e38])
    assert [int(state.skipped) for _, state in found] == [0, 1, 1]
    np.testing.assert_allclose([w for w, _ in found], [-3e8, -3e8, -4.7e8], rtol=1e-6)
    traces = [state.inner[0].trace for _, state in found]
    np.testing.assert_allclose(traces, [3e38, 3e38, 1.7e38], rtol=1e-6)


@pytest.mark.parametrize("loss_scale", [None, 1.0])
def test_e24_a_window_whose_update_overflows(loss_scale):
    """It is lost, since its sum would be in the way of all windows to come."""
    tx = jgrad.accumulate(jgrad.gradient_descent(1.0), 2)
    tx = jgrad.skip_nonfinite(tx, loss_scale=loss_scale)
    found = sequence(tx, jnp.asarray(-60000, jnp.float16), [60000, 60000, -2048, -2048])
    assert [float(w) for w, _ in found] == [-60000, -60000, -60000, -57952]
    assert [int(state.skipped) for _, state in found] == [0, 1, 1, 1]
    assert [int(state.inner.mini_step) for _, state in found] == [1, 0, 1, 0]
    assert [int(state.inner.inner.step) for _, state in found] == [0, 0, 0, 1]


@pytest.mark.slow(always=["False"])
@pytest.mark.parametrize("check_finite", [True, False])
def test_e24_a_bad_mini_batch_closes_its_window(check_finite):
    """Left out and counted by both, with a scale halved, and `emit` as good as ever."""
    tx = jgrad.accumulate(jgrad.gradient_descent(1.0), 4, check_finite=check_finite)
    tx = jgrad.skip_nonfinite(tx, loss_scale=8.0)
    w, state = X, tx.init(X)
    for g, emit in ((8.0, False), (24.0, False), (NAN, True)):
        w, state = compiled(tx)(w, state, g * X, emit=jnp.asarray(emit))
    np.testing.assert_array_equal(w, -X)
    assert (int(state.skipped), int(state.inner.skipped)) == (1, 1)
    assert (int(state.inner.mini_step), int(state.inner.inner.step)) == (0, 1)
    assert float(state.loss_scale) == 4


@pytest.mark.slow
@pytest.mark.parametrize("size", [5, 5000, 100_003])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_e24_one_element_among_many(dtype, bad, size):
    """XLA's maximum of thousands of numbers does not see a NaN among them."""
    rate = 2.0**-26  # so that the update is below the bound of updates
    tx = jgrad.skip_nonfinite(jgrad.accumulate(jgrad.gradient_descent(rate), 2))
    ones = jnp.ones(size, dtype)
    state = tx.init(ones)
    for g in (ones.at[size // 2].set(bad), jnp.full(size, jnp.finfo(dtype).max, dtype)):
        updates, state = jax.jit(tx.update)(g, state, 0 * ones)
    assert int(state.skipped) == int(state.inner.skipped) == 1
    np.testing.assert_array_equal(
        updates,
        (-rate * g.astype(jnp.float32 if g.dtype != jnp.complex64 else g.dtype)).astype(dtype),
    )


@pytest.mark.slow(always=["rest"])
@pytest.mark.parametrize("place", ["layer", "rest"])
def test_clipping_of_some_gradients_does_not_decide_for_all(place):
    """Its norm is finite where a leaf that it does not see is not."""
    clip = optax.masked(jgrad.clip_by_global_norm(1.0), {"layer": True, "rest": False})
    tx, w, g = jgrad.skip_nonfinite(optax.chain(clip, jgrad.adam(0.1))), params(), gradients(1)[0]
    g[place] = jax.tree.map(lambda x: x * NAN, g[place])
    found = compiled(tx)(w, tx.init(w), g)
    assert_equal((found[0], found[1].inner), (w, tx.init(w).inner))
    assert int(found[1].skipped) == 1


@pytest.mark.slow(always=["identity"])
@pytest.mark.parametrize(
    "tx", [optax.identity(), jgrad.clip_by_global_norm(1.0)], ids=["identity", "clip"]
)
def test_gradients_that_pass(tx):
    """They are updates then, and zero in a step that is skipped."""
    masked = optax.chain(optax.masked(jgrad.adam(0.1), {"a": True, "b": False}), tx)
    w, g = {"a": X, "b": X}, {"a": X, "b": X.at[0].set(NAN)}
    safe = jgrad.skip_nonfinite(masked)
    for make in (lambda f: f, jax.jit):
        updates, state = make(safe.update)(g, safe.init(w), w)
        assert_equal(updates, jax.tree.map(jnp.zeros_like, w))
        assert int(state.skipped) == 1


def test_gradients_that_another_transformation_spoils():
    """Finite ones in, NaN out: what a method makes of them is looked at, if this is asked for."""
    spoil = optax.stateless(lambda updates, params: jax.tree.map(jnp.log, updates))
    tx = jgrad.skip_nonfinite(optax.chain(spoil, jgrad.adam(0.1)), check_results=True)
    w, state = compiled(tx)(X, tx.init(X), -X)
    np.testing.assert_array_equal(w, X)
    assert_equal(state.inner, tx.init(X).inner)
    assert int(state.skipped) == 1


def test_a_method_that_forgets_to_keep_old_moments():
    """Its moments are not settled, and so the old ones are chosen afterwards."""

    def compute(inputs, step):
        mw = [m + g for m, g in zip(step.moments["mw"].old, inputs.g, strict=True)]
        return mw, mw  # which `write` should have made

    tx = jgrad.skip_nonfinite(transformation("forgetful", compute, has=("mw",)))
    start = compiled(tx)(X, tx.init(X), X)
    found = compiled(tx)(*start, NAN * X)
    assert_equal((found[0], found[1].inner), (start[0], start[1].inner))
    assert int(found[1].skipped) == 1


def test_an_update_that_is_compiled_apart():
    """Nothing inside it is told the decision, which is made afterwards."""
    inner = jgrad.adam(0.1)
    tx = jgrad.skip_nonfinite(
        optax.GradientTransformationExtraArgs(inner.init, jax.jit(inner.update))
    )
    w, state = compiled(tx)(X, tx.init(X), X)
    again, state = compiled(tx)(w, state, NAN * X)
    assert_equal(again, w)
    assert int(state.skipped) == 1
    assert (w < X).all()


def test_branch_lets_the_gradients_alone_decide():
    """As the option says: what `tx` makes of finite gradients is not looked at."""
    tx = jgrad.skip_nonfinite(optax.scale(1e30), branch=True)
    updates, state = tx.update(1e30 * X, tx.init(X))
    assert jnp.isinf(updates).all()
    updates, state = tx.update(NAN * X, state)
    np.testing.assert_array_equal(updates, 0 * X)
    assert int(state.skipped) == 1


def test_e24_what_the_caller_knows():
    """`finite=` of the call, beside what is found."""
    tx = jgrad.skip_nonfinite(jgrad.accumulate(jgrad.gradient_descent(1.0), 2))
    _, state = tx.update(X, tx.init(X), X, finite=False)
    assert (int(state.skipped), int(state.inner.skipped), int(state.inner.count)) == (1, 1, 0)
    _, state = tx.update(NAN * X, tx.init(X), X, finite=True)
    assert (int(state.skipped), int(state.inner.skipped), int(state.inner.count)) == (1, 1, 0)


KEEPS = {
    "a sum that overflows": (lambda kept, g: kept + g, [3e38, 3e38, -3e38], [3e38, 3e38, 0]),
    "a logarithm that is no number": (lambda kept, g: jnp.log(g), [1.0, -1.0], [0, 0]),
}


@pytest.mark.parametrize(("keep", "given", "expected"), KEEPS.values(), ids=KEEPS)
def test_a_state_that_is_not_finite_beside_a_finite_step(keep, given, expected):
    """Whatever `tx` keeps is looked at, if this is asked for, though no update shows it."""

    def update(g, kept, w=None):
        return jax.tree.map(jnp.zeros_like, g), keep(kept, g)

    inner = optax.GradientTransformation(jnp.zeros_like, update)
    tx = jgrad.skip_nonfinite(inner, check_results=True)
    found = sequence(tx, jnp.float32(1), given)
    assert [float(state.inner) for _, state in found] == pytest.approx(expected)
    assert [int(state.skipped) for _, state in found] == [0, 1, 1][: len(given)]


def test_a_gradient_that_would_be_clipped():
    """Infinity is no large number, though `optax.clip` makes one of it."""
    tx = jgrad.skip_nonfinite(optax.chain(optax.clip(1.0), optax.sgd(0.5)))
    found = sequence(tx, jnp.float32(1), [5.0, INF, -INF, -5.0])
    assert [float(w) for w, _ in found] == [0.5, 0.5, 0.5, 1]
    assert [int(state.skipped) for _, state in found] == [0, 1, 2, 2]


def test_a_step_that_overflows_without_parameters():
    """Of a transformation without state: there is nothing else to look at."""
    tx = jgrad.skip_nonfinite(optax.scale(1e30), check_results=True)
    updates, state = tx.update(1e30 * X, tx.init(X))
    np.testing.assert_array_equal(updates, 0 * X)
    assert int(state.skipped) == 1


# ---- results of other libraries ----------------------------------------------------------------


def doubling():
    """A transformation of another library that overflows: the update, and what it keeps."""

    def update(g, kept, w=None):
        new = jax.tree.map(lambda k, x: 2 * k + x, kept, g)
        return new, new

    return optax.GradientTransformation(lambda w: jax.tree.map(jnp.zeros_like, w), update)


@pytest.mark.parametrize("wrap", [lambda tx: tx, jitted], ids=["told", "apart"])
def test_what_another_library_overflows_saturates(wrap):
    """Gradients decide: infinity becomes the largest number, in updates what can be added."""
    tx, w = jgrad.skip_nonfinite(wrap(doubling())), X
    state = tx.init(w)
    for g in (3e38, 3e38, NAN):
        updates, state = jax.jit(tx.update)(g * X, state, w)
    assert int(state.skipped) == 1
    np.testing.assert_array_equal(updates, 0 * X)
    np.testing.assert_array_equal(state.inner, jnp.full(3, jnp.finfo(jnp.float32).max))
    updates, _ = jax.jit(tx.update)(X, state, w)
    np.testing.assert_array_equal(updates, jnp.full(3, 2.0**102))


def test_an_infinity_from_the_start_stays():
    """As that of `reduce_on_plateau`, to which every loss is compared."""
    kept = optax.GradientTransformation(lambda w: INF * w, lambda g, kept, w=None: (g, kept + 1))
    tx = jgrad.skip_nonfinite(kept)
    _, state = jax.jit(tx.update)(X, tx.init(X))
    assert jnp.isinf(state.inner).all()


@pytest.mark.parametrize(
    ("check_results", "skipped"), [(None, 1), (True, 1), (False, 0)], ids=["float16", "on", "off"]
)
def test_float16_overflows(check_results, skipped):
    """At 65504: its updates are looked at, unless this is turned off."""
    tx = jgrad.skip_nonfinite(optax.scale(2.0), check_results=check_results)
    w, g = jnp.zeros(3, jnp.float16), jnp.full(3, 40000, jnp.float16)
    updates, state = jax.jit(tx.update)(g, tx.init(w), w)
    assert int(state.skipped) == skipped
    np.testing.assert_array_equal(updates, w if skipped else INF * jnp.ones_like(w))


def test_parameters_in_float16_that_would_overflow():
    """Where the update alone does not: 60000 and 60000 are too much."""
    w = {"half": jnp.full(3, 60000, jnp.float16), "full": X}
    tx = jgrad.skip_nonfinite(optax.identity())
    updates, state = jax.jit(tx.update)(w, tx.init(w), w)
    assert_equal(updates, jax.tree.map(jnp.zeros_like, w))
    assert int(state.skipped) == 1


def test_what_knows_one_decision_is_chosen_again():
    """Moments in 8 bits know that gradients are finite, and not yet that a result is not."""
    spoil = optax.stateless(lambda updates, params: jax.tree.map(jnp.log, updates))
    inner = optax.chain(jgrad.adam(0.1, moment_dtype="8bit"), spoil)
    tx, w = jgrad.skip_nonfinite(inner, check_results=True), jnp.ones((4, 256))
    state = tx.init(w)
    new, found = compiled(tx)(w, state, w)
    assert_equal((new, found.inner), (w, state.inner))
    assert int(found.skipped) == 1


def test_a_window_in_a_program_of_its_own():
    """It hears of no decision, so that a bad call is as if it had not been."""
    window = jgrad.accumulate(jgrad.gradient_descent(1.0), 2, check_finite=False)
    tx = jgrad.skip_nonfinite(jitted(window))
    found = every_step(tx, 0 * X, [X, NAN * X, 3 * X, X])
    assert [float(w[0]) for w, _ in found] == [0, 0, -2, -2]
    assert int(found[-1][1].skipped) == 1


@pytest.mark.parametrize("leaf", ["a", "b"])
def test_a_window_for_some_leaves(leaf):
    """A bad gradient of the others would be their update: then the call is as if it had not been."""
    window = jgrad.accumulate(jgrad.gradient_descent(1.0), 2)
    tx = jgrad.skip_nonfinite(optax.masked(window, {"a": True, "b": False}))
    w, g = {"a": 0 * X, "b": 0 * X}, {"a": X, "b": X}
    bad = g | {leaf: NAN * X}
    (_, _), (after, state) = every_step(tx, w, [g, bad])
    assert_equal(after, {"a": -X if leaf == "a" else 0 * X, "b": 2 * X if leaf == "a" else X})
    assert int(state.skipped) == 1


# ---- loss scaling ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "interval", "steps", "scales"),
    [
        (8.0, 2, "++++", [8, 16, 16, 32]),  # twice as much after each two in a row
        (8.0, 2, "+-+-++", [8, 4, 4, 2, 2, 4]),  # of which a bad one breaks the count
        (8.0, 1, "+++", [16, 32, 64]),
        (4.0, 9, "-----", [2, 1, 1, 1, 1]),  # not below 1
        (3.0, 9, "--", [1.5, 1]),
        (None, 2000, "+-+", [1, 1, 1]),
    ],
)
def test_dynamic_scale(first, interval, steps, scales):
    tx = jgrad.skip_nonfinite(
        jgrad.gradient_descent(0.1), loss_scale=first, growth_interval=interval
    )
    found = sequence(tx, jnp.float32(1), [0.5 if s == "+" else INF for s in steps])
    assert [float(state.loss_scale) for _, state in found] == scales
    assert int(found[-1][1].skipped) == steps.count("-")


def kept():
    """A transformation whose state is the last gradient that it saw."""
    return optax.GradientTransformation(
        lambda w: jnp.zeros(w.shape, jnp.float32), lambda g, old, w=None: (jnp.zeros_like(g), g)
    )


@pytest.mark.parametrize("scale", [2.0**15, jnp.float32(2.0**15)], ids=["number", "array"])
def test_gradients_are_unscaled_in_float32(scale):
    """1e-8 is 0 in float16; scaled by 2^15 it is not, and `tx` sees it."""
    assert jnp.float16(1e-8) == 0
    w, g = jnp.ones(3, jnp.float16), jnp.full(3, 1e-8 * 2**15, jnp.float16)
    tx = jgrad.skip_nonfinite(kept(), loss_scale=scale)
    updates, state = tx.update(g, tx.init(w), w)
    assert (state.inner.dtype, updates.dtype) == (jnp.float32, jnp.float16)
    np.testing.assert_allclose(state.inner, 1e-8, rtol=1e-3)


def test_the_ceiling():
    """The scale grows to a last value that is finite, and gradients are right up to there."""
    tx = jgrad.skip_nonfinite(kept(), loss_scale=2.0**120, growth_interval=1)
    w, g = X, 1e5 * X
    state = tx.init(w)
    for _ in range(12):
        before = state.loss_scale
        _, state = tx.update(g, state, w)
        np.testing.assert_allclose(state.inner, 1e5 / float(before), rtol=1e-6)
    assert float(before) == float(state.loss_scale) >= 2.0**124
    assert float(tx.update(INF * g, state, w)[1].loss_scale) == float(before) / 2


def test_the_state_is_one_tree():
    """With a scale and without."""
    states = [
        jgrad.skip_nonfinite(jgrad.adam(0.1), loss_scale=scale).init(params(jnp.float16))
        for scale in (None, 2.0**15, np.float32(8), jnp.float32(8))
    ]
    for state in states[1:]:
        chex.assert_trees_all_equal_shapes_and_dtypes(states[0], state)
        assert jax.tree.structure(states[0]) == jax.tree.structure(state)
    assert [float(state.loss_scale) for state in states] == [1, 2**15, 8, 8]
    assert states[0].loss_scale.dtype == jnp.float32


# ---- many leaves ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [None, 0, 255, 256, 599])
def test_faults_among_many_leaves(fault):
    leaves = [jnp.ones(2)] * 600
    if fault is not None:
        leaves[fault] = jnp.array([1.0, jnp.nan])
    assert bool(decisions.all_finite(leaves)) == (fault is None)


def test_many_leaves_make_no_program_of_as_many_arguments():
    """An eager call compiles each: 18 s for one of 5,000 arguments, and no time for 20 of 256."""
    jaxpr = jax.make_jaxpr(decisions.all_finite)([jnp.ones(2)] * 600)
    assert max(len(equation.invars) for equation in jaxpr.eqns) <= 256
