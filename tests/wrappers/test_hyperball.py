"""Matrices that keep their norm, against the definition in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jgrad
from tests.multi_device.meshes import mesh_of
from tests.support import messages
from tests.support.choice import mostly_slow
from tests.support.loops import compiled, step_of, step_on

LEAVES = {"embed": False, "layers": True, "b": False, "w": True}
LAYERS = {"embed": None, "layers": (0, 1), "b": None, "w": None}
RATE = 0.02
X = jnp.ones((2, 3))


def params(dtype="float32", scale=1.0):
    """Two layers with three experts each, of norms that differ."""
    draws = np.random.RandomState(0)
    shapes = {"embed": (9, 3), "layers": (2, 3, 4, 5), "b": (5,), "w": (4, 6)}
    tree = {name: scale * draws.randn(*shape) for name, shape in shapes.items()}
    tree["layers"] *= np.arange(1.0, 7.0).reshape(2, 3, 1, 1)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def gradients(count, like, scale=1.0):
    draws = np.random.RandomState(1)
    draw = lambda x: jnp.asarray(scale * draws.randn(*x.shape), x.dtype)
    return [jax.tree.map(draw, like) for _ in range(count)]


packs = functools.partial(jgrad.pack, layer_axes=LAYERS)
forms = pytest.mark.parametrize("pack", [lambda x: x, packs], ids=["tree", "packed"])


def norms(x):
    """Of each matrix, in float64."""
    x = np.asarray(x, np.float64)
    return np.sqrt(np.sum(x * x, axis=(-2, -1), keepdims=True))


def expected_steps(w, directions, rate=RATE, radius=None):
    """W' = R N(W - rate R N(u)), in float64, from directions that are subtracted."""
    w = np.asarray(w, np.float64)
    r = norms(w) if radius is None else radius
    for u in directions:
        u = np.asarray(u, np.float64)
        size = norms(u)
        if np.all(size > 0):
            new = w - rate * r * (u / size)
            w = r * new / norms(new)
    return w


def around(tx, **options):
    return jgrad.hyperball(tx, RATE, **{"leaves": LEAVES, "layer_axes": LAYERS} | options)


ADAMH = around(jgrad.adam(1e-3))


def train(tx, w, grads, **kwargs):
    state = jax.jit(tx.init)(w)
    for g in grads:
        w, state = compiled(tx)(w, state, g, **kwargs)
    return w, state


def assert_close(found, expected, rtol):
    for name in ("layers", "w"):
        a, b = np.asarray(found[name], np.float64), expected[name]
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.max(np.abs(b)))


# ---- the step ----------------------------------------------------------------------------------


@pytest.mark.slow(always=["float32-tree"])
@forms
@pytest.mark.parametrize(
    "dtype", mostly_slow(["float32", "float64", "complex128"], "float32", "float64")
)
def test_definition(dtype, pack, x64):
    """30 steps around plain gradients; other leaves have the step of the optimizer."""
    factor = 1 + 2j if dtype == "complex128" else 1.0
    w = jax.tree.map(lambda x: x.astype(dtype) * factor, params("float64"))
    grads = gradients(30, w)
    found, state = train(around(jgrad.gradient_descent(0.1)), pack(w), list(map(pack, grads)))
    found = jgrad.unpack(found)
    if dtype == "complex128":
        as_real = lambda x: np.concatenate([np.real(x), np.imag(x)], axis=-1)
        w, found = jax.tree.map(as_real, w), jax.tree.map(as_real, found)
        grads = [jax.tree.map(as_real, g) for g in grads]
    rtol = 2e-6 if dtype == "float32" else 1e-13
    for name in ("layers", "w"):
        expected = expected_steps(w[name], [g[name] for g in grads])
        np.testing.assert_allclose(found[name], expected, rtol, rtol * np.max(np.abs(expected)))
    plain = w["embed"] - 0.1 * sum(np.asarray(g["embed"]) for g in grads)
    np.testing.assert_allclose(found["embed"], plain, 1e-5, 1e-5)
    assert int(state.done) == 30


@pytest.mark.slow(always=["False"])
@pytest.mark.parametrize("packed", [False, True])
def test_each_leaf_in_its_precision(packed, x64):
    """Neighbours of float32 and float64 share no sums, and radii have the precision of a leaf."""
    w = params() | {"w": params("float64")["w"], "near": params()["w"]}
    choice = {"leaves": LEAVES | {"near": True}, "layer_axes": LAYERS | {"near": None}}
    pack = functools.partial(jgrad.pack, layer_axes=choice["layer_axes"]) if packed else lambda x: x
    tx, grads = around(jgrad.gradient_descent(0.1), **choice), gradients(3, w)
    found, state = train(tx, pack(w), list(map(pack, grads)))
    found = jgrad.unpack(found)
    for name, rtol in (("layers", 1e-6), ("near", 1e-6), ("w", 1e-13)):
        assert found[name].dtype == state.radius[name].dtype == w[name].dtype
        expected = expected_steps(w[name], [g[name] for g in grads])
        np.testing.assert_allclose(found[name], expected, rtol, rtol * np.max(np.abs(expected)))


@pytest.mark.slow
@pytest.mark.parametrize("pack", [packs, pytest.param(lambda x: x, marks=pytest.mark.slow)])
def test_the_norm_after_1000_steps(pack):
    """It is that of the start to 1e-6: no copy of this method that was seen keeps it."""
    w = params()
    tx = ADAMH
    packed_w = pack(w)
    draws = jax.random.split(jax.random.key(0), 1000)

    def step(carry, key):
        w, state = carry
        g = pack(jax.tree.map(lambda x: jax.random.normal(key, x.shape), params()))
        updates, state = tx.update(g, state, w)
        return (optax.apply_updates(w, updates), state), None

    (found, state), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, draws))(
        (packed_w, tx.init(packed_w))
    )
    found = jgrad.unpack(found)
    for name in ("layers", "w"):
        np.testing.assert_allclose(norms(found[name]), norms(w[name]), rtol=1e-6)
        np.testing.assert_allclose(state.radius[name], norms(w[name]), rtol=3e-7)


def test_the_norm_is_that_of_the_first_step():
    """Weights that were changed from outside come back to it: it is not that of the current step."""
    w = params()
    tx = around(jgrad.gradient_descent(1.0))
    state = tx.init(w)
    larger = jax.tree.map(lambda x: 3 * x, w)
    (g,) = gradients(1, w)
    found, state = compiled(tx)(larger, state, g)
    np.testing.assert_allclose(norms(found["w"]), norms(w["w"]), rtol=1e-6)


@pytest.mark.slow(always=["1e+25-1e-25-packed"])
@forms
@pytest.mark.parametrize("size", [1e25, 1e-25])
@pytest.mark.parametrize("of_gradient", [1e25, 1e-25, 1.0])
def test_any_scale(size, of_gradient, pack):
    w = params(scale=size)
    grads = gradients(3, w, of_gradient)
    # A rate of 0 for the others, which would overflow.
    tx = around(optax.partition({"own": optax.sgd(1.0), "none": optax.set_to_zero()}, _labels))
    if pack is packs:
        tx = around(optax.sgd(1.0))
    found, _ = train(tx, pack(w), list(map(pack, grads)))
    expected = {k: expected_steps(w[k], [g[k] for g in grads]) for k in ("layers", "w")}
    assert_close(jgrad.unpack(found), expected, 1e-6)


@pytest.mark.slow(always=["1e-25"])
@pytest.mark.parametrize("size", [1e25, 1e-25, 0])
def test_constants(size):
    """Weights and directions that a jitted function closes over: as those that it is given."""
    w, tx = params(scale=size or 1.0), around(optax.sgd(1.0))
    grads = gradients(1, w, size)
    found, _ = jax.jit(lambda: step_of(tx)(w, tx.init(w), grads[0]))()
    assert_close(found, {k: expected_steps(w[k], [grads[0][k]]) for k in ("layers", "w")}, 1e-6)


def _labels(tree):
    return {name: "own" if LEAVES[name] else "none" for name in tree}


@pytest.mark.slow(always=["float32-1.0-1e+25", "float64-1e-150-1.0"])
@pytest.mark.parametrize(("dtype", "radius", "scale"), [("float32", 1e-20, 1.0),
    ("float32", 1.0, 1e25), ("float32", 1e-10, 1e-4), ("float32", 1e12, 1e17),
    ("float64", 1e-150, 1.0), ("float64", 1.0, 1e12)])  # fmt: skip
def test_weights_far_above_the_radius(dtype, radius, scale, x64):
    """What is added rounds with them: the norm is the radius up to that, and from the next step."""
    w, (first, second) = params(dtype, scale), gradients(2, params(dtype), 1e10)
    leaves = {"leaves": {**LEAVES, "w": False}, "layer_axes": LAYERS}
    tx = jgrad.hyperball(optax.sgd(1e-9), RATE, radius=radius, **leaves)
    in_radii = lambda x: norms(np.asarray(x["layers"], np.float64) / radius)
    found, _ = train(tx, w, [first])
    rounding = np.finfo(dtype).eps * in_radii(w)
    assert np.all(np.abs(in_radii(found) - 1) <= rounding + 1e-6)
    found, _ = train(tx, w, [first, second])
    np.testing.assert_allclose(in_radii(found), 1.0, rtol=1e-6)


@pytest.mark.slow(always=["3e+38"])
@pytest.mark.parametrize("rate", [2e19, 3e38])
def test_a_large_rate_has_the_direction_of_the_update(rate):
    w, (g,) = params(), gradients(1, params())
    found, _ = train(around(optax.sgd(1.0)), w, [g], hyperball_learning_rate=rate)
    for name in ("layers", "w"):
        u = -np.asarray(g[name], np.float64) / norms(g[name])
        np.testing.assert_allclose(found[name] / norms(w[name]), u, rtol=1e-5, atol=1e-6)


def test_matrices_of_zeros():
    """They have no norm to keep: the step of the optimizer passes."""
    w = params() | {"w": jnp.zeros((4, 6))}
    w["layers"] = w["layers"].at[1, 2].set(0.0)
    grads = gradients(2, w)
    tx = around(jgrad.gradient_descent(0.1))
    found, state = train(tx, w, grads)
    for name, i in (("w", ()), ("layers", (1, 2))):
        plain = -0.1 * sum(np.asarray(g[name][i]) for g in grads)
        np.testing.assert_allclose(found[name][i], plain, rtol=2e-6)
    assert str(state.describe()) == (
        "layers  6 matrices  4.96 to 23.4; 1 of norm 0, moved by `tx` alone\n"
        "w       1 matrix    1 of norm 0, moved by `tx` alone"
    )


def test_what_describe_says_of_others():
    """Of a matrix without elements, of no matrices, and of one whose norm is NaN."""
    w = {"a": jnp.ones((0, 3)), "b": jnp.ones((0, 4, 3)), "c": jnp.stack([X, 0 * X, jnp.nan * X])}
    tx = jgrad.hyperball(optax.sgd(1.0), RATE, leaves=True, layer_axes={"a": None, "b": 0, "c": 0})
    assert tx.init(w).describe() == (
        "a  1 matrix    1 of norm 0, moved by `tx` alone\n"
        "b  0 matrices\n"
        "c  3 matrices  2.45 to 2.45; 1 of norm 0, moved by `tx` alone; 1 of norm nan, moved by `tx` "
        "alone"
    )


@pytest.mark.slow(always=["1e-05-0.0001"])
@pytest.mark.parametrize("rate", mostly_slow([1e-4, 0.02], 1e-4))
@pytest.mark.parametrize("size", [0.0, 1e-5])
def test_a_radius_is_the_norm_from_the_first_step(size, rate):
    """Also of a matrix of zeros, whose new norm is a small rate, and of a small one."""
    w, (g,) = params(scale=size), gradients(1, params())
    tx = jgrad.hyperball(optax.sgd(1.0), rate, leaves=LEAVES, layer_axes=LAYERS, radius=2.0)
    found, _ = train(tx, w, [g])
    for name in ("layers", "w"):
        np.testing.assert_allclose(norms(found[name]), 2.0, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 0.02])
def test_zeros_without_a_direction(rate):
    """Matrices of zeros that are to have a norm stay where the rate is 0 or no gradient came."""
    w = jax.tree.map(jnp.zeros_like, params())
    g = w if rate else gradients(1, w)[0]
    tx = jgrad.hyperball(optax.sgd(1.0), rate, leaves=LEAVES, layer_axes=LAYERS, radius=2.0)
    updates, _ = jax.jit(tx.update)(g, tx.init(w), w)
    assert not np.any(updates["w"])
    assert not np.any(updates["layers"])


def test_leaves_without_a_norm():
    """None and integers are not chosen, whatever `leaves` says."""
    w = {"w": params()["w"], "none": None, "count": jnp.arange(6).reshape(2, 3)}
    g = {"w": w["w"], "none": None, "count": np.zeros((2, 3), jax.dtypes.float0)}
    for options in ({}, {"radius": 2.0}):
        tx = jgrad.hyperball(jgrad.adam(1e-3), RATE, leaves=True, **options)
        state = tx.init(w)
        assert state.radius["none"] is state.radius["count"] is None
        updates, state = jax.jit(tx.update)(g, state, w)
        assert updates["none"] is None
        assert not np.any(updates["count"])
        assert state.describe().startswith("w  1 matrix")
        packed = jgrad.pack({"": None, "w": w["w"]})
        in_buffer = jgrad.unpack(tx.init(packed).radius)
        np.testing.assert_allclose(in_buffer["w"], state.radius["w"], rtol=1e-6)


# ---- options -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_radius():
    w, grads = params() | {"w": jnp.zeros((4, 6))}, gradients(3, params())
    given = {"embed": 1.0, "layers": lambda shape: shape[0] + shape[1], "b": 1.0, "w": 2.0}
    found, state = train(around(jgrad.adam(1e-3), radius=given), w, grads)
    np.testing.assert_allclose(norms(found["w"]), 2.0, rtol=1e-6)
    np.testing.assert_allclose(norms(found["layers"]), 9.0, rtol=1e-6)
    assert state.radius["embed"] is None
    by_shape, _ = train(around(jgrad.adam(1e-3), radius=lambda shape: shape[0]), w, grads)
    np.testing.assert_allclose(norms(by_shape["layers"]), 4.0, rtol=1e-6)


def test_rates():
    """A schedule of the updates done, rules by path, and the number of a call."""
    w, grads = params(), gradients(3, params())
    schedule = optax.linear_schedule(0.03, 0.0, 3)
    leaves = {"leaves": LEAVES, "layer_axes": LAYERS}
    tx = jgrad.hyperball(optax.sgd(1.0), jgrad.by_path({"w": schedule}, rest=0.1), **leaves)
    found, _ = train(tx, w, grads)
    expected = np.asarray(w["w"], np.float64)
    for i, g in enumerate(grads):
        radius = norms(w["w"])
        expected = expected_steps(expected, [g["w"]], float(schedule(i)), radius)
    np.testing.assert_allclose(found["w"], expected, rtol=1e-5, atol=1e-6)
    now, _ = train(tx, w, grads[:1], hyperball_learning_rate=0.2)
    expected = {k: expected_steps(w[k], [grads[0][k]], 0.2) for k in ("layers", "w")}
    assert_close(now, expected, 1e-6)


ADAM, SHAPES = jgrad.adam(1e-3), jax.eval_shape(params)


def traced(tx, made_by=None, **options):
    """A step of shapes, with the state of this transformation or of another one."""
    state = jax.eval_shape((made_by or tx).init, SHAPES)
    return jax.eval_shape(functools.partial(tx.update, **options), SHAPES, state, SHAPES)


def test_decay_of_leaves_whose_norms_change():
    """Of others it would change the norms that are kept, and is an error."""
    traced(around(optax.inject_hyperparams(jgrad.adam, static_args="weight_decay")(1e-3)))
    others = {name: not use for name, use in LEAVES.items()}
    traced(around(jgrad.adam(1e-3, weight_decay=0.1, weight_decay_mask=others)))


# ---- in its surroundings -----------------------------------------------------------------------


@pytest.mark.slow(always=["1.0-True-of_w1", "1e-25-True-of_w2"])
@pytest.mark.parametrize(("scale", "check", "of_w"), [(1.0, False, P("model")), (1.0, True, P()),
    (1e-25, True, P("model")), pytest.param(1.0, True, P("model"), marks=pytest.mark.slow),
    pytest.param(1e-25, False, P(), marks=pytest.mark.slow)])  # fmt: skip
def test_shard_map(scale, check, of_w):
    """Norms of whole matrices from parts, beside whole ones; one all-reduce of all sums."""
    w, grads = params(), gradients(2, params(), scale)
    spec = {"embed": P(), "layers": P(None, None, "model"), "b": P(), "w": of_w}
    tx = around(jgrad.gradient_descent(0.1), mesh_axes=spec)
    step, found, state = step_on(mesh_of(model=2), tx, spec, P(), check), w, tx.init(w)
    for g in grads:
        found, state = step(found, state, g)
    expected = {k: expected_steps(w[k], [g[k] for g in grads]) for k in ("layers", "w")}
    assert_close(found, expected, 1e-6)
    assert str(jax.make_jaxpr(step)(w, state, grads[0])).count("psum") == 1


def test_shardings_of_norms():
    """Those of layers lie where the layers do, on all devices that share a layer."""
    for spec, expected in (
        (P("d"), P("d")),
        (P(None, None, "d"), P()),
        (P("d", None, "e"), P("d")),
    ):
        of_leaf = dict.fromkeys(LEAVES, P()) | {"layers": spec}
        of_leaf = {name: NamedSharding(mesh_of(d=2, e=2), x) for name, x in of_leaf.items()}
        w = jax.device_put(params(), of_leaf)
        assert jgrad.state_shardings(ADAMH, w).radius["layers"].spec == expected


@pytest.mark.slow(always=["packed"])
@forms
def test_slopes_where_no_norm_is_kept(pack):
    """Of a matrix of zeros, and of a buffer that has both: those of plain steps, and finite."""
    w, (g,) = params() | {"w": jnp.zeros((4, 6))}, gradients(1, params())
    tx = around(jgrad.gradient_descent(0.1))
    state = tx.init(pack(w))

    def loss(w):
        updates, _ = tx.update(pack(g), state, pack(w))
        moved = jgrad.unpack(optax.apply_updates(pack(w), updates))
        return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(moved))

    slopes = jax.jit(jax.grad(loss))(w)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(slopes))
    for name in ("b", "embed", "w"):
        np.testing.assert_allclose(slopes[name], 2 * (w[name] - 0.1 * g[name]), rtol=1e-5)


test_message = messages.test_of("hyperball", globals())
