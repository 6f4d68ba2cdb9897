"""`watch`: norms beside NumPy's in float64, the form of a report, and every place to put it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jgrad
from tests.cases import gradients, params
from tests.multi_device.meshes import mesh_of
from tests.support.loops import assert_equal, every_step, step_of, step_on, train, with_loss
from tests.support.other_platforms import as_on

NAN, INF, X = float("nan"), float("inf"), jnp.ones(3)
AXES = {"embed": {"table": None}, "layers": {"w": 0, "b": 0}, "head": [None]}


def model(seed=0, dtype=jnp.float32):
    """With a stack of three layers, whose sizes differ."""
    rng = np.random.default_rng(seed)
    sizes = np.array([1e-3, 1.0, 1e3])

    def draw(*shape):
        x = rng.normal(size=shape)
        return x * sizes.reshape(3, *[1] * (len(shape) - 1)) if shape[0] == 3 else x

    shapes = {"embed": {"table": (5, 4)}, "layers": {"w": (3, 4, 6), "b": (3, 6)}, "head": [(4, 2)]}
    return jax.tree.map(
        lambda shape: jnp.asarray(draw(*shape), dtype), shapes, is_leaf=lambda x: type(x) is tuple
    )


def f64(x):
    return np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)


def size_of(x, axis=None):
    """The 2-norm of an array, or of each index of its first axis."""
    squares = np.abs(f64(x)) ** 2
    return np.sqrt(squares.sum() if axis is None else squares.reshape(len(squares), -1).sum(1))


def norms(kind, tree, axes=AXES):
    """By name, as the report has them."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    stacked = jax.tree.leaves(axes, is_leaf=lambda x: x is None)
    found = {kind: np.sqrt(sum(size_of(x) ** 2 for _, x in leaves))}
    for (path, x), axis in zip(leaves, stacked, strict=True):
        names = [str(getattr(key, "key", getattr(key, "idx", None))) for key in path]
        found["/".join([kind, *names])] = size_of(x, axis)
    return found


def expected(g, u, w, axes=AXES):
    found = norms("grad_norm", g, axes) | norms("update_norm", u, axes)
    found |= norms("param_norm", w, axes)
    for key in norms("", g, axes):
        a, b = found[f"update_norm{key}"], found[f"param_norm{key}"]
        found[f"update_ratio{key}"] = np.where(b == 0, 0, a / np.where(b == 0, 1, b))
    return found


def close(found, truth, rtol=1e-6):
    for key, x in truth.items():
        assert found[key].shape == np.shape(x), key
        np.testing.assert_allclose(f64(found[key]), x, rtol=rtol, err_msg=key)


def updated(tx, w, g, state=None):
    return jax.jit(tx.update)(g, tx.init(w) if state is None else state, w)


# ---- what is measured --------------------------------------------------------------------------


@pytest.mark.slow(always=["1-tree"])
@pytest.mark.parametrize("packed", [False, True], ids=["tree", "packed"])
@pytest.mark.parametrize("every", [1, 3])
def test_norms(packed, every):
    """Totals, leaves and layers; before clipping, and before the update is added."""
    w, g = model(0), model(1)
    tx = optax.chain(jgrad.clip_by_global_norm(0.1), jgrad.adam(0.1, weight_decay=0.1))
    plain, _ = updated(tx, w, g)
    watched = jgrad.watch(tx, every=every, layer_axes=None if packed else AXES)
    if packed:
        w, g = (jgrad.pack(x, layer_axes=AXES) for x in (w, g))
    u, state = updated(watched, w, g)
    if packed:
        assert_equal(u, updated(tx, w, g)[0])
        w, g, u = map(jgrad.unpack, (w, g, u))
    else:
        assert_equal(u, plain)
    found = jgrad.report(state)
    close(found, expected(g, u, w))
    assert found["grad_norm/layers/w"].shape == (3,)
    assert int(found["nonfinite"]) == 0
    assert (int(found["calls"]), int(found["measured"])) == (1, 1)
    np.testing.assert_allclose(found["clip_factor"], 0.1 / norms("", g)[""], rtol=1e-6)


def test_norms_at_every_scale():
    w = {"large": jnp.full(4, 1e30), "small": jnp.full(4, 1e-30), "zero": jnp.zeros(4)}
    u, state = updated(jgrad.watch(optax.scale(-1.0)), w, w)
    close(jgrad.report(state), expected(w, u, w, {"large": None, "small": None, "zero": None}))


def test_norms_above_the_largest_number():
    """At most that number: no norm of finite gradients is infinite."""
    w = {"a": jnp.full(4, 3e38), "b": jnp.ones(1)}
    state = updated(jgrad.watch(optax.identity()), w, w)[1]
    found = jgrad.report(state)
    assert found["grad_norm/a"] == found["grad_norm"] == jnp.finfo(jnp.float32).max
    assert int(found["nonfinite"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("bad", [NAN, INF])
def test_gradients_that_are_not_finite(bad):
    """Counted by layer; the step is skipped inside, so that its update is zero."""
    w, g = model(0), model(1)
    g["layers"]["w"] = g["layers"]["w"].at[1, 2, 3].set(bad)
    g["embed"]["table"] = g["embed"]["table"].at[0, 0].set(bad)
    tx = jgrad.watch(jgrad.skip_nonfinite(jgrad.adam(0.1)), layer_axes=AXES)
    found = jgrad.report(updated(tx, w, g)[1])
    assert int(found["nonfinite"]) == 2
    assert not jnp.isfinite(found["grad_norm"])
    assert list(jnp.isfinite(found["grad_norm/layers/w"])) == [True, False, True]
    assert jnp.isfinite(found["grad_norm/head/0"])
    assert float(found["update_norm"]) == 0
    assert int(found["skipped"]) == 1
    found = jgrad.report(updated(jgrad.watch(jgrad.adam(0.1)), w, g)[1])
    assert int(found["nonfinite"]) == 2


def test_float64(x64):
    """Norms are computed in float64, and stored in float32."""
    w = {"w": jnp.full(3, 1e200), "v": jnp.full(3, 1.0)}
    assert w["w"].dtype == jnp.float64
    _, state = updated(jgrad.watch(jgrad.adam(0.1)), w, w)
    found = jgrad.report(state)
    assert found["grad_norm/w"] == found["grad_norm"] == jnp.finfo(jnp.float32).max
    np.testing.assert_allclose(found["grad_norm/v"], np.sqrt(3), rtol=1e-6)
    assert {x.dtype for x in found.values()} == {np.dtype("float32"), np.dtype("int32")}


def test_leaves_that_are_not_there():
    """None, integers and missing gradients: the first two have no numbers, the last is zero."""
    w = {"w": jnp.ones((3, 2)), "none": None, "count": jnp.arange(3), "b": jnp.ones(2)}
    g = {"w": jnp.ones((3, 2)), "none": None, "count": None, "b": None}
    tx = jgrad.watch(jgrad.gradient_descent({"w": 0.1, "none": 0.1, "count": 0.1, "b": 0.2}))
    _, state = updated(tx, w, g)
    found = jgrad.report(state)
    assert {key.partition("/")[2] for key in found} == {"", "w", "b"}
    assert float(found["grad_norm/b"]) == float(found["update_norm/b"]) == 0
    np.testing.assert_allclose(found["param_norm/b"], np.sqrt(2), rtol=1e-6)
    np.testing.assert_allclose(found["grad_norm"], np.sqrt(6), rtol=1e-6)


def test_a_bare_array_and_names_that_clash():
    found = jgrad.watch(optax.identity()).init(jnp.ones(3)).report
    assert "grad_norm/params" in found
    w = {"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(2)}
    _, state = updated(jgrad.watch(optax.identity()), w, w)
    found = {key: x for key, x in state.report.items() if key.startswith("grad_norm/")}
    assert found.keys() == {"grad_norm/a/b", "grad_norm/a/b#1"}
    np.testing.assert_allclose(sorted(found.values()), [1, np.sqrt(2)], rtol=1e-6)


# ---- when --------------------------------------------------------------------------------------


def test_every():
    """The first call, and each third: all others keep its numbers."""
    tx, w = jgrad.watch(jgrad.adam(0.1), every=3), {"x": X}
    grads = [{"x": jnp.sin(i + X)} for i in range(7)]
    steps = every_step(tx, w, grads)
    found = [jax.device_get(jgrad.report(state)) for _, state in steps]
    assert [int(x["calls"]) for x in found] == [1, 2, 3, 4, 5, 6, 7]
    assert [int(x["measured"]) for x in found] == [1, 1, 3, 3, 3, 6, 6]
    always = [
        jax.device_get(jgrad.report(state))
        for _, state in every_step(jgrad.watch(jgrad.adam(0.1)), w, grads)
    ]
    for x in found:
        then = always[int(x["measured"]) - 1]
        close(x, {key: f64(y) for key, y in then.items() if key != "calls"})
    plain, _ = train(jgrad.adam(0.1), w, grads)
    chex.assert_trees_all_close(steps[-1][0], plain, rtol=1e-6)


# ---- where -------------------------------------------------------------------------------------


def clipped(tx):
    return optax.chain(jgrad.clip_by_global_norm(0.01), tx)


def test_notes_of_an_open_window():
    """The numbers of the last window stay while the next is open, and with `emit=False`."""
    rate = lambda done: 0.1 / (1 + done.astype(jnp.float32))
    tx = jgrad.watch(jgrad.accumulate(clipped(jgrad.adam(rate)), 2))
    w, grads = {"x": X}, [{"x": jnp.sin(i + X)} for i in range(5)]
    found = [float(jgrad.report(s)["learning_rate"]) for _, s in every_step(tx, w, grads)]
    np.testing.assert_allclose(found, [0, 0.1, 0.1, 0.05, 0.05], rtol=1e-6)
    w, state = train(tx, w, grads[:2])
    _, state = tx.update(grads[2], state, w, emit=False)
    np.testing.assert_allclose(jgrad.report(state)["learning_rate"], 0.1, rtol=1e-6)
    _, state = tx.update(grads[2], state, w, emit=True)
    np.testing.assert_allclose(jgrad.report(state)["learning_rate"], 0.05, rtol=1e-6)


def test_skipping_looks_at_nothing_again():
    """All that `watch` makes is settled: no array is read to see whether it is finite."""
    tree = {f"w{i}": jnp.ones((64, 64)) for i in range(3)}

    def reads(tx):
        text = str(jax.make_jaxpr(tx.update)(tree, tx.init(tree), tree))
        return text.count("name=_is_finite"), text.count("name=_stays_finite")

    assert reads(jgrad.skip_nonfinite(jgrad.watch(jgrad.adam(0.1)))) == reads(
        jgrad.skip_nonfinite(jgrad.adam(0.1))
    )


@pytest.mark.parametrize("every", [1, 2])
def test_no_traced_value_is_left(every):
    """Neither in the decision of a wrapper around, nor in notes of a branch inside."""
    inner = jgrad.accumulate(clipped(jgrad.adam(0.1)), 2)
    tx, w = jgrad.skip_nonfinite(jgrad.watch(clipped(jgrad.adam(0.1)), every=every)), {"x": X}
    windows = jgrad.watch(jgrad.skip_nonfinite(inner), every=every)
    with jax.checking_leaks():
        for one in (tx, windows):
            jax.eval_shape(one.update, w, jax.eval_shape(one.init, w), w)


def test_watching_twice():
    """Outside of clipping and inside: the outer one keeps the name."""
    w = g = {"x": X}
    tx = jgrad.watch(optax.chain(jgrad.clip_by_global_norm(0.01), jgrad.watch(jgrad.adam(0.1))))
    found = jgrad.report(updated(tx, w, g)[1])
    assert float(found["grad_norm"]) > 0.1
    np.testing.assert_allclose(found["grad_norm#1"], 0.01, rtol=1e-5)
    np.testing.assert_allclose(found["learning_rate"], 0.1, rtol=1e-6)


def test_an_update_that_needs_an_argument(caplog):
    """Of another library: at `init` nobody has it, so that its notes are left out, which is said."""

    def update(g, state, w=None, *, value, **extra):
        return jax.tree.map(lambda x: x * value.astype(x.dtype), g), state

    by_value = optax.GradientTransformationExtraArgs(lambda w: optax.EmptyState(), update)
    tx, w, (g,) = jgrad.watch(optax.chain(by_value, jgrad.adam(0.1))), params(), gradients(1)
    jax.eval_shape(tx.init, w)
    _, state = tx.update(g, tx.init(w), w, value=jnp.float32(2.0))
    found = jgrad.report(state)
    assert "learning_rate" not in found
    assert float(found["grad_norm"]) > 0
    (said,) = caplog.messages  # once for this transformation
    assert said == (
        "watch: an update inside needs what `init` does not have (missing 1 required keyword-only "
        "argument: 'value'), so what is inside adds no numbers to the report: put `watch` inside "
        "of it, or name the axes."
    )


def test_a_clip_over_axes_that_init_does_not_have(caplog):
    """`init` may stand outside of the `shard_map` in which updates are."""
    clip = jgrad.clip_by_global_norm(1.0, mesh_axes=P("d"))
    tx = optax.chain(clip, jgrad.adam(0.1))
    assert "learning_rate" not in jgrad.report(jgrad.watch(tx).init(params()))
    (said,) = caplog.messages
    assert "needs what `init` does not have (no axis 'd' here)" in said


def test_a_missing_loss_behind_a_compiled_update(caplog):
    """What `init` tries may not be kept as the program of calls, where a loss is missing."""
    inner = jgrad.skip_spikes(jgrad.adam(0.1))
    compiled = optax.GradientTransformationExtraArgs(inner.init, jax.jit(inner.update))
    tx, w, (g,) = jgrad.watch(compiled), params(), gradients(1)
    state = tx.init(w)
    assert "(`loss`: missing)" in caplog.text
    with pytest.raises(TypeError, match="skip_spikes: `loss`: missing"):
        tx.update(g, state, w)


def test_an_update_that_is_wrong(caplog):
    """Its error is that of `init`, and no number is lost in silence."""

    def update(g, state, w=None):
        return jax.tree.map(lambda x: x @ jnp.ones((9, 9)), g), state

    wrong = optax.GradientTransformation(lambda w: optax.EmptyState(), update)
    with pytest.raises(TypeError, match="contracting dimensions") as error:
        jgrad.watch(optax.chain(wrong, jgrad.adam(0.1))).init({"w": jnp.ones((8, 8))})
    (note,) = (x for x in error.value.__notes__ if x.startswith("watch"))
    assert note == (
        "watch: `init` tried an update, of the parameters in place of gradients, and this was "
        "raised; put `watch` inside of what needs other arguments."
    )
    assert not caplog.messages


# ---- devices -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(every, check_vma):
    """Norms of whole leaves, on all devices; notes too, which `init` finds outside."""
    w, g = ({"w": x[:, :3], "b": x[0, :4]} for x in np.random.RandomState(0).randn(2, 8, 4))
    w, g = jax.tree.map(jnp.float32, (w, g))

    def make(**axes):
        inner = optax.chain(jgrad.clip_by_global_norm(0.1, **axes), jgrad.lamb(0.1, **axes))
        return jgrad.watch(jgrad.skip_nonfinite(inner, **axes), every=every, **axes)

    tx = make(mesh_axes="data")
    state = tx.init(w)
    specs = jax.tree.map(lambda x: P("data") if x.shape in ((8, 3), (4,)) else P(), state)
    _, state = step_on(mesh_of(data=4), tx, P("data"), specs, check_vma)(w, state, g)
    alone = jgrad.report(train(make(), w, [g])[1])
    assert jgrad.report(state).keys() == alone.keys()
    close(jgrad.report(state), {k: f64(x) for k, x in alone.items()}, 3e-6)


def test_state_shardings():
    mesh = mesh_of(data=4)
    w = jax.device_put({"w": jnp.ones((8, 3)), "b": jnp.ones(4)}, NamedSharding(mesh, P("data")))
    tx = jgrad.watch(jgrad.adam(0.1))
    shardings = jgrad.state_shardings(tx, w)
    assert {x.spec for x in shardings.report.values()} == {P()}
    assert shardings.inner.mw["w"].spec == P("data")
    assert all(x.sharding.is_fully_replicated for x in tx.init(w).report.values())


# ---- a report without it -------------------------------------------------------------------------


def test_counters_without_watch():
    """Those of each wrapper, from anywhere in a state: the same as with `watch`."""
    w, bad = {"w": X}, {"w": X * jnp.nan}
    tx = jgrad.skip_nonfinite(jgrad.accumulate(jgrad.skip_spikes(optax.identity()), 2))
    tx = with_loss(
        optax.chain(
            optax.masked(tx, {"w": True}),
            jgrad.skip_nonfinite(jgrad.average_params(optax.identity(), 0.9)),
        )
    )
    watched = jgrad.report(train(jgrad.watch(tx), w, [w, bad])[1])
    found = jgrad.report(train(tx, w, [w, bad])[1])
    names = ["skipped", "loss_scale", "skipped_mini_batches", "spikes", "spike_restarts"]
    assert list(found) == [*names, "skipped#1", "loss_scale#1"]
    numbers = {name: float(x) for name, x in found.items()}
    assert numbers == {name: float(watched[name]) for name in found}
    assert numbers["skipped"] == 1


@pytest.mark.not_in_jax_0_8("branches")
def test_donated_arrays_are_not_copied():
    """Though a branch of some steps reads them."""
    w, tx = {"w": jnp.ones((256, 256))}, jgrad.watch(jgrad.adam(0.1), every=2)
    step = jax.jit(step_of(tx), donate_argnums=(0, 1)).lower(w, tx.init(w), w).compile()
    assert step.memory_analysis().temp_size_in_bytes < 1.1 * w["w"].nbytes


@pytest.mark.slow
def test_some_steps_as_a_gpu_measures_them():
    """Where no copy of what a branch reads is to be avoided."""
    tx, w, g = jgrad.watch(jgrad.adam(0.1), every=2), {"x": X}, {"x": 2 * X}
    step = step_of(tx)
    state = jax.jit(step)(w, tx.init(w), g)[1]
    found, expected = as_on("cuda", step)(w, state, g), jax.jit(step)(w, state, g)
    chex.assert_trees_all_equal_structs(found, expected)
    chex.assert_trees_all_close(found, expected, rtol=1e-5)
