"""Random bits in `shard_map`: those of one device where specs say how leaves are sharded.

The truth is the same function on one device. Weights and moments are rounded at random in the same
programs, so that an element with other bits shows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jgrad
from tests.multi_device.meshes import mesh_of, specs_of, varying
from tests.support.errors import assert_error
from tests.support.loops import assert_equal
from tests.support.private import forced, platforms

SPECS = {
    "rows": P("a"),
    "columns": P(None, "b"),
    "both": P("a", "b"),
    "rows over both": P(("b", "a"), None),
}
SHAPE = (16, 1024)
RATE = 0.01


def numbers(seed, shape=SHAPE, dtype=jnp.float32):
    """A large leaf, and one that every device has."""
    rng = np.random.default_rng(seed)
    tree = {"w": rng.normal(size=shape), "scale": rng.normal(size=8)}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def recipes(specs):
    """Methods whose moments are rounded, and weights that are; specs are said at each door."""
    inside = {} if specs is None else {"mesh_axes": specs}
    return {
        "8 bits": jgrad.lion(RATE, moment_dtype="8bit", **inside),
        "bfloat16": jgrad.adam(RATE, moment_dtype=jnp.bfloat16, **inside),
        "a ratio": jgrad.lamb(
            RATE, moment_dtype=jnp.bfloat16, trust_ratio_mask=False, layer_axes=None, **inside
        ),
        "weights": jgrad.stochastic_rounding(jgrad.lion(RATE), **inside),
        "both": jgrad.stochastic_rounding(jgrad.lion(RATE, moment_dtype="8bit"), **inside),
    }


def of_dtype(name, w):
    half = name in ("weights", "both")
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), w) if half else w


def updated(txs, ws, states, g):
    """Weights and states of each recipe, after a step."""
    new = {name: tx.update(g, states[name], ws[name]) for name, tx in txs.items()}
    ws = {name: optax.apply_updates(ws[name], updates) for name, (updates, _) in new.items()}
    return ws, {name: state for name, (_, state) in new.items()}


def on_a_mesh(txs, specs, mesh, *, check_vma=True):
    """The same in `shard_map`, each leaf as its spec says."""
    ws, g = {name: of_dtype(name, numbers(0)) for name in txs}, numbers(1)
    states = {name: tx.init(ws[name]) for name, tx in txs.items()}
    own = {
        name: specs_of(jgrad.state_shardings(tx, ws[name], shardings(mesh, specs)))
        for name, tx in txs.items()
    }
    ins = dict.fromkeys(txs, specs), own, specs
    run = jax.shard_map(
        lambda *args: updated(txs, *args),
        mesh=mesh,
        in_specs=ins,
        out_specs=ins[:2],
        check_vma=check_vma,
    )
    return jax.device_get(jax.jit(run)(ws, states, g))


def shardings(mesh, specs):
    return jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), specs)


def on_one_device(txs):
    ws = {name: of_dtype(name, numbers(0)) for name in txs}
    states = {name: tx.init(ws[name]) for name, tx in txs.items()}
    run = jax.jit(lambda *args: updated(txs, *args))
    return jax.device_get(run(ws, states, numbers(1)))


def assert_same(found, expected):
    """Moments bit for bit, and weights that are rounded; others up to the last bits of a step."""
    assert_equal(found[1], expected[1])
    for name, w in expected[0].items():
        for a, b in zip(jax.tree.leaves(found[0][name]), jax.tree.leaves(w), strict=True):
            atol = 0 if b.dtype == jnp.bfloat16 else 1e-6
            np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=0, atol=atol)


@pytest.mark.slow(always=["True-both"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_bits_of_one_device(spec, check_vma):
    specs = {"w": spec, "scale": P()}
    txs = recipes(specs)
    found = on_a_mesh(txs, specs, mesh_of(a=2, b=2), check_vma=check_vma)
    assert_same(found, on_one_device(recipes(None)))


@pytest.mark.slow(always=["kernel"])
@pytest.mark.parametrize("form", ["kernel", "two passes"])
def test_bits_of_one_device_in_kernels(form):
    """As on a TPU and a GPU, where elements are counted inside a kernel."""
    specs = {"w": P("a", "b"), "scale": P()}
    names = ("8 bits", "both")
    txs = {name: recipes(specs)[name] for name in names}
    with platforms.forced(form):
        found = on_a_mesh(txs, specs, mesh_of(a=2, b=2), check_vma=False)
    assert_same(found, on_one_device({name: recipes(None)[name] for name in names}))


def test_a_wrapper_says_it_for_all_inside():
    """`stochastic_rounding` and `apply_gradients` tell it to moments, through other wrappers."""
    specs = {"w": P("a"), "scale": P()}
    lion = jgrad.lion(RATE, moment_dtype=jnp.bfloat16)
    tx = jgrad.stochastic_rounding(jgrad.skip_nonfinite(lion, mesh_axes=specs), mesh_axes=specs)
    rounded = jgrad.stochastic_rounding(lion)
    w, g = of_dtype("weights", numbers(0)), numbers(1)

    def update(g, w):
        new, state = jgrad.apply_gradients(rounded, g, rounded.init(w), w, mesh_axes=specs)
        return new, state.inner.mw, tx.update(g, tx.init(w), w)[1].inner.inner.mw

    mapped = jax.shard_map(update, mesh=mesh_of(a=4), in_specs=(specs,) * 2, out_specs=(specs,) * 3)
    expected, state = jgrad.apply_gradients(rounded, g, rounded.init(w), w)
    new, *moments = jax.jit(mapped)(g, w)
    assert_equal(jax.device_get(new), jax.device_get(expected))
    for found in moments:
        assert_equal(jax.device_get(found), jax.device_get(state.inner.mw))


def test_one_spec_for_all_leaves():
    """A leaf that types know to be the same on all devices stays the same."""
    tx = jgrad.lion(RATE, moment_dtype=jnp.bfloat16, mesh_axes=P("a"))
    specs = {"w": P("a"), "scale": P()}
    update = jax.shard_map(
        lambda g: tx.update(g, tx.init(g), g)[1].mw,
        mesh=mesh_of(a=4),
        in_specs=(specs,),
        out_specs=specs,
    )
    expected = tx.update(numbers(1), tx.init(numbers(1)), numbers(1))[1].mw
    assert_equal(jax.device_get(jax.jit(update)(numbers(1))), jax.device_get(expected))


@pytest.mark.parametrize("rows", ["zero", "local"])
def test_bits_of_one_device_in_packed_leaves(rows):
    """Rows of a buffer that `zero` shards, or a buffer of what each device has of some leaves."""
    tree = {"w": jnp.ones((8, 300), jnp.bfloat16), "up": jnp.full((16, 40), 3, jnp.bfloat16)}
    specs = P("a") if rows == "local" else P()
    tx = jgrad.stochastic_rounding(
        jgrad.gradient_descent(1e-3), mesh_axes=specs if rows == "local" else None
    )
    tx = jgrad.zero(tx, "a") if rows == "zero" else tx

    def update(w):
        packed = jgrad.pack(w, multiple_of=4)
        g = jax.tree.map(jnp.ones_like, packed)
        if rows == "zero":
            g = jax.tree.map(lambda x: x.astype(jnp.float32), g)
        updates, _ = tx.update(g, tx.init(packed), packed)
        return jgrad.unpack(updates)

    mapped = jax.shard_map(
        update, mesh=mesh_of(a=4), in_specs=(specs,), out_specs=specs, check_vma=False
    )
    plain = jgrad.stochastic_rounding(jgrad.gradient_descent(1e-3))
    expected, _ = plain.update(jax.tree.map(jnp.ones_like, tree), plain.init(tree), tree)
    found = jax.device_get(jax.jit(mapped)(tree))
    assert_equal(found, jax.device_get(expected))
    assert 0 < np.mean(found["w"] != 0) < 1


def moved(*, check_vma, **axes):
    """Which weights of equal ones moved: what each of four devices has of two leaves."""
    tx = jgrad.stochastic_rounding(jgrad.gradient_descent(1e-3), **axes)
    w = jax.tree.map(jnp.ones_like, numbers(0, dtype=jnp.bfloat16))

    def update(w):
        updates, _ = tx.update(jax.tree.map(jnp.ones_like, w), tx.init(w), w)
        return jax.tree.map(lambda u: jnp.expand_dims(varying_too(u != 0), 0), updates)

    def varying_too(x):
        return varying(x, "a") if check_vma and x.ndim == 1 else x

    specs = {"w": P("a"), "scale": P()}
    run = jax.shard_map(
        update, mesh=mesh_of(a=4), in_specs=(specs,), out_specs=P("a"), check_vma=check_vma
    )
    return jax.device_get(jax.jit(run)(w))


def test_nobody_says_how_a_leaf_is_sharded():
    """Where types know that, devices have bits of their own, and where they do not, the same ones.

    A leaf that all devices have is rounded alike in either case.
    """
    found = {check: moved(check_vma=check) for check in (True, False)}
    for of in found.values():
        assert len({x.tobytes() for x in of["scale"]}) == 1
        assert 0 < of["w"].mean() < 1
    assert len({x.tobytes() for x in found[True]["w"]}) == 4
    assert len({x.tobytes() for x in found[False]["w"]}) == 1
    pairs = np.corrcoef(found[True]["w"].reshape(4, -1))
    assert np.abs(pairs - np.eye(4)).max() < 5 / (SHAPE[0] * SHAPE[1] / 4) ** 0.5


def test_a_layer_in_the_backward_pass():
    """Rounded as in its stack on one device."""
    tx = jgrad.stochastic_rounding(jgrad.gradient_descent(1e-3))
    params = {"layers": {"w": jnp.ones((3, 8, 40), jnp.bfloat16)}}
    specs = {"layers": {"w": P(None, "a", "b")}}

    def loss(params):
        x = jnp.zeros((), jnp.bfloat16)
        add = lambda layer, x: x + jnp.sum(layer["w"])
        return jgrad.scan_layers(add, params["layers"], x).astype(jnp.float32)

    def step(tx, params, mesh_axes=None):
        own = {"mesh_axes": mesh_axes, "gradients": lambda g: g}  # of constants: they are complete
        step = jgrad.step_in_backward(tx, loss, **own)
        with forced():
            return step(params, tx.init(params))[0]

    expected = jax.device_get(jax.jit(lambda p: step(tx, p))(params))
    told = jgrad.stochastic_rounding(jgrad.gradient_descent(1e-3), mesh_axes=specs)
    for run in (lambda p: step(tx, p, specs), lambda p: step(told, p)):
        mapped = jax.shard_map(
            run, mesh=mesh_of(a=2, b=2), in_specs=(specs,), out_specs=specs, check_vma=False
        )
        assert_equal(jax.device_get(jax.jit(mapped)(params)), expected)
    assert 0 < np.mean(expected["layers"]["w"] != 1) < 1


def test_an_axis_that_is_not_there():
    tx = jgrad.stochastic_rounding(jgrad.gradient_descent(1e-3), mesh_axes={"w": P("b")})
    w = {"w": jnp.ones((8, 3), jnp.bfloat16)}
    update = lambda w: tx.update(w, tx.init(w), w)[0]
    run = jax.shard_map(update, mesh=mesh_of(a=4), in_specs=P("a"), out_specs=P("a"))
    text = "stochastic_rounding: `mesh_axes` at ['w']: no axis 'b' here, expected one of the mesh: 'a'."
    assert_error(ValueError, text, lambda: jax.eval_shape(run, w))
