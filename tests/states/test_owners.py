"""Counters, moments and windows go to whom they belong, where several have the same meaning."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.support.states import as_file, assert_same_bits, filled

W = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}


def schedule(step):
    return 0.1 / (1.0 + step)


adam, scheduled = jgrad.adam(0.1), optax.scale_by_schedule(schedule)


def accumulate(tx, every=3, **options):
    return jgrad.accumulate(tx, every, **options)


def multi_steps(tx, every=3):
    return optax.MultiSteps(tx, every).gradient_transformation()


def hyperball(tx):
    return jgrad.hyperball(tx, schedule, leaves={"w": True, "b": False})


def labeled(of_w, of_b, label_of_w="w", label_of_b="b"):
    """A partition with a transformation for each of the two leaves."""
    pairs = {label_of_w: of_w, label_of_b: of_b}
    return optax.partition(pairs, {"w": label_of_w, "b": label_of_b})


def state_of(tx, seed=0):
    return filled(jax.eval_shape(tx.init, W), seed)


def carried(old, tx, **options):
    return jgrad.carry_over(old, like=jax.eval_shape(tx.init, W), **options)


# ---- counters of updates and of mini-batches ---------------------------------------------------

# The counter of each state, and what is inside of it.
COUNTS = {
    jgrad.HyperballState: ("done", "inner"),
    jgrad.AccumulateState: ("mini_step", "inner"),
    optax.MultiStepsState: ("gradient_step", "inner_opt_state"),
    optax.ScaleByScheduleState: ("count", None),
    jgrad.OptState: ("step", None),
}
HYPERBALL, ACCUMULATE, MULTI_STEPS, SCHEDULE, ADAM = COUNTS


def counters(state):
    """Those of updates, by what has them."""
    if type(state) not in COUNTS:
        return {key: x for link in state for key, x in counters(link).items()}
    count, inner = COUNTS[type(state)]
    inside = counters(getattr(state, inner)) if inner else {}
    return {type(state): int(getattr(state, count)), **inside}


def after_seven(tx):
    """A state with the counters of 7 mini-batches, in windows of 3."""
    state = tx.init(W)
    every = {HYPERBALL: 7, SCHEDULE: 7, ACCUMULATE: 1, MULTI_STEPS: 2}
    every[ADAM] = 2 if {ACCUMULATE, MULTI_STEPS} & counters(state).keys() else 7

    def with_counters(state):
        if type(state) not in COUNTS:
            return tuple(map(with_counters, state))
        count, inner = COUNTS[type(state)]
        inside = {inner: with_counters(getattr(state, inner))} if inner else {}
        return state._replace(**{count: jnp.asarray(every[type(state)])}, **inside)

    return with_counters(state)


def hyperball_of_2_0(tx):
    """Around windows, which 2.1 refuses: states of such a run are files that may be read."""
    init = lambda w: hyperball(adam).init(w)._replace(inner=tx.init(w))
    return optax.GradientTransformation(init, hyperball(adam).update)


AROUND, BESIDE = hyperball_of_2_0(accumulate(adam)), optax.chain(scheduled, accumulate(adam))
NEAR = {
    "accumulate removed inside hyperball": (AROUND, hyperball(adam), {HYPERBALL: 7, ADAM: 2}),
    "hyperball removed": (AROUND, accumulate(adam), {ACCUMULATE: 1, ADAM: 2}),
    "hyperball moved inside": (AROUND, accumulate(hyperball(adam)), {ACCUMULATE: 1, HYPERBALL: 2, ADAM: 2}),
    "to MultiSteps": (AROUND, hyperball_of_2_0(multi_steps(adam)), {HYPERBALL: 7, MULTI_STEPS: 2, ADAM: 2}),
    "from MultiSteps": (optax.chain(scheduled, multi_steps(adam)), BESIDE, {SCHEDULE: 7, ACCUMULATE: 0, ADAM: 2}),
    "hyperball around, accumulate inside": (adam, AROUND, {HYPERBALL: 7, ACCUMULATE: 0, ADAM: 7}),
    "accumulate around hyperball": (hyperball(adam), accumulate(hyperball(adam)),
     {ACCUMULATE: 0, HYPERBALL: 7, ADAM: 7}),
    "the other order of a chain": (BESIDE, optax.chain(accumulate(adam), scheduled),
     {ACCUMULATE: 1, ADAM: 2, SCHEDULE: 7}),
    "the schedule moved inside": (BESIDE, accumulate(optax.chain(scheduled, adam)),
     {ACCUMULATE: 1, SCHEDULE: 2, ADAM: 2}),
    "accumulate removed in a chain": (BESIDE, optax.chain(scheduled, adam), {SCHEDULE: 7, ADAM: 2}),
    "hyperball for a schedule": (BESIDE, AROUND, {HYPERBALL: 7, ACCUMULATE: 1, ADAM: 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_what_counts_the_same(name):
    """Moments keep their step; schedules count updates inside of a window, and batches around it."""
    before, after, expected = NEAR[name]
    state, _ = jgrad.carry_over(after_seven(before), like=after.init(W))
    assert counters(state) == expected


def test_a_counter_of_another_thing_is_lost():
    """The account says it, unless another that is kept has counted the same."""
    _, account = carried(after_seven(BESIDE), accumulate(adam))
    assert account.dropped == ("step",)
    old = after_seven(optax.chain(scheduled, adam))
    assert not carried(old, adam, strict=True)[1].dropped


def test_moments_bring_their_step():
    """Though what counts for more parameters is around them."""
    old = state_of(hyperball(labeled(optax.adam(0.1), optax.trace(0.9))))
    own = old.inner.inner_states["w"].inner_state[0]
    assert old.done != own.count
    state, _ = carried(old, adam, reset={"w": False, "b": True}, params=W)
    assert int(state.step) == int(own.count)


# ---- moments -----------------------------------------------------------------------------------


def test_of_two_moments_each_finds_its_own():
    old = state_of(optax.chain(optax.trace(0.9), optax.scale_by_adam()))
    state, account = carried(old, adam)
    assert_same_bits(state.mw, old[1].mu)
    assert account.dropped == ("mw/b", "mw/w")
    reordered = optax.chain(adam, optax.trace(0.9))
    with pytest.raises(ValueError, match="`momentum`: None"):
        carried(old, reordered)
    turned, account = carried(old, reordered, momentum="keep")
    assert_same_bits((turned[0].mw, turned[0].step), (old[1].mu, old[1].count))
    assert_same_bits(turned[1].trace, old[0].trace)
    assert "(OptState, TraceState) by `momentum=" in str(account)
    both, account = carried(state, optax.chain(optax.trace(0.9), adam))
    assert_same_bits(both[1], state)
    assert account.zero == ("mw/b", "mw/w")


# ---- partitions --------------------------------------------------------------------------------

FIELDS = ("ema", "step", "inner", "count", "mu", "inner_state")


@pytest.mark.parametrize("new", [("z", "a"), *itertools.pairwise(FIELDS)])
def test_labels(new):
    """By the parameters of a label, whatever it is called; its counters and windows with them."""
    windowed = labeled(accumulate(adam), optax.adam(0.1))
    old = state_of(windowed)
    renamed = labeled(accumulate(adam), optax.adam(0.1), *new)
    state, _ = carried(old, renamed, strict=True)
    for was, now in zip("wb", new, strict=True):
        assert_same_bits(state.inner_states[now], old.inner_states[was])
    for before in (state, as_file(state)):
        assert_same_bits(carried(before, windowed, strict=True)[0], old)
    whole, _ = carried(state, adam)
    assert_same_bits(whole.mw["w"], old.inner_states["w"].inner_state.inner.mw["w"])
    assert_same_bits(whole.mw["b"], old.inner_states["b"].inner_state[0].mu["b"])


def test_windows_of_two_labels():
    """A mean is the sum over the count of its own window; weights are those of its own, too."""
    old = state_of(labeled(accumulate(adam, 3), accumulate(adam, 5)))
    windows = {name: old.inner_states[name].inner_state for name in "wb"}
    assert windows["w"].count != windows["b"].count
    means, _ = carried(old, labeled(multi_steps(adam, 3), multi_steps(adam, 5)))
    for name, window in windows.items():
        found = means.inner_states[name].inner_state.acc_grads[name]
        expected = np.asarray(window.total[name]) / np.asarray(window.count)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    # What is weighted is another sum: that window begins anew as a whole.
    weighted, account = carried(old, labeled(accumulate(adam), accumulate(adam, weighted=True)))
    assert_same_bits(weighted.inner_states["w"], old.inner_states["w"])
    anew = weighted.inner_states["b"].inner_state
    assert not any(x.any() for x in (anew.count, anew.mini_step, anew.weight, anew.total["b"]))
    assert "accumulate.total/b" in account.dropped
    assert "accumulate.total/b" in account.zero
    # So does one of two labels together, whose counters are two.
    whole, account = carried(old, accumulate(adam))
    assert not any(x.any() for x in (whole.count, whole.mini_step, *whole.total.values()))
    assert_same_bits(whole.inner.mw["w"], windows["w"].inner.mw["w"])


def test_losses_of_two_labels():
    """A window of another size begins anew, with its counters."""

    def spikes(of_w, of_b):
        return labeled(jgrad.skip_spikes(adam, window=of_w), jgrad.skip_spikes(adam, window=of_b))

    old = state_of(spikes(16, 32))
    state, _ = carried(old, spikes(16, 8))
    assert_same_bits(state.inner_states["w"], old.inner_states["w"])
    found = state.inner_states["b"].inner_state
    assert (int(found.accepted), int(found.streak), found.losses.any()) == (0, 0, False)
    assert int(found.skipped) == 0
