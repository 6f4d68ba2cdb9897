"""Models as people write them: arrays of each layer beside its weights, and calls around the model.

Dropout by keys, adapters beside a frozen base, auxiliary losses, skips of a U-Net, layers along
another axis; a model written for one example, jitted, checkpointed or cast. The truth is the
ordinary step, in float64: gradient descent, so that a gradient of another size is seen.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jgrad
from tests.backward import models
from tests.multi_device.meshes import mesh_of, place
from tests.support.other_platforms import as_on
from tests.support.private import forced, inner_equations

LAYERS, WIDTH, ROWS = 3, 4, 5
SCAN = jgrad.scan_layers
KEY = jax.random.key(0)
TX = jgrad.gradient_descent(0.1)


def array(*shape):
    """The same for each shape, in the precision of the test."""
    return jnp.asarray(0.4 * np.random.default_rng(len(shape)).normal(size=shape))


def params():
    """Two stacks, arrays of each layer in no stack, and two matrices."""
    stack = {"up": array(LAYERS, WIDTH, 6), "down": array(LAYERS, 6, WIDTH)}
    base = array(LAYERS, WIDTH, WIDTH)
    others = {"base": base, "first": array(WIDTH, WIDTH), "last": array(WIDTH, WIDTH)}
    return {"a": stack, "b": jax.tree.map(jnp.sin, stack), **others}


def block(layer, x):
    return x + jnp.tanh(x @ layer["up"]) @ layer["down"]


def of_value(p, x):
    return jnp.mean(jnp.square(x @ p["last"]))


def difference(found, expected):
    """The largest of all leaves, relative to the leaf."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    both = (map(np.asarray, jax.tree.leaves(jax.device_get(x))) for x in (found, expected))
    return max(np.max(abs(a - b)) / np.max(1e-9 + abs(b)) for a, b in zip(*both, strict=True))


def jitted(f):
    """Compiled quickly."""
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})


def assert_as_ordinary(loss, p, *args, tx=TX, **options):
    """The same weights, state and results; and each leaf that has a gradient is moved."""
    given = p, tx.init(p), *args
    ordinary = models.ordinary(tx, loss, options.get("has_aux", False))
    expected = jitted(ordinary)(*given)
    found = jitted(jgrad.step_in_backward(tx, loss, **options))(*given)
    assert difference(found, expected) < 1e-11
    return found


# ---- arrays of each layer ----------------------------------------------------------------------


def dropped(layer, x, key):
    return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), block(layer, x), x)


def dropout(p, x, keys):
    return of_value(p, SCAN(dropped, p["a"], x @ p["first"], xs=keys))


def unet(p, x, keys):
    """Skips from one stack to the other."""
    x, skips = SCAN(lambda w, x: (block(w, x), x), p["a"], x @ p["first"], has_ys=True)
    return of_value(p, SCAN(lambda w, x, y: block(w, x + y), p["b"], x, xs=skips[::-1]))


def auxiliary(p, x, keys):
    """Losses of each layer, some of them for a log alone, beside a key and the number of the layer."""

    def turn(layer, x, given):
        i, key = given
        x = dropped(layer, x, key)
        return x, {
            "loss": i.astype(x.dtype) * jnp.mean(x**2),
            "log": jnp.max(x),
            "argmax": jnp.argmax(x),
        }

    x, ys = SCAN(turn, p["a"], x @ p["first"], xs=(jnp.arange(LAYERS), keys), has_ys=True)
    return of_value(p, x) + jnp.sum(ys["loss"] * jnp.arange(1.0, LAYERS + 1)), ys


def adapted(base_of, remat=True):
    """Weights beside those of the layer."""

    def turn(layer, x, base):
        return jnp.tanh(x @ (base + layer["up"] @ layer["down"]))

    def loss(p, x, keys):
        x = SCAN(turn, p["a"], x @ p["first"], xs=base_of(p), remat=remat)
        return of_value(p, x)

    return loss


OF_LAYERS = {
    "keys": (dropout, {}),
    "unet": (unet, {}),
    "auxiliary": (auxiliary, {"has_aux": True}),
    "frozen outside": (adapted(lambda p: array(LAYERS, WIDTH, WIDTH)), {}),
    "frozen parameters": (adapted(lambda p: jax.lax.stop_gradient(p["base"])), {}),
    "parameters": (adapted(lambda p: p["base"]), {}),
    "computed": (adapted(lambda p: jnp.sin(p["base"]) @ p["first"]), {}),
    "computed, stored": (adapted(lambda p: jnp.sin(p["base"]) @ p["first"], remat=False), {}),
}


@pytest.mark.slow(always=["auxiliary", "computed"])
@pytest.mark.parametrize("name", OF_LAYERS)
def test_arrays_of_each_layer(x64, name):
    loss, options = OF_LAYERS[name]
    assert_as_ordinary(loss, params(), array(ROWS, WIDTH), jax.random.split(KEY, LAYERS), **options)


@pytest.mark.slow
def test_keys_of_the_old_kind_under_a_norm_of_all(x64):
    """In both passes."""
    tx = jgrad.skip_nonfinite(optax.chain(jgrad.clip_by_global_norm(0.01), jgrad.adam(1e-2)))
    keys = jax.random.split(jax.random.PRNGKey(1), LAYERS)
    assert_as_ordinary(dropout, params(), array(ROWS, WIDTH), keys, tx=tx, first_pass=True)


# ---- what is carried and stored ------------------------------------------------------------------


def carried(loss, p, shape):
    """How often a loop of a step returns an array of that shape."""
    step = jgrad.step_in_backward(TX, loss)
    x, keys = array(ROWS, WIDTH), jax.random.split(KEY, LAYERS)
    jaxpr = jax.make_jaxpr(step)(p, TX.init(p), x, keys).jaxpr
    loops = [x for x in inner_equations(jaxpr.eqns) if x.primitive.name in ("scan", "while")]
    return sum(x.aval.shape == shape for loop in loops for x in loop.outvars)


def test_what_loops_carry():
    """A gradient of all layers of `xs` where parameters have one; the weights; one carry a layer."""
    p, stacked, carry = params(), (LAYERS, WIDTH, WIDTH), (LAYERS, ROWS, WIDTH)
    for name, count in (("frozen outside", 0), ("frozen parameters", 0), ("computed", 1)):
        loss = OF_LAYERS[name][0]
        assert carried(loss, p, stacked) == count, name
        assert carried(loss, p, p["a"]["up"].shape) == 1, name
        assert carried(loss, p, carry) == 1, name
    assert carried(in_half, {"a": p["a"], "first": p["first"], "last": p["last"]}, carry) == 1


# ---- axes of layers ------------------------------------------------------------------------------


def along(axes):
    """Parameters with layers along other axes, and their loss."""
    p = params()
    names = ("up", "down")
    moved = {k: jnp.moveaxis(p["a"][k], 0, axis) for k, axis in zip(names, axes, strict=True)}
    axis = axes[0] if axes[0] == axes[1] else dict(zip(names, axes, strict=True))

    def loss(p, x):
        return of_value(p, SCAN(block, p["a"], x @ p["first"], axis=axis))

    return {"a": moved, "first": p["first"], "last": p["last"]}, loss


OF_AXES = {
    "adam": (lambda: jgrad.adam(1e-2, weight_decay=0.1), {}),
    "gradients": (
        lambda: TX,
        {"gradients": lambda g: jax.tree.map(lambda x: x / jnp.linalg.norm(x), g)},
    ),
    "lamb": (lambda: jgrad.lamb(1e-2, layer_axes={"a": 1, "first": None, "last": None}), {}),
    "clip": (lambda: optax.chain(jgrad.clip_by_global_norm(0.01), TX), {"first_pass": True}),
    "optax": (lambda: optax.chain(optax.trace(0.9), optax.scale(-0.1)), {"elementwise": True}),
}


@pytest.mark.slow(always=["adam", "gradients"])
@pytest.mark.parametrize("name", OF_AXES)
def test_layers_along_another_axis(x64, name):
    make, options = OF_AXES[name]
    p, loss = along((1, 1) if name == "lamb" else (1, -1))
    if name != "gradients":
        assert_as_ordinary(loss, p, array(ROWS, WIDTH), tx=make(), **options)
        return
    given = p, TX.init(p), array(ROWS, WIDTH)
    results = []
    for is_forced in (True, False):
        with forced(is_forced):
            results.append(jitted(jgrad.step_in_backward(TX, loss, **options))(*given))
    assert difference(*results) < 1e-11


def test_random_bits_of_layers_along_another_axis():
    """Those of the stack."""
    tx = jgrad.stochastic_rounding(jgrad.gradient_descent(1e-2))
    p, loss = along((1, 2))
    p = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), p)
    given = p, tx.init(p), jnp.asarray(array(ROWS, WIDTH), jnp.bfloat16)
    steps = models.ordinary(tx, in_float32(loss)), jgrad.step_in_backward(tx, in_float32(loss))
    expected, found = (jitted(step)(*given)[0] for step in steps)
    differ = [
        np.mean(np.asarray(a != b))
        for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True)
    ]
    assert max(differ) < 0.1


def in_float32(loss):
    return lambda p, x: loss(p, x).astype(jnp.float32)


def test_blocks_of_layers_along_another_axis():
    """They lie along the last axis, or cross layers."""
    tx = jgrad.adam(1e-2, moment_dtype="8bit")

    def step(*shape):
        p = {"a": {"w": jnp.full(shape, 0.1)}}
        loss = lambda p, x: jnp.sum(SCAN(lambda w, x: x * w["w"], p["a"], x, axis=1))
        x = jnp.ones((shape[0], shape[2]))
        return jax.eval_shape(jgrad.step_in_backward(tx, loss), p, tx.init(p), x)

    assert step(8, 2, 256)[1].mw["a"]["w"].scale.shape == (8, 2, 1)
    with pytest.raises(ValueError, match=r"make the last axis a multiple of 256 .* `layer_axes=1`"):
        step(64, 2, 128)


# ---- calls around a model ------------------------------------------------------------------------


def model(p, x):
    return SCAN(block, p["a"], x @ p["first"]) @ p["last"]


def mean(y):
    return jnp.mean(jnp.square(y))


def of_one(p, x):
    """As equinox writes it, with dropout."""
    keys = jax.random.split(KEY, ROWS)

    def one(row, key):
        return SCAN(dropped, p["a"], row @ p["first"], xs=jax.random.split(key, LAYERS))

    return mean(jax.vmap(one)(x, keys) @ p["last"])


def in_half(p, x, *rest):
    """Weights are cast as a whole, and read for a log."""
    half = jax.tree.map(lambda w: w.astype(jnp.float32), p)
    y = model(half, x.astype(jnp.float32))
    return mean(y).astype(x.dtype)


def half_in_jit(p, x):
    """And frozen there, in a norm by which the loss is multiplied."""

    @jax.jit
    def halve(p):
        return jax.tree.map(lambda w: 0.5 * w, p), optax.tree.norm(jax.lax.stop_gradient(p))

    half, norm = halve(p)
    return norm * mean(model(half, x))


def with_norms(p, x):
    half = jax.tree.map(lambda w: 0.5 * w, p)
    return mean(model(half, x)), {"norm": optax.tree.norm(p), "of half": optax.tree.norm(half)}


def penalised(p, x):
    """The remedy for a penalty of all weights: that of a layer is computed in its block."""

    def of(tree):
        return sum(jnp.sum(jnp.square(w)) for w in jax.tree.leaves(tree))

    def turn(layer, x):
        return block(layer, x), of(layer)

    x, penalties = SCAN(turn, p["a"], x @ p["first"], has_ys=True)
    return of_value(p, x) + 0.1 * (jnp.sum(penalties) + of((p["first"], p["last"])))


JITTED = jax.jit(model)
AROUND = {
    "vmap": lambda p, x: mean(jax.vmap(lambda row: model(p, row))(x)),
    "vmap of dropout": of_one,
    "jit": lambda p, x: mean(JITTED(p, x)),
    "checkpoint": lambda p, x: mean(jax.checkpoint(model)(p, x)),
    "named_call": lambda p, x: mean(jax.named_call(model, name="model")(p, x)),
    "all": lambda p, x: mean(
        jax.jit(jax.checkpoint(lambda p, x: jax.vmap(lambda row: JITTED(p, row))(x)))(p, x)
    ),
    "cast": in_half,
    "cast in jit": half_in_jit,
    "norms": with_norms,
    "penalty": penalised,
    "frozen layers": lambda p, x: mean(model(p | {"a": jax.lax.stop_gradient(p["a"])}, x)),
    "groups": lambda p, x: of_value(
        p, SCAN(lambda group, x: SCAN(block, group, x), p["a"], x @ p["first"])
    ),
}


@pytest.mark.slow(always=["all", "cast in jit", "norms"])
@pytest.mark.parametrize("name", AROUND)
def test_calls_around(x64, name):
    p = {name: x for name, x in params().items() if name in ("a", "first", "last")}
    if name == "groups":
        p["a"] = jax.tree.map(lambda w: jnp.stack([w, 2 * w]), p["a"])
    JITTED(params(), array(ROWS, WIDTH))  # a trace is kept
    assert_as_ordinary(AROUND[name], p, array(ROWS, WIDTH), has_aux=name == "norms")
    assert jnp.isfinite(JITTED(params(), array(ROWS, WIDTH))).all()


@pytest.mark.slow
def test_equinox(x64):
    """A model for one example, and its own `filter_jit`."""
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        layers: eqx.nn.MLP
        last: jax.Array

        def __call__(self, x):
            arrays, static = eqx.partition(self.layers, eqx.is_array)
            turn = lambda layer, x: x + eqx.combine(layer, static)(x)
            return SCAN(turn, arrays, x) @ self.last

    @eqx.filter_vmap
    def make(key):
        return eqx.nn.MLP(WIDTH, WIDTH, 6, 1, key=key)

    whole = Model(make(jax.random.split(KEY, LAYERS)), array(WIDTH, 2))
    p, static = eqx.partition(whole, eqx.is_inexact_array)

    def loss(p, x):
        return mean(eqx.filter_jit(lambda m, x: jax.vmap(m)(x))(eqx.combine(p, static), x))

    assert_as_ordinary(loss, p, array(ROWS, WIDTH), tx=jgrad.adam(1e-2))


# ---- where it runs -------------------------------------------------------------------------------


def loss_of_all(p, x, keys):
    """Of `xs`, `ys`, another axis, a cast and `vmap` at once."""

    def one(row):
        half = jax.tree.map(lambda w: 1.5 * w, p)
        turn = lambda w, x, given: (dropped(w, x, given[0]) @ given[1], jnp.mean(x**2))
        given = keys, jnp.sin(p["base"])
        return SCAN(
            turn, half["a"], row @ p["first"], xs=given, has_ys=True, axis={"up": 1, "down": 0}
        )

    x, ys = jax.vmap(one)(x)
    return of_value(p, x) + jnp.mean(ys)


def of_all():
    p = params()
    p["a"]["up"] = jnp.moveaxis(p["a"]["up"], 0, 1)
    del p["b"]
    return p, array(8, WIDTH), jax.random.split(KEY, LAYERS)


def test_all_at_once(x64):
    p, *args = of_all()
    assert_as_ordinary(loss_of_all, p, *args)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_the_programs_of_other_platforms(x64, platform):
    p, *args = of_all()
    given = p, TX.init(p), *args
    expected = jitted(models.ordinary(TX, loss_of_all))(*given)
    with forced(False):
        found = as_on(platform, jgrad.step_in_backward(TX, loss_of_all))(*given)
    assert difference(found, expected) < 1e-11


@pytest.mark.slow(always=["True"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map(x64, check_vma):
    """With a part of the batch on each device; without types, two models on each by `vmap`."""
    p, x, keys = of_all()
    many = (lambda f: f) if check_vma else lambda f: jax.vmap(f, (0, *[None] * 2))
    p = p if check_vma else jax.tree.map(lambda w: jnp.stack([w, 0.5 * w]), p)

    def loss(p, x, keys):
        return jax.lax.pmean(loss_of_all(p, x, keys), "d")

    def of(loss, **own):
        step = jgrad.step_in_backward(TX, loss, **own) if own else models.ordinary(TX, loss)
        return many(lambda p, x, keys: step(p, TX.init(p), x, keys)[::2])

    own = {"gradients": lambda g: g if check_vma else jax.lax.pmean(g, "d")}
    mapped = jax.shard_map(
        of(loss, **own),
        mesh=mesh_of(d=4),
        in_specs=(P(), P("d"), P()),
        out_specs=P(),
        check_vma=check_vma,
    )
    found, expected = jax.jit(mapped)(p, x, keys), of(loss_of_all)(p, x, keys)
    assert difference(found, expected) < 1e-11


@pytest.mark.slow(always=["Auto"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_leaves(x64, kind):
    """A layer is sharded along its own axis, wherever that of the layers is; or is constrained."""
    p, x, keys = of_all()
    specs = {
        "a": {"up": P("d"), "down": P(None, None, "d")},
        **dict.fromkeys(("base", "first", "last"), P()),
    }
    mesh = mesh_of(getattr(AxisType, kind), d=2)

    def loss(p, x, keys, whole=lambda w: w):
        def turn(w, x, key):
            return dropped(jax.tree.map(whole, w), x, key), jnp.mean(x**2)

        axis = {"up": 1, "down": 0}
        x, ys = SCAN(turn, p["a"], x @ p["first"], xs=keys, has_ys=True, axis=axis)
        return of_value(p, x) + jnp.sum(ys)

    def on_mesh(p, x, keys):
        if kind == "Explicit":
            return loss(p, x, keys, lambda w: jax.sharding.reshard(w, P()))
        return loss(p | {"a": jax.lax.with_sharding_constraint(p["a"], specs["a"])}, x, keys)

    expected = jitted(models.ordinary(TX, loss))(p, TX.init(p), x, keys)
    with jax.set_mesh(mesh):
        sharded = place(p, mesh, specs)
        step = jgrad.step_in_backward(TX, on_mesh, mesh_axes=specs)
        found = jax.jit(step)(sharded, TX.init(sharded), x, keys)
    assert difference(found, expected) < 1e-11
