"""States of `offload` that begin in slices: the same numbers, and one slice on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jgrad
from tests.multi_device.meshes import mesh_of, place
from tests.support.memory import kinds, largest_on_device, offloaded, on_device
from tests.support.private import host_memory, inner_equations

pytestmark = pytest.mark.not_in_jax_0_8("host memory")

SLICE = 2**15
LARGEST = 256 * 256  # elements of a layer, of which one is on the device


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(host_memory, "SLICE", SLICE)


def params(dtype=jnp.bfloat16):
    """A stack, rows that divide into slices, and rows that do not."""
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    layers = {"w": array(4, 256, 256), "b": array(4, 256)}
    return {"embedding": array(1024, 256), "layers": layers, "odd": array(301, 256)}


def on_one_device(w):
    """On a mesh, whose types say that nothing is sharded: there are eight devices."""
    return place(w, mesh_of(d=1), P())


AXES = {"embedding": None, "layers": 0, "odd": None}
MATRICES = {"embedding": False, "layers": {"w": True, "b": False}, "odd": False}


def adam(**options):
    return jgrad.adam(1e-3, **options)


def eight_bits():
    return jgrad.stochastic_rounding(adam(moment_dtype="8bit"))


def random():
    """Of another library: random numbers, a copy, what is scaled by a norm, numbers of Python."""

    def init(params):
        keys = iter(jax.random.split(jax.random.key(0), 4))
        noise = jax.tree.map(lambda x: jax.random.bits(next(keys), x.shape), params)
        unit = jax.tree.map(lambda x: x * jnp.max(x), params)
        state = {"noise": noise, "unit": unit, "params": params}
        return state | {"key": jax.random.key(1), "n": 3, "name": "random", "none": None}

    return optax.GradientTransformation(init, lambda g, s, w=None: (g, s))


# A transformation, and how many of its large arrays are made in slices, and whole.
CASES = {
    "adam": (adam, 4, 2),
    "bfloat16": (lambda: adam(moment_dtype=jnp.bfloat16), 4, 2),
    "8bit": (eight_bits, 4, 0),
    "adan": (lambda: jgrad.adan(1e-3), 8, 4),
    "lion": (lambda: jgrad.lion(1e-3), 2, 1),
    "lamb": (lambda: jgrad.lamb(1e-3, layer_axes=AXES), 4, 2),
    "muon": (lambda: jgrad.muon(1e-3, adam_learning_rate=1e-3, matrices=MATRICES), 3, 2),
    "adafactor": (lambda: jgrad.adafactor(1e-3), 0, 0),
    "soap": (lambda: jgrad.soap(1e-3, matrices=MATRICES, layer_axes=AXES), 4, 6),
    "master_weights": (lambda: jgrad.master_weights(adam()), 6, 3),
    "average_params": (lambda: jgrad.average_params(adam(), 0.9), 6, 3),
    "schedule_free": (lambda: jgrad.schedule_free(adam()), 8, 4),
    "hyperball": (
        lambda: jgrad.hyperball(adam(), 0.02, leaves=MATRICES, layer_axes=AXES), 4, 2),
    "counters": (lambda: jgrad.skip_nonfinite(jgrad.accumulate(jgrad.watch(adam()), 2)), 6, 3),
    "optax": (lambda: optax.adamw(1e-3, mu_dtype=jnp.float32), 4, 2),
    "a part": (lambda: optax.masked(optax.adam(1e-3), MATRICES), 2, 0),
}  # fmt: skip
QUICK = ["adam-jit", "8bit-jit", "master_weights-eager", "hyperball-eager", "optax-eager"]
FORMS = {"eager": lambda f: f, "jit": lambda f: lambda x: jax.jit(f)(x)}


def assert_same(found, expected):
    """Bit for bit, wherever they lie."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(*map(jax.tree.leaves, on_device((found, expected))), strict=True):
        assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.slow(always=QUICK)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_the_same_state(name, form):
    """As of `tx` under `jit`, in the memory where large arrays belong, from weights on either."""
    make, in_slices, whole = CASES[name]
    tx, w = make(), params()
    expected = offloaded(jax.jit(tx.init)(w))
    places = kinds(expected)
    for given in (w, host_memory.large_to_host(w)):
        found = FORMS[form](jgrad.offload(tx).init)(given)
        assert_same(found, expected)
        assert kinds(found) == places
    program = jax.make_jaxpr(jgrad.offload(tx).init)(on_one_device(w))
    loops = sum(x.primitive.name == "scan" for x in inner_equations(program.jaxpr.eqns))
    assert (loops, places.count("pinned_host") - loops) == (in_slices, whole)


@pytest.mark.parametrize("name", ["adam", "bfloat16", "master_weights", "average_params", "optax"])
def test_one_layer_on_the_device(name):
    """Nothing larger is made there: no weights are fetched, and no zeros wait."""
    tx, w = jgrad.offload(CASES[name][0]()), params()
    del w["odd"]
    given = host_memory.large_to_host(on_one_device(w))
    assert largest_on_device(jax.make_jaxpr(tx.init)(given).jaxpr) == LARGEST


def test_what_has_no_slices():
    """Random numbers are those of the whole array; what is no array stays as it is."""
    tx = random()
    expected = tx.init(params())
    found = jgrad.offload(tx).init(host_memory.large_to_host(params()))
    for name in ("n", "name", "none"):
        assert found.pop(name) == expected.pop(name)
    keys = [jax.random.key_data(x.pop("key")).tolist() for x in (found, expected)]
    assert keys[0] == keys[1]
    assert_same(found, expected)
    assert kinds(found) == kinds(host_memory.large_to_host(expected))


def test_types_alone():
    tx, w = jgrad.offload(adam()), params()
    shapes = jax.eval_shape(tx.init, w)
    assert shapes == jax.eval_shape(adam().init, w)


def test_weights_of_numpy():
    """They go to the host: as arguments of a program, all would go to the device."""
    w = jax.tree.map(np.asarray, params(jnp.float32))
    tx = jgrad.offload(jgrad.average_params(adam(), 0.9))
    assert_same(tx.init(w), jax.jit(jgrad.average_params(adam(), 0.9).init)(w))


def test_on_the_device_of_the_weights():
    """Zeros of optax, too, which depend on no weight."""
    device = jax.devices()[1]
    w = jax.device_put(params(), device)
    for tx in (adam(), optax.adam(1e-3)):
        state = jgrad.offload(tx).init(w)
        assert {x.sharding.device_set.pop() for x in jax.tree.leaves(state)} == {device}


# ---- sharded leaves ------------------------------------------------------------------------------

SPECS = {
    "embedding": P("d"),
    "layers": {"w": P(None, "d"), "b": P()},
    "odd": P(None, "d"),
}
SHARDED = {
    "adam": (adam, 2),
    "8bit": (eight_bits, 2),
    "master_weights": (lambda: jgrad.master_weights(adam()), 3),
    "optax": (lambda: optax.adam(1e-3), 2),
}


@pytest.mark.slow(always=["Auto-adam", "Auto-optax"])
@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_sharded_as_without_slices(axis_type, name, monkeypatch):
    """Arrays keep their shards, in eager mode and in `jit`; rows that are sharded are not cut."""
    tx = jgrad.offload(SHARDED[name][0]())
    mesh = mesh_of(axis_type, d=4)
    w = host_memory.large_to_host(place(params(), mesh, SPECS))
    forms = [tx.init]
    if axis_type == AxisType.Auto or name != "optax":  # else its zeros have no mesh
        shardings = jgrad.state_shardings(tx, w)
        forms += [jax.jit(tx.init), jax.jit(tx.init, out_shardings=shardings)]
    found = [f(w) for f in forms]
    monkeypatch.setattr(host_memory, "SLICE", 2**40)
    for state, f in zip(found, [tx.init, *map(jax.jit, [tx.init] * 2)], strict=False):
        expected = jgrad.offload(SHARDED[name][0]()).init(w) if f is tx.init else f(w)
        assert_same(state, expected)
    for x, y in zip(*map(jax.tree.leaves, (found[0], tx.init(w))), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def test_slices_under_jit_on_a_mesh():
    """Of stacks: their layers are not sharded. Rows may be, as far as a type of `Auto` says it."""
    w = place(params(), mesh_of(d=4), SPECS)
    program = jax.make_jaxpr(jgrad.offload(adam()).init)(w).jaxpr
    shapes = [x.outvars[0].aval.shape for x in program.eqns if x.primitive.name == "scan"]
    assert shapes == [(4, 1, 256, 256)] * 2


# ---- how many slices -----------------------------------------------------------------------------

COUNTS = {
    "rows": ((1024, 256), 8),
    "layers": ((6, 256, 256), 6),
    "groups of small layers": ((64, 32, 128), 8),
    "small": ((128, 256), None),
    "no rows that divide": ((1025, 256), None),
    "no multiple of a tile": ((2, 2**16), None),
    "layers of vectors": ((2048, 1, 512), 32),
    "one axis": ((2**20,), None),
}


@pytest.mark.parametrize("name", COUNTS)
def test_how_many_slices(name):
    shape, count = COUNTS[name]
    assert host_memory.slices(shape) == count
