"""Moments in 8 bits: their numbers, at every scale and in the mean; shapes, dtypes, and what is said.

Transformations of JAX and of optax are in `test_surroundings.py`, messages in `test_messages.py`,
codes and the errors of steps in `quantized/`.
"""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from jgrad._inputs import transformation as forms
from jgrad._quantized import codec, encoding
from jgrad._quantized.geometry import Geometry
from jgrad._quantized.random_bits import ElementKeys, step_keys
from tests.support.eight_bits import (
    CONSTANT_FREE,
    EACH,
    ELEMENTWISE,
    MAKES,
    RATE,
    assert_same_moments,
    gradients,
    in_float32,
    is_blocks,
    model,
    moments,
    normal,
    optimizers,
    packed_or_not,
    packs,
    unpacked,
    value,
)
from tests.support.errors import assert_error
from tests.support.loops import assert_equal, train
from tests.support.private import forced

# ---- at every scale ----------------------------------------------------------------------------


@pytest.mark.slow
@packed_or_not
@optimizers(ELEMENTWISE)
def test_e30_blocks_of_zeros(make, packed):
    """Scale 0 and codes 0; what never had a gradient does not move; a first one of 1e-15 is kept."""
    options = {"epsilon": 0.0} if "epsilon" in inspect.signature(make).parameters else {}
    tx = make(**options)
    w = {"w": jnp.ones((32, 256))}
    g = {"w": normal((32, 256)).at[8:].set(0.0)}
    w, g = (jgrad.pack(w), jgrad.pack(g)) if packed else (w, g)
    new, state = train(tx, w, [g] * 3)
    moved = jgrad.unpack(new)["w"]
    np.testing.assert_array_equal(moved[8:], 1.0)
    assert np.all(moved[:8] != 1)
    for x in moments(state):
        assert not np.any(x.codes.reshape(-1, 256)[8:])
        assert not np.any(x.scale.reshape(-1)[8:])
    late = jax.tree.map(lambda x: x.at[8:].set(1e-15), g)
    updates, state = jax.jit(tx.update)(late, state, new)
    for x in moments(state):
        assert np.all(x.codes.reshape(-1, 256)[8:] != 0)
        assert np.all(x.scale.reshape(-1)[8:] > 0)
    exact = in_float32(make)(**options)
    expected, _ = jax.jit(exact.update)(late, train(exact, w, [g] * 3)[1], new)
    found, expected = jgrad.unpack(updates)["w"][8:], jgrad.unpack(expected)["w"][8:]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow(always=["-1e+20"])
@pytest.mark.parametrize("outlier", [-1e20, 1e8, 1e20])
def test_e31_one_outlier(outlier):
    """Blocks beside it are bit for bit as without it; no element of its own steps further than before."""
    tx, w = CONSTANT_FREE(), {"w": jnp.zeros(8192)}
    rows = normal((300, 8192), spread=0.1)

    def run(rows):
        def body(state, g):
            updates, state = tx.update({"w": g}, state, w)
            return state, updates["w"]

        return jax.lax.scan(body, tx.init(w), rows)

    (state, steps), (usual, expected) = (
        jax.jit(run)(rows.at[10, 600].set(outlier)),
        jax.jit(run)(rows),
    )
    own = slice(512, 768)
    beside = lambda x: np.delete(np.asarray(x), np.arange(512, 768), axis=-1)
    np.testing.assert_array_equal(beside(steps), beside(expected))
    for x, y in zip(moments(state), moments(usual), strict=True):
        np.testing.assert_array_equal(beside(x.codes), beside(y.codes))
        np.testing.assert_array_equal(np.delete(x.scale, 2), np.delete(y.scale, 2))
    chex.assert_tree_all_finite(state)
    assert np.max(np.abs(steps[:, own])) <= 1.05 * np.max(np.abs(expected))


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [-46, -27, 33])
def test_e34_the_same_at_every_scale(exponent):
    """Gradients of 1e-14, 1e-8 and 1e10: the same codes and steps as at 1, bit for bit."""
    # None so small that its square is not a normal number.
    large = lambda x: jnp.where(jnp.abs(x) < 0.01, 0.01, x)
    w, grads = model(), [jax.tree.map(large, g) for g in gradients(5)]
    factor = 2.0**exponent
    tx = CONSTANT_FREE()
    expected, state = train(tx, w, grads)
    scaled = [jax.tree.map(lambda x: x * factor, g) for g in grads]
    found, other = train(tx, w, scaled)
    chex.assert_trees_all_equal(found, expected)
    for name in w:
        for x, y, power in ((state.mw, other.mw, 1), (state.vw, other.vw, 2)):
            np.testing.assert_array_equal(x[name].codes, y[name].codes)
            np.testing.assert_array_equal(x[name].scale * factor**power, y[name].scale)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-19, 3e38, 1e-23, 1e-38, 1e-42])
@optimizers(ELEMENTWISE)
def test_e34_at_the_ends_of_float32(make, size):
    """Second moments, or gradients, that are subnormal or too large: finite, no longer than float32's."""
    w = {"w": jnp.zeros(4096)}
    g = {"w": jnp.linspace(-size, size, 4096)}
    longest = []
    for tx in (make(), in_float32(make)()):
        state, steps = tx.init(w), []
        for _ in range(4):
            updates, state = jax.jit(tx.update)(g, state, w)
            chex.assert_tree_all_finite((updates, state))
            steps.append(float(np.max(np.abs(updates["w"]))))
        longest.append(max(steps))
    assert longest[0] <= 1.1 * longest[1]


# ---- in the mean -------------------------------------------------------------------------------


def _second_moments(beta2, rows):
    """v of 8192 weights after gradients, a row for each step, of which each broadcasts."""
    tx, w = jgrad.adam(RATE, beta2=beta2, moment_dtype="8bit"), {"w": jnp.zeros(8192)}

    @jax.jit
    def run(rows):
        def body(state, g):
            return tx.update({"w": jnp.tile(g, 32)}, state, w)[1], None

        return jax.lax.scan(body, tx.init(w), rows)[0]

    return value(run(rows).vw["w"]).reshape(32, 256).astype(float)


@pytest.mark.slow(always=["0.9999"])
@pytest.mark.parametrize("beta2", [0.9999, 0.999999])
def test_e35_large_betas(beta2):
    """v follows in the mean, from gradients that rise and fall; each weight within 35%."""
    steps = 2000
    scale = np.where(np.arange(steps) < steps // 4, 0.3, 1.0)[:, None]
    sizes = np.exp(np.random.default_rng(0).normal(size=256))
    rows = jnp.asarray(scale * sizes, jnp.float32)
    v = _second_moments(beta2, rows)
    expected = np.zeros(256)
    for g in np.asarray(rows, float):
        expected = beta2 * expected + (1 - beta2) * g**2
    ratio = v / expected
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / np.sqrt(ratio.size)
    assert ratio.std() < 0.35


def _stored(rule, old, steps, *, stochastic):
    """A moment after steps of a rule of one array, rounded as transformations do, or to the nearest."""
    own = Geometry.for_leaf(old.shape)
    keys = ElementKeys(np.array([1, 2], np.uint32), np.zeros((), np.uint32))

    @jax.jit
    def run(old):
        def body(moment, step):
            rounding = encoding.Rounding(step_keys(step), keys) if stochastic else None
            return encoding.encoded(rule, [moment], own, codec.codec_of(moment), rounding), None

        return jax.lax.scan(body, old, jnp.arange(steps))[0]

    return value(run(old)).astype(float)


@pytest.mark.parametrize(("beta", "low", "high"), [(0.9, 0.6, 0.82), (0.99, 0.05, 0.3)])
def test_e35_first_moments_reach_a_constant_gradient(beta, low, high):
    """In the mean, from 0 and whatever their size; to the nearest they stick below it."""
    g = jnp.asarray(np.linspace(1, 2, 4096), jnp.float32)
    rule = lambda x: beta * encoding.decoded(x) + (1 - beta) * g.reshape(x.codes.shape)
    start = encoding.zeros(jnp.zeros(4096), (), codec.for_moments(second=False))
    exact = np.asarray(g, float) * (1 - beta**1000)
    found = _stored(rule, start, 1000, stochastic=True) / exact
    assert abs(found.mean() - 1) < 4 * found.std() / 64 + 1e-3
    stuck = _stored(rule, start, 1000, stochastic=False) / exact
    assert low < stuck.min() < stuck.max() < high


# ---- what is not finite ------------------------------------------------------------------------


@pytest.mark.slow(always=["nan-adam-tree"])
@packed_or_not
@optimizers(ELEMENTWISE)
@pytest.mark.parametrize("bad", [jnp.nan, -jnp.inf])
def test_e33_not_finite_in_one_block(make, packed, bad):
    """The scales of that block say so, and no others; `skip_nonfinite` restores codes and scales."""
    w, (a, b, c) = model(), gradients(3)
    broken = b | {"c": b["c"].at[69, 89].set(bad)}  # in the last block, which is shorter
    if packed:
        w, a, broken, c = map(jgrad.pack, (w, a, broken, c))
    _, state = train(make(), w, [a, broken])
    scales = [unpacked(x, "scale") for x in (state.mw, state.vw) if x is not None]
    for i, scale in enumerate(scales):
        wrong = {name: np.flatnonzero(~np.isfinite(np.ravel(x))) for name, x in scale.items()}
        assert wrong["a"].size == 0
        # A second moment counts an infinite gradient as the largest one whose square is finite.
        hidden = i == 1 and not jnp.isnan(bad)
        first = 70 * 90 if hidden else 70 * 90 // 256 * 256
        np.testing.assert_array_equal(wrong["c"], np.arange(first, 70 * 90))
    tx = jgrad.skip_nonfinite(make())
    expected, other = train(tx, w, [a, c])
    found, state = train(tx, w, [broken, a, broken, c, broken])
    assert_equal(found, expected)
    assert_equal(state.inner, other.inner)
    assert int(state.skipped) == 3


# ---- shapes, dtypes and forms ------------------------------------------------------------------

SIZES = (1, 255, 256, 257, 4095, 4096, 4097, 0)


@pytest.mark.slow
@packed_or_not
@optimizers()
def test_e38_leaves_of_every_size(make, packed):
    """From 4096 elements on in 8 bits, of size 0 and 0-d as ever; the weights near float32's."""
    w = {f"n{n}": normal((n,), n) for n in SIZES} | {"scalar": jnp.float32(2.0)}
    grads = [{name: normal(x.shape, t, spread=0.1) for name, x in w.items()} for t in (1, 2)]
    state = make().init(w)
    assert {name for name, x in state.mw.items() if is_blocks(x)} == {"n4096", "n4097"}
    if packed:
        buffers = make().init(jgrad.pack(w)).mw
        assert all(is_blocks(x) for x in jax.tree.leaves(buffers, is_leaf=is_blocks))
    forms = (jgrad.pack(w), [jgrad.pack(g) for g in grads]) if packed else (w, grads)
    found, _ = train(make(), *forms)
    expected, _ = train(in_float32(make)(), w, grads)
    for name, x in jgrad.unpack(found).items():
        own = name in ("n4096", "n4097") or packed
        moved = np.linalg.norm(np.ravel(expected[name] - w[name]))
        off = np.linalg.norm(np.ravel(x - expected[name]))
        assert off <= (0.1 if own else 1e-5) * moved


@pytest.mark.slow
def test_e39_leaves_that_have_no_8_bits():
    """Integers and frozen leaves have no moments, None and keys pass; complex ones keep full precision."""
    w = {"n": jnp.arange(5000), "none": None, "k": jax.random.key(0), "w": jnp.ones(5000)}
    w |= {"z": jnp.ones(5000, jnp.complex64), "frozen": jnp.ones(5000)}
    g = jax.tree.map(lambda x: x, w) | {"n": None, "k": None, "frozen": None}
    tx = jgrad.adam(RATE, moment_dtype="8bit")
    state = tx.init(w)
    updates, new = jax.jit(tx.update)(g, state, w)
    assert is_blocks(state.mw["w"])
    assert state.mw["n"] is None
    assert (state.mw["z"].dtype, state.vw["z"].dtype) == (jnp.complex64, jnp.float32)
    assert_equal((new.mw["frozen"], new.vw["frozen"]), (state.mw["frozen"], state.vw["frozen"]))
    assert not np.any(updates["frozen"])
    exact = jgrad.adam(RATE)
    expected, _ = jax.jit(exact.update)(g, exact.init(w), w)
    np.testing.assert_allclose(updates["z"], expected["z"], rtol=1e-6)


# NorMuon's second moments are no blocks, and of matrices that are rounded elsewhere when packed.
@pytest.mark.slow
@optimizers([name for name in MAKES if packs(name)])
def test_e40_tree_and_packed(make):
    """Codes and scales bit for bit where no norm enters a moment; updates to rounding."""
    w, grads = model(), gradients(4)
    found, state = train(make(), jgrad.pack(w), [jgrad.pack(g) for g in grads])
    expected, other = train(make(), w, grads)
    chex.assert_trees_all_close(jgrad.unpack(found), expected, rtol=2e-6, atol=2e-6)
    if make.func not in (jgrad.lars, jgrad.adafactor):  # sums of a buffer are in another order
        assert_same_moments(state, other)
        return
    codes = [unpacked(x, "codes") for x in (state.mw, other.mw)]
    for a, b in zip(*map(jax.tree.leaves, codes), strict=True):
        assert np.mean(np.asarray(a) != np.asarray(b)) < 1e-3


@pytest.mark.slow(one_in=12)
@optimizers()
def test_e41_what_was_chosen_is_visible(make):
    """`full_precision` as a tree or a function; the state says which leaves are in 8 bits."""
    w = model()
    choices = ({"a": True, "c": False}, lambda p: {n: n == "a" for n in p})
    for choice in choices:
        state = make(full_precision=choice).init(w)
        assert {n: x.dtype for n, x in state.mw.items()} == {"a": "float32", "c": "int8"}
        assert "Blocks(int8[" in str(state)
    _, state = train(make(full_precision=choices[0]), w, gradients(2))
    _, exact = train(in_float32(make)(), w, gradients(2))
    np.testing.assert_allclose(state.mw["a"], exact.mw["a"], rtol=1e-6, atol=1e-7)
    full = make(full_precision=True).init(w)
    assert not moments(full)
    if make.func not in (jgrad.muon, jgrad.soap):  # they refuse packed matrices
        assert not moments(make(full_precision=True).init(jgrad.pack(w)))


@pytest.mark.slow
@packed_or_not
@optimizers([name for name in EACH if packs(name)])
def test_e43_no_slope_through_8_bits(make, packed):
    """`jax.grad` through two steps is an error, and through one that only reads the state is not."""
    w, (g, h) = model(), gradients(2)
    w, g, h = map(jgrad.pack, (w, g, h)) if packed else (w, g, h)
    tx = make()

    def loss(scale):
        own = jax.tree.map(lambda x: scale * x, g)
        _, state = tx.update(own, tx.init(w), w)
        updates, _ = tx.update(h, state, w)
        return sum(jnp.sum(x) for x in jax.tree.leaves(updates))

    message = (
        "jgrad: no derivative goes through moments stored in 8 bits; differentiate a recipe "
        "without `moment_dtype='8bit'`, or apply `jax.lax.stop_gradient` to what is stored."
    )
    assert_error(TypeError, message, lambda: jax.grad(loss)(1.0))


# ---- what is said --------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["4bit", jnp.int8, "uint8", jnp.float16, 8])
@pytest.mark.parametrize("name", EACH)
def test_e41_other_forms(name, given):
    function = MAKES[name].func.__name__
    assert_error(
        TypeError,
        f"{function}: `moment_dtype`: {given!r}, expected a real floating dtype with the range of "
        "float32, or '8bit'.",
        lambda: MAKES[name](moment_dtype=given),
    )


@packed_or_not
def test_e39_float64(x64, packed):
    """An error that names the largest leaf of a buffer; kept by `full_precision`, in float64."""
    w = {"layer": {"w": jnp.ones((64, 64), jnp.float64), "b": jnp.ones(3, jnp.float64)}}
    form = jgrad.pack(w) if packed else w
    message = (
        "adam: `params` at ['layer']['w']: dtype float64, expected at most float32 "
        "beside 8 bits; keep it by `full_precision`."
    )
    make = functools.partial(jgrad.adam, RATE, moment_dtype="8bit")
    assert_error(TypeError, message, lambda: make().init(form))
    state = make(full_precision=True).init(form)
    assert {x.dtype for x in jax.tree.leaves((state.mw, state.vw))} == {jnp.dtype("float64")}


def test_no_large_leaf_is_said_once(caplog):
    """In the log, where nothing is an error; not for a user who keeps every leaf in float32."""
    forms._seen.clear()
    small, large = {"w": jnp.ones((32, 64)), "n": jnp.arange(9000), "x": None}, jnp.ones((64, 64))
    for tx, w in (
        (jgrad.adam(0.1), small),
        (jgrad.adam(0.1, moment_dtype="8bit"), small | {"v": large}),
        (jgrad.adam(0.1, moment_dtype="8bit"), {"n": small["n"]}),
        (jgrad.adam(0.1, moment_dtype="8bit", full_precision=True), small),
        (jgrad.adam(0.1, moment_dtype="8bit"), jgrad.pack({"w": small["w"], "v": large})),
    ):
        tx.init(w)
    assert not caplog.records
    tx = jgrad.accumulate(jgrad.lamb(0.1, moment_dtype="8bit"), 2)
    for init in (jax.jit(tx.init), tx.init):
        init(small)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("jgrad", "WARNING")
    assert record.getMessage() == (
        "lamb: `moment_dtype='8bit'` has no effect on these leaves: moments are in 8 bits from "
        "4096 elements of a leaf on, and the largest of these has 2048. Said once for these shapes."
    )
    tx.init({"w": jnp.ones((16, 128))})  # another model, of as many elements
    assert len(caplog.records) == 2


def test_updates_that_float8_weights_lose_are_said_once(caplog):
    """Below a quarter of its epsilon nothing moves; with `master_weights` there is nothing to say."""
    forms._seen.clear()
    w = {"w": jnp.ones(8, jnp.float8_e4m3fn), "b": jnp.ones(3)}
    sgd, grads = jgrad.gradient_descent(0.03), [w] * 10
    kept, _ = train(jgrad.master_weights(sgd), w, grads)
    assert np.all(np.float32(kept["w"]) == 0.6875)  # nearest to 0.7
    assert not caplog.records
    lost, _ = train(sgd, w, grads)
    assert np.all(np.float32(lost["w"]) == 1)
    sgd.init(w)
    (record,) = caplog.records
    assert record.getMessage() == (
        "gradient_descent: `params` in float8_e4m3fn: updates below 0.03125 times a weight are lost to rounding; put "
        "`master_weights` around `gradient_descent`. Said once for these shapes."
    )


def test_a_share_of_a_model_is_no_small_model(caplog):
    """A step in the backward pass begins states of its own, of layers and of what is in no stack."""
    forms._seen.clear()
    params = {"layers": {"w": jnp.ones((2, 64, 64))}, "head": jnp.ones((64, 3))}
    tx = jgrad.adam(0.1, moment_dtype="8bit")

    def loss(params, x):
        x = jgrad.scan_layers(lambda layer, x: x @ layer["w"], params["layers"], x)
        return jnp.mean(x @ params["head"])

    state, step = tx.init(params), jgrad.step_in_backward(tx, loss)
    for is_forced in (True, False):
        with forced(is_forced):
            jax.eval_shape(step, params, state, jnp.ones((2, 64)))
    assert not caplog.records
