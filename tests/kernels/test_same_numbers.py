"""A step of each form has the codes, the scales and the weights of the plain one, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.support.eight_bits import unquantized
from tests.support.kernels import ADAM, BETAS, FORMS, MOMENTUM, normal, plain, rate, steps
from tests.support.loops import assert_equal

pytestmark = pytest.mark.bits
slow = pytest.mark.slow

# One leaf for a kernel, one of layers, and two that no kernel takes.
SHAPES = {"w": (24, 512), "stack": (2, 9, 256), "odd": (50, 100), "b": (24,)}


def model(dtype=jnp.float32, seed=0, shapes=SHAPES):
    return normal(shapes, seed, dtype)


def gradients(count=3, dtype=jnp.float32, shapes=SHAPES):
    return [jax.tree.map(lambda x: x / 64, model(dtype, t, shapes)) for t in range(1, count + 1)]


def assert_same(tx, form, w, grads, leaves, **options):
    """And so many leaves have the form."""
    found = steps(tx, w, grads, form, **options)
    options.pop("step", None)
    expected = plain(tx, w, grads, **options)
    assert_equal((found.w, found.state), (expected.w, expected.state))
    assert found.leaves == leaves
    return found


# ---- recipes -----------------------------------------------------------------------------------


def clipped(tx):
    return optax.chain(jgrad.clip_by_global_norm(1.0), tx)


MUON = functools.partial(
    jgrad.muon,
    rate,
    matrices={"w": True, "stack": True, "odd": False, "b": False},
    momentum=0.875,
    moment_dtype="8bit",
    adam_learning_rate=rate,
    adam_beta1=0.875,
    adam_beta2=1 - 2.0**-5,
)
RECIPES = {
    "adam": ADAM,
    "adam, two steps in one": lambda: jgrad.average_params(ADAM(), 0.875),
    "step size": functools.partial(ADAM, bias_correction="step_size"),
    "cautious": functools.partial(ADAM, weight_decay_rule="cautious"),
    "independent": functools.partial(ADAM, weight_decay=2.0**-9, weight_decay_rule="independent"),
    "scale_by_adam": lambda: optax.chain(jgrad.scale_by_adam(moment_dtype="8bit", **BETAS), optax.scale(-(2.0**-6))),
    "momentum": MOMENTUM,
    "nesterov": functools.partial(MOMENTUM, nesterov=True),
    "clip": lambda: clipped(ADAM()),
    "skip": lambda: jgrad.skip_nonfinite(clipped(ADAM())),
    "skip with a loss scale": lambda: jgrad.skip_nonfinite(clipped(ADAM()), loss_scale=4.0),
    "accumulate": lambda: jgrad.accumulate(ADAM(), 2),
    "master": lambda: jgrad.master_weights(ADAM()),
    "stochastic": lambda: jgrad.stochastic_rounding(ADAM()),
    "skip, clip, stochastic": lambda: jgrad.skip_nonfinite(clipped(jgrad.stochastic_rounding(ADAM()))),
    "lamb": lambda: jgrad.lamb(rate, weight_decay=0.125, moment_dtype="8bit", **BETAS),
    "lars": lambda: jgrad.lars(rate, momentum=0.875, weight_decay=0.125, moment_dtype="8bit"),
    "muon": MUON,
}  # fmt: skip
IN_BFLOAT16 = ("master", "stochastic", "skip, clip, stochastic")
QUICK = {
    "kernel": ("lamb", "cautious", "accumulate", "skip, clip, stochastic"),
    "two passes": ("adam", "lars", "skip, clip, stochastic"),
}


def recipes(names=RECIPES, quick=QUICK):
    """Each in each form; others than these are slow."""
    rows = [
        pytest.param(name, form, marks=() if name in quick[form] else slow)
        for name in names
        for form in FORMS
    ]
    return pytest.mark.parametrize(("name", "form"), rows)


@pytest.mark.slow
@recipes()
def test_recipes(name, form):
    dtype = jnp.bfloat16 if name in IN_BFLOAT16 else jnp.float32
    assert_same(RECIPES[name](), form, model(dtype), gradients(3, dtype), 2)


RATES = {"w": 2.0**-6, "stack": 2.0**-7, "odd": 2.0**-8, "b": 2.0**-9}
BETAS_BY_PATH = jgrad.by_path({"stack": 0.75}, rest=0.875)
PACKED = {
    "adam": lambda: jgrad.adam(RATES, **(ADAM.keywords | {"beta1": BETAS_BY_PATH})),
    "momentum": lambda: jgrad.gradient_descent(RATES, **MOMENTUM.keywords),
    "lamb": RECIPES["lamb"],
    "lars": RECIPES["lars"],
    "accumulate": RECIPES["accumulate"],
    "skip, clip, stochastic": RECIPES["skip, clip, stochastic"],
}


@pytest.mark.slow(one_in=2)
@recipes(PACKED, {"kernel": ("adam",), "two passes": ("skip, clip, stochastic",)})
def test_packed(name, form):
    """One leaf, whose rows have keys, decays and rates of their own."""
    dtype = jnp.bfloat16 if name in IN_BFLOAT16 else jnp.float32
    grads = [jgrad.pack(g) for g in gradients(3, dtype)]
    found = assert_same(PACKED[name](), form, jgrad.pack(model(dtype)), grads, 1)
    on_tree = plain(PACKED[name](), model(dtype), gradients(3, dtype))
    if name in ("adam", "momentum", "accumulate"):
        large = lambda w: (w["w"], w["stack"])  # others are not in 8 bits by themselves
        assert_equal(large(jgrad.unpack(found.w)), large(on_tree.w))


# ---- numbers -----------------------------------------------------------------------------------

NUMBERS = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-30, -1e-30, 1e30, 3e38, 1e-44)


def odd_gradients(dtype=jnp.float32):
    """Each of these numbers in a block of its own; then a row of nothing else."""
    steps = gradients(3, dtype)
    for i, x in enumerate(NUMBERS):
        steps[1]["w"] = steps[1]["w"].at[i, 3 * i].set(x)
        steps[1]["w"] = steps[1]["w"].at[i + len(NUMBERS)].set(x)
        steps[2]["stack"] = steps[2]["stack"].at[1].set(0.0)
    return steps


@pytest.mark.slow
@recipes(
    ("adam", "momentum", "lars", "clip", "stochastic"),
    {"kernel": ("adam",), "two passes": ("momentum",)},
)
def test_numbers_of_all_sizes(name, form):
    """NaN, infinities, zeros, what overflows and what is subnormal."""
    dtype = jnp.bfloat16 if name in IN_BFLOAT16 else jnp.float32
    found = assert_same(RECIPES[name](), form, model(dtype), odd_gradients(dtype), 2)
    assert not np.all(np.isfinite(np.asarray(found.w["w"], np.float32)))


@recipes(
    ("skip", "skip with a loss scale", "skip, clip, stochastic"),
    {"kernel": ("skip with a loss scale", "skip, clip, stochastic"), "two passes": ("skip",)},
)
def test_a_skipped_step(name, form):
    """Codes, scales and weights stay, and the next step is as if it had not been."""
    dtype = jnp.bfloat16 if name in IN_BFLOAT16 else jnp.float32
    good = gradients(2, dtype)
    bad = odd_gradients(dtype)[1]
    found = assert_same(RECIPES[name](), form, model(dtype), [good[0], bad], 2)
    before = plain(RECIPES[name](), model(dtype), good[:1])
    moments = [unquantized(optax.tree.get(x.state, "mw")) for x in (found, before)]
    assert_equal((found.w, moments[0]), (before.w, moments[1]))
    assert int(found.state.skipped) == 1


def test_a_skipped_step_of_weights_that_are_not_their_copies():
    """As after a user has changed them: they stay, too."""
    tx, w = jgrad.skip_nonfinite(jgrad.master_weights(ADAM())), model(jnp.bfloat16)
    changed = jax.tree.map(lambda x: 2 * x, w)
    bad = odd_gradients(jnp.bfloat16)[1]
    found = assert_same(tx, "kernel", changed, [bad], 2, state=tx.init(w))
    assert_equal(found.w, changed)


@pytest.mark.slow(always=["momentum-kernel"])
@recipes(
    ("adam", "momentum", "accumulate", "skip, clip, stochastic"),
    {"kernel": ("momentum",), "two passes": ()},
)
def test_x64(name, form, x64):
    dtype = jnp.bfloat16 if name in IN_BFLOAT16 else jnp.float32
    assert_same(RECIPES[name](), form, model(dtype), gradients(2, dtype), 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=slow)])
@pytest.mark.parametrize("form", [FORMS[0], pytest.param(FORMS[1], marks=slow)])
def test_gradients_of_another_dtype(form, dtype):
    """Weights in float32, gradients in half precision; a kernel has no float16."""
    assert_same(MOMENTUM(), form, model(), gradients(2, dtype), 2)


# ---- leaves ------------------------------------------------------------------------------------

ROWS = {n: (n, 256 * -(-16 // n)) for n in (1, 7, 8, 127, 128, 129, 300, 1024, 1025, 2100)}
COLUMNS = {n: (8, n) for n in (512, 2048, 2304)}
STACKED = {"3-D": (3, 7, 256), "4-D": (2, 3, 5, 256), "with ones": (1, 20, 1, 256)}


GROUPS = {f"{n} rows": ROWS[n] for n in ROWS} | {f"{n} columns": COLUMNS[n] for n in COLUMNS}
GROUPS |= STACKED | {"both": (1025, 2304)}
QUICK_SIZES = ("both", "4-D")


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK_SIZES else slow) for x in GROUPS]
)
def test_sizes(name):
    """Leaves of less than a tile, of several steps of the grid, and of parts of these."""
    shapes = {"first": (3,), "w": GROUPS[name]}
    assert_same(MOMENTUM(), "kernel", model(shapes=shapes), gradients(2, shapes=shapes), 1)
