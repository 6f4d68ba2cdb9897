"""`weight_decay_rule`: decoupled, cautious, independent, and coupled where it is part of momentum.

The rows of `tests/cases.py` have each rule, for wrappers, devices, and what is packed or in 8 bits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from tests.cases import MASK, gradients, params, rank_two
from tests.reference import optimizers as reference
from tests.support import compiler, draws
from tests.support.loops import assert_equal, run, step_of, train

RATE, DECAY = 0.05, 0.1
RULES = ("decoupled", "cautious", "independent")
MUON = {"matrices": rank_two, "adam_learning_rate": 0.003}
METHODS = {
    "descent": (jgrad.gradient_descent, {}),
    "momentum": (jgrad.gradient_descent, {"momentum": 0.8}),
    "nesterov": (jgrad.gradient_descent, {"momentum": 0.8, "nesterov": True}),
    "adam": (jgrad.adam, {}),
    "adam, all decay": (jgrad.adam, {"beta1": 0.5, "weight_decay_mask": None}),
    "lamb": (jgrad.lamb, {"trust_ratio_mask": MASK}),
    "lars": (jgrad.lars, {"trust_coefficient": 0.1}),
    "lars, nesterov": (jgrad.lars, {"trust_coefficient": 0.1, "nesterov": True}),
    "lars, outside": (jgrad.lars, {"trust_coefficient": 0.1, "rate_in_momentum": False}),
    "lars, plain": (jgrad.lars, {"trust_coefficient": 0.1, "momentum": None}),
    "muon": (jgrad.muon, MUON),
    "muon, two decays": (jgrad.muon, MUON | {"adam_weight_decay": 0.02, "nesterov": False}),
}


def method(name, rule, rate=RATE, **more):
    make, options = METHODS[name]
    own = {"weight_decay": DECAY, "weight_decay_mask": MASK, "weight_decay_rule": rule}
    return make(rate, **(own | options | more))


def expected_of(name, rule, w, grads, rate=RATE):
    make, options = METHODS[name]
    own = {"weight_decay": DECAY, "weight_decay_mask": MASK, "weight_decay_rule": rule} | options
    leaves = lambda tree: None if tree is None else jax.tree.leaves(tree)
    own["decay"] = leaves(own.pop("weight_decay_mask"))
    if "trust_ratio_mask" in own:
        own["trust"] = leaves(own.pop("trust_ratio_mask"))
    if "matrices" in own:
        own["matrices"] = leaves(own["matrices"](w))
    optimizer = getattr(reference, make.__name__)(leaves(w), rate, **own)
    return reference.trajectory(optimizer, list(map(leaves, grads)))


@pytest.mark.slow(always=["nesterov-cautious", "lamb-cautious", "lars-independent",
    "lamb-independent", "muon-cautious"])  # fmt: skip
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", METHODS)
def test_trajectory(name, rule, x64):
    """Ten steps with a schedule are those of the definitions; the rules differ."""
    schedule = lambda done: RATE / (1 + done)
    w, grads = params("float64"), gradients(10, "float64")
    found, _ = run(method(name, rule, lambda done: schedule(done.astype(float))), w, grads)
    for a, b in zip(found, expected_of(name, rule, w, grads, schedule), strict=True):
        for x, y in zip(jax.tree.leaves(a), b, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12 * np.max(np.abs(y)))


@pytest.mark.slow(always=["gradient_descent"])
@pytest.mark.parametrize("name", ["gradient_descent", "lars"])
def test_coupled_is_the_default(name):
    make = functools.partial(getattr(jgrad, name), RATE, weight_decay=DECAY)
    w, grads = params(), gradients(3)
    assert_equal(train(make(), w, grads), train(make(weight_decay_rule="coupled"), w, grads))
    assert_equal(
        train(jgrad.gradient_descent(RATE, weight_decay=DECAY), w, grads),
        train(method("descent", "decoupled", weight_decay_mask=None), w, grads),
    )  # without momentum they are one


# ---- which weights are cautious ----------------------------------------------------------------

TINY, LARGEST = 1e-30, 3e38


@pytest.mark.parametrize(("u", "w", "decays"), [(2.0, 3.0, True), (-2.0, -3.0, True),
    (2.0, -3.0, False), (-2.0, 3.0, False), (0.0, 3.0, False), (-0.0, -3.0, False),
    (TINY, TINY, True), (TINY, -TINY, False), (-TINY, -3.0, True), (LARGEST, LARGEST, True),
    (-LARGEST, LARGEST, False), (np.inf, 3.0, True), (np.nan, 3.0, False), (2.0, np.nan, False),
    (2 + 1j, 3 - 1j, True), (1 + 3j, -1 + 3j, True), (1j, 1.0 + 0j, False), (1j, -1j, False),
    (0j, 1j, False), (TINY * (1 + 1j), TINY * (1 + 2j), True), (TINY * 1j, -TINY * 1j, False),
    (1e20 * (1 + 2j), 1e20 * (2 - 0.5j), True), (1e20 * (1 + 2j), 1e20 * (2 - 1.5j), False)])  # fmt: skip
def test_signs(u, w, decays):
    """By signs, and not by a product that vanishes or overflows."""
    dtype = np.complex64 if isinstance(u, complex) else np.float32
    direction, x = jnp.asarray([u], dtype), jnp.asarray([w], dtype)

    def update(decay, rule):
        tx = jgrad.gradient_descent(1.0, weight_decay=decay, weight_decay_rule=rule)
        return tx.update(direction, tx.init(x), x)[0]

    found, plain = update(0.5, "cautious"), update(0.5, "decoupled")
    np.testing.assert_array_equal(found, plain if decays else -direction)
    assert found.dtype == dtype


def test_no_weight_moves_away_or_overflows():
    """The direction of Adam is 0 where no gradient came: those weights stay."""
    tx = jgrad.adam(RATE, weight_decay=0.5, weight_decay_rule="cautious")
    w = {"w": jnp.asarray([LARGEST, -LARGEST, 1.0, -1.0, 1.0, TINY], jnp.float32)}
    g = {"w": jnp.asarray([LARGEST, -LARGEST, 0.0, 0.0, -TINY, TINY], jnp.float32)}
    new, _ = train(tx, w, [g])
    assert np.all(np.isfinite(new["w"]))
    assert_equal(new["w"][2:4], w["w"][2:4])
    plain, _ = train(jgrad.adam(RATE), w, [g])
    assert_equal(new["w"][4], plain["w"][4])


# ---- independent decay -------------------------------------------------------------------------


def test_decay_has_its_own_schedule_paths_and_calls():
    """None of which the rate knows of."""
    own = jgrad.by_path({"a": lambda done: 0.5 / (1 + done.astype(float)), "b": 0.25}, rest=0.0)
    tx = jgrad.adam(0.0, weight_decay=own, weight_decay_rule="independent")
    w = {name: jnp.full(3, 8.0) for name in "abc"}
    zero = jax.tree.map(jnp.zeros_like, w)
    new, state = train(tx, w, [zero, zero])
    expected = {"a": 8 * 0.5 * 0.75, "b": 8 * 0.75**2, "c": 8.0}
    assert_equal(new, {name: jnp.full(3, x, jnp.float32) for name, x in expected.items()})
    updates, _ = jax.jit(tx.update)(zero, state, w, weight_decay=0.5)
    assert_equal(updates, jax.tree.map(lambda x: -x / 2, w))


# ---- packed --------------------------------------------------------------------------------------

SHAPES = {"w": (64, 128), "up": (8, 16), "b": (8,)}


model = functools.partial(draws.normal, SHAPES)


@pytest.mark.bits
@pytest.mark.slow(always=["independent"])
@pytest.mark.parametrize("rule", RULES[1:])
def test_some_leaves_of_a_buffer_decay(rule):
    """They have the bits of the tree."""
    mask = {"w": True, "up": False, "b": True}
    tx = method("momentum", rule, weight_decay_mask=mask)
    w, grads = model(0), [model(t) for t in range(1, 5)]
    step = jax.jit(step_of(tx), compiler_options=compiler.as_users_have())
    on_tree, packed = w, jgrad.pack(w)
    state, of_packed = tx.init(w), tx.init(packed)
    for g in grads:
        on_tree, state = step(on_tree, state, g)
        packed, of_packed = step(packed, of_packed, jgrad.pack(g))
    assert_equal(jgrad.unpack(packed), on_tree)


# ---- what it costs -----------------------------------------------------------------------------


@pytest.mark.slow(one_in=12)
@pytest.mark.parametrize("packed", [False, True], ids=["tree", "packed"])
@pytest.mark.parametrize("rule", RULES[1:])
@pytest.mark.parametrize("name", ["adam", "lamb", "nesterov", "lars", "muon"])
def test_bytes_are_those_of_the_usual_decay(name, rule, packed):
    """The direction is read once: a cautious rule takes its signs from the first moment."""
    w = {f"{i}": jnp.ones((128, 256)) for i in range(4)}
    options = {"weight_decay_mask": None}
    if name == "lamb":
        options["trust_ratio_mask"] = None
    if name == "muon":
        options["matrices"] = dict.fromkeys(w, False)
    w = jgrad.pack(w) if packed else w

    def cost(rule):
        tx = method(name, rule, **options)
        state = jax.eval_shape(tx.init, w)
        step = jax.jit(step_of(tx), donate_argnums=(0, 1)).lower(w, state, w).compile()
        size = 4 * 128 * 256
        temporaries = step.memory_analysis().temp_size_in_bytes
        return step.cost_analysis()["bytes accessed"] / size, temporaries / size

    usual = "coupled" if METHODS[name][0] in (jgrad.gradient_descent, jgrad.lars) else "decoupled"
    found, expected = cost(rule), cost(usual)
    assert found[0] <= expected[0] + 0.01
    assert found[1] <= expected[1] + 0.01
    if name == "adam":
        assert found[0] < 40.1
        assert found[1] < 0.01
