"""`weight_decay_rule`: decoupled, cautious, independent, and coupled where it is part of momentum."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jgrad
from jgrad._arithmetic import rules
from tests.cases import MASK, gradients, params, rank_two
from tests.multi_device.meshes import mesh_of
from tests.reference import optimizers as reference
from tests.support.choice import mostly_slow
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
QUICK = [
    ("nesterov", "cautious"),
    ("lars", "independent"),
    ("lars", "cautious"),
    ("muon", "cautious"),
]
QUICK += [("lars, outside", "decoupled"), ("lamb", "cautious"), ("lamb", "independent")]
QUICK += [("adam", rule) for rule in RULES[1:]] + [("muon, two decays", "independent")]


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


ROWS = [
    pytest.param(name, rule, marks=() if (name, rule) in QUICK else pytest.mark.slow)
    for name in METHODS
    for rule in RULES
]


@pytest.mark.slow(
    always=[
        "nesterov-cautious",
        "lamb-cautious",
        "lars-independent",
        "lamb-independent",
        "muon-cautious",
    ]
)
@pytest.mark.parametrize(("name", "rule"), ROWS)
def test_trajectory(name, rule, x64):
    """Ten steps with a schedule are those of the definitions; the rules differ."""
    schedule = lambda done: RATE / (1 + done)
    w, grads = params("float64"), gradients(10, "float64")
    found, _ = run(method(name, rule, lambda done: schedule(done.astype(float))), w, grads)
    for a, b in zip(found, expected_of(name, rule, w, grads, schedule), strict=True):
        for x, y in zip(jax.tree.leaves(a), b, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12 * np.max(np.abs(y)))


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(METHODS, "adam"))
def test_the_rules_are_different(name):
    """And independent decay is that of each step, whatever the rate."""
    w, grads = params(), gradients(4)
    ends = [train(method(name, rule), w, grads)[0]["rest"][0] for rule in RULES]
    for i in range(len(RULES)):
        assert np.max(np.abs(ends[i] - ends[i - 1])) > 1e-3
    rates = {"adam_learning_rate": 0.0} if name.startswith("muon") else {}
    still, _ = train(method(name, "independent", 0.0, **rates), w, grads[:1])
    decays = np.float32(METHODS[name][1].get("adam_weight_decay", DECAY))
    np.testing.assert_allclose(still["rest"][1], w["rest"][1] * (1 - decays), rtol=1e-6)
    np.testing.assert_allclose(still["layer"]["w"], w["layer"]["w"] * 0.9, rtol=1e-6)


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


@pytest.mark.parametrize(
    ("u", "w", "decays"),
    [
        (2.0, 3.0, True),
        (-2.0, -3.0, True),
        (2.0, -3.0, False),
        (-2.0, 3.0, False),
        (0.0, 3.0, False),
        (-0.0, -3.0, False),
        (TINY, TINY, True),
        (TINY, -TINY, False),
        (-TINY, -3.0, True),
        (LARGEST, LARGEST, True),
        (-LARGEST, LARGEST, False),
        (np.inf, 3.0, True),
        (np.nan, 3.0, False),
        (2.0, np.nan, False),
        (2 + 1j, 3 - 1j, True),
        (1 + 3j, -1 + 3j, True),
        (1j, 1.0 + 0j, False),
        (1j, -1j, False),
        (0j, 1j, False),
        (TINY * (1 + 1j), TINY * (1 + 2j), True),
        (TINY * 1j, -TINY * 1j, False),
        (1e20 * (1 + 2j), 1e20 * (2 - 0.5j), True),
        (1e20 * (1 + 2j), 1e20 * (2 - 1.5j), False),
    ],
)
def test_signs(u, w, decays):
    """By signs, and not by a product that vanishes or overflows."""
    dtype = np.complex64 if isinstance(u, complex) else np.float32
    direction, x = jnp.asarray([u], dtype), jnp.asarray([w], dtype)
    found = rules.add_cautiously(direction, x, direction, jnp.float32(0.5))
    plain = rules.add_scaled(direction, x, jnp.float32(0.5))
    np.testing.assert_array_equal(found, plain if decays else direction)
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


def test_independent_decay_is_pytorch_s_with_the_rate_in_it():
    """AdamW of PyTorch and optax multiplies by the rate: at a constant rate they are one."""
    w, grads = params(), gradients(5)
    found, _ = train(
        jgrad.adam(RATE, weight_decay=RATE * DECAY, weight_decay_rule="independent"), w, grads
    )
    with jax.numpy_dtype_promotion("standard"):
        expected, _ = train(optax.adamw(RATE, weight_decay=DECAY), w, grads)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6 * np.max(np.abs(b), initial=0))


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


@pytest.mark.parametrize("rule", mostly_slow(RULES, "cautious"))
def test_inject_hyperparams(rule):
    """A string stays what it is; a new decay compiles nothing."""
    options = {"weight_decay": 0.25, "weight_decay_rule": rule}
    tx = optax.inject_hyperparams(jgrad.adam)(RATE, **options)
    w, grads = params(), gradients(2)
    state = tx.init(w)
    step = jax.jit(step_of(tx))
    once, state = step(w, state, grads[0])
    assert step._cache_size() == 1
    plain, _ = train(jgrad.adam(RATE, **options), w, grads[:1])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, once, plain)
    state.hyperparams["weight_decay"] = jnp.float32(0.5)
    step(once, state, grads[1])
    assert step._cache_size() == 1


# ---- inside wrappers, packed, in 8 bits, on devices --------------------------------------------

SHAPES = {"w": (64, 128), "up": (8, 16), "b": (8,)}


def model(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=s), dtype) for name, s in SHAPES.items()}


FORMS = {
    "float32": (lambda tx: tx, {}),
    "masked": (lambda tx: tx, {"weight_decay_mask": {"w": True, "up": False, "b": True}}),
    "8 bits": (lambda tx: tx, {"moment_dtype": "8bit"}),
    "skip": (jgrad.skip_nonfinite, {}),
    "accumulate": (lambda tx: jgrad.accumulate(tx, 2), {}),
}


@pytest.mark.slow(always=["gradient_descent-independent-masked"])
@pytest.mark.bits
@pytest.mark.parametrize("form", mostly_slow(FORMS, "masked", "8 bits"))
@pytest.mark.parametrize("rule", RULES[1:])
@pytest.mark.parametrize("make", mostly_slow([jgrad.adam, jgrad.gradient_descent], jgrad.adam))
def test_packed_has_the_bits_of_the_tree(make, rule, form):
    around, options = FORMS[form]
    momentum = {"momentum": 0.9} if make is jgrad.gradient_descent else {}
    tx = around(make(0.01, weight_decay=0.1, weight_decay_rule=rule, **momentum, **options))
    w, grads = model(0), [model(t) for t in range(1, 5)]
    if form == "8 bits":  # a buffer is in 8 bits as a whole
        w, grads = ({"w": x["w"]} for x in (w,)), [{"w": g["w"]} for g in grads]
        (w,) = w
    on_tree, _ = train(tx, w, grads)
    found, _ = train(tx, jgrad.pack(w), list(map(jgrad.pack, grads)))
    assert_equal(jgrad.unpack(found), on_tree)


@pytest.mark.parametrize("rule", RULES[1:])
def test_a_skipped_step_does_not_decay(rule):
    tx = jgrad.skip_nonfinite(jgrad.adam(0.01, weight_decay=0.1, weight_decay_rule=rule))
    w = model(0)
    bad = model(1) | {"b": jnp.full(8, jnp.nan)}
    new, state = train(tx, w, [bad])
    assert_equal(new, w)
    assert int(state.skipped) == 1


@pytest.mark.slow
@pytest.mark.parametrize("rule", mostly_slow(RULES[1:], "cautious"))
def test_weights_in_bfloat16(rule):
    """Weights that are rounded at random, and those with copies, are near those of float32."""
    w, grads = model(0), [model(t) for t in range(1, 7)]
    half = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
    tx = jgrad.adam(0.01, weight_decay=0.02, weight_decay_rule=rule)
    rounded = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), half(tree))
    expected, _ = train(tx, rounded(w), list(map(rounded, grads)))
    for around in (jgrad.stochastic_rounding, jgrad.master_weights):
        found, _ = train(around(tx), half(w), list(map(half, grads)))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert a.dtype == jnp.bfloat16
            error = np.abs(np.asarray(a, np.float32) - b)
            assert np.all(error <= 6 * 2.0**-7 * np.abs(b) + 1e-3)  # an ulp in each step


@pytest.mark.slow
@pytest.mark.parametrize("rule", mostly_slow(RULES[1:], "cautious"))
@pytest.mark.parametrize("name", mostly_slow(["adam", "momentum", "lamb", "lars"], "lars"))
def test_on_devices(name, rule):
    """Sharded leaves under `jit`, in `shard_map` with `mesh_axes`, and `zero` of a packed model."""
    mesh = mesh_of(d=8)
    options = {"weight_decay_mask": None, "trust_ratio_mask": None}
    options = {k: v for k, v in options.items() if k == "weight_decay_mask" or name == "lamb"}
    tx = method(name, rule, **options)
    w, grads = model(0), [model(t) for t in range(1, 4)]
    expected, _ = train(tx, w, grads)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    sharding = NamedSharding(mesh, P("d"))
    place = lambda tree: jax.device_put(tree, sharding)
    found, _ = train(tx, place(w), list(map(place, grads)))
    jax.tree.map(close, found, expected)
    assert found["w"].sharding.is_equivalent_to(sharding, 2)

    def steps(tx):
        def loop(w, *grads):
            state = tx.init(w)
            for g in grads:
                w, state = step_of(tx)(w, state, g)
            return w

        return loop

    own = {} if name in ("adam", "momentum") else {"mesh_axes": "d"}
    inside = jax.shard_map(
        steps(method(name, rule, **options, **own)),
        mesh=mesh,
        in_specs=(P("d"),) * 4,
        out_specs=P("d"),
    )
    jax.tree.map(close, jax.jit(inside)(w, *grads), expected)
    pack = functools.partial(jgrad.pack, multiple_of=8)
    zero = jax.shard_map(
        steps(jgrad.zero(tx, "d")),
        mesh=mesh,
        in_specs=(P(),) * 4,
        out_specs=P(),
        check_vma=False,
    )
    found = jax.jit(zero)(pack(w), *map(pack, grads))
    jax.tree.map(close, jgrad.unpack(found), expected)


# ---- what it costs -----------------------------------------------------------------------------


@pytest.mark.slow(one_in=6)
@pytest.mark.parametrize("packed", [False, True], ids=["tree", "packed"])
@pytest.mark.parametrize("rule", RULES[1:])
@pytest.mark.parametrize(
    "name", mostly_slow(["adam", "lamb", "nesterov", "lars", "muon"], "adam", "muon")
)
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
