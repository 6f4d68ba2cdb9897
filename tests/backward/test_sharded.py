"""On several devices: under `jit` with automatic and explicit axes, in `shard_map`, and in `pmap`.

The truth is the ordinary step on one device, with the whole batch, and the ordinary step on the
same mesh has the collectives that a step may have.
"""

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jgrad
from benchmarks.accelerators import hlo
from tests.backward import models, on_devices
from tests.backward.models import assert_equal
from tests.backward.on_devices import CASES, METHODS
from tests.backward.recipes import FIRST, adam, clipped
from tests.multi_device.meshes import mesh_of, place
from tests.support import oldest
from tests.support.errors import assert_error
from tests.support.memory import kinds

# Each way, and of places and methods those that have most to go wrong there.
QUICK = [
    *("Auto-FSDP-8 bits", "Auto-layers-8 bits", "Auto-tensor-muon", "Explicit-both-8 bits"),
    *("checked-tensor-skip(clip)", "checked-FSDP-on hosts"),
    *("unchecked-data-8 bits", "unchecked-tensor-muon", "pmap-data-muon"),
]


ALL = [
    pytest.param(way, where, name, id=f"{way}-{where}-{name}")
    for way, places in CASES.items()
    for where in places
    for name in METHODS
]
of_cases = pytest.mark.parametrize(("way", "where", "name"), ALL)


def assert_as_on_one_device(found, expected, dtype):
    """Of float32 weights a mean over devices is rounded, and then a few codes are others."""
    if dtype == jnp.float32:
        assert_equal(found, expected, 8, few=1e-3)
        return
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        largest = np.abs(np.asarray(y)).max()  # Adam divides gradients that are nearly zero
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-11 * largest)


def assert_replicas_agree(tree):
    for x in jax.tree.leaves(tree):
        parts = collections.defaultdict(list)
        for shard in x.addressable_shards:
            parts[str(shard.index)].append(np.asarray(shard.data))
        for first, *others in parts.values():
            for other in others:
                np.testing.assert_array_equal(first, other)


@pytest.mark.slow(always=QUICK)
@of_cases
def test_as_on_one_device(x64, way, where, name):
    if METHODS[name].on_host:
        oldest.skip("host memory")
    found, expected = on_devices.ran(way, where, name), on_devices.on_one_device(name)
    if way != "pmap":  # which checks it where it joins the parts
        assert_replicas_agree((found.params, found.state))
        assert_as_on_one_device(found.state, expected.state, METHODS[name].dtype)
        if METHODS[name].on_host:
            arrays = [x for x in jax.tree.leaves((found.params, found.state)) if x.ndim]
            assert set(kinds(arrays)) == {"pinned_host"}
    assert_as_on_one_device(found.params, expected.params, METHODS[name].dtype)


# ---- what they move ------------------------------------------------------------------------------


# XLA deals out Newton's products with automatic axes, now by one kind and now by another.
BY_TOTAL = "Auto", "muon"


def limits(way, where, name, expected):
    """How many collectives of a kind there may be: those in a loop over layers count once."""
    method, passes = METHODS[name], 1 + len(METHODS[name].options)
    limit = collections.Counter({kind: passes * n for kind, n in expected.items()})
    if method.has_norms and where != "data":
        # Those of layers are joined apart from those of the rest. Inside of `shard_map` each is a
        # maximum and then a sum, of weights and of updates.
        limit["all-reduce"] += 1 if way in ("Auto", "Explicit") else 5
    if way in ("unchecked", "pmap"):
        limit["all-reduce"] += passes  # as are the means that a user asks for
    if where == "layers":
        limit["all-gather"] += 8  # each turn gathers what it cuts: two moments, codes and scales
    return limit


@pytest.mark.slow(always=["Auto-FSDP-8 bits", "unchecked-data-8 bits"])
@of_cases
def test_collectives(x64, way, where, name):
    """Beside those of the ordinary step, outside of rare branches."""
    texts = [on_devices.ran(way, where, name, is_ordinary=x).text for x in (False, True)]
    found, expected = (hlo.collectives_by_place(text).outside for text in texts)
    assert expected
    limit = limits(way, where, name, expected)
    if (way, name) == BY_TOTAL:
        assert sum(found.values()) <= limit.total()
    else:
        assert all(n <= limit[kind] for kind, n in found.items()), (found, expected)


# ---- models of flax ------------------------------------------------------------------------------

SIDE = 16


class Linen(nn.Module):
    """Parameters in boxes with names, which `linen` takes off, and constrains on a mesh."""

    @nn.compact
    def __call__(self, x):
        def leaf(name, shape, names):
            return self.param(name, nn.with_partitioning(nn.initializers.normal(0.3), names), shape)

        first = leaf("first", (SIDE, SIDE), ("d", None))
        up = leaf("up", (3, SIDE, 2 * SIDE), (None, "d", None))
        down = leaf("down", (3, 2 * SIDE, SIDE), (None, None, "d"))
        return jgrad.scan_layers(models.block, {"up": up, "down": down}, jnp.tanh(x @ first))


class Nnx(nnx.Module):
    """Variables with names."""

    def __init__(self, key):
        def leaf(shape, names):
            return nnx.Param(0.3 * jax.random.normal(key, shape), out_sharding=names)

        self.first = leaf((SIDE, SIDE), ("d", None))
        self.up = leaf((3, SIDE, 2 * SIDE), (None, "d", None))
        self.down = leaf((3, 2 * SIDE, SIDE), (None, None, "d"))

    def __call__(self, x):
        layers = {"up": self.up, "down": self.down}
        return jgrad.scan_layers(models.block, layers, jnp.tanh(x @ self.first[...]))


def of_linen(x):
    params = jax.jit(Linen().init)(jax.random.key(0), x)
    return params, Linen().apply, nn.get_partition_spec(params)


def of_nnx(x):
    graph, params = nnx.split(Nnx(jax.random.key(0)))
    return params, lambda params, x: nnx.merge(graph, params)(x), nnx.get_partition_spec(params)


def run(step, *args):
    return jax.jit(step, compiler_options=on_devices.QUICKLY)(*args)


@pytest.mark.slow(always=["of_linen"])
@pytest.mark.parametrize("make", [of_linen, of_nnx])
def test_parameters_with_names_of_mesh_axes(x64, make):
    """As flax places them, which constrains a stack as a whole."""
    mesh, tx = mesh_of(d=2), adam()
    x = models.batch(dtype=jnp.float64)
    with jax.set_mesh(mesh):
        params, apply, specs = make(x)
        places = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
        )

        def loss(params, x):
            return jnp.mean(jnp.square(apply(params, x)))

        state, one = jax.jit(tx.init)(params), models.ordinary(tx, loss)
        expected = run(one, params, state, x)
        params, x = jax.device_put(params, places), place(x, mesh, P("d"))
        step = jgrad.step_in_backward(tx, loss, mesh_axes=specs)
        found = run(step, params, state, x)
    assert_as_on_one_device(found, expected, jnp.float64)
    for new, old in zip(*map(jax.tree.leaves, (found[0], params)), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim)


# ---- what else there is on devices ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["layers", "xs"])
def test_layers_that_a_type_says_are_sharded(name):
    """With explicit axes a loop cannot cut them."""
    mesh = mesh_of(AxisType.Explicit, d=2)
    trees = {"layers": {"w": jnp.ones((4, 2, 2))}, "xs": {"w": jnp.ones((4, 2, 2))}}
    with jax.set_mesh(mesh):
        trees[name] = place(trees[name], mesh, P("d"))
        assert_error(
            ValueError,
            f"scan_layers: `{name}` at ['w']: sharded over 'd' along the axis of the layers, which a "
            "scan cuts, expected another axis, or none.",
            lambda: jgrad.scan_layers(lambda w, x, y: x, carry=jnp.ones(2), **trees),
        )


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_models_side_by_side_on_devices(check_vma):
    """`vmap` inside `shard_map`: two models on each device."""
    tx, x = jgrad.skip_nonfinite(clipped(adam())), models.batch()
    params = jax.tree.map(
        lambda p: jnp.stack([p * (0.5 + i / 32) for i in range(16)]), models.params()
    )

    def run(step):
        def one(params):
            return step(params, tx.init(params), x)[0]

        mapped = jax.shard_map(
            jax.vmap(one), mesh=mesh_of(d=8), in_specs=P("d"), out_specs=P("d"), check_vma=check_vma
        )
        return jax.jit(mapped)(place(params, mesh_of(d=8), P("d")))

    own = {} if check_vma else {"gradients": lambda g: g}
    steps = jgrad.step_in_backward(tx, models.loss, **FIRST, **own), models.ordinary(tx)
    assert_equal(*map(run, steps), 256)


def test_a_gradient_lies_as_its_weights_do():
    """Where types do not say it, `mesh_axes` does: no layer is gathered for its update."""
    mesh, tx, x = mesh_of(d=8), adam(), models.batch()
    specs = {"first": P(), "layers": {"up": P(None, "d"), "down": P(None, "d")}, "last": P()}
    with jax.set_mesh(mesh):
        params = place(models.params(width=32, hidden=256), mesh, specs)
        step = jgrad.step_in_backward(tx, models.loss, mesh_axes=specs)
        text = jax.jit(step).lower(params, tx.init(params), x).as_text()
    constraints = [line for line in text.splitlines() if "sharding_constraint" in line]
    of_layers = [line for line in constraints if '[{}, {"d"}, {}]' in line]
    assert len(of_layers) == 2
