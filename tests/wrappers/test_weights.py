"""Mini-batches of different sizes, weighted by their tokens, beside the whole batch in NumPy."""

import itertools
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jgrad
from tests.support.choice import mostly_slow
from tests.support.loops import assert_equal, compiled, step_of, with_loss

NAN, INF = float("nan"), float("inf")
X = jnp.ones(3)
TOKENS = 48
SPLITS = ([48], [12, 12, 12, 12], [1, 2, 40, 5], [30, 0, 17, 1])
SHAPES = {"a": (3,), "b": (4, 2)}


def per_token(dtype="float32", shapes=SHAPES):
    """The gradient of each token, in float64."""
    rng = np.random.default_rng(0)
    turn = 1 - 0.5j if np.issubdtype(jnp.dtype(dtype), np.complexfloating) else 1
    return {k: turn * rng.normal(size=(TOKENS, *shape)) for k, shape in shapes.items()}


def mini_batches(split, grads, dtype="float32"):
    """The mean over each, and its tokens; of no tokens anything is as good."""
    ends = np.cumsum([0, *split])
    for start, end in itertools.pairwise(ends):
        some = slice(start, end) if end > start else slice(0, 1)
        yield {k: jnp.asarray(x[some].mean(0), dtype) for k, x in grads.items()}, end - start


def train(tx, w, rows, pack=False):
    """One window, closed by its last call."""
    pack_if = jgrad.pack if pack else lambda tree: tree
    w, rows = pack_if(w), list(rows)
    state = tx.init(w)
    for i, (g, tokens) in enumerate(rows):
        last = jnp.asarray(i == len(rows) - 1)
        w, state = compiled(tx)(w, state, pack_if(g), weight=jnp.float32(tokens), emit=last)
    return (jgrad.unpack(w) if pack else w), state


def params(dtype="float32", shapes=SHAPES):
    return {k: jnp.ones(shape, dtype) for k, shape in shapes.items()}


def weighted(tx, every=100, **options):
    return jgrad.accumulate(tx, every, weighted=True, **options)


def wide(tree):
    return jax.tree.map(lambda x: np.asarray(x, complex if jnp.iscomplexobj(x) else float), tree)


# ---- any way of splitting ----------------------------------------------------------------------


@pytest.mark.slow(one_in=24)
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize(
    "dtype", mostly_slow(["float32", "float64", "complex128"], "float32", "float64")
)
@pytest.mark.parametrize("form", ["tree", "packed", "skip", "spikes", "skip and spikes"])
def test_the_mean_of_all_tokens(split, form, dtype, request):
    """The step of the whole batch, to a rounding or two of each sum.

    The sum of weights stays in float32, which counts tokens exactly.
    """
    if dtype != "float32":
        request.getfixturevalue("x64")
    grads = per_token(dtype)
    tx = weighted(jgrad.gradient_descent(1.0))
    if form == "skip":
        tx = jgrad.skip_nonfinite(tx)
    if "spikes" in form:
        tx = jgrad.skip_spikes(tx)
        tx = jgrad.skip_nonfinite(tx) if form != "spikes" else tx
        tx = with_loss(tx)
    rows = mini_batches(split, grads, dtype)
    found, state = train(tx, params(dtype), rows, pack=form == "packed")
    expected = {k: 1 - x.mean(0) for k, x in grads.items()}
    atol = 1e-6 if dtype == "float32" else 1e-12
    chex.assert_trees_all_close(wide(found), expected, atol=atol, rtol=0)
    assert int(optax.tree.get(state, "step")) == 1
    weight = optax.tree.get(state, "weight")
    assert (float(weight), weight.dtype) == (0, jnp.float32)


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_half_precision_gradients(split):
    """Each is rounded once, before it is weighted; sums and means in float32."""
    grads = per_token()
    tx = weighted(jgrad.master_weights(jgrad.gradient_descent(1.0)))
    rows = list(mini_batches(split, grads, "bfloat16"))
    _, state = train(tx, params("bfloat16"), rows)
    expected = {k: 1 - sum(n * np.asarray(g[k], float) for g, n in rows) / TOKENS for k in grads}
    chex.assert_trees_all_close(wide(state.inner.master), expected, atol=1e-6, rtol=0)


@pytest.mark.slow(always=["own tokens-True"])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("alike", [True, False], ids=["all tokens", "own tokens"])
def test_on_devices(alike, check_vma):
    """Gradients are means over all devices' tokens; each says its own tokens, or those of all."""
    tx = weighted(jgrad.gradient_descent(1.0), 4, mesh_axes="data")
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 9, size=(4, 8))
    sums = rng.normal(size=(4, 8, 3))  # of the gradients of each device's tokens
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def step(w, state, part, n):
        total = jax.lax.psum(n[0], "data")
        g = jax.lax.psum(part[0], "data") / total
        return step_of(tx)(w, state, g, weight=total if alike else n[0])

    run = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=P(),
            check_vma=check_vma,
        )
    )  # fmt: skip
    w, state = jnp.zeros(3), tx.init(jnp.zeros(3))
    for part, n in zip(sums, tokens, strict=True):
        w, state = run(w, state, jnp.float32(part), jnp.float32(n))
    np.testing.assert_allclose(w, -sums.sum((0, 1)) / tokens.sum(), atol=1e-6)


# ---- what is left out --------------------------------------------------------------------------


def run(tx, rows):
    updates, state = None, tx.init(X)
    for g, n in rows:
        updates, state = jax.jit(tx.update)(g * X, state, 0 * X, weight=n)
    return float(updates[0]), state


def find(state):
    return state if isinstance(state, jgrad.WeightedAccumulateState) else find(state.inner)


def test_a_spike_takes_its_weight_with_it():
    tx = jgrad.skip_spikes(weighted(jgrad.gradient_descent(1.0), 3), window=4)
    state = tx.init(X)
    for g, n, loss in ((1.0, 1.0, 1.0), (7.0, 100.0, 90.0), (5.0, 3.0, 1.0)):
        updates, state = tx.update(g * X, state, X, weight=n, loss=loss)
    np.testing.assert_array_equal(updates, -4 * X)


# What is around, the middle one of three mini-batches as (gradient, weight), and how many are left out.
MIDDLE = {
    "NaN": (None, (NAN, 1000.0), 1), "infinity": (None, (INF, 1000.0), 1),
    "NaN in skip": (jgrad.skip_nonfinite, (NAN, 1000.0), 1), "infinity in skip": (jgrad.skip_nonfinite, (INF, 1000.0), 1),
    "a weight of NaN": (None, (9.0, NAN), 1), "an infinite weight": (None, (9.0, INF), 1),
    "the other infinity": (None, (9.0, -INF), 1), "a negative weight": (None, (9.0, -1.0), 1),
    "no weight": (None, (9.0, 0.0), 0),
}  # fmt: skip


@pytest.mark.slow(always=["NaN", "infinity in skip", "an infinite weight", "a negative weight"])
@pytest.mark.parametrize("name", MIDDLE)
def test_a_mini_batch_is_left_out_with_its_weight(name):
    """By its gradient, or by a traced weight that is none, and counted."""
    around, middle, skipped = MIDDLE[name]
    tx = weighted(jgrad.gradient_descent(1.0), 3)
    found, state = run(around(tx) if around else tx, [(1.0, 1.0), middle, (5.0, 3.0)])
    assert (found, int(find(state).skipped)) == (-4, skipped)


def test_a_weight_of_zero_adds_nothing():
    """Nor does an infinite gradient that nobody checks."""
    tx = weighted(jgrad.gradient_descent(1.0), 3, check_finite=False)
    found, state = run(tx, [(1.0, 1.0), (INF, 0.0), (5.0, 3.0)])
    assert (found, int(state.skipped)) == (-4, 0)


@pytest.mark.slow(always=["alone"])
@pytest.mark.parametrize("around", [lambda tx: tx, jgrad.skip_nonfinite], ids=["alone", "skip"])
def test_a_window_of_weight_zero(around):
    """Updates nothing, as one without finite mini-batches, and the next starts anew."""
    tx = around(weighted(jgrad.adam(1.0, weight_decay=0.1), 2))
    found, state = run(tx, [(1.0, 0.0), (5.0, 0.0)])
    assert found == 0
    state = find(state)
    start = weighted(jgrad.adam(1.0), 2).init(X)
    assert_equal(state, start)


def test_watched():
    """`watch` finds the form of its report without a call that has a weight."""
    state = jgrad.watch(weighted(jgrad.adam(0.1), 3)).init(X)
    assert {"learning_rate", "update_norm"} <= state.report.keys()


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_what_overflows_is_the_largest_number(dtype):
    """The sum of w g, and the mean, where the sum of weights is below 1."""
    most = float(jnp.finfo("float32").max)
    for rows in (
        [(most, 4.0), (most, 8.0)],
        [(most, 0.1), (most, 0.1)],
        [(1.0, 2e37), (1.0, 2e37)],
    ):
        tx = weighted(optax.identity(), 2)
        state = tx.init(jnp.zeros(3, dtype))
        for g, n in rows:
            updates, state = tx.update(jnp.full(3, g, dtype), state, weight=n)
        assert jnp.isfinite(updates).all()
        assert (updates.real > 0.99 * min(most / 12, rows[0][0])).all()


def test_skip_nonfinite_drops_a_window_with_its_weight():
    """One whose update overflows: float16 has no room for it."""
    tx = jgrad.skip_nonfinite(weighted(jgrad.gradient_descent(1.0), 2))
    w, state = jnp.asarray(-60000, jnp.float16), None
    state = tx.init(w)
    for g in (60000, 60000, -2048, -2048):
        w, state = step_of(tx)(w, state, jnp.full_like(w, g), weight=3.0)
    assert (float(w), int(state.skipped), float(state.inner.weight)) == (-57952, 1, 0)


# ---- its state -----------------------------------------------------------------------------------


def test_it_has_what_the_other_state_has():
    """What optax reads, and what wrappers do; a pickle has the name that users import."""
    state = weighted(jgrad.adam(0.1), 1).init(params())
    names = {x for x in dir(jgrad.AccumulateState) if x not in dir(tuple)}
    assert names <= set(dir(state))
    _, new = weighted(jgrad.adam(0.1), 1).update(params(), state, params(), weight=2.0)
    assert [bool(s.has_updated) for s in (state, new)] == [False, True]
    assert (int(new.gradient_step), list(jgrad.report(new))) == (1, ["skipped_mini_batches"])
    assert type(pickle.loads(pickle.dumps(new))) is jgrad.WeightedAccumulateState
