"""Methods as a user writes them: AdaMax beside its paper, and Lion beside `jgrad.lion`, bit for bit.

Loops, meshes, `vmap` and x64 are in `everywhere/test_surroundings.py`, which takes AdaMax from here.
"""

import functools
import gc
import inspect
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import jgrad
from tests.backward import models
from tests.cases import MASK, RATE, gradients, params
from tests.multi_device.meshes import mesh_of, place, specs_of
from tests.support import kernels, messages
from tests.support.errors import assert_error
from tests.support.loops import assert_equal, step_of, train
from tests.support.private import forced
from tests.wrappers.test_every_wrapper import WRAPPERS, as_well

STEPS = 5
FORMS = {"float32": {}, "bf16": {"moment_dtype": jnp.bfloat16}, "8bit": {"moment_dtype": "8bit"}}
BETAS = {"beta1": 0.875, "beta2": 1 - 2.0**-5}  # exact, so that each CPU has the same products


@jgrad.optimizer_of_leaf
def adamax(g, mw, vw, *, beta1=0.9, beta2=0.999, epsilon=1e-8):
    mw = beta1.value * mw + beta1.complement * g
    vw = jnp.maximum(beta2.value * vw, jnp.abs(g))
    return mw / beta1.correction / (vw + epsilon), mw, vw


def lion_of_leaf(g, mw, *, beta1=0.9, beta2=0.99):
    """Lion."""
    x = beta1.value * mw + beta1.complement * g
    sign = jnp.where(x > 0, 1.0, jnp.where(x < 0, -1.0, 0.0))
    return sign.astype(x.dtype), beta2.value * mw + beta2.complement * g


own_lion = jgrad.optimizer_of_leaf(lion_of_leaf)
trusted = jgrad.optimizer_of_leaf(lion_of_leaf, stays_finite=True)


@jgrad.optimizer_of_leaf
def descent(g):
    return g


@jgrad.optimizer_of_leaf
def decaying(g, *, strength, step):
    return g * strength / step


def expected(w, grads, rates, beta1=0.9, beta2=0.999, decays=0.0):
    """AdaMax in float64, from section 7.1 of its paper, with epsilon and decoupled decay."""
    w = np.asarray(w, np.float64)
    m, u = np.zeros_like(w), np.zeros_like(w)
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        g = np.asarray(g, np.float64)
        m = beta1 * m + (1 - beta1) * g
        u = np.maximum(beta2 * u, np.abs(g))
        w = w - rate * (m / (1 - beta1**t) / (u + 1e-8) + decays * w)
    return w


def assert_is(found, grads, rates, rtol, betas=0.9, decays=0.0):
    """Each leaf as the reference has it; options are of all leaves, or trees of them."""
    spread = lambda x: jax.tree.leaves(
        jax.tree.map(lambda _: x, params()) if np.ndim(x) == 0 else x
    )
    columns = map(jax.tree.leaves, (found, params(), *grads))
    for i, (new, old, *of_leaf) in enumerate(zip(*columns, strict=True)):
        options = {"beta1": spread(betas)[i], "decays": spread(decays)[i]}
        right = expected(old, of_leaf, rates, **options)
        np.testing.assert_allclose(np.asarray(new, np.float64), right, rtol=rtol, atol=rtol)


@pytest.mark.slow(always=["tree"])
@pytest.mark.parametrize("pack", [lambda x: x, jgrad.pack], ids=["tree", "packed"])
def test_adamax(pack):
    """With numbers of each leaf, a schedule, decay and its mask."""
    grads = gradients(STEPS)
    betas = jax.tree.map(lambda x: 0.9 if x.ndim == 1 else 0.5, params())
    rate = lambda done: RATE / (1 + done.astype(jnp.float32))
    tx = adamax(rate, beta1=betas, weight_decay=0.1, weight_decay_mask=MASK)
    w, state = train(tx, pack(params()), list(map(pack, grads)))
    rates = [RATE / (1 + t) for t in range(STEPS)]
    decays = jax.tree.map(lambda used: 0.1 * used, MASK)
    assert_is(jgrad.unpack(w), grads, rates, 2e-6, betas, decays)
    assert isinstance(state, jgrad.OptState)
    assert int(state.step) == STEPS


@pytest.mark.slow
def test_adamax_in_double_precision(x64):
    """Of weights in float64, and with float32 ones Python's numbers change no dtype."""
    grads = gradients(STEPS, jnp.float64)
    w = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params())
    found, _ = train(adamax(RATE), w, grads)
    assert_is(found, grads, [RATE] * STEPS, 1e-13)
    single = jax.tree.map(lambda x: x.astype(jnp.float32), (w, grads))
    w, state = train(adamax(RATE), *single)
    assert {x.dtype for x in jax.tree.leaves((w, state.mw, state.vw))} == {np.dtype(np.float32)}


def test_numbers_of_one_call():
    """By any name that the method has, and by the number of the update."""
    w, g = params(), gradients(1)[0]
    tx = decaying(1.0, strength=2.0)
    state = tx.init(w)._replace(step=jnp.asarray(3, jnp.int32))  # the fourth update comes
    for factor, numbers in (0.5, {}), (1.25, {"strength": 5.0}), (0.25, {"learning_rate": 0.5}):
        updates, _ = jax.jit(tx.update)(g, state, w, **numbers)
        jax.tree.map(lambda u, g, x=factor: np.testing.assert_allclose(u, -x * g, 1e-6), updates, g)


def test_without_moments():
    w, grads = params(), gradients(2)
    found = train(descent(RATE, weight_decay=0.1), w, grads)
    assert found[1][1:] == (None, None)
    same = jgrad.gradient_descent(RATE, weight_decay=0.1, weight_decay_rule="decoupled")
    assert_equal(found, train(same, w, grads))


# ---- beside `jgrad.lion` -----------------------------------------------------------------------


def both(outside=own_lion, **options):
    """The same Lion, written inside and outside."""
    return (make(2.0**-6, **BETAS, **options) for make in (jgrad.lion, outside))


@pytest.mark.slow(always=["float32-tree", "8bit-packed"])
@pytest.mark.bits
@pytest.mark.parametrize("packed", [False, True], ids=["tree", "packed"])
@pytest.mark.parametrize("form", FORMS)
def test_lion(form, packed):
    """And the rules of decay, which look at the direction."""
    put = jgrad.pack if packed else lambda tree: tree
    w, *grads = (put(kernels.normal({"w": (16, 256), "b": (3,)}, seed)) for seed in range(4))
    options = {"weight_decay": 0.125, "weight_decay_rule": "cautious"} | FORMS[form]
    inside, outside = both(**options)
    assert_equal(train(outside, w, grads), train(inside, w, grads))


@pytest.mark.slow(always=["kernel"])
@pytest.mark.bits
@pytest.mark.parametrize("form", kernels.FORMS)
def test_lion_in_a_kernel(form):
    w, *grads = (kernels.normal({"w": (16, 256), "b": (3,)}, seed) for seed in range(3))
    inside, outside = both(moment_dtype="8bit")
    found = kernels.steps(outside, w, grads, form)
    assert found.leaves > 0
    expected = kernels.plain(inside, w, grads)
    assert_equal((found.w, found.state), (expected.w, expected.state))


@pytest.mark.slow(always=["untold-skip_nonfinite0"])
@pytest.mark.parametrize("wrapper", WRAPPERS, ids=str)
@pytest.mark.parametrize("make", [own_lion, trusted], ids=["untold", "trusted"])
def test_lion_in_each_wrapper(make, wrapper):
    """Whether they look at it once more or not: at a NaN in the third gradient."""
    w, grads = params(wrapper.dtype), gradients(4, wrapper.dtype)
    if wrapper.skips:
        grads[2]["layer"]["w"] *= jnp.nan
    inside, outside = (wrapper.around(tx) for tx in both(make))
    expected = train(inside, w, grads)
    as_well(wrapper, train(outside, w, grads), expected)
    if wrapper.skips:
        assert int(optax.tree.get(expected[1], "skipped")) == 1


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize("form", ["float32", "8bit"])
def test_lion_in_the_backward_pass(form):
    inside, outside = both(**FORMS[form])
    w, batches = models.params(), [models.batch(seed) for seed in range(2)]
    with forced():
        runs = [
            models.run(jgrad.step_in_backward(tx, models.loss), w, tx.init(w), batches)
            for tx in (inside, outside)
        ]
    assert_equal(*runs)


@pytest.mark.slow
@pytest.mark.bits
def test_lion_in_zero():
    """Each device has a shard of packed weights, gradients and moments in 8 bits."""
    mesh = mesh_of(data=8)
    w, *grads = (
        jgrad.pack(kernels.normal({"w": (16, 256), "b": (3,)}, seed), multiple_of=8)
        for seed in range(3)
    )

    def trained(tx):
        tx = jgrad.zero(tx, "data")
        shardings = jgrad.state_shardings(tx, place(w, mesh, P()), shard_over="data")
        state, specs = jax.jit(tx.init, out_shardings=shardings)(w), specs_of(shardings)
        own = P(), specs
        step = jax.jit(
            jax.shard_map(
                step_of(tx), mesh=mesh, in_specs=(*own, P()), out_specs=own, check_vma=False
            )
        )
        found = place(w, mesh, P()), state
        for g in grads:
            found = step(*found, g)
        return jax.device_get(found)

    inside, outside = map(trained, both(moment_dtype="8bit"))
    assert_equal(outside, inside)


# ---- what users get wrong ----------------------------------------------------------------------


def test_a_step_that_is_not_finite_is_skipped():
    """The root of a negative gradient: wrappers look at a user's method like at other libraries'."""
    tx = jgrad.optimizer_of_leaf(lambda g: jnp.sqrt(g))(RATE)
    tx = jgrad.skip_nonfinite(tx, check_results=True)
    w, g = {"w": jnp.ones(3)}, {"w": jnp.asarray([1.0, -1.0, 2.0])}
    found, state = train(tx, w, [g, jax.tree.map(jnp.ones_like, g)])
    assert int(state.skipped) == 1
    np.testing.assert_allclose(found["w"], 1 - RATE, rtol=1e-6)


@pytest.mark.slow(always=["usual-bf16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [trusted, own_lion], ids=["promised", "usual"])
def test_skipping_costs_no_more_than_for_the_method_inside(form, make):
    """By the bytes of the program: a user's method is told the decision, too."""
    w = {"w": jnp.ones((512, 1024))}

    def moved(make):
        tx = jgrad.skip_nonfinite(make(RATE, **FORMS[form]))
        step = jax.jit(functools.partial(jgrad.apply_gradients, tx), donate_argnums=(1, 2))
        return step.lower(w, tx.init(w), w).compile().cost_analysis()["bytes accessed"]

    assert moved(make) == pytest.approx(moved(jgrad.lion), rel=1e-3)


@jgrad.optimizer_of_leaf
def signum(g, mw, *, beta=0.9):
    mw = beta.value * mw + g
    return jnp.sign(mw), mw


def test_operations_that_no_kernel_has():
    """Lowered on a machine without a TPU, a kernel has no sign: the leaf is XLA's."""
    w = {"w": jnp.ones((16, 256))}
    tx = signum(RATE, moment_dtype="8bit")
    assert jgrad.leaf_programs(tx, w) == {".mw['w']": "XLA: no kernel has `sign`"}
    step = jax.jit(functools.partial(jgrad.apply_gradients, tx))
    exported = export.export(step, platforms=["tpu", "cuda"])(w, tx.init(w), w)
    assert exported.mlir_module().count("tpu_custom_call") == 0
    one = adamax(RATE, moment_dtype="8bit")
    assert set(jgrad.leaf_programs(one, w).values()) == {"one kernel"}
    step = jax.jit(functools.partial(jgrad.apply_gradients, one))
    exported = export.export(step, platforms=["tpu"])(w, one.init(w), w)
    assert exported.mlir_module().count("tpu_custom_call") == 1


OF_KERNELS = {
    "numbers": lambda x, y: abs(-x) + x / y - jnp.square(x) * x**3,
    "choices": lambda x, y: jnp.where(~((x > y) & (x <= 1) | (x == 0) | (x != 3)), x, -y),
    "limits": lambda x, y: jnp.clip(jnp.maximum(jnp.minimum(x, y), -y), 0.125, 1.0),
    "dtypes": lambda x, y: x.astype(jnp.bfloat16).astype(x.dtype) + (x < y).astype(x.dtype),
    "calls": lambda x, y: jax.jit(lambda x: 2 * x)(x) + jnp.full_like(x, 2) + y,
}
OF_TILES = {"roots": lambda x: jnp.exp(-jnp.sqrt(abs(x))) + jax.lax.rsqrt(1 + x * x)}
OF_TILES["logarithms"] = lambda x: jnp.log(1 + x * x) + jnp.tanh(x)


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("name", [*OF_KERNELS, *OF_TILES])
def test_operations_that_kernels_have(name):
    """Of elements, and some of numbers alone: lowered by this version of JAX, without a TPU."""

    @jgrad.optimizer_of_leaf
    def method(g, mw, *, number=0.5):
        if name in OF_TILES:
            return g * OF_TILES[name](g) * number, mw
        f = OF_KERNELS[name]
        return g * f(g, mw + 1) * f(number, 2 * number), mw

    w = {"w": jnp.ones((16, 256))}
    tx = method(RATE, moment_dtype="8bit")
    assert set(jgrad.leaf_programs(tx, w).values()) == {"one kernel"}
    step = jax.jit(functools.partial(jgrad.apply_gradients, tx))
    exported = export.export(step, platforms=["tpu"])(w, tx.init(w), w)
    assert exported.mlir_module().count("tpu_custom_call") == 1


HALF, HALVES = jnp.asarray(0.5), jnp.asarray([0.25, 0.5, 0.75])


@jax.jit
def with_complement(x, part):
    return x * part, 1 - part


def called(g, part):
    product, complement = with_complement(g, part)
    return product + g * complement


# Of elements, and with what no kernel has but the last.
OF_XLA = {
    "an array": lambda g, x: g * HALF * x,
    "a table": lambda g, x: g * HALVES[(2 * x).astype(jnp.int32)],
    "a branch": lambda g, x: jax.lax.cond(x > 0.25, lambda: 2 * g, lambda: g),
    "a loop": lambda g, x: jax.lax.fori_loop(0, 3, lambda i, y: y * x + i * g, g),
    "a while": lambda g, x: jax.lax.while_loop(
        lambda y: y[0] < 1, lambda y: (1.0, y[1] * x), (x, g)
    )[1],
    "a rule of slopes": lambda g, x: jax.nn.relu(g) * x,
    "half precision": lambda g, x: (1024 * g).astype(jnp.float16).astype(g.dtype) * x,
    "a call": called,
}


@pytest.mark.slow(one_in=8, always=["an array-kernel"])
@pytest.mark.parametrize("form", kernels.FORMS)
@pytest.mark.parametrize("name", OF_XLA)
def test_functions_with_programs_in_them(name, form):
    @jgrad.optimizer_of_leaf
    def method(g, mw, *, part=0.5):
        return OF_XLA[name](g, part), 0.5 * mw + 0.5 * g

    tx = method(2.0**-6, moment_dtype="8bit")
    w, *grads = (kernels.normal({"w": (16, 256), "b": (3,)}, seed) for seed in range(3))
    found, expected = kernels.steps(tx, w, grads, form), kernels.plain(tx, w, grads)
    assert_equal((found.w, found.state), (expected.w, expected.state))
    assert (found.leaves > 0) == (form == "two passes" or name == "a call")
    right = jax.tree.map(
        lambda w, *gs: w - 2.0**-6 * sum(OF_XLA[name](g, jnp.asarray(0.5)) for g in gs), w, *grads
    )
    chex.assert_trees_all_close(found.w, right, rtol=1e-5, atol=1e-6)


OTHERS = [jnp.cbrt, jnp.sinc, jnp.log2, jax.nn.gelu, jax.scipy.special.erfinv, jnp.nan_to_num]


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("f", OTHERS, ids=lambda f: f.__name__)
def test_other_operations_of_elements(f, standard_promotion):
    """They are known by their names, some of which are of one version of JAX."""
    w = {"w": jnp.linspace(0.125, 0.75, 7)}
    tx = jgrad.optimizer_of_leaf(lambda g: g * f(g + 0.125))(1.0)  # 0 for 0
    updates, _ = tx.update(w, tx.init(w), w)
    np.testing.assert_allclose(updates["w"], -w["w"] * f(w["w"] + 0.125), rtol=1e-6)


def test_a_complex_moment_of_magnitudes(standard_promotion):
    """The square of a complex gradient is complex; that of its absolute value is what is meant."""

    @jgrad.optimizer_of_leaf
    def squared(g, vw):
        return g, vw + jnp.square(g)

    w = {"w": jnp.ones(3, jnp.complex64)}
    expected = "the new `vw`, which is real where the gradient is complex."
    message = f"squared: returned complex64[3], expected {expected}"
    assert_error(TypeError, message, lambda: squared(RATE).update(w, squared(RATE).init(w), w))
    real = jax.tree.map(jnp.real, w)
    assert float(squared(RATE).update(real, squared(RATE).init(real), real)[1].vw["w"][0]) == 1


def test_a_root_of_a_number():
    """A kernel has those of elements alone."""

    @jgrad.optimizer_of_leaf
    def rooted(g, mw, *, number=0.5):
        return g * jnp.sqrt(number), mw

    programs = jgrad.leaf_programs(rooted(RATE, moment_dtype="8bit"), {"w": jnp.ones((16, 256))})
    assert programs == {".mw['w']": "XLA: no kernel has `sqrt`"}


def test_the_factory():
    """It has the name and the text of the function, and says which options it has."""
    assert (own_lion.__name__, own_lion.__doc__) == ("lion_of_leaf", "Lion.")
    found, expected = (inspect.signature(make).parameters for make in (own_lion, jgrad.lion))
    assert [(k, x.kind, x.default) for k, x in found.items()] == [
        (k, x.kind, x.default) for k, x in expected.items()
    ]


def of_kind(name):
    """A function that is none of one leaf."""
    functions = {
        "other": lambda x, mw: (x, mw),
        "nothing": lambda: 0.0,
        "any": lambda g, **numbers: g,
        "taken": lambda g, *, moment_dtype: g,
        "loss": lambda g, *, loss: g,
        "alone": lambda g, mw: mw,
        "bool": lambda g: g > 0,
        "norm": lambda g, mw: (g / jnp.linalg.norm(g), mw),
        "sorted": lambda g: jnp.sort(g),
        "row": lambda g: g + jnp.zeros((2, 1), g.dtype) * jnp.max(g, 1, keepdims=True),
        "written": lambda g: g.at[0].set(0.0),
        "product": lambda g: g @ jnp.ones((g.shape[-1],) * 2),
        "rows": lambda g: jax.lax.map(lambda row: row - jnp.mean(row), g),
        "noise": lambda g: g * jax.random.uniform(jax.random.key(0), g.shape),
        "table": lambda g: g * np.ones((1, 3), np.float32),
        "size": lambda g: g / g.size,
        "list": lambda g, mw: [g, mw],
        "self": lambda g, *, self: g,
        "value": lambda g, *, value: g,
    }
    functions[name].__name__ = name
    return functions[name]


@jgrad.optimizer_of_leaf
def normalized(g, vw, *, beta=0.9, epsilon=0.0):
    """0 / 0 at zero, without an epsilon."""
    vw = beta.value * vw + beta.complement * g * g
    return g / (jnp.sqrt(vw / beta.correction) + epsilon), vw


@jgrad.optimizer_of_leaf
def lifted(g, mw, *, floor=0.0, step):
    return g, mw + g + floor / step


def test_zeros_of_zeros():
    """They are asked for with the numbers of the factory, where these are known."""
    w = {"w": jnp.ones(300)}
    for epsilon in (lambda done: 1e-8, {"w": 1e-8}, jnp.float32(1e-8)):
        normalized(RATE, epsilon=epsilon)
    tx = optax.chain(normalized(RATE, epsilon=1e-8), jgrad.clip_by_global_norm(1.0))
    packed = jgrad.pack(w)
    updates, _ = jax.jit(tx.update)(packed, tx.init(packed), packed)
    np.testing.assert_allclose(jgrad.unpack(updates)["w"], -RATE, rtol=1e-6)
    jax.eval_shape(lambda x: normalized(RATE, epsilon=x).init(w), jnp.float32(1e-8))

    def first_step(temperature):
        @jgrad.optimizer_of_leaf
        def scaled(g):
            return g * temperature

        tx = scaled(RATE)
        return tx.update(w, tx.init(w))[0]["w"]

    # Whether a traced number from outside makes zeros of zeros is not known.
    found = jax.jit(jax.vmap(first_step))(jnp.array([0.0, 2.0]))
    np.testing.assert_allclose(found, np.outer([0.0, -2 * RATE], np.ones(300)), rtol=1e-6)

    @jgrad.optimizer_of_leaf
    def logarithm(g):
        return jnp.where(g == 0, 0.0, jnp.sign(g) * jnp.log(abs(g)))

    with jax.debug_nans(True):  # of what is looked for, and of what a function chooses away
        logarithm(RATE)
        with pytest.raises(ValueError, match="returned nan for the direction"):
            normalized(RATE, epsilon=0.0)


@pytest.mark.not_in_jax_0_8("traces")
def test_it_goes_with_its_last_use():
    """In a loop over functions nothing stays of them, but for what JAX has in its caches."""

    def used(moment_dtype):
        def signum(g, mw, *, beta=0.9):
            mw = beta.value * mw + g
            return jnp.sign(mw), mw

        make = jgrad.optimizer_of_leaf(signum)
        tx = jgrad.skip_nonfinite(make(RATE, moment_dtype=moment_dtype))
        w = {"w": jnp.ones((16, 256))}
        jax.make_jaxpr(tx.update)(w, tx.init(w), w)
        return weakref.ref(signum)

    found = [used(form) for form in (None, "8bit")]
    jax.clear_caches()
    gc.collect()
    assert [x() for x in found] == [None, None]


test_calls = messages.test_of("of_leaf", globals())


test_other_functions = messages.test_of("of_leaf_functions", globals())
