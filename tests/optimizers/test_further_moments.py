"""Methods with more moments than `OptState` has, as users write them: Adan and AdEMAMix.

Loops, meshes, `vmap` and x64 are in `everywhere/test_surroundings.py`, which takes AdEMAMix from
here.
"""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jgrad
from tests.backward import models
from tests.cases import MASK, RATE, gradients, params
from tests.multi_device.meshes import mesh_of, place, specs_of
from tests.support import kernels, messages
from tests.support.loops import assert_equal, train
from tests.support.private import forced
from tests.support.states import as_file, filled
from tests.wrappers.test_every_wrapper import WRAPPERS, close as alike

FORMS = {"float32": {}, "bf16": {"moment_dtype": jnp.bfloat16}, "8bit": {"moment_dtype": "8bit"}}
W = {"large": jnp.ones((16, 256)), "small": jnp.ones(3)}


@jgrad.optimizer_of_leaf
def ademamix(
    g, mw, slow, vw, *, beta1=0.9, beta2=0.999, beta3=0.9999, alpha=5.0, epsilon=1e-8
):  # fmt: skip
    mw = beta1.value * mw + beta1.complement * g
    slow = beta3.value * slow + beta3.complement * g
    vw = beta2.value * vw + beta2.complement * jnp.square(jnp.abs(g))
    root = jnp.sqrt(vw / beta2.correction)
    return (mw / beta1.correction + alpha * slow) / (root + epsilon), mw, slow, vw


@jgrad.optimizer_of_leaf
def adan(g, mw, vw, dw, gw, *, beta1=0.98, beta2=0.92, beta3=0.99, epsilon=1e-8, step):
    difference = jnp.where(step > 1, g - gw, 0.0)
    mw = beta1.value * mw + beta1.complement * g
    vw = beta3.value * vw + beta3.complement * jnp.square(g + beta2.value * difference)
    dw = beta2.value * dw + beta2.complement * difference
    ahead = mw / beta1.correction + beta2.value * dw / beta2.correction
    return ahead / (jnp.sqrt(vw / beta3.correction) + epsilon), mw, vw, dw, g


@jgrad.optimizer_of_leaf(magnitudes=("peak",))
def bounded(g, peak, other, *, beta=0.9, epsilon=1e-8):
    """One of magnitudes by the word of its user, and in no order of the library's."""
    peak = jnp.maximum(beta.value * peak, jnp.abs(g))
    return g / (peak + epsilon), peak, beta.value * other + g


@jgrad.optimizer_of_leaf
def two_averages(g, mw, slow):
    """With fields of which `ademamix` has more."""
    return mw + slow, 0.5 * mw + g, 0.75 * slow + g


def both(**options):
    """Adan, written inside and outside."""
    return (make(RATE, **options) for make in (jgrad.adan, adan))


def close(found, expected, distance=1e-4):
    """Weights, beside how far they moved; every step is at most 2 rates of 5."""
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=distance * 10 * RATE)


# ---- judges ------------------------------------------------------------------------------------


def test_ademamix(standard_promotion):
    w, grads = params(), gradients(20)
    theirs = optax.contrib.ademamix(RATE, alpha=3.0, weight_decay=0.1, mask=MASK)
    ours = ademamix(RATE, alpha=3.0, weight_decay=0.1, weight_decay_mask=MASK)
    close(train(ours, w, grads)[0], train(theirs, w, grads)[0])


@pytest.mark.slow(always=["float32-tree", "8bit-packed"])
@pytest.mark.parametrize("packed", [False, True], ids=["tree", "packed"])
@pytest.mark.parametrize("form", FORMS)
def test_adan(form, packed):
    """Moments are rounded by the same bits, so that few of them differ."""
    put = jgrad.pack if packed else lambda tree: tree
    w, *grads = (put(kernels.normal({"w": (16, 256), "b": (3,)}, seed)) for seed in range(6))
    (expected, old), (found, state) = (
        train(tx, w, grads) for tx in both(weight_decay=0.1, **FORMS[form])
    )
    close(found, expected, 1e-4 if form == "float32" else 0.1)
    assert state._fields == old._fields
    dtypes = lambda tree: [x.dtype for x in jax.tree.leaves(tree)]
    assert dtypes(state) == dtypes(old)


def test_8_bits():
    """Close to float32, in all three moments; in one kernel on a TPU."""
    w, *grads = (kernels.normal({"w": (16, 256)}, seed) for seed in range(11))
    (expected, _), (found, state) = (
        train(ademamix(RATE, **FORMS[x]), w, grads) for x in ("float32", "8bit")
    )
    error, moved = (jnp.linalg.norm(found["w"] - x["w"]) for x in (expected, w))
    assert error < 0.05 * moved
    assert [x["w"].codes.dtype.name for x in state[1:]] == ["int8", "int8", "uint8"]
    programs = jgrad.leaf_programs(ademamix(RATE, moment_dtype="8bit"), w)
    assert programs == {f".{x}['w']": "one kernel" for x in ("mw", "slow", "vw")}


def test_magnitudes(standard_promotion):
    """Real where gradients are complex, and without a sign in 8 bits."""
    w = {"c": jnp.ones(3, jnp.complex64), "w": jnp.ones((16, 256))}
    tx = bounded(RATE, moment_dtype="8bit")
    _, state = train(tx, w, [w])
    assert state._fields == ("step", "peak", "other")
    assert [x["c"].dtype.name for x in state[1:]] == ["float32", "complex64"]
    assert [x["w"].codes.dtype.name for x in state[1:]] == ["uint8", "int8"]


def test_the_order_of_two_moments():
    """The state stays the same."""
    make = jgrad.optimizer_of_leaf(lambda g, vw, mw: (g, vw + abs(g), mw + 2.0 * g))
    _, state = train(make(RATE), W, [W])
    assert isinstance(state, jgrad.OptState)
    assert_equal((state.mw, state.vw), (jax.tree.map(lambda x: 2 * x, W), W))


# ---- its state ---------------------------------------------------------------------------------


def state_of(tx, seed=0):
    return filled(jax.eval_shape(tx.init, W), seed)


def test_a_state_is_of_the_factory():
    """One type for all its optimizers, which a pickle finds."""
    state = state_of(ademamix(RATE))
    assert type(state) is ademamix.State is type(ademamix(1.0).init(W))
    assert (ademamix.State.__module__, ademamix.State.__qualname__) == (__name__, "ademamix.State")
    copy = pickle.loads(pickle.dumps(state))
    assert type(copy) is ademamix.State
    assert_equal(copy, state)


@pytest.mark.parametrize("make", [ademamix, bounded, two_averages], ids=lambda x: x.__name__)
def test_carry_over(make):
    """To 8 bits in a wrapper; from a file without types, too, where fields have no order."""
    old = state_of(make(RATE))
    like = jgrad.skip_nonfinite(make(RATE, moment_dtype="8bit")).init(W)
    state, account = jgrad.carry_over(old, like=like)
    assert account.converted == tuple(f"{name}/large" for name in old._fields[1:])
    assert not account.dropped
    file = dict(sorted(as_file(old).items()))
    again, from_file = jgrad.carry_over(file, like=like)
    assert_equal(again, state)
    assert sorted(from_file.converted) == sorted(account.converted)
    assert_equal(jgrad.carry_over(file, like=old, strict=True)[0], old)


def test_a_cell_that_is_run_again():
    """The state of the last run goes on in the next; other moments are another type."""

    def define(magnitudes=()):
        def method(g, mw, slow):
            return mw + slow, 0.5 * mw + g, 0.75 * slow + g

        return jgrad.optimizer_of_leaf(method, magnitudes=magnitudes)

    _, state = train(define()(RATE), W, [W])
    define()(RATE).update(W, state, W)
    assert define(("slow",)).State is not define().State


def test_carry_over_from_another_method():
    """Averages of gradients are kept where moments beside them begin with zeros; no other is made up."""
    old = state_of(jgrad.adam(RATE))
    with pytest.raises(ValueError, match="slow/large, a moment that `old` lacks; start afresh"):
        jgrad.carry_over(old, like=state_of(ademamix(RATE)))
    with pytest.raises(ValueError, match="peak/large, a moment that `old` lacks; start afresh"):
        jgrad.carry_over(state_of(ademamix(RATE)), like=state_of(bounded(RATE)))
    state, account = jgrad.carry_over(old, like=state_of(ademamix(RATE)), reset=True)
    assert int(state.step) == int(old.step)
    assert not any(map(jnp.any, jax.tree.leaves(state[1:])))
    assert account.reset[:2] == ("mw/large", "mw/small")


def test_a_moment_may_have_any_other_name():
    """Those of fields of wrappers, too, which a state declares not to be what they are there."""
    make = jgrad.optimizer_of_leaf(lambda g, inner, mu: (g, inner + g, mu))
    _, old = train(make(RATE), W, [W])
    state, account = jgrad.carry_over(old, like=make(RATE, moment_dtype="8bit").init(W))
    assert account.converted == ("inner/large", "mu/large")
    assert jax.tree.structure(state.mu) == jax.tree.structure(state.inner)


def test_shardings_host_memory_and_reports():
    mesh = mesh_of(data=8)
    w = place(W, mesh, {"large": P("data"), "small": P()})
    tx = jgrad.offload(jgrad.watch(ademamix(RATE, moment_dtype="8bit")))
    specs = specs_of(jgrad.state_shardings(tx, w)).inner
    for moment in (specs.mw, specs.slow, specs.vw):
        assert moment["large"].codes == moment["large"].scale == P("data")
    _, state = train(tx, W, [W])
    assert jgrad.report(state)


# ---- wherever a method may be ------------------------------------------------------------------


@pytest.mark.slow(always=["skip_nonfinite0"])
@pytest.mark.parametrize("wrapper", WRAPPERS, ids=str)
def test_in_each_wrapper(wrapper):
    w, grads = params(wrapper.dtype), gradients(4, wrapper.dtype)
    if wrapper.skips:
        grads[2]["layer"]["w"] *= jnp.nan
    inside, outside = (wrapper.around(tx) for tx in both())
    found, expected = (train(tx, w, grads) for tx in (outside, inside))
    alike(found[0], expected[0], wrapper.dtype)


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize("form", ["float32", "8bit"])
def test_in_the_backward_pass(form):
    """As in the ordinary step."""
    tx = ademamix(RATE, **FORMS[form])
    w, batches = models.params(), [models.batch(seed) for seed in range(2)]
    with forced():
        found = models.run(jgrad.step_in_backward(tx, models.loss), w, tx.init(w), batches)
    grads = lambda w, batch: jax.grad(models.loss)(w, batch)
    state = tx.init(w)
    for batch in batches:
        w, state = jax.jit(lambda w, s, b: jgrad.apply_gradients(tx, grads(w, b), s, w))(
            w, state, batch
        )
    close(found[0], w, 1e-3)


# ---- what users get wrong ----------------------------------------------------------------------


def plain(g, mw, slow):
    return g, mw, slow


def default(g, mw, beta1=0.9):
    return g, mw


def beta(g, mw, beta1):
    return g, mw


def counted(g, step):
    return g


def alone(g, mw, slow):
    return g, mw


def other(g, count):
    return g, count


OLD = jgrad.adam(RATE).init(W)
test_calls = messages.test_of("of_leaf_moments", globals())
