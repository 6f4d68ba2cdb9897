"""`moment_dtype="8bit"` in transformations: the edges E30 to E43, each test named by its number."""

import functools
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from jgrad._quantized import leaves
from jgrad._quantized.leaves import Geometry
from jgrad._quantized.random_bits import step_keys
from jgrad._trees.blocks import is_blocks
from tests.errors import assert_error
from tests.loops import assert_equal, step_of, train

RATE = 0.05
slow = pytest.mark.slow
MAKES = {
    "adam": functools.partial(jgrad.adam, RATE),
    "adamw": functools.partial(jgrad.adam, RATE, weight_decay=0.1),
    "lamb": functools.partial(jgrad.lamb, RATE, weight_decay=0.1),
    "lars": functools.partial(jgrad.lars, RATE, weight_decay=0.1),
    "momentum": functools.partial(jgrad.gradient_descent, RATE, momentum=0.9),
    "nesterov": functools.partial(jgrad.gradient_descent, RATE, momentum=0.9, nesterov=True),
    "scale_by_adam": jgrad.scale_by_adam,
}
ELEMENTWISE = ("adam", "momentum", "scale_by_adam")
FEW = ("adam", "lamb")
CONSTANT_FREE = functools.partial(jgrad.adam, RATE, epsilon=0.0, moment_dtype="8bit")


def optimizers(names=MAKES, quick=("adam",)):
    """The transformations in 8 bits, those that are not quick marked slow; other options follow."""
    makes = [
        pytest.param(
            functools.partial(MAKES[name], moment_dtype="8bit"),
            id=name,
            marks=() if name in quick else slow,
        )
        for name in names
    ]
    return pytest.mark.parametrize("make", makes)


def in_float32(make):
    """The same factory without `moment_dtype`."""
    options = {name: x for name, x in make.keywords.items() if name != "moment_dtype"}
    return functools.partial(make.func, *make.args, **options)


FORMS = {"tree": False, "packed": True}
packed_or_not = pytest.mark.parametrize("packed", FORMS.values(), ids=FORMS)


def mostly(quick):
    """On a tree and packed, of which one is slow."""
    rows = [pytest.param(x, id=n, marks=() if n == quick else slow) for n, x in FORMS.items()]
    return pytest.mark.parametrize("packed", rows)


def normal(shape, seed=0, *, spread=1.0):
    """Numbers whose sizes differ by a factor of about `e**spread`."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(
        rng.normal(size=shape) * np.exp(spread * rng.normal(size=shape)), jnp.float32
    )


def model(seed=0):
    """A leaf of whole blocks, and one whose last block is shorter."""
    shapes = {"a": (16, 512), "c": (70, 90)}
    return {name: normal(shape, seed + i) for i, (name, shape) in enumerate(shapes.items())}


def gradients(count, seed=10):
    return [model(seed + 5 * t) for t in range(count)]


def moments(state):
    """Every array in 8 bits of a state."""
    return [x for x in jax.tree.leaves(state, is_leaf=is_blocks) if is_blocks(x)]


def value(x):
    """The numbers of a moment, in whichever form."""
    return np.asarray(jax.jit(leaves.decoded)(x) if is_blocks(x) else x)


def per_element(x, part):
    """Codes or scales of a moment for each element, as float32."""
    if part == "codes":
        return x.codes.astype(jnp.float32)
    shape = x.codes.shape
    return jnp.broadcast_to(leaves.geometry(x).per_element(x.scale), shape)


def unpacked(moment, part):
    """The same of a moment that may be packed, on the tree."""
    return jgrad.unpack(jax.tree.map(lambda x: per_element(x, part), moment, is_leaf=is_blocks))


def assert_same_moments(a, b):
    """Codes and scales of two states bit for bit, packed or not."""
    for x, y in ((a.mw, b.mw), (a.vw, b.vw)):
        for part in ("codes", "scale"):
            chex.assert_trees_all_equal(unpacked(x, part), unpacked(y, part))


# ---- at every scale ----------------------------------------------------------------------------


@mostly("tree")
@optimizers(ELEMENTWISE)
def test_e30_blocks_of_zeros(make, packed):
    """Scale 0 and codes 0; what never had a gradient does not move; a first one of 1e-15 is kept."""
    options = {"epsilon": 0.0} if "adam" in make.func.__name__ else {}
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


@pytest.mark.parametrize("outlier", [-1e20, *(pytest.param(x, marks=slow) for x in (1e8, 1e20))])
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


def test_e32_a_second_moment_above_zero_is_never_zero():
    """Gradients over 15 decades in each block: steps at most twice the longest of float32."""
    w = {"w": jnp.zeros(8192)}
    rng = np.random.default_rng(0)
    sizes = jnp.asarray(10 ** rng.uniform(-12, 3, 8192), jnp.float32).at[::7].set(0)
    rows = normal((400, 8192), 1, spread=0) * sizes[None]

    def run(tx):
        def body(state, g):
            updates, state = tx.update({"w": g}, state, w)
            return state, updates["w"]

        return jax.jit(lambda: jax.lax.scan(body, tx.init(w), rows))()

    state, steps = run(CONSTANT_FREE())
    exact, expected = run(jgrad.adam(RATE, epsilon=0.0))
    v = np.asarray(exact.vw["w"])
    np.testing.assert_array_equal(np.asarray(state.vw["w"].codes) == 0, v == 0)
    assert np.max(np.abs(steps)) <= 2 * np.max(np.abs(expected))
    never = np.asarray(sizes) == 0
    assert not np.any(np.asarray(state.mw["w"].codes)[never])
    assert not np.any(np.asarray(steps)[:, never])


@pytest.mark.parametrize("exponent", [-46, *(pytest.param(x, marks=slow) for x in (-27, 33))])
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


@pytest.mark.parametrize(
    "size", [1e-19, 3e38, *(pytest.param(x, marks=slow) for x in (1e-23, 1e-38, 1e-42))]
)
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


@pytest.mark.parametrize(
    ("beta2", "steps"), [(0.9999, 2000), pytest.param(0.999999, 2000, marks=slow)]
)
def test_e35_large_betas(beta2, steps):
    """v follows in the mean, from gradients that rise and fall; each weight within 35%."""
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


@mostly("packed")
def test_e35_betas_of_zero(packed):
    """m = g and v = g^2, to a neighbour on the grid."""
    w, (g,) = model(), gradients(1)
    tx = jgrad.adam(RATE, beta1=0.0, beta2=0.0, epsilon=0.0, moment_dtype="8bit")
    exact = jgrad.adam(RATE, beta1=0.0, beta2=0.0, epsilon=0.0)
    forms = (jgrad.pack(w), jgrad.pack(g)) if packed else (w, g)
    found, state = train(tx, forms[0], [forms[1]] * 2)
    expected, _ = train(exact, w, [g] * 2)
    chex.assert_trees_all_close(jgrad.unpack(found), expected, rtol=1e-6)
    mw, vw = (jgrad.unpack(jax.tree.map(value, x, is_leaf=is_blocks)) for x in (state.mw, state.vw))
    for name in w:
        g0 = np.asarray(g[name])
        floor = 2**-13 * np.max(np.abs(g0))
        np.testing.assert_allclose(mw[name], g0, rtol=1 / 8, atol=floor)
        np.testing.assert_allclose(vw[name], g0**2, rtol=1 / 8, atol=2**-29 * np.max(g0**2))


def test_e36_no_gradient_beside_a_busy_neighbour():
    """For 10,000 steps: v decays as beta2^t in the mean, down to the floor."""
    start, steps = 50, 10_000
    busy = np.arange(256) % 2 == 0
    rows = np.ones((start + steps, 256), np.float32)
    rows[start:, ~busy] = 0
    v = _second_moments(0.999, jnp.asarray(rows))
    idle, expected = v[:, ~busy], (1 - 0.999**start) * 0.999**steps
    assert abs(idle.mean() / expected - 1) < 4 * idle.std() / idle.mean() / np.sqrt(idle.size)
    assert idle.min() < expected < idle.max()
    np.testing.assert_allclose(v[:, busy].mean(), 1 - 0.999 ** (start + steps), rtol=0.02)


def _stored(rule, old, steps, *, stochastic):
    """A moment after steps of a rule of one array, rounded as transformations do, or to the nearest."""
    own = Geometry.of_leaf(old.shape)
    keys = leaves.ElementKeys(np.array([1, 2], np.uint32), np.zeros((), np.uint32))

    @jax.jit
    def run(old):
        def body(moment, step):
            rounding = leaves.Rounding(step_keys(step), keys) if stochastic else None
            return leaves.encoded(rule, [moment], own, moment.codes.dtype, rounding), None

        return jax.lax.scan(body, old, jnp.arange(steps))[0]

    return value(run(old)).astype(float)


def test_e36_to_the_nearest_nothing_decays():
    """What rounding to the nearest does, and why this library does not: v stays, for ever."""
    start = leaves.encoded(lambda x: x, [jnp.ones(4096)], Geometry.of_leaf((4096,)), jnp.uint8)
    keep = lambda x: 0.999 * leaves.decoded(x)
    np.testing.assert_array_equal(_stored(keep, start, 2000, stochastic=False), 1.0)
    found = _stored(keep, start, 2000, stochastic=True)
    assert abs(found.mean() / 0.999**2000 - 1) < 0.1


@pytest.mark.parametrize(("beta", "low", "high"), [(0.9, 0.6, 0.82), (0.99, 0.05, 0.3)])
def test_e35_first_moments_reach_a_constant_gradient(beta, low, high):
    """In the mean, from 0 and whatever their size; to the nearest they stick below it."""
    g = jnp.asarray(np.linspace(1, 2, 4096), jnp.float32)
    rule = lambda x: beta * leaves.decoded(x) + (1 - beta) * g.reshape(x.codes.shape)
    start = leaves.zeros(jnp.zeros(4096), (), second=False)
    exact = np.asarray(g, float) * (1 - beta**1000)
    found = _stored(rule, start, 1000, stochastic=True) / exact
    assert abs(found.mean() - 1) < 4 * found.std() / 64 + 1e-3
    stuck = _stored(rule, start, 1000, stochastic=False) / exact
    assert low < stuck.min() < stuck.max() < high


# ---- what is not finite ------------------------------------------------------------------------


@mostly("tree")
@optimizers(ELEMENTWISE)
@pytest.mark.parametrize("bad", [jnp.nan, pytest.param(-jnp.inf, marks=slow)])
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


@mostly("tree")
@optimizers(FEW)
def test_e38_leaves_of_every_size(make, packed):
    """From 4096 elements on in 8 bits, of size 0 and 0-d as ever; the weights near float32's."""
    w = {f"n{n}": normal((n,), n) for n in SIZES} | {"scalar": jnp.float32(2.0)}
    grads = [{name: normal(x.shape, t, spread=0.1) for name, x in w.items()} for t in (1, 2)]
    state = make().init(w)
    assert {name for name, x in state.mw.items() if is_blocks(x)} == {"n4096", "n4097"}
    if packed:
        assert all(
            map(is_blocks, jax.tree.leaves(make().init(jgrad.pack(w)).mw, is_leaf=is_blocks))
        )
    forms = (jgrad.pack(w), [jgrad.pack(g) for g in grads]) if packed else (w, grads)
    found, _ = train(make(), *forms)
    expected, _ = train(in_float32(make)(), w, grads)
    for name, x in jgrad.unpack(found).items():
        own = name in ("n4096", "n4097") or packed
        moved = np.linalg.norm(np.ravel(expected[name] - w[name]))
        off = np.linalg.norm(np.ravel(x - expected[name]))
        assert off <= (0.1 if own else 1e-5) * moved


@pytest.mark.parametrize(
    ("axis", "packed"),
    [(1, False), *(pytest.param(*x, marks=slow) for x in ((0, False), (0, True), (1, True)))],
)
def test_e38_layers_share_no_block(axis, packed):
    """A gradient of 1e10 in one layer changes no code of another; 1000 elements are 4 blocks each."""
    make = functools.partial(jgrad.lamb, RATE, layer_axes=axis, moment_dtype="8bit")
    shape = (5, 1000) if axis == 0 else (1000, 5)
    w, g = {"s": jnp.ones(shape)}, {"s": normal(shape)}
    large = {"s": g["s"].at[(2, 999) if axis == 0 else (999, 2)].set(1e10)}
    if packed:
        pack = functools.partial(jgrad.pack, layer_axes={"s": axis})
        w, g, large = pack(w), pack(g), pack(large)
    (_, usual), (_, state) = (train(make(), w, [g, x, g]) for x in (g, large))
    other = np.arange(5) != 2
    for x, y in ((usual.mw, state.mw), (usual.vw, state.vw)):
        for part in ("codes", "scale"):
            a, b = (np.moveaxis(unpacked(t, part)["s"], axis, 0) for t in (x, y))
            np.testing.assert_array_equal(a[other], b[other])
            assert not np.array_equal(a[2], b[2])


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


@optimizers(("adam", "adamw", "lamb", "lars", "momentum", "nesterov"), ("lamb", "momentum"))
def test_e40_tree_and_packed(make):
    """Codes and scales bit for bit where no norm enters a moment; updates to rounding."""
    w, grads = model(), gradients(4)
    found, state = train(make(), jgrad.pack(w), [jgrad.pack(g) for g in grads])
    expected, other = train(make(), w, grads)
    chex.assert_trees_all_close(jgrad.unpack(found), expected, rtol=2e-6, atol=2e-6)
    if make.func is not jgrad.lars:  # a sum of squares of a buffer is in another order
        assert_same_moments(state, other)
        return
    codes = [unpacked(x, "codes") for x in (state.mw, other.mw)]
    for a, b in zip(*map(jax.tree.leaves, codes), strict=True):
        assert np.mean(np.asarray(a) != np.asarray(b)) < 1e-3


@optimizers(FEW)
def test_e40_pack_small_and_resumed(make):
    """Large leaves beside packed small ones; a state that was saved goes on bit for bit."""
    w = model() | {f"s{i}": normal((10,), i) for i in range(4)}
    grads = [
        g | {f"s{i}": normal((10,), 7 * i + t) for i in range(4)}
        for t, g in enumerate(gradients(4))
    ]
    expected, state = train(make(), w, grads)
    found, inner = train(jgrad.pack_small(make()), w, grads)
    chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=1e-7)
    inner = getattr(inner, "inner", inner)
    half, middle = train(make(), w, grads[:2])
    restored = jax.tree.map(jnp.asarray, pickle.loads(pickle.dumps(jax.device_get(middle))))
    for g in grads[2:]:
        half, restored = jax.jit(step_of(make()))(half, restored, g)
    assert_equal((half, restored), (expected, state))


@optimizers(("adam", "lamb", "momentum"))
def test_e41_what_was_chosen_is_visible(make):
    """`full_precision` as a tree or a function; the state says which leaves are in 8 bits."""
    w = model()
    choices = ({"a": True, "c": False}, lambda p: {n: n == "a" for n in p})
    for choice in choices:
        state = make(full_precision=choice).init(w)
        assert {n: x.dtype for n, x in state.mw.items()} == {
            "a": "float32",
            "c": "int8",
        }
        assert "Blocks(codes" in str(state)
    _, state = train(make(full_precision=choices[0]), w, gradients(2))
    _, exact = train(in_float32(make)(), w, gradients(2))
    np.testing.assert_allclose(state.mw["a"], exact.mw["a"], rtol=1e-6, atol=1e-7)
    full = make(full_precision=True).init(w)
    assert not moments(full)
    assert not moments(make(full_precision=True).init(jgrad.pack(w)))


# ---- under transformations of JAX and of optax ---------------------------------------------------


@optimizers(FEW)
def test_e42_vmap(make):
    """Three models at once: each has the codes that it has alone."""
    large = lambda tree: {"c": tree["c"]}
    models = [large(model(t)) for t in range(3)]
    grads = [[large(g) for g in gradients(2, 10 + t)] for t in range(3)]
    tx = make()
    alone = [train(tx, w, g) for w, g in zip(models, grads, strict=True)]
    stack = lambda *xs: jax.tree.map(lambda *x: jnp.stack(x), *xs)
    w = stack(*models)
    state = jax.vmap(tx.init)(w)
    step = jax.jit(jax.vmap(step_of(tx)))
    for t in range(2):
        w, state = step(w, state, stack(*(g[t] for g in grads)))
    for i, (own, expected) in enumerate(alone):
        got, found = jax.tree.map(lambda x, i=i: x[i], (w, state))
        chex.assert_trees_all_close(got, own, rtol=1e-6, atol=1e-6)
        assert_same_moments(found, expected)


@optimizers(FEW)
def test_e42_scan(make):
    """As a loop of steps; the form of the state does not change."""
    w, grads, tx = model(), gradients(4), make()
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)
    body = lambda carry, g: (step_of(tx)(*carry, g), None)
    (found, state), _ = jax.jit(lambda: jax.lax.scan(body, (w, tx.init(w)), stacked))()
    expected, other = train(tx, w, grads)
    chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=1e-6)
    assert_same_moments(state, other)


@packed_or_not
@optimizers()
def test_e42_donation(make, packed):
    """The memory of codes and scales is used again: donated arrays are gone, with no warning."""
    w, (g,) = model(), gradients(1)
    w, g = (jgrad.pack(w), jgrad.pack(g)) if packed else (w, g)
    tx = make()
    state = tx.init(w)
    lowered = jax.jit(tx.update, donate_argnums=1).lower(g, state, w)
    compiled = lowered.compile()
    held = sum(x.nbytes for x in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes == held
    _, new = compiled(g, state, w)
    jax.block_until_ready(new)
    assert all(x.is_deleted() for pair in moments(state) for x in pair)


@optimizers(FEW)
def test_e42_accumulate(make):
    """Mini-steps with `emit=False` leave codes alone; the window is a step with the mean."""
    w, grads = model(), gradients(2)
    tx = jgrad.accumulate(make(), 2)
    state = tx.init(w)
    _, state = jax.jit(lambda g, s: tx.update(g, s, w, emit=False))(grads[0], state)
    assert_equal(state.inner, make().init(w))
    updates, state = jax.jit(lambda g, s: tx.update(g, s, w, emit=True))(grads[1], state)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *grads)
    expected, inner = jax.jit(make().update)(mean, make().init(w), w)
    chex.assert_trees_all_close(updates, expected, rtol=1e-5, atol=1e-6)
    for x, y in zip(moments(state.inner), moments(inner), strict=True):
        np.testing.assert_array_equal(x.scale, y.scale)
        assert np.mean(np.asarray(x.codes) != np.asarray(y.codes)) < 1e-3


def test_e42_inject_hyperparams():
    """optax's wrapper gives the rate as an array."""
    w, grads = model(), gradients(3)
    make = functools.partial(jgrad.adam, moment_dtype="8bit")
    others = ("moment_dtype", "beta1", "beta2", "epsilon", "weight_decay")
    wrapped = optax.inject_hyperparams(make, static_args=others)(learning_rate=RATE)
    found, state = train(wrapped, w, grads)
    expected, inner = train(make(RATE), w, grads)
    chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=1e-7)
    assert_same_moments(state.inner_state, inner)


@mostly("packed")
@optimizers()
def test_e42_strict_promotion(make, packed):
    """The suite's own setting, and each of JAX's: the same bits."""
    w, grads = model(), gradients(2)
    w, grads = (jgrad.pack(w), [jgrad.pack(g) for g in grads]) if packed else (w, grads)
    assert jax.config.jax_numpy_dtype_promotion == "strict"
    assert jax.config.jax_numpy_rank_promotion == "raise"
    strict = train(make(), w, grads)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        chex.assert_trees_all_equal(train(make(), w, grads), strict)


# ---- slopes ------------------------------------------------------------------------------------


@mostly("tree")
@optimizers()
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


@optimizers(("adam", "lamb"))
def test_e43_slopes_through_bfloat16_are_those_of_float32(make):
    """As if nothing were rounded: within some units in the last place of bfloat16."""
    w, (g, h) = {"w": normal((300,))}, [{"w": normal((300,), t)} for t in (1, 2)]

    def slope(tx):
        def loss(scale):
            _, state = tx.update({"w": scale * g["w"]}, tx.init(w), w)
            updates, _ = tx.update(h, state, w)
            return jnp.sum(updates["w"] * w["w"])

        return float(jax.grad(loss)(jnp.float32(1.0)))

    exact = in_float32(make)()
    rounded = functools.partial(in_float32(make), moment_dtype=jnp.bfloat16)()
    expected = slope(exact)
    assert abs(expected) > 1e-4
    np.testing.assert_allclose(slope(rounded), expected, rtol=0.05)


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["4bit", jnp.int8, "uint8", jnp.float16, 8])
@pytest.mark.parametrize("name", ["adam", "lamb", "lars", "momentum", "scale_by_adam"])
def test_e41_other_forms(name, given):
    function = MAKES[name].func.__name__ if name != "scale_by_adam" else name
    assert_error(
        TypeError,
        f"{function}: `moment_dtype`: {given!r}, expected a real floating dtype with the range of "
        "float32, or '8bit'.",
        lambda: MAKES[name](moment_dtype=given),
    )


def adam8(**options):
    return jgrad.adam(RATE, moment_dtype="8bit", **options)


W = {"layer": {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}}


def changed(state, field, **parts):
    """A state with other codes or scales of `w`."""
    moment = getattr(state, field)["layer"]
    blocks = moment["w"]._replace(**parts)
    return state._replace(**{field: {"layer": moment | {"w": blocks}}})


def test_e41_full_precision_without_8_bits():
    assert_error(
        ValueError,
        "adam: `full_precision`: True of type bool, expected None without `moment_dtype='8bit'`.",
        lambda: jgrad.adam(RATE, full_precision=True),
    )


def test_e41_full_precision_on_a_part_of_a_buffer():
    assert_error(
        ValueError,
        "adam: `full_precision` at ['layer']['b']: True, expected the same for all leaves of its "
        "buffer, since they share an array; leave it unpacked.",
        lambda: adam8(full_precision={"layer": {"w": False, "b": True}}).init(jgrad.pack(W)),
    )


@packed_or_not
def test_e39_float64(x64, packed):
    """An error that names the largest leaf of a buffer; kept by `full_precision`, in float64."""
    w = {"layer": {"w": jnp.ones((64, 64), jnp.float64), "b": jnp.ones(3, jnp.float64)}}
    form = jgrad.pack(w) if packed else w
    assert_error(
        TypeError,
        "adam: `params` at ['layer']['w']: dtype float64, expected at most float32 "
        "beside 8 bits; keep it by `full_precision`.",
        lambda: adam8().init(form),
    )
    state = adam8(full_precision=True).init(form)
    assert {x.dtype for x in jax.tree.leaves((state.mw, state.vw))} == {jnp.dtype("float64")}


def test_e41_states_of_another_recipe():
    """Of float32 in one of 8 bits, and the reverse."""
    tx, plain = adam8(), jgrad.adam(RATE)
    assert_error(
        TypeError,
        "adam: `state.mw` at ['layer']['w']: an array of float32 and shape (64, 64), expected Blocks, "
        "8 bits; make them by `quantized(state, like=jax.eval_shape(tx.init, params))`.",
        lambda: tx.update(W, plain.init(W), W),
    )
    assert_error(
        TypeError,
        "adam: `state.mw` at ['layer']['w']: Blocks of shape (64, 64), expected an array; make it one "
        "by `unquantized(state)`.",
        lambda: plain.update(W, tx.init(W), W),
    )
    full = adam8(full_precision={"layer": {"w": True, "b": False}})
    for a, b in ((tx, full), (full, tx)):
        with pytest.raises(TypeError, match=r"`state.mw` at \['layer'\]\['w'\]"):
            a.update(W, b.init(W), W)


@pytest.mark.parametrize(
    ("field", "dtype", "expected"),
    [
        ("mw", "uint8", "int8"),
        ("vw", "int8", "uint8"),
        ("mw", "float32", "int8"),
        ("vw", "float32", "uint8"),
    ],
)
def test_e41_codes_of_another_dtype(field, dtype, expected):
    state = adam8().init(W)
    codes = getattr(state, field)["layer"]["w"].codes.astype(dtype)
    assert_error(
        TypeError,
        f"adam: `state.{field}` at ['layer']['w']: an array of {dtype} and shape (64, 64) as `codes`, "
        f"expected {expected}.",
        lambda: adam8().update(W, changed(state, field, codes=codes), W),
    )


@pytest.mark.parametrize("shape", [(32,), (64, 1), (1,), ()])
def test_e41_scales_of_another_block(shape):
    """128 elements to a block, or 2048, or one scale for each row of 64."""
    state = changed(adam8().init(W), "vw", scale=jnp.zeros(shape))
    assert_error(
        ValueError,
        f"adam: `state.vw` at ['layer']['w']: `scale` of shape {shape}, expected a number for each "
        "block of 256 elements of `codes`, of shape (64, 64).",
        lambda: adam8().update(W, state, W),
    )
