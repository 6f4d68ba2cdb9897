"""On several devices: under `jit` with automatic and explicit axes, and in `shard_map`.

The truth is the ordinary step on the same mesh, and an elementwise method has no more
collectives than that.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jgrad
from benchmarks.accelerators import hlo
from tests.backward import models
from tests.backward.models import AXES, assert_equal
from tests.backward.recipes import adam, clipped, eight_bits, muon
from tests.multi_device.meshes import mesh_of, place, shardings_of

SIZES = {"width": 32, "hidden": 256}
SPECS = {
    "first": P("d"),
    "layers": {"up": P(None, "d", "m"), "down": P(None, "m", "d")},
    "last": P("d"),
}
X = jnp.asarray(np.random.default_rng(0).normal(size=(8, models.WIDTH)), jnp.float32)
FIRST = {"first_pass": True}


def skip(**axes):
    return jgrad.skip_nonfinite(clipped(adam(), **axes), **axes)


def watched(**axes):
    return jgrad.watch(eight_bits(), layer_axes=AXES, **axes)


def lamb(**axes):
    return jgrad.lamb(1e-2, layer_axes=AXES, **axes)


SUBJECTS = {
    "adam": (adam, {}),
    "8 bits": (eight_bits, {}),
    "skip(clip)": (skip, FIRST),
    "lamb": (lamb, {}),
    "muon": (muon, {}),
    "watch": (watched, {}),
}
of_subjects = pytest.mark.parametrize("name", SUBJECTS)


def sharded_loss(params, x):
    """For explicit axes: a layer is gathered along one axis, and stays sharded along the other."""

    def block(layer, x):
        up = jax.sharding.reshard(layer["up"], P(None, "m"))
        down = jax.sharding.reshard(layer["down"], P("m", None))
        return x + jnp.matmul(jnp.tanh(x @ up), down, out_sharding=P("d", None))

    x = jnp.tanh(x @ jax.sharding.reshard(params["first"], P()))
    x = jgrad.scan_layers(block, params["layers"], x)
    return jnp.mean(jnp.square(x @ jax.sharding.reshard(params["last"], P())))


def compiled(step, params, state, x):
    outputs = jax.tree.map(lambda a: a.sharding, (params, state))
    step = jax.jit(step, out_shardings=(*outputs, None))
    return step.lower(params, state, x).compile()


@pytest.mark.slow(always=["Auto-8 bits"])
@of_subjects
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_under_jit(kind, name):
    """FSDP along one axis and tensors along another."""
    (make, options), mesh = SUBJECTS[name], mesh_of(getattr(AxisType, kind), d=4, m=2)
    tx, loss = make(), models.loss if kind == "Auto" else sharded_loss
    with jax.set_mesh(mesh):
        params, x = place(models.params(**SIZES), mesh, SPECS), place(X, mesh, P("d"))
        state = jax.jit(tx.init, out_shardings=jgrad.state_shardings(tx, params))(params)
        steps = (
            jgrad.step_in_backward(tx, loss, mesh_axes=SPECS, **options),
            models.ordinary(tx, loss, mesh_axes=SPECS),
        )
        both = [compiled(step, params, state, x) for step in steps]
        assert_equal(*(step(params, state, x) for step in both), 256, few=1e-3)
    if not options:  # nor has it a second backward pass
        found, expected = (hlo.collectives(step.as_text()) for step in both)
        if name in ("adam", "8 bits"):
            assert found.keys() == expected.keys()
            assert all(found[kind] <= n for kind, n in expected.items())
        elif name in ("lamb", "watch"):  # norms of layers are joined apart from those of the rest
            extra = {kind: n - expected.get(kind, 0) for kind, n in found.items()}
            assert extra.pop("all-reduce") <= 3
            assert max(extra.values(), default=0) <= 0


ROWS = {
    "first": P("d"),
    "layers": {"up": P(None, "d"), "down": P(None, "d")},
    "last": P(),
}
MESH_AXES = {"first": "d", "layers": "d", "last": None}


def gathered_loss(params, x):
    """As it is written in `shard_map`: a layer is gathered where it is used."""

    def whole(w):
        return jax.lax.all_gather(w, "d", axis=0, tiled=True)

    def block(layer, x):
        return models.block(jax.tree.map(whole, layer), x)

    x = jnp.tanh(x @ whole(params["first"]))
    x = jgrad.scan_layers(block, params["layers"], x)
    return jax.lax.pmean(jnp.mean(jnp.square(x @ params["last"])), "d")


def in_shard_map(step, tx, params, x, specs, of_batch, *, check_vma):
    """Two steps, from a state that is made inside."""

    def run(params, x):
        state = tx.init(params)
        for _ in range(2):
            params, state, value = step(params, state, x)
        return params, value

    mesh = mesh_of(d=8)
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(specs, of_batch), out_specs=(specs, P()), check_vma=check_vma
    )
    return jax.jit(mapped)(place(params, mesh, specs), x)


@pytest.mark.slow(always=["True-skip(clip)"])
@pytest.mark.parametrize("name", ["adam", "8 bits", "skip(clip)", "lamb", "watch"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map(check_vma, name):
    make, options = SUBJECTS[name]
    tx = make(mesh_axes=MESH_AXES) if name in ("skip(clip)", "lamb", "watch") else make()
    if not check_vma:  # the gathers of the loss have summed them
        options = options | {"gradients": lambda g: g}
    steps = (
        jgrad.step_in_backward(tx, gathered_loss, **options),
        models.ordinary(tx, gathered_loss),
    )
    params = models.params(**SIZES)
    run = functools.partial(in_shard_map, tx=tx, params=params, x=X, specs=ROWS, of_batch=P("d"))
    assert_equal(*(run(step, check_vma=check_vma) for step in steps), 256, few=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_models_side_by_side_on_devices(check_vma):
    """`vmap` inside `shard_map`: two models on each device."""
    tx = skip()
    params = jax.tree.map(
        lambda p: jnp.stack([p * (0.5 + i / 32) for i in range(16)]), models.params()
    )

    def run(step):
        def one(params):
            return step(params, tx.init(params), X)[0]

        mapped = jax.shard_map(
            jax.vmap(one), mesh=mesh_of(d=8), in_specs=P("d"), out_specs=P("d"), check_vma=check_vma
        )
        return jax.jit(mapped)(place(params, mesh_of(d=8), P("d")))

    own = {} if check_vma else {"gradients": lambda g: g}
    steps = jgrad.step_in_backward(tx, models.loss, **FIRST, **own), models.ordinary(tx)
    assert_equal(*map(run, steps), 256)


def test_a_gradient_lies_as_its_weights_do():
    """Where types do not say it, `mesh_axes` does: no layer is gathered for its update."""
    mesh, tx = mesh_of(d=8), adam()
    specs = {"first": P(), "layers": {"up": P(None, "d"), "down": P(None, "d")}, "last": P()}
    with jax.set_mesh(mesh):
        params = place(models.params(**SIZES), mesh, specs)
        step = jgrad.step_in_backward(tx, models.loss, mesh_axes=specs)
        text = jax.jit(step).lower(params, tx.init(params), X).as_text()
    constraints = [line for line in text.splitlines() if "sharding_constraint" in line]
    of_layers = [line for line in constraints if '[{}, {"d"}, {}]' in line]
    assert len(of_layers) == 2


@pytest.mark.slow
def test_shardings_stay():
    mesh, tx = mesh_of(d=4, m=2), adam()
    with jax.set_mesh(mesh):
        params = place(models.params(**SIZES), mesh, SPECS)
        step = jax.jit(jgrad.step_in_backward(tx, models.loss, mesh_axes=SPECS))
        new, state, _ = step(params, jax.jit(tx.init)(params), place(X, mesh, P("d")))
    expected = shardings_of(mesh, SPECS)
    for tree in (new, state.mw):
        same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), tree, expected)
        assert all(jax.tree.leaves(same))
