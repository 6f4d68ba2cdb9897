"""The steps of the authors' implementations in PyTorch: schedulefree, heavyball, emerging-optimizers.

`tests/pages/upstream_steps.py` says how theirs were made. A float32 step of Newton-Schulz may be off
by 2e-5 of its norm (`test_single_precision` of tests/muon/test_muon.py), so float32 rows agree to so
much of the length of the way. Float64 rows agree to 1e-12, schedule-free ones of heavyball to 1e-6.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.pages import upstream_steps
from tests.pages.upstream_steps import ROWS, SHAPES, SHOWN

with np.load(upstream_steps.DATA) as _data:
    THEIRS = dict(_data)

# Written out by emerging-optimizers; `jgrad.muon` has those of another cushion by this name.
POLAR_EXPRESS = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
)


# ---- ours, of the same meaning -----------------------------------------------------------------


def rate(done):
    """A warm-up of four steps."""
    return jnp.minimum((done + 1) / 4, 1) / 8


def rate_of_the_paper(done):
    """The bias of the second moment is corrected in the rate, and so in decay and weights."""
    return rate(done) * jnp.sqrt(1 - (63 / 64) ** (done + 1))


def schedule_free_adamw(power=0.0, rate=rate, bias_correction="moments"):
    adam = {"beta1": 0.0, "beta2": 63 / 64, "epsilon": 0.0, "bias_correction": bias_correction}
    inner = jgrad.adam(rate, weight_decay=1 / 8, **adam)
    return jgrad.schedule_free(inner, beta=7 / 8, learning_rate=rate, step_power=power)


def muon(learning_rate=1 / 16, output_axes=0, **options):
    own = {"momentum": 7 / 8, "weight_decay": 1 / 8, "output_axes": output_axes} | options
    return jgrad.muon(learning_rate, matrices=True, adam_learning_rate=0.0, **own)


def normuon():
    """Theirs has one number for each index of the longer side."""
    return muon(
        rule="normuon",
        normuon_beta=7 / 8,
        output_axes={"wide": 1, "tall": 0, "square": 0},
        scale=lambda out, into: max(out, into) ** 0.5,
    )


AVERAGED = {
    "schedule-free, reference": schedule_free_adamw,
    "schedule-free, paper": lambda: schedule_free_adamw(0.0, rate_of_the_paper, None),
    "schedule-free, in place": schedule_free_adamw,
    "schedule-free, power 1": lambda: schedule_free_adamw(1.0),
    "schedule-free SGD": lambda: jgrad.schedule_free(optax.chain(optax.add_decayed_weights(1 / 8),
     jgrad.gradient_descent(rate)), beta=7 / 8, learning_rate=rate),
    "schedule-free, heavyball": schedule_free_adamw,
    "schedule-free, heavyball, power 1": lambda: schedule_free_adamw(1.0),
}  # fmt: skip
MUON = {
    "muon": muon,
    "muon, no nesterov": lambda: muon(nesterov=False),
    "muon, quintic": lambda: muon(coefficients="you"),
    "muon, polar_express": lambda: muon(coefficients=POLAR_EXPRESS),
    "muon, deepseekv4": lambda: muon(coefficients="deepseek_v4"),
    "muon, spectral": lambda: muon(scale=lambda out, into: max(out, into) ** 0.5),
    "muon, unit_rms_norm": lambda: muon(scale="spectral"),
    "muon, heavyball": lambda: muon(coefficients="you"),
    "muon, heavyball, no nesterov": lambda: muon(coefficients="you", nesterov=False),
    "normuon": normuon,
}
# What makes the directions u.
HYPERBALL = {
    "hyperball": lambda: muon(1.0, weight_decay=0.0),
    "hyperball, radius": lambda: muon(1.0, weight_decay=0.0),
    "hyperball, heavyball": lambda: jgrad.adam(1.0, beta1=0.0, beta2=63 / 64, epsilon=0.0),
}
# What differs.
DIFFERENT = {
    "muon, bfloat16": "sums of products are bfloat16, too, where ours are float32",
    "muon, heavyball, EMA": "looks ahead by g + m', not by momentum m' + (1 - momentum) g",
}


def test_every_row_is_compared():
    rows = [*AVERAGED, *MUON, *HYPERBALL, *DIFFERENT]
    assert sorted(rows) == sorted(ROWS) == sorted(THEIRS)


# ---- comparisons -------------------------------------------------------------------------------


def flat(tree):
    return np.concatenate([np.ravel(tree[name]) for name in SHAPES])


def steps_of(tx, radius=None):
    """Weights after each update, and the state; theirs are brought to a radius before the first."""
    w, grads = jax.tree.map(jnp.asarray, upstream_steps.problem())
    if radius is not None:
        w = jax.tree.map(lambda x: x * (radius / jnp.linalg.norm(x)), w)
    state, update = tx.init(w), jax.jit(tx.update)
    yield w, state
    for g in grads:
        updates, state = update(g, state, w)
        w = optax.apply_updates(w, updates)
        yield w, state


def ways(found):
    """For each of the updates that are kept the weights, and the length of the way to there."""
    found = [flat(w) for w in found]
    lengths = np.cumsum([np.linalg.norm(b - a) for a, b in itertools.pairwise(found)])
    return [(found[i], lengths[i - 1]) for i in SHOWN]


IN_FLOAT32 = ("muon, heavyball, no nesterov", "hyperball, heavyball")  # corrections of heavyball


def assert_same_ways(name, found):
    part = 2e-5 if ROWS[name][0] == "emerging" else 1e-7 if name in IN_FLOAT32 else 1e-12
    for (own, length), theirs in zip(ways(found), THEIRS[name][:, 0], strict=True):
        rounding = part * length + part / 20 * np.linalg.norm(theirs)
        assert np.linalg.norm(own - theirs) <= rounding


@pytest.mark.slow(one_in=8)
@pytest.mark.parametrize("name", AVERAGED)
def test_schedule_free(name, x64, standard_promotion):
    found = list(steps_of(AVERAGED[name]()))
    # Of heavyball they differ by roundings of float32.
    rtol = 1e-6 if "heavyball" in name else 1e-14
    for i, (y, average) in zip(SHOWN, THEIRS[name], strict=True):
        w, state = found[i]
        np.testing.assert_allclose(flat(w), y, rtol=rtol, atol=rtol)
        np.testing.assert_allclose(flat(state.average), average, rtol=rtol, atol=rtol)


@pytest.mark.slow(one_in=16)
@pytest.mark.parametrize("name", MUON)
def test_muon(name, x64):
    assert_same_ways(name, [w for w, _ in steps_of(MUON[name]())])


@pytest.mark.slow
@pytest.mark.parametrize("name", HYPERBALL)
def test_hyperball(name, x64):
    radius = ROWS[name][2].get("hyperball_radius")
    ours = jgrad.hyperball(HYPERBALL[name](), 1 / 16, leaves=lambda _: True, radius=radius)
    assert_same_ways(name, (w for w, _ in steps_of(ours, radius)))


def distance(name, tx):
    """The largest difference, as a part of the way."""
    rows = zip(ways(w for w, _ in steps_of(tx)), THEIRS[name][:, 0], strict=True)
    return max(np.linalg.norm(own - theirs) / length for (own, length), theirs in rows)


@pytest.mark.slow
def test_what_differs(x64):
    """By as much as the reasons say: some roundings of 2^-9, and another direction."""
    assert 1e-3 < distance("muon, bfloat16", muon(compute_dtype=jnp.bfloat16)) < 5 * 4 * 2**-9
    assert distance("muon, heavyball, EMA", muon(coefficients="you")) > 1e-2
