"""Properties that all wrappers have.

What they do on meshes, in `shard_map`, inside `zero`, packed and under x64 is in
`multi_device/test_in_shard_map.py` and `everywhere/test_surroundings.py`, which take them from here.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.cases import RATE, gradients, params, rank_two
from tests.support.choice import mostly_slow
from tests.support.compilations import compilations
from tests.support.loops import assert_equal, compiled, step_of, told, train, with_loss
from tests.wrappers.test_hand_over import slowly

X = jnp.ones(3)


@dataclasses.dataclass(frozen=True, eq=False)
class Wrapper:
    """One of them, around or beside an optimizer.

    Attributes:
      name: of the function.
      around: makes a transformation of an optimizer, and of `mesh_axes` where there are norms or
        flags that devices share.
      own: fields of its state that are found by name, and what they are at the start.
      like_params: those among them that are trees like the parameters.
      state: the type of its state.
      dtype: of the parameters, where it matters.
      calls: updates until the optimizer has run.
      shares: whether it takes `mesh_axes`.
      skips: whether it leaves out gradients that are not finite.
    """

    name: str
    around: Callable[..., Any]
    own: dict[str, Any] = dataclasses.field(default_factory=dict)
    like_params: tuple[str, ...] = ()
    state: Any = None
    dtype: Any = jnp.float32
    calls: int = 1
    shares: bool = False
    skips: bool = False

    def __str__(self) -> str:
        return self.name


WRAPPERS = [
    Wrapper("clip_by_global_norm", lambda tx, **axes: optax.chain(jgrad.clip_by_global_norm(0.01, **axes), tx),
     shares=True),
    Wrapper("accumulate", lambda tx, **axes: jgrad.accumulate(tx, 2, **axes),
     {"mini_step": 0, "count": 0, "skipped": 0}, ("total",), jgrad.AccumulateState, calls=2, shares=True, skips=True),
    Wrapper("skip_nonfinite", jgrad.skip_nonfinite, {"skipped": 0, "streak": 0, "loss_scale": 1},
     state=jgrad.SkipState, shares=True, skips=True),
    Wrapper("skip_nonfinite", lambda tx, **axes: jgrad.skip_nonfinite(tx, loss_scale=8.0, growth_interval=3, **axes),
     {"skipped": 0, "streak": 0, "loss_scale": 8}, shares=True, skips=True),
    Wrapper("skip_spikes", lambda tx, **axes: with_loss(jgrad.skip_spikes(tx, **axes)),
     {"skipped": 0, "accepted": 0, "streak": 0, "restarts": 0}, state=jgrad.SpikeState, shares=True),
    Wrapper("master_weights", jgrad.master_weights, {}, ("master",), jgrad.MasterState, dtype=jnp.bfloat16),
    Wrapper("stochastic_rounding", jgrad.stochastic_rounding, {"done": 0}, (), jgrad.StochasticState,
     dtype=jnp.bfloat16),
    Wrapper("hyperball", lambda tx, **axes: jgrad.hyperball(tx, 0.02, leaves=rank_two, **axes), {"done": 0}, (),
     jgrad.HyperballState, shares=True),
    Wrapper("offload", jgrad.offload),
    Wrapper("average_params", lambda tx: jgrad.average_params(tx, 0.9), {}, ("average",), jgrad.EmaState),
    Wrapper("watch", jgrad.watch, {}, (), jgrad.WatchState, shares=True),
    Wrapper("schedule_free", lambda tx: jgrad.schedule_free(tx, learning_rate=RATE),
     {"weight_sum": 0, "largest_rate": 0}, ("z", "average"), jgrad.ScheduleFreeState),
]  # fmt: skip

every_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS, ids=str)
# For tests that compile much: around an optimizer in two ways.
few_wrappers = pytest.mark.parametrize(
    "wrapper", mostly_slow(WRAPPERS, "accumulate", "master_weights"), ids=str
)
with_state = pytest.mark.parametrize("wrapper", [w for w in WRAPPERS if w.state], ids=str)


@functools.cache
def around_adam(wrapper):
    return wrapper.around(jgrad.adam(RATE))


def few(tree):
    """Three leaves of the five, which take half the time to compile."""
    return tree | {"rest": tree["rest"][2]}


def setup(wrapper, steps=4, seed=1, dtype=None):
    """The transformation around Adam, parameters and gradients."""
    dtype = wrapper.dtype if dtype is None else dtype
    grads = [few(g) for g in gradients(steps, dtype, seed)]
    return around_adam(wrapper), few(params(dtype)), grads


def close(found, expected, dtype=jnp.float32):
    """To single precision, or to a unit in the last place of parameters that are stored as less."""
    tolerance = max(1e-6, float(jnp.finfo(dtype).eps) if dtype != jnp.float32 else 0)
    widen = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
    chex.assert_trees_all_close(widen(found), widen(expected), rtol=tolerance, atol=tolerance)


def as_well(wrapper, found, expected):
    """Close; where weights are rounded at random, they have the same bits wherever the step runs."""
    close(found, expected, wrapper.dtype)
    if wrapper.name == "stochastic_rounding":
        assert_equal(found[0], expected[0])


# ---- beside and inside of others ---------------------------------------------------------------


@pytest.mark.slow
@few_wrappers
def test_inject_hyperparams(wrapper):
    """The optimizer's numbers may be traced."""
    tx, w, grads = setup(wrapper)
    injected = optax.inject_hyperparams(
        lambda learning_rate: wrapper.around(jgrad.adam(learning_rate))
    )
    close(train(injected(learning_rate=RATE), w, grads)[0], train(tx, w, grads)[0], wrapper.dtype)


@pytest.mark.parametrize("wrapper", mostly_slow(WRAPPERS, "skip_spikes", "accumulate"), ids=str)
def test_debug_flags(wrapper):
    """Eager steps of finite numbers, the third of zeros, have no NaN and no infinity on their way."""
    tx, w, (g, *_) = setup(wrapper)
    with jax.debug_infs(True), jax.debug_nans(True):
        state = tx.init(w)
        for gradient in (g, g, jax.tree.map(jnp.zeros_like, g)):
            w, state = step_of(tx)(w, state, gradient)


# ---- under JAX's transformations ---------------------------------------------------------------


@every_wrapper
def test_empty_tree(wrapper):
    tx, _, _ = setup(wrapper)
    state = tx.init({})
    for _ in range(wrapper.calls):
        updates, state = jax.jit(tx.update)({}, state, {})
        assert updates == {}
    assert optax.tree.get(state, "mw") == {}


@pytest.mark.slow(one_in=2)
@every_wrapper
def test_eval_shape_and_jit_of_init(wrapper):
    tx, w, _ = setup(wrapper)
    state = tx.init(w)
    chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(tx.init, w), state)
    chex.assert_trees_all_equal(jax.jit(tx.init)(w), state)


@every_wrapper
def test_init_of_numpy(wrapper):
    """In double precision, which JAX has not here, and a number of Python: as of JAX's arrays."""
    own = {"w": np.ones((3, 2)), "n": np.arange(2), "x": 1.5}
    if wrapper.dtype != jnp.float32:
        own = {"w": own["w"].astype(wrapper.dtype), "n": own["n"]}
    tx = around_adam(wrapper)
    expected = tx.init(jax.tree.map(jnp.asarray, own))
    chex.assert_trees_all_equal_shapes_and_dtypes(tx.init(own), expected)


# ---- the state ---------------------------------------------------------------------------------


@every_wrapper
def test_tree_get(wrapper):
    """Moments and the wrapper's own fields are found by name, inside of whatever is around."""
    tx, w, _ = setup(wrapper)
    state = optax.chain(optax.scale(1.0), optax.masked(tx, True)).init(w)
    for name in ("mw", "vw"):
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), w)
        chex.assert_trees_all_equal(optax.tree.get(state, name), zeros)
    for name, value in wrapper.own.items():
        assert optax.tree.get(state, name) == value
        assert optax.tree.get(optax.tree.set(state, **{name: 7}), name) == 7
    for name in wrapper.like_params:
        like = optax.tree.get(state, name)
        assert jax.tree.structure(like) == jax.tree.structure(w)
        assert {x.dtype for x in jax.tree.leaves(like)} == {jnp.dtype(jnp.float32)}


@every_wrapper
def test_tree_map_params(wrapper):
    """optax knows which parts of the state are like the parameters."""
    tx, w, _ = setup(wrapper)
    marked = optax.tree_map_params(
        tx, lambda _: "like", tx.init(w), transform_non_params=lambda _: "other"
    )
    for name in ("mw", "vw", *wrapper.like_params):
        assert set(jax.tree.leaves(optax.tree.get(marked, name))) == {"like"}
    for name in wrapper.own:
        assert optax.tree.get(marked, name) == "other"


@with_state
def test_the_state_of_another(wrapper):
    """A message that names both, for each state that is not this wrapper's own."""
    kind = wrapper.state
    tx = wrapper.around(jgrad.adam(RATE))
    others = [w.around(jgrad.adam(RATE)).init(X) for w in WRAPPERS if w.state]
    for state in (*others, None, (), tuple(tx.init(X))):
        if isinstance(state, kind):
            continue
        with pytest.raises(TypeError) as caught:
            tx.update(X, state, X)
        remedy = (
            " `carry_over` converts the states of optax." if type(state) is tuple and state else ""
        )
        assert str(caught.value) == (
            f"{wrapper.name}: `state`: {type(state).__name__}, expected the {kind.__name__} that "
            f"this `{wrapper.name}` made with `init`.{remedy}"
        )


# ---- leaves, dtypes and calls ------------------------------------------------------------------

ZEROS = {"None": None, "float0": np.zeros(3, jax.dtypes.float0), "int": jnp.zeros(3, jnp.int32)}


@pytest.mark.slow(always=["None-accumulate", "float0-clip_by_global_norm", "float0-schedule_free",
    "int-schedule_free"])  # fmt: skip
@every_wrapper
@pytest.mark.parametrize("zero", ZEROS.values(), ids=ZEROS)
def test_leaves_that_are_not_updated(zero, wrapper):
    """Integers, None and a leaf without a gradient stay; the others are trained as if alone."""
    draw = lambda seed: params(wrapper.dtype, seed)["layer"]["w"]
    w = {"a": draw(0), "b": draw(1), "n": jnp.arange(3), "none": None}
    g = {"a": draw(2), "b": None, "n": zero, "none": None}
    tx = around_adam(wrapper)
    found, state = train(tx, w, [g] * 4)
    expected, _ = train(tx, {"a": w["a"]}, [{"a": g["a"]}] * 4)
    close(found.pop("a"), expected["a"], wrapper.dtype)
    assert_equal(found, {name: w[name] for name in found})
    assert_equal(optax.tree.get(state, "mw")["b"], jnp.zeros(w["b"].shape))


DTYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.mark.slow(always=["float16-master_weights", "float16-hyperball", "bfloat16-offload",
    "bfloat16-average_params", "bfloat16-watch", "float32-hyperball", "float32-watch",
    "float64-stochastic_rounding"])  # fmt: skip
@every_wrapper
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_do_not_drift(dtype, wrapper, x64):
    """Those of parameters and state, whatever the gradients have; moments are float32 or wider."""
    if (wrapper.name, dtype) == ("stochastic_rounding", "float16"):
        with pytest.raises(TypeError, match="expected bfloat16"):
            around_adam(wrapper).init(params(dtype))
        return
    tx, w = around_adam(wrapper), params(dtype) | {"n": jnp.arange(2)}
    state = jax.eval_shape(tx.init, w)
    for of_gradients in DTYPES:
        g = gradients(1, of_gradients)[0] | {"n": None}
        new = jax.eval_shape(step_of(tx), w, state, g)
        chex.assert_trees_all_equal_shapes_and_dtypes(new, (w, state))
    wide = jnp.float64 if dtype == "float64" else jnp.float32
    assert {x.dtype for x in jax.tree.leaves(optax.tree.get(state, "mw"))} == {jnp.dtype(wide)}


@pytest.mark.slow(always=["accumulate", "master_weights"])
@every_wrapper
def test_a_rate_for_one_call(wrapper):
    """Arguments of the call reach the optimizer inside."""
    tx, w, grads = setup(wrapper)
    other = told(wrapper.around(jgrad.adam(7.0)), learning_rate=RATE)
    close(train(other, w, grads)[0], train(tx, w, grads)[0], wrapper.dtype)


@pytest.mark.slow(always=["offload", "pack_small"])
@pytest.mark.parametrize("wrap", [jgrad.skip_nonfinite, lambda tx: jgrad.accumulate(tx, 2),
    jgrad.offload, jgrad.pack_small], ids=["skip_nonfinite", "accumulate", "offload", "pack_small"])  # fmt: skip
def test_without_parameters(wrap):
    """As optax: updates then have the gradients' dtypes."""
    tx, g = wrap(jgrad.adam(0.5)), {"a": X, "b": jnp.full(3, 2.0, jnp.bfloat16)}
    found, expected = tx.init(g), tx.init(g)
    for _ in range(2):
        updates, found = jax.jit(tx.update)(g, found)
        same, expected = jax.jit(tx.update)(g, expected, g)
    assert_equal((updates, found), (same, expected))


@pytest.mark.parametrize("grads_dtype", DTYPES)
@pytest.mark.parametrize(("wrap", "dtype"), [(jgrad.master_weights, "bfloat16"),
    (jgrad.master_weights, "float16"), (jgrad.stochastic_rounding, "bfloat16")])  # fmt: skip
def test_what_is_inside_sees_float32(wrap, dtype, grads_dtype, x64):
    """Gradients and parameters, for those of half precision."""
    seen = []

    def update(g, state, w=None, **extra):
        seen.append((g.dtype, w.dtype, extra))
        return -g, state

    spy = optax.GradientTransformationExtraArgs(lambda w: (seen.append(w.dtype), ())[1], update)
    tx, w = wrap(spy), jnp.ones(3, dtype)
    updates, _ = tx.update(jnp.ones(3, grads_dtype), tx.init(w), w, value=3)
    assert seen == [jnp.float32, (jnp.float32, jnp.float32, {"value": 3})]
    assert updates.dtype == dtype


# ---- steps that are left out -------------------------------------------------------------------

# A bad mini-batch of `accumulate` counts in its window, `offload` stands outermost, and a loss scale
# would never halve.
INSIDE_SKIP = [
    w
    for w in WRAPPERS
    if w.name not in ("accumulate", "offload") and w.own.get("loss_scale", 1) == 1
]
INSIDE_SKIP += [
    Wrapper("slowly", lambda tx: slowly(tx, 0.25)),
    Wrapper("watch-2", lambda tx: jgrad.watch(WRAPPERS[0].around(tx), every=2)),
]


@pytest.mark.slow(always=["skip_nonfinite-adam0", "skip_spikes-adam0"])
@pytest.mark.parametrize("make", mostly_slow([jgrad.adam, optax.adam], jgrad.adam))
@pytest.mark.parametrize("wrapper", INSIDE_SKIP, ids=str)
def test_as_if_a_skipped_step_had_not_been(wrapper, make, standard_promotion):
    """Bit for bit: weights, and whatever the wrapper keeps."""
    tx, (_, w, (a, b, c)) = jgrad.skip_nonfinite(wrapper.around(make(RATE))), setup(wrapper, 3)
    bad = jax.tree.map(lambda x: x * float("nan"), a)
    found, state = train(tx, w, [a, bad, b, c])
    expected, alone = train(tx, w, [a, b, c])
    assert_equal((found, state.inner), (expected, alone.inner))
    assert (int(state.skipped), int(alone.skipped)) == (1, 0)


MOST = 2**31 - 1


@with_state
def test_counters_saturate(wrapper):
    """Of updates and of what was left out, with finite gradients and with others."""
    tx, w, (g,) = setup(wrapper, 1)
    names = {"done", "skipped", "streak"}.intersection(wrapper.state._fields)
    counters = lambda state: [optax.tree.get(state, name) for name in names]
    assert all((x.shape, x.dtype) == ((), jnp.int32) for x in counters(tx.init(w)))
    full = optax.tree.set(tx.init(w), **dict.fromkeys(names, jnp.int32(MOST)))
    for factor in (1.0, float("nan")):
        scaled = jax.tree.map(lambda x, f=factor: x * jnp.asarray(f, x.dtype), g)
        found = set(map(int, counters(compiled(tx)(w, full, scaled)[1])))
        assert found <= {MOST, 0}
        if "done" in names or (factor != 1 and wrapper.skips):
            assert MOST in found


def skipped(tx, g, **extra):
    return tx.update(g, tx.init(g), g, **extra)[1].skipped


window = functools.partial(jgrad.accumulate, optax.identity(), 2)
LEFT_OUT = {
    "accumulate": lambda g, **axes: skipped(window(**axes), g),
    "skip_nonfinite": lambda g, **axes: skipped(jgrad.skip_nonfinite(optax.scale(1.0), **axes), g),
    "a weight": lambda g, **axes: skipped(window(weighted=True, **axes), X, weight=g[1]),
}


@pytest.mark.slow(always=["skip_nonfinite"])
@pytest.mark.parametrize("count", LEFT_OUT.values(), ids=LEFT_OUT)
def test_devices_of_a_mesh_axis_leave_out_the_same(count):
    """With `mesh_axes`, a NaN in one part of a cut leaf is seen by all parts."""
    x = jnp.array([[1.0, float("nan")], [1.0, 1.0]])
    for axes, counts in ((None, [1, 0]), ("data", [1, 1])):
        found = jax.vmap(functools.partial(count, mesh_axes=axes), axis_name="data")(x)
        assert found.tolist() == counts


# ---- all together ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap", [jgrad.skip_nonfinite, lambda tx: jgrad.accumulate(tx, 1)], ids=["skip", "accumulate"]
)
def test_the_dtypes_of_a_state_do_not_drift(wrap):
    """Whatever the transformation inside makes of them: a step would be compiled again."""

    def update(g, kept, w=None):
        return g, kept.astype(jnp.float32) + 1

    inner = optax.GradientTransformation(lambda w: jnp.zeros(3, jnp.bfloat16), update)
    tx, w = wrap(inner), jnp.ones(3)
    _, state = jax.jit(tx.update)(w, tx.init(w), w)
    assert state.inner.dtype == jnp.bfloat16
    assert float(state.inner[0]) == 1


@pytest.mark.parametrize("wrap", [jgrad.skip_nonfinite, lambda tx: jgrad.accumulate(tx, 2),
    lambda tx: jgrad.skip_nonfinite(jgrad.accumulate(jgrad.master_weights(tx), 2))],
    ids=["skip", "accumulate", "all"])  # fmt: skip
def test_an_eager_call_compiles_nothing_anew(wrap):
    """The first window apart: `lax.cond` would be compiled at each call."""
    tx, w = wrap(optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.adam(0.1))), {"a": jnp.ones(3)}
    state = [tx.init(w)]

    def call(scale):
        _, state[0] = tx.update({"a": scale * jnp.ones(3)}, state[0], w)

    compilations(call, 1.0, 2.0, float("nan"), 3.0, 4.0)  # as many as there is to compile
    assert compilations(call, 5.0, 6.0, float("nan"), 7.0) == 0
