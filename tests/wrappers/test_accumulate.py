"""One update for a window of mini-batches, with the mean of their gradients."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.cases import CASES, FEW, every_case, gradients, params
from tests.support import oldest
from tests.support.choice import mostly_slow
from tests.support.loops import (
    assert_equal,
    compiled,
    every_step,
    run,
    stack,
    step_of,
    told,
    with_loss,
)

NAN, INF = float("nan"), float("inf")
X = jnp.ones(3)


def mean(trees):
    """In float64 NumPy."""
    return jax.tree.map(lambda *xs: np.mean([np.asarray(x, np.float64) for x in xs], 0), *trees)


def poisoned(g, bad):
    """With a single element that is not finite."""
    return g | {"layer": g["layer"] | {"b": g["layer"]["b"].at[1].set(bad)}}


# ---- the numbers -------------------------------------------------------------------------------


@pytest.mark.slow(one_in=2)
@every_case(FEW)
@pytest.mark.parametrize("every", mostly_slow([1, 3], 3))
def test_a_window_is_one_update_with_the_mean(case, every, x64):
    """Three windows are three steps of the reference, with means by NumPy."""
    w, grads = params("float64"), gradients(3 * every, "float64")
    found, state = run(jgrad.accumulate(case.tx(), every), w, grads)
    means = [mean(grads[i : i + every]) for i in range(0, len(grads), every)]
    for a, b in zip(found[every - 1 :: every], case.trajectory(w, means), strict=True):
        for x, y in zip(jax.tree.leaves(a), b, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12 * np.max(np.abs(y)))
    assert (int(state.inner.step), int(state.mini_step), int(state.count)) == (3, 0, 0)
    assert not any(x.any() for x in jax.tree.leaves(state.total))


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("dtype", ["complex64", "bfloat16", "float16"])
def test_the_mean_of_other_dtypes(dtype):
    """Of complex numbers, part by part, also where their sum overflows."""
    most = float(jnp.finfo(dtype).max) if dtype == "complex64" else 2.0**15
    rows = [[1, -3, most], [2, 5, most], [3, 1, most]]
    turn = 1 - 0.5j if dtype == "complex64" else 1
    grads = [jnp.asarray(row, dtype) * jnp.asarray(turn, dtype) for row in rows]
    tx = jgrad.accumulate(jgrad.gradient_descent(1.0), 3)
    updates = run(tx, 0 * grads[0], grads)[0][-1]
    assert updates.dtype == dtype
    np.testing.assert_allclose(updates[:2], -turn * np.array([2, 1]), rtol=1e-6)
    assert jnp.isfinite(updates).all()
    assert abs(updates[2]) >= most / 3


# ---- windows as `optax.MultiSteps` has them ----------------------------------------------------

growing = lambda done: jnp.where(done < 2, 1, 3)  # windows of 1, 1, 3, 3, ...


@pytest.mark.slow(always=["<lambda>-False"])
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("every", mostly_slow([2, growing], growing))
def test_beside_multi_steps(every, mean, standard_promotion):
    """Means or sums, windows by the number of updates, and what optax reads of a state."""
    inner = optax.sgd(optax.linear_schedule(0.1, 0.0, 10), momentum=0.9)
    theirs = optax.MultiSteps(inner, every, use_grad_mean=mean)
    ours = jgrad.accumulate(inner, every, mean=mean)
    w, *grads = ({"w": p["layer"]["w"]} for p in (params(), *gradients(9)))
    rows = zip(every_step(ours, w, grads), every_step(theirs, w, grads), strict=True)
    assert not ours.init(w).has_updated
    updated = []
    for (found, state), (expected, their_state) in rows:
        chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)
        assert int(state.gradient_step) == int(their_state.gradient_step)
        assert int(state.mini_step) == int(their_state.mini_step)
        assert bool(state.has_updated) == bool(theirs.has_updated(their_state))
        updated.append(bool(state.has_updated))
    assert updated == [i in ((1, 3, 5, 7) if every == 2 else (0, 1, 4, 7)) for i in range(9)]


def test_a_traced_length_below_one():
    """Counts as 1; what is not traced is an error."""
    tx = jgrad.accumulate(jgrad.gradient_descent(0.1), lambda done: 1 - done)
    w, update = jnp.ones(3), jax.jit(tx.update)
    state = tx.init(w)
    for i in range(1, 4):
        updates, state = update(w, state)
        np.testing.assert_allclose(updates, -0.1, rtol=1e-6)
        assert int(state.gradient_step) == i
    with pytest.raises(ValueError, match="`every`: -2, expected a number in"):
        tx.update(w, state)


INNER = {
    "8 bits": lambda: jgrad.adam(0.1, moment_dtype="8bit"),
    "a chain": lambda: jgrad.average_params(
        optax.chain(jgrad.clip_by_global_norm(1.0), optax.adam(0.1)), 0.9
    ),
    "masked": lambda: optax.masked(jgrad.skip_nonfinite(jgrad.adam(0.1)), lambda w: {"w": True}),
    "injected": lambda: optax.inject_hyperparams(optax.sgd)(0.1),
    "watched": lambda: jgrad.watch(jgrad.adam(0.1)),
}


@pytest.mark.slow(always=["8 bits-True"])
@pytest.mark.parametrize("weighted", mostly_slow([False, True], True))
@pytest.mark.parametrize("inner", mostly_slow(INNER, "8 bits", "watched"))
def test_a_function_of_updates_is_the_emit_of_a_caller(inner, weighted, standard_promotion):
    """Bit for bit, around any state that counts, in a scan that meets a NaN."""
    w, own = {"w": jnp.ones((64, 64))}, {"weighted": weighted}
    grads = [{"w": jnp.sin(i + jnp.arange(4096.0)).reshape(64, 64)} for i in range(9)]
    grads[3] = {"w": grads[3]["w"].at[0, 0].set(NAN)}
    weights = {"weight": jnp.arange(1.0, 10.0)} if weighted else {}
    emit = jnp.isin(jnp.arange(9), jnp.array([0, 1, 4, 7]))

    def trained(every, **emit):
        tx = jgrad.skip_nonfinite(jgrad.accumulate(INNER[inner](), every, **own))
        body = lambda carry, x: (step_of(tx)(*carry, x[0], **x[1]), None)
        return jax.lax.scan(body, (w, tx.init(w)), (stack(grads), weights | emit))[0]

    found = jax.jit(trained, static_argnums=0)(growing)
    assert_equal(found, jax.jit(trained, static_argnums=0)(100, emit=emit))
    assert int(found[1].inner.gradient_step) == 4


@pytest.mark.parametrize("case", {case.make: case for case in CASES}.values(), ids=str)
def test_every_method_counts_its_updates(case):
    """Whatever the type of its state."""
    state = jgrad.accumulate(case.without_masks().tx(), growing).init({"w": jnp.ones((4, 3))})
    assert (int(state.gradient_step), bool(state.has_updated)) == (0, False)


class Net(NamedTuple):
    """Parameters with the names of counters."""

    count: Any
    gradient_step: Any
    step: Any


NOT_THE_FIRST_COUNTER = {
    "losses": lambda: optax.chain(optax.contrib.reduce_on_plateau(), jgrad.adam(0.1)),
    "losses of optax": lambda: optax.chain(optax.contrib.reduce_on_plateau(), optax.adam(0.1)),
    "parameters": lambda: jgrad.average_params(jgrad.adam(0.1), 0.9),
    "parameters of optax": lambda: optax.chain(optax.trace(0.9), optax.adam(0.1)),
}


@pytest.mark.slow(always=["losses of optax", "parameters of optax"])
@pytest.mark.parametrize("inner", NOT_THE_FIRST_COUNTER.values(), ids=NOT_THE_FIRST_COUNTER)
def test_the_first_counter_may_count_something_else(inner, standard_promotion):
    """Windows grow by the updates of the method, and a window without any mini-batch is none."""
    tx = told(jgrad.accumulate(inner(), growing), value=1.0)
    w, found = Net(*jnp.ones((3, 2))), []
    g = [w, jax.tree.map(lambda p: p * NAN, w), *[w] * 4]
    for _, state in every_step(tx, w, g):
        found.append((int(state.gradient_step), int(state.mini_step), bool(state.has_updated)))
    assert found == [(1, 0, 1), (1, 0, 1), (2, 0, 1), (2, 1, 0), (2, 2, 0), (3, 0, 1)]


@pytest.mark.parametrize("every", [np.int64(2), lambda done: np.int64(2), lambda done: np.array(2)])
def test_integers_of_numpy(every, x64):
    """As those of Python: none is wider than a counter."""
    w = jnp.ones(3)
    _, state = run(jgrad.accumulate(jgrad.adam(0.1), every), w, [w] * 5)
    assert (int(state.gradient_step), int(state.mini_step)) == (2, 1)


def test_models_whose_windows_differ():
    """Under `vmap`: one that leaves out its first mini-batches has not come to longer windows."""
    rows = jnp.array([[1.0, NAN], [2.0, NAN], [3.0, 3.0], [4.0, 4.0], [5.0, 5.0]])
    tx = jgrad.accumulate(jgrad.gradient_descent(1.0), growing, mean=False)
    w, state = jnp.zeros(2), jax.vmap(tx.init)(jnp.zeros(2))
    step, found = jax.jit(jax.vmap(step_of(tx))), []
    for g in rows:
        w, state = step(w, state, g)
        found.append(w.tolist())
    assert found == [[-1, 0], [-3, 0], [-3, -3], [-3, -7], [-15, -7]]
    assert (state.gradient_step.tolist(), state.has_updated.tolist()) == ([3, 2], [True, False])


@pytest.mark.slow(always=["bfloat16"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_sum_that_its_dtype_cannot_hold(dtype):
    """The largest number, as a sum in float32 is; what is infinite before stays so."""
    most = jnp.finfo(dtype).max
    g = jnp.array([most, -most, 1.0, INF], dtype)
    for checked, rest in (True, 0), (False, INF):
        tx = jgrad.accumulate(optax.identity(), 2, mean=False, check_finite=checked)
        given, update = g.at[3].set(0) if checked else g, jax.jit(tx.update)
        _, state = update(given, tx.init(g), g)
        updates, _ = update(given, state, g)
        np.testing.assert_array_equal(updates, jnp.array([most, -most, 2, rest], dtype))


def test_the_sum_of_weighted_gradients():
    tx = jgrad.accumulate(optax.identity(), 2, mean=False, weighted=True)
    state = tx.update(X, tx.init(X), X, weight=3.0)[1]
    np.testing.assert_array_equal(tx.update(10 * X, state, X, weight=0.5)[0], 8 * X)


@pytest.mark.slow
def test_e50_fractional_weights(standard_promotion, x64):
    """The gradient of the whole batch, from mini-batches that weigh 1/8, 5/2, and nothing.

    optax weighs mini-batches alike. A denominator of at least 1, which trainers write against
    0 / 0, makes updates too short where a window weighs less.
    """
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(24, 3))), jnp.asarray(rng.normal(size=24))
    w = jnp.asarray(rng.normal(size=3))

    def total(w, x, y, m):
        return jnp.sum(m * jnp.square(x @ w - y))

    def window(tx, scales, **weight_of):
        """The update of one window; each mini-batch has the mean over its own tokens."""
        state = tx.init(w)
        for x_i, y_i, m in zip(jnp.split(x, 3), jnp.split(y, 3), scales, strict=True):
            mean = jax.grad(total)(w, x_i, y_i, m) / jnp.where(m.sum() == 0, 1, m.sum())
            more = {name: weight(m) for name, weight in weight_of.items()}
            updates, state = tx.update(mean, state, w, **more)
        return updates

    masks = np.zeros((3, 8))
    masks[0, 0], masks[1, :5] = 1 / 8, 1 / 2
    for scale in (1.0, 1 / 128):  # a window that weighs 2.625, and 0.0205
        scales = jnp.asarray(scale * masks)
        whole = jax.grad(total)(w, x, y, scales.ravel()) / scales.sum()
        tx = jgrad.accumulate(optax.identity(), 3, weighted=True)
        found = window(tx, scales, weight=jnp.sum)
        np.testing.assert_allclose(found, whole, rtol=1e-13)
        alike = window(optax.MultiSteps(optax.identity(), 3), scales)
        assert not np.allclose(alike, whole, rtol=0.1)
    nothing = window(tx, 0 * scales, weight=jnp.sum)
    np.testing.assert_array_equal(nothing, 0)


# ---- mini-batches that are not finite ----------------------------------------------------------


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize("bad", mostly_slow([NAN, INF, -INF], NAN, INF))
@pytest.mark.parametrize("at", mostly_slow([(0,), (2,), (0, 1)], (2,), (0, 1)))
def test_a_mini_batch_that_is_not_finite_is_left_out(bad, at, x64):
    """Skipped, counted, and the mean is over the others."""
    w, grads = params("float64"), gradients(3, "float64")
    given = [poisoned(g, bad) if i in at else g for i, g in enumerate(grads)]
    tx = jgrad.accumulate(optax.identity(), 3)
    state = tx.init(w)
    for g in given:
        updates, state = tx.update(g, state, w)
    used = mean([g for i, g in enumerate(grads) if i not in at])
    chex.assert_trees_all_close(updates, used, rtol=1e-14)
    assert (int(state.skipped), int(state.mini_step), int(state.count)) == (len(at), 0, 0)


@pytest.mark.slow
def test_e11_one_nan_and_optax_never_recovers(standard_promotion):
    w, grads = params(), gradients(6)
    grads[1] = poisoned(grads[1], np.nan)
    found, _ = run(optax.MultiSteps(optax.sgd(0.1), 2), w, grads)
    assert jnp.isnan(found[-1]["layer"]["b"]).any()
    found, state = run(jgrad.accumulate(optax.sgd(0.1), 2), w, grads)
    chex.assert_tree_all_finite((found, state))


@pytest.mark.slow(always=["full"])
@pytest.mark.parametrize("how", mostly_slow(["full", "emit"], "full"))
def test_a_window_without_any_finite_mini_batch(how):
    """It updates nothing, closes, and the next window is as if it had not been."""
    w, grads = params(), gradients(4)
    tx = jgrad.accumulate(jgrad.adam(0.1, weight_decay=0.1), 2)
    before, old = run(tx, w, grads[:2])
    state, bad = old, poisoned(grads[0], INF)
    for emit in (None, None) if how == "full" else (jnp.array(True),):
        same, state = compiled(tx)(before[-1], state, bad, emit=emit)
        assert_equal(same, before[-1])
    count = 2 if how == "full" else 1
    assert_equal(state, old._replace(skipped=jnp.int32(count)))


# ---- emit --------------------------------------------------------------------------------------


def test_a_leaf_without_a_gradient_when_the_window_closes():
    """It is left alone, and its sum is not taken into the next window."""
    tx = jgrad.accumulate(jgrad.gradient_descent(1.0), 2)
    w = {"a": X, "b": X}
    state = tx.init(w)
    for b in (X, None, X, 3 * X):
        updates, state = tx.update({"a": X, "b": b}, state, w)
        if b is None:
            np.testing.assert_array_equal(updates["b"], 0 * X)
            np.testing.assert_array_equal(state.total["b"], 0 * X)
    np.testing.assert_array_equal(updates["a"], -X)
    np.testing.assert_array_equal(updates["b"], -2 * X)


# ---- finite ------------------------------------------------------------------------------------


@pytest.mark.parametrize("check_finite", [True, False])
@pytest.mark.parametrize("flag", [bool, jnp.asarray], ids=["bool", "array"])
def test_finite_as_the_caller_knows_it(flag, check_finite):
    """What is said is believed, and nothing is read to find out."""
    tx = jgrad.accumulate(jgrad.gradient_descent(1.0), 3, check_finite=check_finite)
    state = tx.init(X)
    for finite, x in ((True, 1.0), (False, 7.0)):
        _, state = tx.update(x * X, state, X, finite=flag(finite))
    updates, state = tx.update(2 * X, state, X)
    np.testing.assert_array_equal(updates, -1.5 * X)
    assert int(state.skipped) == 1
    program = jax.make_jaxpr(lambda *args: tx.update(*args, finite=jnp.asarray(True)))(X, state, X)
    assert "reduce_max" not in str(program)


# ---- leaves and dtypes -------------------------------------------------------------------------


@pytest.mark.slow(one_in=5)
@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        ("bfloat16", [256.0] + [1.0] * 16, 16.0),  # 256 + 1 is 256 in bfloat16
        ("float16", [2048.0] + [1.0] * 31, 65.0),
        ("float16", [60000.0] * 4, 60000.0),  # the sum is beyond float16
    ],
)
@pytest.mark.parametrize("params_dtype", [None, "float32"])
def test_half_precision_is_summed_in_float32(dtype, values, expected, params_dtype):
    """And the mean has the dtype of the gradient again, which `tx` would have seen without."""
    values = [jnp.full(2, x, dtype) for x in values]
    w = jnp.zeros(2, params_dtype or dtype)
    kept = optax.GradientTransformation(
        lambda w: jnp.zeros(2, dtype), lambda g, old, w=None: (g, g)
    )
    tx = jgrad.accumulate(kept, len(values))
    state = tx.init(w)
    assert state.total.dtype == jnp.float32
    update = jax.jit(tx.update)
    for g in values:
        updates, state = update(g, state, w)
    np.testing.assert_array_equal(updates, jnp.full(2, expected, w.dtype), strict=True)
    np.testing.assert_array_equal(state.inner, jnp.full(2, expected, dtype), strict=True)


# ---- beside others -----------------------------------------------------------------------------


# The XLA of JAX 0.8 writes g - g out before it adds it up.
LOOK = 4.1 if oldest.IS_OLDEST else 1


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize(("check_finite", "limit"), [(False, 3), (True, 3 + LOOK)])
@pytest.mark.parametrize(("make", "weighted"), [(jgrad.adam, False), (optax.adam, False),
    (jgrad.adam, True)], ids=["jgrad", "optax", "weighted"])  # fmt: skip
def test_e11_bytes_moved_by_a_mini_step(make, weighted, check_finite, limit):
    """Gradient and sum read, sum written; once more the gradient to look at it before.

    A weight is multiplied in the pass that adds.
    """
    shapes = [(512, 512), (1024, 256), (256, 1024), (1000, 100), (160_000,), (1000,)]
    w = {str(i): jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(shapes)}
    tx = jgrad.accumulate(make(0.1), 4, check_finite=check_finite, weighted=weighted)
    options = {"weight": jax.ShapeDtypeStruct((), jnp.float32)} if weighted else {}

    def mini_step(state, g, w, options):
        return tx.update(g, state, w, emit=False, **options)[1]

    args = jax.eval_shape(tx.init, w), w, w, options
    program = jax.jit(mini_step, donate_argnums=0).lower(*args).compile()
    size = sum(4 * x.size for x in w.values())
    assert 3 * size <= program.cost_analysis()["bytes accessed"] < 1.005 * limit * size
    written = 1 if check_finite and LOOK > 1 else 0  # g - g, all of it
    assert program.memory_analysis().temp_size_in_bytes < (0.005 + written) * size


def conditionals(jaxpr):
    return [e for e in jaxpr.eqns if e.primitive.name == "cond"]


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("packed", [False, True], ids=["tree", "packed"])
def test_an_open_window_writes_nothing_for_the_branch(dtype, packed):
    """It returns arrays that it was given; and XLA copies these, unless the branch is the first.

    For a GPU a branch by a bool would be the second; `clamp` makes the number for `switch`.
    """
    w, (g,) = params(dtype), gradients(1, dtype)
    if packed:
        w, g = jgrad.pack(w), jgrad.pack(g)
    inner = optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.adam(0.1, weight_decay=0.1))
    for wrap in (lambda tx: tx, jgrad.skip_nonfinite):
        tx = wrap(jgrad.accumulate(jgrad.master_weights(inner), 4))
        program = jax.make_jaxpr(tx.update)(g, tx.init(w), w).jaxpr
        made_by = {id(v): e.primitive.name for e in program.eqns for v in e.outvars}
        found = conditionals(program)
        assert len(found) == 2
        for conditional in found:
            opened, _ = conditional.params["branches"]
            given = set(map(id, opened.jaxpr.invars))
            assert given.issuperset(map(id, opened.jaxpr.outvars))
            assert made_by[id(conditional.invars[0])] == "clamp"


def test_only_arrays_of_the_sum_leave_its_branches():
    """Each is as large as one leaf: no updates beside them, nor means."""
    w, (g,) = params(), gradients(1)
    tx = jgrad.accumulate(jgrad.adam(0.1), 4)
    args = g, tx.init(w), w
    program = jax.make_jaxpr(tx.update)(*args).jaxpr
    size = sum(x.size for x in jax.tree.leaves(w))
    sizes = [sum(v.aval.size for v in e.outvars) for e in conditionals(program)]
    assert sizes == [size, 3 * size + 1]  # the mean; then the step, both moments, and a counter


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_that_are_wider_than_their_sum(dtype, x64):
    """The mean is in float64, and so is what updates are made of; and the sum stays in float32."""
    tx = jgrad.accumulate(optax.identity(), 2)
    state = tx.init(jnp.zeros(3, "float32"))
    third, w = jnp.full(3, 1 / 3, "float64"), jnp.zeros(3, dtype)
    update = jax.jit(tx.update)
    held, state = update(third, state, w)
    np.testing.assert_array_equal(held, 0 * w, strict=True)
    total = np.float64(np.float32(1 / 3))
    np.testing.assert_array_equal(state.total, jnp.full(3, total, "float32"), strict=True)
    updates, state = update(third, state, w)
    np.testing.assert_array_equal(
        updates, np.full(3, (total + 1 / 3) / 2).astype(dtype), strict=True
    )
    np.testing.assert_array_equal(state.total, jnp.zeros(3, "float32"), strict=True)


# ---- windows of one mini-batch -----------------------------------------------------------------

EMITS = {"python": False, "traced": jnp.asarray(False)}
AROUND = {
    "bare": lambda tx: tx,
    "skip_nonfinite": jgrad.skip_nonfinite,
    "skip_spikes": lambda tx: with_loss(jgrad.skip_spikes(tx)),
    "both": lambda tx: with_loss(jgrad.skip_nonfinite(jgrad.skip_spikes(tx))),
}


def with_sum(state):
    """As 1.0 has it."""
    return state._replace(total=jax.tree.map(jnp.zeros_like, state.inner.mw))


def test_one_mini_batch_needs_no_sum():
    """Neither in the state nor on the way: the program is that of what is inside."""
    w = {"w": jnp.ones((256, 256)), "b": jnp.ones(256)}
    adam, costs = jgrad.adam(0.1), []
    for tx in (adam, jgrad.accumulate(adam, 1, check_finite=False)):
        state = tx.init(w)
        program = jax.jit(step_of(tx), donate_argnums=(0, 1)).lower(w, state, w).compile()
        costs.append((program.memory_analysis(), program.cost_analysis()["bytes accessed"]))
    assert state.total is None
    assert jax.eval_shape(step_of(tx), w, state, w)[1].total is None
    size = 4 * (256 * 256 + 256)
    for name in ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes"):
        alone, both = (getattr(memory, name) for memory, _ in costs)
        assert abs(both - alone) < size / 50, name
    assert abs(costs[1][1] - costs[0][1]) < size / 50


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_a_state_of_1_0_with_a_sum(weighted):
    """It goes on as it is, with the same numbers; one mini-batch is not finite."""
    w, grads = params(), gradients(4)
    grads[1] = poisoned(grads[1], NAN)
    tx = jgrad.accumulate(jgrad.adam(0.1), 1, weighted=weighted)
    new, old = (w, tx.init(w)), (w, with_sum(tx.init(w)))
    options = {"weight": 3.0} if weighted else {}
    step = jax.jit(lambda w, s, g: step_of(tx)(w, s, g, **options))
    for g in grads:
        new, old = step(*new, g), step(*old, g)
    assert new[1].total is None
    assert not any(x.any() for x in jax.tree.leaves(old[1].total))
    both = [(w, *s[:3], s.inner) for w, s in (new, old)]
    chex.assert_trees_all_close(*both, rtol=2e-6 if weighted else 0)
    assert (int(new[1].skipped), int(new[1].inner.step)) == (1, 3)


@pytest.mark.slow(always=["traced-both"])
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("emit", EMITS.values(), ids=EMITS)
def test_a_window_that_may_stay_open_has_a_sum(emit, around):
    """`emit` decides, as in 1.0; so does another `every` for the same state."""
    (first, second), w = gradients(2), params()
    one, two = (around(jgrad.accumulate(jgrad.gradient_descent(1.0), n)) for n in (1, 2))
    expected = step_of(one)(w, one.init(w), mean([first, second]))[0]
    found, state = step_of(one)(w, one.init(w), first, emit=emit)
    chex.assert_trees_all_equal(found, w)
    assert int(optax.tree.get(state, "mini_step")) == 1
    assert_equal(jax.jit(step_of(one))(w, one.init(w), first, emit=jnp.asarray(emit)), (w, state))
    found, state = step_of(one)(w, state, second)
    chex.assert_trees_all_close(found, expected, rtol=1e-6)
    assert int(optax.tree.get(state, "mini_step")) == 0
    found, state = run(two, w, [first, second])
    chex.assert_trees_all_close(found[-1], expected, rtol=1e-6)
    of_one = compiled(two)(w, one.init(w), first)
    found, _ = compiled(two)(*of_one, second)
    chex.assert_trees_all_close(found, expected, rtol=1e-6)


def test_an_open_window_is_left_behind():
    """`carry_over` drops the sum and says so; its counters divide nothing."""
    (first, second), w = gradients(2), params()
    one, three = (jgrad.accumulate(jgrad.gradient_descent(1.0), n) for n in (1, 3))
    _, old = step_of(three)(w, three.init(w), first)
    state, account = jgrad.carry_over(old, like=one.init(w))
    assert sum("total" in x for x in account.dropped) == 5
    found = step_of(one)(w, state, second)
    assert_equal(found, step_of(one)(w, one.init(w), second))
    back, account = jgrad.carry_over(found[1], like=three.init(w))
    assert sum("total" in x for x in account.from_like) == 5
    assert_equal(back.total, three.init(w).total)
