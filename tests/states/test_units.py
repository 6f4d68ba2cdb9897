"""Every state that `carry_over` takes, into every method with a first moment, in the unit of that.

After three steps of the old method, three of the new one follow the float64 reference, which goes on
from moments that NumPy accumulates and converts by hand.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jgrad
from tests.reference import optimizers as reference
from tests.support.errors import assert_error

rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


W = {"b": normal(3), "w": normal(4, 3)}
GRADIENTS = [{"b": normal(3), "w": normal(4, 3)} for _ in range(6)]
STEPS, BETA, ETA = 3, 0.9, 0.1
IS_MATRIX = {"b": False, "w": True}
falling = optax.linear_schedule(0.1, 0.0, 10)

# ---- moments by hand: the next one, by the last one, weights, gradient, rate and second moment ----


def mean(beta):
    return lambda m, w, g, rate, v: beta * m + (1 - beta) * g


def gradients(m, w, g, rate, v):
    return BETA * m + g


def scaled(m, w, g, rate, v):
    return BETA * m + ETA * np.linalg.norm(w) / np.linalg.norm(g) * g


def steps(m, w, g, rate, v):
    return BETA * m + rate * scaled(0 * m, w, g, rate, v)


def updates(m, w, g, rate, v):
    return BETA * m - rate * scaled(0 * m, w, g, rate, v)


def updates_of_rmsprop(m, w, g, rate, v):
    return BETA * m - rate * g / np.sqrt(v + 1e-8)


class Old(NamedTuple):
    """A transformation of before.

    Attributes:
      tx: it.
      unit: of its first moment; "others" are those of no method of jgrad.
      first: the rule of its first moment.
      beta2: of its second moment, if that is an average of squares of gradients.
      rate: its learning rate.
      has_step: whether its state counts.
      said: `old_momentum`, where the state does not say it.
    """

    tx: Any
    unit: str
    first: Callable[..., Any] | None = None
    beta2: float | None = None
    rate: Any = 0.1
    has_step: bool = True
    said: str | None = None

    def moments(self, weights, name):
        """Those of one leaf after the first steps, in float64."""
        m, v = np.zeros(W[name].shape), np.zeros(W[name].shape)
        for t in range(STEPS):
            w, g = (np.asarray(x[name], np.float64) for x in (weights[t], GRADIENTS[t]))
            rate = float(self.rate(t)) if callable(self.rate) else self.rate
            v = v if self.beta2 is None else self.beta2 * v + (1 - self.beta2) * g**2
            m = m if self.first is None else self.first(m, w, g, rate, v)
        return m, v


clip = optax.clip_by_global_norm(1e9)
lars = functools.partial(optax.lars, trust_coefficient=ETA)
rmsprop = functools.partial(optax.rmsprop, 0.1, momentum=BETA)
# What optimizers have: averages without or with those of squares, sums of gradients, or of updates.
averages = functools.partial(Old, unit="averages")
adams = functools.partial(averages, first=mean(0.9), beta2=0.999)
sums = functools.partial(Old, unit="gradients", first=gradients, has_step=False)
of_updates = functools.partial(Old, unit="updates", has_step=False)
of_lars = functools.partial(of_updates, first=updates)
falling_lars = functools.partial(of_lars, rate=falling, has_step=True)
of_rates = functools.partial(of_updates, first=lambda m, w, g, rate, v: BETA * m - rate * g)


def outside(tx):
    """Of LARS with the rate outside of its momentum."""
    return Old(tx, "scaled gradients", scaled, said="scaled gradients")


OLD = {
    "gradient_descent": sums(
        jgrad.gradient_descent(0.1, momentum=BETA), has_step=True, said="gradients"
    ),
    "lars": Old(
        jgrad.lars(falling, trust_coefficient=ETA), "steps", steps, rate=falling, said="steps"
    ),
    "lars, the rate outside": outside(
        jgrad.lars(0.1, trust_coefficient=ETA, rate_in_momentum=False)
    ),
    "adam": adams(jgrad.adam(0.01)),
    "lamb": adams(jgrad.lamb(0.01)),
    "optax.adam": adams(optax.adam(0.01)),
    "optax.adamw": adams(optax.chain(clip, optax.adamw(falling)), rate=falling),
    "optax.amsgrad": adams(optax.amsgrad(0.01)),
    "optax.lamb": adams(optax.lamb(0.01)),
    "optax.adabelief": averages(optax.adabelief(0.01), first=mean(0.9)),
    "optax.acprop": averages(optax.contrib.acprop(0.01), first=mean(0.9)),
    "optax.lion": averages(optax.lion(0.01), first=mean(0.99)),
    "optax.ema": averages(
        optax.chain(optax.ema(0.9, debias=False), optax.scale_by_sign(), optax.scale(-0.01)),
        first=mean(0.9),
    ),
    "optax.sgd": sums(optax.sgd(0.1, momentum=BETA)),
    "optax.sgd, a schedule": sums(optax.sgd(falling, momentum=BETA, nesterov=True), has_step=True),
    "optax.sgd, clipped": sums(optax.chain(clip, optax.sgd(0.1, momentum=BETA))),
    "optax.trace": sums(optax.chain(clip, optax.trace(BETA), optax.scale(-0.1))),
    "optax.trace, nested": sums(
        optax.chain(optax.chain(clip, optax.trace(BETA)), optax.scale(-0.1))
    ),
    "optax.trace, named": of_rates(
        optax.named_chain(("rate", optax.scale(-0.1)), ("trace", optax.trace(BETA))),
        said="updates",
    ),
    "optax.trace, the rate outside": sums(optax.chain(clip, optax.trace(BETA)), said="gradients"),
    "optax.lars": of_lars(lars(0.1)),
    "optax.lars, a schedule": falling_lars(lars(falling)),
    "optax.lars, masked": of_lars(
        lars(0.1, weight_decay_mask=IS_MATRIX, trust_ratio_mask={"b": True, "w": True})
    ),
    "optax.lars, injected": of_lars(optax.inject_hyperparams(lars)(0.1), has_step=True),
    "optax.lars, averaged": falling_lars(optax.chain(clip, lars(falling), jgrad.ema(0.9))),
    "optax.lars, and another": of_lars(optax.chain(lars(0.1), optax.scale(1.0))),
    "optax.lars, of a part": falling_lars(
        optax.partition({"a": optax.apply_if_finite(lars(falling), 3)}, {"b": "a", "w": "a"})
    ),
    "optax.trace of a rate": of_rates(
        optax.chain(optax.scale_by_schedule(lambda t: -falling(t)), optax.trace(BETA), clip),
        rate=falling,
        has_step=True,
    ),
    "optax.trace, said": Old(
        optax.chain(optax.scale(0.1), optax.trace(BETA), optax.scale(-1)),
        "steps",
        lambda m, w, g, rate, v: BETA * m + rate * g,
        has_step=False,
        said="steps",
    ),
    "optax.rmsprop": of_updates(rmsprop(), first=updates_of_rmsprop, beta2=0.9),
    "optax.rmsprop, centered": adams(
        rmsprop(momentum=None, centered=True, bias_correction=True), beta2=0.9
    ),
    "optax.trace of rmsprop": Old(
        optax.chain(optax.scale_by_rms(0.9), optax.trace(BETA), optax.scale(-0.1)),
        "others",
        beta2=0.9,
        has_step=False,
    ),
    "optax.adafactor": Old(optax.adafactor(0.01, momentum=BETA), "others"),
    "optax.novograd": Old(optax.novograd(0.01), "others"),
}


class New(NamedTuple):
    """A method of jgrad, with the unit of its first moment, and `like_momentum`."""

    method: Any
    unit: str
    options: dict[str, Any]
    said: str | None = None

    @property
    def tx(self):
        options = dict(self.options)
        if "matrices" in options:
            options["matrices"] = IS_MATRIX
        return self.method(falling, **options)

    def path(self, weights, state):
        """The weights after each of the last steps, by the float64 reference."""
        method = getattr(reference, self.method.__name__)
        optimizer = method(jax.tree.leaves(weights), falling, **self.options, state=state)
        return reference.trajectory(optimizer, map(jax.tree.leaves, GRADIENTS[STEPS:]))


NEW = {
    "gradient_descent": New(
        jgrad.gradient_descent, "gradients", {"momentum": BETA}, said="gradients"
    ),
    "lars": New(jgrad.lars, "steps", {"trust_coefficient": ETA}, said="steps"),
    "lars, the rate outside": New(
        jgrad.lars,
        "scaled gradients",
        {"trust_coefficient": ETA, "rate_in_momentum": False},
        said="scaled gradients",
    ),
    "adam": New(jgrad.adam, "averages", {}),
    "lamb": New(jgrad.lamb, "averages", {}),
    "muon": New(
        jgrad.muon,
        "averages",
        {"matrices": list(IS_MATRIX.values()), "scale": "original", "adam_learning_rate": 0.01},
    ),
}

# What a first moment of one unit is in another one. Where there is none, it starts at zero.
CONVERTED = {
    ("averages", "gradients"): lambda m: m / (1 - BETA),
    ("gradients", "averages"): lambda m: m * (1 - BETA),
    ("updates", "steps"): np.negative,
    ("steps", "updates"): np.negative,
}


def moments_by_hand(old, unit, weights):
    """First and second moments of the new method."""
    first, second = [], []
    for name in W:
        m, v = old.moments(weights, name)
        convert = (
            (lambda m: m) if old.unit == unit else CONVERTED.get((old.unit, unit), np.zeros_like)
        )
        first.append(convert(m))
        factor = {"averages": 19, "gradients": 0.19}.get(old.unit, 0)
        estimated = factor * np.maximum(m**2, np.mean(m**2))
        second.append(estimated if old.beta2 is None else v)
    return first, second


@functools.cache
def trained(name):
    """The weights before each of the first steps and behind them, and the state."""
    tx = OLD[name].tx
    weights, state = [W], tx.init(W)
    with jax.numpy_dtype_promotion("standard"):
        for g in GRADIENTS[:STEPS]:
            change, state = tx.update(g, state, weights[-1])
            weights.append(optax.apply_updates(weights[-1], change))
    return weights, state


@functools.cache
def like_of(name):
    return jax.eval_shape(NEW[name].tx.init, W)


@functools.cache
def last_steps(name):
    tx = NEW[name].tx

    @jax.jit
    def run(w, state):
        def body(carry, g):
            w, state = carry
            change, state = tx.update(g, state, w)
            w = optax.apply_updates(w, change)
            return (w, state), w

        gradients = jax.tree.map(lambda *x: jnp.stack(x), *GRADIENTS[STEPS:])
        found = jax.lax.scan(body, (w, state), gradients)[1]
        return [jax.tree.map(lambda x, i=i: x[i], found) for i in range(len(GRADIENTS) - STEPS)]

    return run


@pytest.mark.parametrize("old", OLD)
def test_every_state_into_every_method(old):
    before = OLD[old]
    weights, state = trained(old)
    for name, new in NEW.items():
        by_decay = {before.unit, new.unit} == {"averages", "gradients"}
        carried, account = jgrad.carry_over(
            state,
            like=like_of(name),
            old_momentum=before.said,
            like_momentum=new.said,
            momentum_decay=BETA if by_decay else None,
        )
        first, second = moments_by_hand(before, new.unit, weights)
        expected = new.path(weights[-1], (STEPS if before.has_step else 0, first, second))
        for found, own in zip(last_steps(name)(weights[-1], carried), expected, strict=True):
            for x, exact in zip(jax.tree.leaves(found), own, strict=True):
                np.testing.assert_allclose(x, exact, 2e-5, 2e-5, err_msg=f"{old} to {name}")
        kept = any(np.any(m) for m in first)
        names = (*account.kept, *account.converted)
        assert {f"mw/{x}" for x in W if kept} == {x for x in names if x.startswith("mw")}, name
        if not kept:
            assert {"mw/b", "mw/w"} <= {*account.zero}
            assert {"mw/b", "mw/w"} <= {*account.dropped}
        assert "not say" not in str(account) or (old.startswith("optax") and before.said is None)


@pytest.mark.parametrize("old", OLD)
def test_nothing_is_silently_kept_in_another_unit(old):
    """Without a word of the user: what may be in another unit has a note, or is dropped."""
    before = OLD[old]
    for name, new in NEW.items():
        account = jgrad.carry_over(trained(old)[1], like=like_of(name))[1]
        is_kept = any(x.startswith("mw") for x in (*account.kept, *account.converted))
        if is_kept and (before.said or new.said):
            assert "not say whether momentum is" in str(account), (old, name)
        if before.said and new.said:
            said = jgrad.carry_over(trained(old)[1], like=like_of(name), like_momentum=new.said)[1]
            assert "mw/w" in said.dropped or "`old` does not say" in str(said), (old, name)
        if is_kept and before.unit != new.unit and not (before.said or new.said):
            assert "averages in `like`" in str(account)


IN_FILES = (
    *("optax.sgd, clipped", "optax.lars", "optax.lars, averaged", "optax.lars, injected"),
    *("optax.rmsprop", "optax.adafactor", "optax.novograd", "optax.trace of a rate"),
)


def test_files_without_a_target(tmp_path):
    """Their dictionaries and lists tell the same."""
    with ocp.StandardCheckpointer() as files:
        files.save(tmp_path / "states", {x: trained(x)[1] for x in IN_FILES})
        files.wait_until_finished()
        plain = files.restore(tmp_path / "states")
    for old in IN_FILES:
        for new in NEW:
            found, expected = (
                jgrad.carry_over(x, like=like_of(new), like_momentum=NEW[new].said)
                for x in (plain[old], trained(old)[1])
            )
            jax.tree.map(np.testing.assert_array_equal, found[0], expected[0])
            assert sorted(str(found[1]).splitlines()) == sorted(str(expected[1]).splitlines())


def pure(state):
    """As `nnx.to_pure_dict` writes it: numbers for places in chains, and nothing that is empty."""
    fields = getattr(state, "_fields", None)
    if isinstance(state, dict):
        return {name: pure(x) for name, x in state.items()}
    if not isinstance(state, tuple):
        return state
    pairs = zip(fields or range(len(state)), state, strict=True)
    return {name: pure(x) for name, x in pairs if jax.tree.leaves(x)}


@pytest.mark.parametrize("old", IN_FILES)
def test_pure_dictionaries(old):
    """What stands behind is not known there, so a note says what was presumed."""
    for new in NEW:
        found, expected = (
            jgrad.carry_over(x, like=like_of(new), like_momentum=NEW[new].said)
            for x in (pure(trained(old)[1]), trained(old)[1])
        )
        jax.tree.map(np.testing.assert_array_equal, found[0], expected[0])
        if OLD[old].unit == "updates" and NEW[new].unit == "steps":
            assert "`old` does not say" in str(found[1])


def trace_of(state):
    return optax.tree.get(state, "trace")


def test_into_states_of_optax():
    """Whose sign is the other one where the learning rate is inside."""
    into_lars = jax.eval_shape(OLD["optax.lars, a schedule"].tx.init, W)
    into_sgd = jax.eval_shape(OLD["optax.sgd"].tx.init, W)
    lars, descent = trained("lars")[1], trained("gradient_descent")[1]
    negative = jax.tree.map(jnp.negative, lars.mw)
    for said in "steps", None:
        state, account = jgrad.carry_over(lars, like=into_lars, old_momentum=said)
        jax.tree.map(np.testing.assert_array_equal, trace_of(state), negative)
        assert int(optax.tree.get(state, "count")) == STEPS
        assert ("`old_momentum=` says" in str(account)) == (said is None)
        state, _ = jgrad.carry_over(descent, like=into_sgd, old_momentum=said and "gradients")
        jax.tree.map(np.testing.assert_array_equal, trace_of(state), descent.mw)
    for old, like, said in (lars, into_sgd, "steps"), (descent, into_lars, "gradients"):
        state, account = jgrad.carry_over(old, like=like, old_momentum=said)
        assert not any(map(np.any, jax.tree.leaves(trace_of(state))))
        assert account.dropped[:2] == ("step", "mw/b") or account.dropped == ("mw/b", "mw/w")


@pytest.mark.parametrize("pack", [lambda x: x, jgrad.pack], ids=["tree", "packed"])
def test_a_sign_in_8_bits(pack):
    """With the codes that the negative array has."""
    w = {"w": normal(64, 128)}
    theirs = lars(0.1).init(w)
    old = (*theirs[:-1], optax.TraceState(w))
    like = jax.eval_shape(jgrad.lars(0.1, moment_dtype="8bit").init, pack(w))
    state, _ = jgrad.carry_over(old, like=like, like_momentum="steps")
    assert jax.tree.structure(state) == jax.tree.structure(like)
    negative = jgrad.OptState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.negative, w), None)
    jax.tree.map(np.testing.assert_array_equal, state, jgrad.carry_over(negative, like=like)[0])
    arrays, _ = jgrad.carry_over(state, like=negative)
    back, _ = jgrad.carry_over(state, like=old, old_momentum="steps")
    np.testing.assert_array_equal(back[-1].trace["w"], -arrays.mw["w"])


def test_two_moments():
    """Of an average and of updates each method takes what it has itself."""
    tx = rmsprop(centered=True)
    _, old = tx.update(GRADIENTS[0], tx.init(W), W)
    state, account = jgrad.carry_over(old, like=like_of("lars"), like_momentum="steps")
    np.testing.assert_array_equal(state.mw["w"], -trace_of(old)["w"])
    assert "mw/w" in account.dropped
    state, _ = jgrad.carry_over(old, like=like_of("adam"))
    np.testing.assert_array_equal(state.mw["w"], optax.tree.get(old, "mu")["w"])


def test_second_moments_of_another_kind():
    """What is no average of squares is estimated by the first moment, or zero."""
    for old in "optax.adabelief", "optax.acprop":
        account = jgrad.carry_over(trained(old)[1], like=like_of("adam"))[1]
        assert account.estimated == account.dropped == ("vw/b", "vw/w")
        assert "averages of squares of deviations, where `like` has averages of squ" in str(account)
    tx = optax.sm3(0.1)
    _, old = tx.update(GRADIENTS[0], tx.init(W), W)
    state, account = jgrad.carry_over(old, like=like_of("adam"))
    assert account.dropped == ("mw/b/0", "mw/w/0", "mw/w/1", "vw/b", "vw/w")
    assert not any(map(np.any, jax.tree.leaves(state)))
    tx = optax.contrib.sophia(0.1)
    account = jgrad.carry_over(tx.init(W), like=like_of("adam"))[1]
    assert account.estimated == ("vw/b", "vw/w")


def of_leaves(names):
    return dict.fromkeys(names, normal(2))


def test_one_moment_of_another_unit_excuses_no_other():
    """It is dropped with a line in the account; that the rest has other paths is an error."""
    old, adam = optax.lars(0.1).init(of_leaves("hxyz")), jgrad.adam(0.1)
    assert_error(
        ValueError,
        "carry_over: `old`: mw/x, mw/y, mw/z, none of which `like` would keep, expected mw/p, mw/q, "
        "mw/r and 3 more: name other paths by `rename`, or begin with zeros by `reset=True`.",
        lambda: jgrad.carry_over(old, like=adam.init(of_leaves("hpqr"))),
    )
    for names in "h", "hxyz", "hpqrxyz":  # a part of it, all of it, and more
        _, account = jgrad.carry_over(old, like=adam.init(of_leaves(names)))
        assert {*account.dropped} == {"mw/h", "mw/x", "mw/y", "mw/z"}
        leaves = "mw/h" if names == "h" else "mw/h and 3 more"
        why = "sums of updates, where `like` has averages of gradients"
        assert f"dropped    {leaves}: {why}" in str(account).splitlines()
    belief = optax.adabelief(0.1).init(of_leaves("hx"))
    _, account = jgrad.carry_over(belief, like=adam.init(of_leaves("hp")))
    assert "mw/h" in account.kept  # beside a second moment of another unit


def test_what_the_account_says():
    descent, adam = trained("gradient_descent")[1], like_of("adam")
    says_open = "not say whether momentum is a sum of gradients (`gradient_descent`) or of steps"
    assert str(jgrad.carry_over(descent, like=descent)[1]) == (
        "kept       step\n"
        "kept       mw, 2 leaves\n"
        f"note       mw: `old` and `like` do {says_open} (`lars`). It is taken for the same in both; "
        "`old_momentum=` and `like_momentum=` say what it is."
    )
    assert str(jgrad.carry_over(descent, like=adam)[1]) == (
        "kept       step\n"
        "kept       mw, 2 leaves\n"
        "estimated  vw, 2 leaves: 0.19 max(mw^2, its mean)\n"
        f"note       mw: `old` does {says_open} (`lars`). It is taken for a sum of gradients; "
        "`old_momentum=` says what it is.\n"
        "note       mw: sums of gradients in `old`, averages in `like`: too large at first, by "
        "1 / (1 - momentum). `momentum_decay=` converts them."
    )
    assert str(jgrad.carry_over(descent, like=adam, old_momentum="steps")[1]) == (
        "kept       step\n"
        "zero       mw/b and 1 more\n"
        "zero       vw, 2 leaves\n"
        "dropped    mw/b and 1 more: sums of steps, where `like` has averages of gradients\n"
        "note       vw of 2 leaves: zero beside a step that is kept, which schedules and bias "
        "correction count: Adam's first 100 steps there are up to 6.6 times too long (betas 0.9, "
        "0.999). Warm up their rate, or set `step` to 0."
    )
    means = optax.chain(clip, optax.ema(0.9), optax.scale(-0.1)).init(W)
    assert str(jgrad.carry_over(means, like=adam)[1]) == (
        "kept       step\n"
        "kept       mw, 2 leaves\n"
        "estimated  vw, 2 leaves: 19 max(mw^2, its mean)\n"
        "note       mw: `old` does not say whether momentum is an average of gradients (`adam`) or "
        "of what another link makes of them. It is taken for an average of gradients; "
        "`old_momentum=` says what it is."
    )
    account = jgrad.carry_over(means, like=descent)[1]  # each side for itself
    assert "`old` does not say whether momentum is an average" in str(account)
    assert "`like` does not say whether momentum is a sum" in str(account)
    assert "taken for a sum of gradients; `like_momentum=` says" in str(account)
    _, account = jgrad.carry_over(
        trained("optax.lars")[1], like=like_of("lars"), like_momentum="steps"
    )
    assert str(account).splitlines()[0] == (
        "converted  mw, 2 leaves: -mw, a sum of updates for one of steps or the reverse"
    )


MOMENTUM = "expected one of 'gradients', 'averages', 'scaled gradients', 'steps', 'updates'."
ERRORS = [
    ("adam", {"old_momentum": "step"}, f"`old_momentum`: 'step' of type str, {MOMENTUM}"),
    ("adam", {"like_momentum": "steps"},
     "`like_momentum`: 'steps', expected None: `like` has no momentum of which it may be said."),
    ("adam", {"momentum_decay": 0.9},
     "`momentum_decay`: 0.9, expected None: no sum of gradients becomes an average here, nor an average a sum."),
    ("gradient_descent", {"momentum_decay": 1}, "`momentum_decay`: 1, expected a number in [0, 1)."),
]  # fmt: skip


@pytest.mark.parametrize(("old", "options", "message"), ERRORS)
def test_message(old, options, message):
    state = trained(old)[1]
    carry_over = functools.partial(jgrad.carry_over, state, like=like_of("adam"), **options)
    assert_error(ValueError, f"carry_over: {message}", carry_over)
