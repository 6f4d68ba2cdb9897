"""Every optimizer times every property that all of them have.

Under transformations of JAX each of them is in `test_surroundings.py`.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.cases import NUMBERS, ONE_EACH, RATE, every_case, gradients, moments_of, params
from tests.support.choice import mostly_slow
from tests.support.loops import assert_equal, assert_within, norm, run, step_of

# Of parameters and of gradients: each once beside the same, a wider and a narrower one.
PAIRS = [
    ("float16", "float16"),
    ("bfloat16", "float32"),
    ("float32", "bfloat16"),
    ("float32", "float64"),
    ("float64", "float64"),
    ("float64", "float16"),
]


def close(found, expected, rtol):
    for a, b in zip(jax.tree.leaves(found), expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(a), b, rtol=rtol, atol=rtol * np.max(np.abs(b), initial=0)
        )


# ---- the numbers -------------------------------------------------------------------------------


@pytest.mark.slow(always=["float64-gradient_descent", "float64-decayed_descent",
    "float64-adam_moments", "float64-adamw", "float64-lars_ivy", "float64-lars_outside",
    "float64-lamb_masked"])  # fmt: skip
@every_case(NUMBERS)
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_reference(case, dtype, x64):
    """50 steps in double precision are the paper's."""
    w, grads = params(dtype), gradients(50, dtype)
    found, _ = run(case.tx(), w, grads)
    for a, b in zip(found, case.trajectory(w, grads), strict=True):
        close(a, b, 1e-12)


@pytest.mark.slow
@every_case(("adamw", "lamb_decayed"))
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_reference_in_single_precision(case, dtype):
    """A step in single precision is that of double precision to a few digits in the last place."""
    w, grads = params(dtype), gradients(10, dtype)
    found, _ = run(case.tx(), w, grads)
    close(found[0], case.trajectory(w, grads)[0], 2e-6)
    close(found[-1], case.trajectory(w, grads)[-1], 4e-5)


@pytest.mark.slow(always=["bfloat16-adam_moments"])
@every_case()
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_reference_in_half_precision(case, dtype):
    """Only what is stored is rounded: one step's update is right to half an ulp of the dtype."""
    w, (g,) = params(dtype), gradients(1, dtype)
    updates, _ = jax.jit(case.tx().update)(g, case.tx().init(w), w)
    (expected,) = case.trajectory(w, [g])
    epsilon = float(jnp.finfo(dtype).eps)
    for p, u, b in zip(jax.tree.leaves(w), jax.tree.leaves(updates), expected, strict=True):
        exact = b - np.asarray(p, np.float64)
        tiny = float(jnp.finfo(dtype).smallest_subnormal)
        np.testing.assert_allclose(
            np.asarray(u, np.float64), exact, rtol=epsilon / 2 + 1e-5, atol=tiny
        )


every_twin = every_case((*ONE_EACH, "lamb_decayed"), lambda case: case.step)


@pytest.mark.slow(always=["lion"])
@pytest.mark.bits
@every_twin
def test_functional_twin(case):
    """Step functions and pairs agree bit for bit over 50 steps in float32."""
    tx, w = case.tx(), params()
    state, step = tx.init(w), jax.jit(step_of(tx))
    # The twin keeps what the pair keeps; methods without moments pass them through.
    twin, moments = w, moments_of(state)
    for t, g in enumerate(gradients(50), start=1):
        w, state = step(w, state, g)
        twin, moments = case.step(twin, g, RATE, moments, t)
        assert_equal(twin, w)
        assert_equal(moments, moments_of(state))
    assert int(state.step) == 50


def roundings(case, w, g, moments):
    """By how many roundings the steps of two programs may differ on complex leaves, for each leaf.

    A processor with FMA computes a product and a sum with one rounding or with two. XLA chooses for
    each program, and of re^2 + im^2 it may choose either product. All else is the same operations on
    the same numbers: complex numbers are multiplied by real ones, with an imaginary part of zero, so
    that no product meets a sum. Counted in u = 2^-24, an operation adds 2 to a difference, 1 for
    each program.

    Second moments: 1 for the product in |g|^2, 2 for its sum, 2 for the product with 1 - beta2, 2
    for the last sum: 7, as all terms are positive.
    Adam's step: 3.5 by the root of that, 2 each for the root, the sum with epsilon and the rate, 6
    for a complex division, which is three operations in the textbook's form: 15.5.
    A norm of n real numbers: 2 n for the sum of squares in any order, n behind the root, and 2.
    LAMB's ratio: two norms, one of a direction that differs by at most 16 already, of terms that may
    cancel; and a division. With the product and the direction: 2 n + 10, and 32 / c, where c is
    what cancellation leaves of the norm.
    LARS's ratio: less than 3 n + 42, from three norms in Ivy's rule.
    Gradient descent has nothing of this: 0.
    """
    if case.make is jgrad.gradient_descent:
        return jax.tree.map(lambda x: 0, w)
    if case.elementwise:
        return jax.tree.map(lambda x: 16, w)
    decay = case.options.get("weight_decay", 0.0)
    direction = jgrad.adam_step(g, *moments)[0] if case.make is jgrad.lamb else g

    def number(d, p):
        d, p = np.asarray(d, complex), decay * np.asarray(p, complex)
        terms, left = norm(np.abs(d) + np.abs(p)), norm(d + p)
        return 3 * 2 * d.size + 10 + 32 * (terms / left if left else 1)

    return jax.tree.map(number, direction, w)


@pytest.mark.slow
@pytest.mark.bits
@every_twin
def test_complex_functional_twin(case):
    """The same for complex weights, to a few roundings of each step: see `roundings`."""
    tx, w, u = case.tx(), params(jnp.complex64), 2.0**-24
    state, step = tx.init(w), jax.jit(step_of(tx))
    for t, g in enumerate(gradients(50, jnp.complex64), start=1):
        found, moments = case.step(w, g, RATE, moments_of(state), t)
        counts = roundings(case, w, g, (state.mw, state.vw, t))
        old, (w, state) = w, step(w, state, g)
        vw, others = moments.pop("vw"), moments_of(state)
        assert_within(vw, others.pop("vw"), jax.tree.map(lambda v: 7 * u * norm(v), vw))
        assert_equal(moments, others)
        # What differs before the last sum is rounded there once in each program, as a weight.
        bound = lambda x, p, count: u * (2 * norm(x) + count * norm(x - p)) if count else 0
        assert_within(found, w, jax.tree.map(bound, w, old, counts))
    assert int(state.step) == 50


@every_case(("momentum", "lars_masked", "lamb_ivy"))
def test_schedule(case, x64):
    """A schedule is a function of the number of updates done, 0 at the first."""
    w, grads = params("float64"), gradients(7, "float64")
    found, _ = run(case.tx(lambda done: 0.1 / (1 + done).astype(float)), w, grads)
    expected = case.trajectory(w, grads, lambda done: 0.1 / (1 + done))
    for a, b in zip(found, expected, strict=True):
        close(a, b, 1e-12)


@pytest.mark.slow
@every_case(("lars_masked",))
def test_rate_tree(case, x64):
    """A prefix tree of rates gives each leaf what a scalar rate would give it."""
    w, grads = params("float64"), gradients(4, "float64")
    rates = {"layer": 0.3, "rest": [0.1, 0.2, jnp.full((5,), 0.4)]}
    found, _ = run(case.tx(rates), w, grads)
    tx = case.tx()
    step = jax.jit(step_of(tx))
    for i, rate in enumerate((0.3, 0.3, 0.1, 0.2, 0.4)):
        alone, state = w, tx.init(w)
        for g in grads:  # one program for all rates
            alone, state = step(alone, state, g, learning_rate=jnp.asarray(rate))
        expected = jax.tree.leaves(alone)[i]
        np.testing.assert_allclose(jax.tree.leaves(found[-1])[i], expected, rtol=1e-12)


@every_case(())
def test_e22_one_trace_whatever_the_rate(case):
    """`learning_rate=` in update stands in for the rate of that call, and a sweep compiles once."""
    w, (g,) = params(), gradients(1)
    tx = case.tx(0.7)
    traced = chex.assert_max_traces(step_of(tx), n=1)
    step = jax.jit(lambda w, state, g, rate: traced(w, state, g, learning_rate=rate))
    for rate in (0.1, 0.2, 0.3):
        found, _ = step(w, tx.init(w), g, jnp.float32(rate))
        expected, _ = jax.jit(step_of(case.tx(rate)))(w, tx.init(w), g)
        chex.assert_trees_all_close(found, expected, rtol=1e-6)


# ---- the state ---------------------------------------------------------------------------------


@every_case(NUMBERS)
def test_state_has_what_the_method_uses(case):
    state = case.tx().init(params())
    assert isinstance(state, case.kind)
    assert state._fields[:3] == ("step", "mw", "vw")
    assert tuple(name for name, x in moments_of(state).items() if x is not None) == case.state
    assert (state.step.dtype, state.step.shape) == (jnp.int32, ())


@pytest.mark.slow(always=["float16-float16-lamb_decayed", "float32-bfloat16-momentum",
    "float32-float64-momentum", "float32-float64-lamb_decayed", "float64-float64-momentum",
    "float64-float64-lamb_decayed", "float64-float16-momentum", "float64-float16-lamb_decayed"])  # fmt: skip
@every_case(("momentum", "lamb_decayed"))
@pytest.mark.parametrize(("dtype", "grads_dtype"), PAIRS)
def test_e18_dtypes_do_not_drift(case, dtype, grads_dtype, x64):
    """State and parameters keep shapes and dtypes, whatever the gradient has, so `scan` works."""
    tx, w, g = case.tx(), params(dtype), gradients(1, grads_dtype)[0]
    state = tx.init(w)
    wide = jnp.float64 if dtype == "float64" else jnp.float32
    assert all(m.dtype == wide for m in jax.tree.leaves(moments_of(state)))

    def body(carry, g):
        return step_of(tx)(*carry, g), None

    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), g)
    new = jax.eval_shape(lambda gs: jax.lax.scan(body, (w, state), gs)[0], stacked)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, (w, state))


@pytest.mark.slow(always=["bfloat16-adam", "bfloat16-lion", "bfloat16-lamb", "8bit-lion",
    "8bit-lars", "8bit-lamb", "8bit-muon", "8bit-adafactor_momentum"])  # fmt: skip
@every_case(ONE_EACH, lambda case: case.rounded)
@pytest.mark.parametrize("form", [jnp.bfloat16, "8bit"], ids=["bfloat16", "8bit"])
def test_moment_dtype(case, form):
    """Large leaves have it, and keep it."""
    tx = case.without_masks().tx(moment_dtype=form)
    w = {"large": jnp.ones((32, 256)), "small": jnp.ones(3)}
    state = tx.init(w)
    is_blocks = lambda x: isinstance(x, jgrad.Blocks)
    for x in jax.tree.leaves([getattr(state, name) for name in case.rounded], is_leaf=is_blocks):
        if form == "8bit":
            assert is_blocks(x) == (x.shape == (32, 256))
        else:
            assert x.dtype == form
    new = jax.eval_shape(step_of(tx), w, state, w)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, (w, state))


@every_case()
def test_complex_moments(case):
    """The second moment of a complex leaf is real, all others are complex."""
    state = case.tx().init(params(jnp.complex64))
    for name, moment in moments_of(state).items():
        dtype = jnp.float32 if name == "vw" else jnp.complex64
        assert all(m.dtype == dtype for m in jax.tree.leaves(moment))


@every_case()
def test_tree_map_params(case):
    """optax knows which parts of the state are like the parameters."""
    mark = {"transform_non_params": lambda _: "other"}
    marked = optax.tree_map_params(case.tx(), lambda _: "moment", case.tx().init(params()), **mark)
    assert marked.step == "other"
    assert all(set(jax.tree.leaves(getattr(marked, x))) == {"moment"} for x in case.state)


def test_optax_names():
    """`count`, `mu` and `nu` read what optax's state has there; fields are those of the format."""
    state = jgrad.adam(RATE).init(params())
    assert state.count is state.step
    assert (state.mu is state.mw, state.nu is state.vw) == (True, True)
    assert state._fields[:3] == ("step", "mw", "vw")
    assert optax.tree.get(state, "count") is None  # as the docs say: fields only


# ---- leaves that are not updated ---------------------------------------------------------------


@pytest.mark.slow(always=["momentum", "adam_moments", "adamw", "lamb_decayed"])
@every_case()
def test_e20_e29_integer_leaves_and_missing_gradients(case):
    """They and their moments are left alone, bit for bit; the others do not notice."""
    case = case.without_masks()
    rng = np.random.default_rng(0)
    w = {"a": jnp.asarray(rng.normal(size=3), jnp.float32), "b": jnp.ones(2)}
    more = {"count": jnp.arange(3), "flag": jnp.array(True), "none": None}
    g = {"a": jnp.asarray(rng.normal(size=3), jnp.float32), "b": None}
    float0 = np.zeros((3,), jax.dtypes.float0)
    tx = case.tx()
    state = tx.init(w | more)
    # Moments of "b" that are not zero.
    state = jax.tree.map(lambda m: m + 1 if m.shape == (2,) else m, state)
    alone_updates, alone = tx.update(g, tx.init(w), w)
    for count in (None, float0, jnp.full(3, 7)):
        grads = g | {"count": count, "flag": None, "none": None}
        updates, new = tx.update(grads, state, w | more)
        found = optax.apply_updates(w | more, updates)
        assert_equal({k: found[k] for k in ("b", *more)}, {"b": w["b"]} | more)
        assert_equal(found["a"], optax.apply_updates(w, alone_updates)["a"])
        assert updates["count"].dtype == jnp.int32
        for name in case.state:
            moments = getattr(new, name)
            assert_equal(moments["a"], getattr(alone, name)["a"])
            assert_equal(moments["b"], jnp.ones(2))
            assert moments["count"] is None


@pytest.mark.slow(always=["b-adamw", "w-muon"])
@every_case(("adamw", "adan", "lars", "lamb", "muon", "normuon", "adafactor_torch", "soap_masked"))
@pytest.mark.parametrize("name", ["b", "w"])
def test_a_missing_gradient_is_seen_by_no_other_leaf(case, name):
    """Behind it in all lists, they have their own options, moments and random bits."""
    put = lambda tree, x: tree | {"layer": tree["layer"] | {name: x}}
    more = {"moment_dtype": jnp.bfloat16} if case.rounded else {}
    tx = case.without_masks().tx({"layer": 0.1, "rest": [0.01, 0.2, 0.3]}, **more)
    w, (first, second), update = params(), gradients(2), jax.jit(tx.update)
    old = update(first, tx.init(w), w)[1]
    updates, state = update(second, old, w)
    for field in {*state._fields} - {"step"}:
        if (x := getattr(state, field)) is not None:
            x = put(x, getattr(old, field)["layer"][name])
            state = state._replace(**{field: x})
    expected = put(updates, jnp.zeros_like(w["layer"][name])), state
    chex.assert_trees_all_close(update(put(second, None), old, w), expected, rtol=1e-5)


def test_a_trust_ratio_of_some_leaves():
    w = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([6.0, 8.0]), "n": jnp.arange(2)}
    u = {"a": jnp.array([1.0, 0.0]), "b": jnp.array([1.0, 0.0]), "n": None}
    tx = jgrad.scale_by_trust_ratio(trust_ratio_mask={"a": True, "b": False, "n": True})
    found, state = tx.update(u, tx.init(w), w)
    chex.assert_trees_all_close(found, {"a": 5 * u["a"], "b": u["b"], "n": jnp.zeros(2, int)})
    assert state == optax.EmptyState()


@every_case()
def test_empty_tree(case):
    tx = case.without_masks().tx()
    updates, state = jax.jit(tx.update)({}, tx.init({}), {})
    assert updates == {}
    assert int(state.step) == 1


@pytest.mark.slow(always=["float32-lamb_decayed"])
@every_case(("lars_masked", "lamb_decayed"))
@pytest.mark.parametrize(
    "dtype", mostly_slow([jnp.float16, jnp.bfloat16, jnp.float32], jnp.float32)
)
def test_zero_gradient(case, dtype):
    """Nothing moves without decay, and nothing is NaN, forward and backward."""
    case = case.without_masks()
    w = {"a": jnp.ones(3, dtype), "zero": jnp.zeros(2, dtype)}
    g = jax.tree.map(jnp.zeros_like, w)
    tx = case.tx(epsilon=0.0) if case.make in (jgrad.adam, jgrad.lamb) else case.tx()
    update, state = jax.jit(tx.update), tx.init(w)
    for _ in range(2):
        updates, state = update(g, state, w)
        chex.assert_tree_all_finite((updates, state))
        if not case.decays:
            assert_equal(updates, g)

    def loss(w, g):
        updates, _ = tx.update(g, tx.init(w), w)
        return sum(jnp.sum(u) for u in jax.tree.leaves(updates))

    if dtype == jnp.float32:  # in float16 the true slope of Adam at zero, 1 / epsilon, is infinite
        chex.assert_tree_all_finite(jax.jit(jax.grad(loss, argnums=(0, 1)))(w, g))


# ---- what is traced -----------------------------------------------------------------------------


@every_case()
def test_eval_shape(case):
    tx, w = case.tx(), params()
    abstract = jax.eval_shape(tx.init, w)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, tx.init(w))


@every_case()
def test_checks_leave_nothing_in_the_program(case, monkeypatch):
    """With every check taken out, the jaxpr is the same."""
    from jgrad._inputs import numbers
    from jgrad._trees import checks

    tx, w = case.tx(), params()
    args = (w, tx.init(w), gradients(1)[0])
    checked = str(jax.make_jaxpr(step_of(tx))(*args))
    nothing = lambda *args, **kwargs: None
    for name in ("same_shapes", "broadcastable", "one_element", "same_structure"):
        monkeypatch.setattr(checks, name, nothing)
    monkeypatch.setattr(numbers, "in_range", nothing)
    assert str(jax.make_jaxpr(step_of(tx))(*args)) == checked
