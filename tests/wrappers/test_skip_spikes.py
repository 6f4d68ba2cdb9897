"""Steps whose loss is far above those before are left out, beside a loop in float64 NumPy."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jgrad
from benchmarks.recipes import clipped
from tests.multi_device.meshes import mesh_of
from tests.support.loops import assert_equal, compiled, stack, step_of, step_on
from tests.support.private import telling
from tests.wrappers.test_hand_over import counting, storing_bytes

NAN, INF = float("nan"), float("inf")
X = jnp.ones(3)
W = {"a": X, "b": jnp.ones((2, 2))}


# ---- the rule, in float64 ----------------------------------------------------------------------


def by_hand(losses, window=128, deviations=6.0, restart=True, dtype="float32"):
    """Which losses are accepted; the window, and what is counted."""
    epsilon = max(float(jnp.finfo(x).eps) for x in (dtype, "float32"))
    last, flags, skipped, streak, restarts = [], [], 0, 0, 0
    for loss in np.asarray(losses, float):
        ok = np.isfinite(loss)
        if ok and 4 * len(last) >= window:
            middle = np.median(last)
            spread = 1.4826 * np.median(np.abs(last - middle))
            ok = loss <= middle + deviations * max(spread, epsilon * abs(middle))
        flags.append(bool(ok))
        if ok:
            last, streak = [*last, loss][-window:], 0
            continue
        skipped, streak = skipped + 1, streak + 1
        if restart and streak == window:
            last, streak, restarts = [], 0, restarts + 1
    return flags, np.array(last), {"skipped": skipped, "streak": streak, "restarts": restarts}


def curve(count=80, spikes=(20, 33, 34, 50, 51, 52), seed=0):
    """A loss that falls, with noise, planted spikes and what is not finite."""
    rng = np.random.default_rng(seed)
    losses = 2 + 3 * np.exp(-np.arange(count) / 30) + 0.05 * rng.normal(size=count)
    for i in spikes:
        losses[i] += rng.choice([1.5, 4.0, 1e6])
    losses[3], losses[25], losses[26], losses[60] = NAN, INF, -INF, NAN
    return np.float32(losses)


def gradient(i):
    """Of step i, as a tree like `W`."""
    rng = np.random.default_rng(i)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), W)


def train(tx, losses, w=W, grads=None):
    """By a scan."""
    grads = [gradient(i) for i in range(len(losses))] if grads is None else grads

    def body(carry, x):
        return step_of(tx)(*carry, x[0], loss=x[1]), None

    run = jax.jit(lambda w, *xs: jax.lax.scan(body, (w, tx.init(w)), xs)[0])
    return run(w, stack(grads), jnp.asarray(losses))


def assert_state(state, expected, window):
    _, last, counts = expected
    assert {name: int(getattr(state, name)) for name in counts} == counts
    assert int(state.accepted) == len(last)
    losses = np.concatenate([np.zeros(window - len(last)), last])
    np.testing.assert_allclose(state.losses, losses, rtol=1e-6)


# ---- decisions ---------------------------------------------------------------------------------


HIGHER = [*1 + 0.01 * np.arange(8.0), *[5.0] * 11]
# Losses, the options, and how many are left out.
LOSSES = {
    "spikes": (curve(), (128, 6.0, True), 5),
    "spikes, a window of 16": (curve(), (16, 6.0, True), 9),
    "spikes, a window of 5": (curve(), (5, 2.0, True), 12),
    "spikes, a window of 4": (curve(), (4, 0.5, True), 17),
    "spikes, without a restart": (curve(), (4, 0.5, False), 17),
    # Another level is left out for a window, and then the window starts anew, if it may.
    "higher": (HIGHER, (8, 6.0, True), 8),
    "higher, without a restart": (HIGHER, (8, 6.0, False), 11),
    # Nothing finite before a quarter, nor after a window was started anew.
    "before a quarter": ([1, 1e30, NAN, 2, 1e9, 1e35], (20, 6.0, True), 1),
    "zeros": ([0, 0, 0, 1e-30, 0], (4, 6.0, True), 1),
    "large": ([3e38, -3e38, 3e38, 2e38, 3.3e38], (5, 6.0, True), 0),
}


@pytest.mark.slow(one_in=2, always=["spikes", "higher", "before a quarter"])
@pytest.mark.parametrize("name", LOSSES)
def test_decisions(name):
    """Which steps are accepted, counted by the step of the optimizer; and what the state has then."""
    losses, (window, deviations, restart), skipped = LOSSES[name]
    losses = np.float32(losses)
    tx = jgrad.skip_spikes(jgrad.adam(0.1), window=window, deviations=deviations, restart=restart)
    expected = by_hand(losses, window, deviations, restart)
    state, update, flags = tx.init(X), jax.jit(tx.update), []
    for loss in losses:
        before = int(state.inner.step)
        _, state = update(X, state, X, loss=loss)
        flags.append(int(state.inner.step) > before)
    assert flags == expected[0]
    assert flags.count(False) == skipped
    assert_state(state, expected, window)


@pytest.mark.parametrize(
    ("dtype", "near", "far"),
    [("float32", 1.0000005, 1.000001), ("bfloat16", 1.046875, 1.0625), ("float16", 1.005, 1.007)],
)
def test_losses_that_are_all_equal(dtype, near, far):
    """Their deviation is 0: six units in the last place of their dtype may be more."""
    tx = jgrad.skip_spikes(jgrad.gradient_descent(1.0), window=4)
    for loss, skipped in ((near, 0), (far, 1), (1.0, 0)):
        state = tx.init(X)
        for x in (1, 1, 1, 1, loss):
            _, state = tx.update(X, state, X, loss=jnp.asarray(x, dtype))
        assert int(state.skipped) == skipped
    assert state.losses.dtype == jnp.float32


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("deviations", [0.5, 6.0])
def test_deviations_may_be_traced(deviations):
    losses = curve()
    make = lambda deviations: jgrad.skip_spikes(jgrad.adam(0.1), window=16, deviations=deviations)
    _, state = train(optax.inject_hyperparams(make)(deviations=deviations), losses)
    assert_state(state.inner_state, by_hand(losses, 16, deviations), 16)


def test_counters_saturate():
    tx, most = jgrad.skip_spikes(jgrad.adam(0.1), window=4, restart=False), jnp.int32(2**31 - 1)
    state = tx.init(X)._replace(skipped=most, streak=most)
    _, state = tx.update(X, state, X, loss=NAN)
    assert (int(state.skipped), int(state.streak)) == (2**31 - 1, 2**31 - 1)


# ---- what is left out enters nothing -----------------------------------------------------------

BIG = {"w": jnp.ones((64, 80)), "b": jnp.ones(64)}
HALF = jax.tree.map(lambda x: x.astype(jnp.bfloat16), W)
RATE = optax.linear_schedule(0.1, 0.0, 50)
CHAIN = jgrad.average_params(optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.adam(RATE)), 0.9)
SUBJECTS = {
    "adam": (CHAIN, W),
    "packed": (CHAIN, jgrad.pack(W)),
    "lamb": (jgrad.lamb(0.1, weight_decay=0.1), W),
    "8 bits": (jgrad.adam(0.1, moment_dtype="8bit"), BIG),
    "8 bits, packed": (jgrad.adam(0.1, moment_dtype="8bit"), jgrad.pack(BIG)),
    "master": (jgrad.master_weights(CHAIN), HALF),
    "stochastic": (jgrad.stochastic_rounding(jgrad.adam(0.1)), HALF),
    "optax": (optax.chain(optax.clip(1.0), optax.adamw(RATE)), W),
    "muon": (jgrad.muon(0.1, matrices={"a": False, "b": True}, adam_learning_rate=0.1), W),
}
AROUND = {
    "alone": jgrad.skip_spikes,
    "around skip": lambda tx, **o: jgrad.skip_spikes(
        jgrad.skip_nonfinite(tx, loss_scale=1.0, growth_interval=1000), **o
    ),
    "inside skip": lambda tx, **o: jgrad.skip_nonfinite(jgrad.skip_spikes(tx, **o)),
    "around another": lambda tx, **o: jgrad.skip_spikes(jgrad.skip_spikes(tx, **o), window=128),
}


@functools.cache
def around(way, subject):
    return AROUND[way](SUBJECTS[subject][0], window=8)


def inner_of(state):
    """Without the wrappers that decide."""
    while isinstance(state, (jgrad.SpikeState, jgrad.SkipState)):
        state = state.inner
    return state


def find(state, kind):
    is_one = lambda x: isinstance(x, kind)
    return next(filter(is_one, jax.tree.leaves(state, is_leaf=is_one)))


@pytest.mark.slow(one_in=16)
@pytest.mark.parametrize(
    ("way", "subject"),
    [
        *(("alone", name) for name in SUBJECTS),
        *((way, name) for way in ("around skip", "inside skip") for name in ("adam", "8 bits", "optax")),
        ("around another", "adam"),
    ],
)  # fmt: skip
def test_as_if_the_spikes_had_not_been(way, subject, standard_promotion):
    """Bit for bit the run without them, and in a step that is left out nothing is written."""
    tx, (_, w) = around(way, subject), SUBJECTS[subject]
    rng = np.random.default_rng(0)
    losses = np.float32([1, 1.1, 0.9, 30, 1, NAN, INF, 0.8, 1.2, 90])
    flags, last, _ = by_hand(losses, 8)
    assert sum(flags) == 6
    found = expected = w, tx.init(w)
    for loss, used in zip(losses, flags, strict=True):
        g = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), w)
        before, found = found, compiled(tx)(*found, g, loss=loss)
        if used:
            expected = compiled(tx)(*expected, g, loss=loss)
        else:
            assert_equal((found[0], inner_of(found[1])), (before[0], inner_of(before[1])))
    assert_equal((found[0], inner_of(found[1])), (expected[0], inner_of(expected[1])))
    state = find(found[1], jgrad.SpikeState)
    if way == "around another":  # its window has no quarter yet
        state = state.inner
    assert int(state.skipped) == (2 if way == "around another" else 4)
    np.testing.assert_array_equal(state.losses[-6:], last.astype(np.float32))
    if way == "around skip":  # its streak and its scale stay, too
        skip = find(found[1], jgrad.SkipState)
        assert (int(skip.streak), int(skip.skipped)) == (6, 0)


@pytest.mark.slow(one_in=10)
@pytest.mark.parametrize("subject", ["adam", "packed", "lamb", "8 bits", "master"])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_gradient_that_is_not_finite_beside_a_fine_loss(subject, bad, standard_promotion):
    """As without `skip_spikes`: an infinity is made no large number, which nobody would see."""
    alone, w = SUBJECTS[subject]
    tx = around("alone", subject)
    g = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(bad), w)
    found, state = compiled(tx)(w, tx.init(w), g, loss=1.0)
    expected, inner = compiled(alone)(w, alone.init(w), g)
    assert not all(np.isfinite(np.asarray(x, float)).all() for x in jax.tree.leaves(found))
    same = lambda a, b: chex.assert_trees_all_close(
        a, b, rtol=1e-2 if subject == "master" else 1e-6
    )
    wide = lambda tree: jax.tree.map(lambda x: np.asarray(x, float), tree)
    same(wide(found), wide(expected))
    same(wide(state.inner), wide(inner))


@pytest.mark.slow
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("way", ["around skip", "inside skip"])
def test_a_gradient_that_skip_nonfinite_leaves_out(way, bad):
    """Each decides for itself, and of the other's steps it counts none."""
    tx = around(way, "adam")
    w, state, g = W, tx.init(W), gradient(0)
    spoiled = jax.tree.map(lambda x: x * bad, g)
    rows = [(g, 1.0), (spoiled, 1.1), (g, 0.9), (spoiled, 50.0), (g, 50.0), (g, 1.0)]
    for given, loss in rows:
        w, state = compiled(tx)(w, state, given, loss=loss)
        chex.assert_tree_all_finite((w, state))
    spikes, skip = find(state, jgrad.SpikeState), find(state, jgrad.SkipState)
    inside = way == "inside skip"
    assert int(find(state, jgrad.OptState).step) == 3
    assert (int(spikes.skipped), int(skip.skipped)) == ((1, 2) if inside else (2, 1))
    assert int(spikes.accepted) == (3 if inside else 4)
    assert int(skip.streak) == 2
    if not inside:
        assert float(skip.loss_scale) == 1


def test_the_scale_of_the_loss_stays():
    """A spike neither halves nor doubles it."""
    tx = jgrad.skip_spikes(
        jgrad.skip_nonfinite(jgrad.adam(0.1), loss_scale=8.0, growth_interval=2), window=4
    )
    state, scales = tx.init(X), []
    for g, loss in ((X, 1.0), (X, 50.0), (NAN * X, 50.0), (X, 1.0), (X, 1.0), (NAN * X, 1.0)):
        _, state = jax.jit(tx.update)(g, state, X, loss=loss)
        scales.append(float(state.inner.loss_scale))
    assert scales == [8, 8, 8, 16, 16, 8]
    assert (int(state.skipped), int(state.inner.skipped)) == (2, 1)


def test_a_branch_inside(standard_promotion):
    """`skip_nonfinite(branch=True)` runs nothing in a step that is left out."""
    tx = jgrad.skip_spikes(jgrad.skip_nonfinite(optax.adam(0.1), branch=True), window=4)
    _, state = train(tx, np.float32([1, 1, 50, 1]))
    assert (int(state.skipped), int(state.inner.skipped), int(state.inner.inner[0].count)) == (
        1,
        0,
        3,
    )
    assert int(state.inner.streak) == 3


# ---- around accumulate -------------------------------------------------------------------------

WINDOWS = {
    "alone": lambda tx: jgrad.skip_spikes(tx, window=4),
    "around skip": lambda tx: jgrad.skip_spikes(jgrad.skip_nonfinite(tx), window=4),
    "inside skip": lambda tx: jgrad.skip_nonfinite(jgrad.skip_spikes(tx, window=4)),
}


@pytest.mark.slow(one_in=10, always=["ours-alone"])
@pytest.mark.parametrize("way", WINDOWS)
@pytest.mark.parametrize(
    "third_party", [None, counting, optax.chain], ids=["ours", "counting", "chain"]
)
def test_a_mini_batch_is_left_out_of_its_window(way, third_party):
    """By its loss or by its gradient; the window goes on, and closes as usual."""
    between = third_party or (lambda tx: tx)
    tx = WINDOWS[way](between(jgrad.accumulate(jgrad.gradient_descent(1.0), 3)))
    rows = [
        (1, 1), (2, 1), (9, 80),  # closed by a spike: the mean of 1 and 2
        (NAN, 1), (4, 1), (6, 1),
        (9, 80), (9, NAN), (INF, 1),  # nothing is left
        (1, 1), (1, 1), (4, 1),
    ]  # fmt: skip
    found, state = [], tx.init(X)
    for g, loss in rows:
        updates, state = compiled_update(tx)(g * X, state, 0 * X, loss=float(loss))
        found.append(float(updates[0]))
    expected = [0, 0, -1.5, 0, 0, -5, 0, 0, 0, 0, 0, -2]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    windows = find(state, jgrad.AccumulateState)
    assert (int(windows.skipped), int(windows.mini_step), int(windows.inner.step)) == (5, 0, 3)
    spikes = find(state, jgrad.SpikeState)
    assert int(spikes.skipped) == 3
    if way != "alone":
        assert int(find(state, jgrad.SkipState).skipped) == 2


def jitted(tx):
    """What is inside is a program of its own."""
    return optax.GradientTransformation(tx.init, jax.jit(tx.update))


@functools.lru_cache(maxsize=8)
def compiled_update(tx):
    return jax.jit(tx.update)


@pytest.mark.parametrize("hides", [jitted, storing_bytes], ids=lambda f: f.__name__)
def test_a_window_that_nothing_reaches(hides, standard_promotion):
    """Where another library's wrapper traces it apart, or hides the window: as if never called."""
    tx = jgrad.skip_spikes(hides(jgrad.accumulate(jgrad.gradient_descent(1.0), 2)), window=4)
    found, state = [], tx.init(0 * X)
    for g, loss in ((1, 1), (9, 80), (3, 1), (9, 80), (5, 1), (7, 1)):
        updates, state = jax.jit(tx.update)(g * X, state, 0 * X, loss=float(loss))
        found.append(float(updates[0]))
    assert found == [0, 0, -2, 0, 0, -6]
    assert int(state.skipped) == 2


@pytest.mark.parametrize("check_finite", [True, False])
def test_what_the_caller_knows(check_finite):
    """`finite=` of the call counts as without `skip_spikes`."""
    tx = jgrad.accumulate(jgrad.gradient_descent(1.0), 3, check_finite=check_finite)
    tx = jgrad.skip_spikes(tx, window=4)
    state = tx.init(X)
    for g, loss, finite in ((1, 1.0, True), (7, 1.0, False), (9, 80.0, True)):
        updates, state = tx.update(g * X, state, X, loss=loss, finite=jnp.asarray(finite))
    np.testing.assert_array_equal(updates, -X)
    assert (int(state.skipped), int(state.accepted), int(state.inner.skipped)) == (1, 1, 2)


# ---- under JAX's transformations ---------------------------------------------------------------


def of_its_device(tx):
    """With a loss for each device, of which `shard_map` hands each an array of one."""

    def update(*args, loss, **extra):
        return tx.update(*args, loss=loss[0], **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("way", ["alone", "inside skip"])
def test_devices_leave_out_the_same(way, check_vma):
    """The loss of one device is a spike, or NaN: its mean decides for all."""
    losses = np.ones((6, 8), np.float32)
    losses[1] -= 0.1
    losses[3, 5], losses[4, 2] = NAN, 800.0
    tx = jgrad.skip_spikes(jgrad.adam(0.1), window=4, mesh_axes="data")
    if way == "inside skip":
        tx = jgrad.skip_nonfinite(tx, mesh_axes="data")
    found = g = w = jnp.ones((8, 3))
    state = tx.init(w)
    specs = jax.tree.map(lambda x: P("data") if x.ndim == 2 else P(), state)
    step = step_on(mesh_of(data=8), of_its_device(tx), P("data"), specs, check_vma, loss=P("data"))
    for row in losses:
        found, state = step(found, state, g, row)
    expected, alone = train(AROUND[way](jgrad.adam(0.1), window=4), losses.mean(1), w, [g] * 6)
    chex.assert_trees_all_close((found, state), (expected, alone), rtol=1e-6)
    assert int(find(state, jgrad.SpikeState).skipped) == 2


@pytest.mark.slow
def test_zero_takes_the_mean_of_losses():
    """Each device gives its own, as it gives the gradient of its own."""
    tx, mesh = jgrad.zero(jgrad.skip_spikes(jgrad.adam(0.1), window=4), "data"), mesh_of(data=8)
    w = jgrad.pack({"w": jnp.ones((64, 80))}, multiple_of=8)
    shardings = jgrad.state_shardings(tx, w, NamedSharding(mesh, P()), shard_over="data")
    specs = jax.tree.map(lambda x: x.spec, shardings)
    step, state = step_on(mesh, of_its_device(tx), P(), specs, False, loss=P("data")), tx.init(w)
    for loss in (np.ones(8), np.arange(8.0) / 3.5, np.array([90.0] + [1.0] * 7)):
        w, state = step(w, state, w, np.float32(loss))
    assert (int(state.skipped), int(state.inner.step)) == (1, 2)


def test_counters_inside_stay_where_a_spike_is_left_out():
    """Of a mini-batch that is a spike, and not finite, the outer wrapper alone says so."""
    window = jgrad.accumulate(jgrad.gradient_descent(1.0), 2)
    tx = jgrad.skip_spikes(jgrad.skip_nonfinite(window, loss_scale=4.0), window=4)
    state, update = tx.init(X), jax.jit(tx.update)
    for loss in (1.0, 1.0, 90.0):
        _, state = update(NAN * X if loss == 90 else X, state, X, loss=loss)
    assert (int(state.skipped), int(state.inner.skipped)) == (1, 0)
    assert (int(state.inner.streak), float(state.inner.loss_scale)) == (2, 4.0)


# ---- what it costs -----------------------------------------------------------------------------


def test_no_norm_of_gradients_decides():
    """The flag of `skip_spikes` is no flag of the gradients, which clipping computes anyway."""
    tx = jgrad.skip_spikes(clipped(jgrad.adam(0.1)), window=4)
    _, state = train(tx, np.float32([1, 1, 90]))
    assert int(state.skipped) == 1


# ---- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrap", "update", "skipped"),
    [
        (lambda tx: tx, jnp.inf, 0),
        (jgrad.skip_nonfinite, 2.0**102, 0),
        (functools.partial(jgrad.skip_nonfinite, check_results=True), 0.0, 1),
    ],
    ids=["alone", "around", "looking"],
)
def test_it_saturates_nothing_by_itself(wrap, update, skipped):
    """What another library overflows is for a wrapper around: to clip, or to find."""
    tx, w = wrap(jgrad.skip_spikes(optax.scale(1e30))), jnp.full(3, 1e30)
    updates, state = jax.jit(tx.update)(w, tx.init(w), w, loss=1.0)
    np.testing.assert_array_equal(updates, jnp.full(3, update, jnp.float32))
    assert int(jgrad.report(state).get("skipped", 0)) == skipped


def test_moments_saturate_by_what_stands_around():
    """What `skip_nonfinite` promises of a method holds with a `skip_spikes` between them."""
    summed = jgrad.optimizer_of_leaf(lambda g, mw: (mw + g, mw + g))
    tx, g = jgrad.skip_nonfinite(jgrad.skip_spikes(summed(1e-30))), jnp.full(3, 3e38)
    state = tx.init(g)
    for _ in range(2):
        updates, state = jax.jit(tx.update)(g, state, g, loss=1.0)
    assert int(state.skipped) == 0
    chex.assert_tree_all_finite((updates, state.inner.inner.mw))


@pytest.mark.parametrize(
    "rejects", [jgrad.skip_spikes, functools.partial(jgrad.skip_nonfinite, branch=True)]
)
def test_what_it_lets_through_may_be_nan(rejects):
    """Of finite gradients, by another library: a `skip_nonfinite` around looks at it, if asked."""
    spoil = optax.stateless(lambda updates, params: jax.tree.map(jnp.log, updates))
    tx, w = jgrad.skip_nonfinite(rejects(spoil), check_results=True), jnp.ones(3)
    updates, state = jax.jit(tx.update)(-w, tx.init(w), w, loss=1.0)
    assert_equal(updates, jnp.zeros(3))
    assert int(state.skipped) == 1


@pytest.mark.slow(one_in=8)
@pytest.mark.parametrize(
    "loss",
    [2, 2.0, np.float32(2), np.float64(2), np.array(2.0), np.int32(2), jnp.bfloat16(2), jnp.int32(2)],
    ids=lambda x: f"{type(x).__name__}-{getattr(x, 'dtype', '')}",
)  # fmt: skip
def test_real_scalars(loss):
    tx = jgrad.skip_spikes(jgrad.adam(0.1), window=4)
    for update in (tx.update, jax.jit(tx.update)):
        _, state = update(X, tx.init(X), X, loss=loss)
        assert (float(state.losses[-1]), state.losses.dtype) == (2, jnp.float32)


@pytest.mark.parametrize("loss", [1e300, NAN, -INF, np.float64(1e300)])
def test_what_float32_cannot_hold(loss):
    """It is not finite."""
    tx = jgrad.skip_spikes(jgrad.adam(0.1))
    assert int(tx.update(X, tx.init(X), X, loss=loss)[1].skipped) == 1


def test_a_dry_run_knows_no_loss():
    tx = jgrad.skip_spikes(jgrad.adam(0.1))
    state = tx.init(X)
    with telling(is_dry=True):
        _, state = tx.update(X, state, X)
    assert int(state.accepted) == 1


def test_report():
    tx = jgrad.skip_spikes(jgrad.adam(0.1))
    _, state = tx.update(X, tx.init(X), X, loss=NAN)
    assert {k: int(x) for k, x in state.__jgrad_report__().items()} == {
        "spikes": 1, "spike_restarts": 0,
    }  # fmt: skip
