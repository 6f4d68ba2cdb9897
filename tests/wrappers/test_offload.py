"""Optimizer state in host memory between steps."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jgrad
from tests.backward import models
from tests.cases import gradients, params
from tests.support.compilations import compilations
from tests.support.eight_bits import quantized, unquantized
from tests.support.errors import assert_error
from tests.support.loops import assert_equal, step_of, train
from tests.support.memory import kinds, on_device, on_host
from tests.support.private import host_memory

ADAMW = jgrad.adam(1e-2, weight_decay=0.1)

pytestmark = pytest.mark.not_in_jax_0_8("host memory")


def stack_of_wrappers():
    chain = jgrad.average_params(optax.chain(jgrad.clip_by_global_norm(1.0), ADAMW), 0.9)
    return jgrad.skip_nonfinite(jgrad.accumulate(jgrad.stochastic_rounding(chain), 2))


TXS = {
    "gradient_descent": (jgrad.gradient_descent(0.1), jnp.float32),
    "adamw": (ADAMW, jnp.float32),
    "lamb": (jgrad.lamb(0.1), jnp.float32),
    "8bit": (jgrad.adam(0.1, moment_dtype="8bit"), jnp.float32),
    "master_weights": (jgrad.master_weights(ADAMW), jnp.bfloat16),
    "all wrappers": (stack_of_wrappers(), jnp.bfloat16),
}


# ---- edge 18: where the state lies -------------------------------------------------------------


@pytest.mark.slow(one_in=6)
@pytest.mark.parametrize(("tx", "dtype"), TXS.values(), ids=TXS)
def test_e47_the_same_numbers(tx, dtype):
    """Under jit without `out_shardings`: arrays of a large leaf stay on the host, all others do not."""
    large = lambda i: {"large": jnp.sin(i + jnp.arange(2.0**18)).reshape(1024, 256).astype(dtype)}
    grads = [g | large(i) for i, g in enumerate(gradients(4, dtype))]
    w, step = params(dtype) | large(-1), jax.jit(step_of(jgrad.offload(tx)))
    found, own = w, jgrad.offload(tx).init(w)
    places = [
        "pinned_host" if x.size >= 2**16 else "device" for x in jax.tree.leaves(own) if x.size
    ]
    for g in grads:
        assert kinds(own) == places
        found, own = step(found, own, g)
        assert set(kinds(found)) == {"device"}
    assert kinds(own) == places
    few = 1e-4 if jnp.int8 in [x.dtype for x in jax.tree.leaves(jgrad.unpack(own))] else 0.0
    models.assert_equal(on_device((found, jgrad.unpack(own))), train(tx, w, grads), few=few)


@pytest.mark.parametrize(
    ("shape", "place"),
    {
        (256, 256): "pinned_host",
        (2**16,): "pinned_host",
        (32, 32, 128): "pinned_host",
        (255, 256): "device",  # small
        (32, 4096): "device",  # vectors of 32 layers
        (32, 3, 4096): "device",
        (32, 4096, 1): "device",
        (): "device",
    }.items(),
)
def test_where_an_array_belongs(shape, place):
    """A rule of its shape; compiled for TPUs in `benchmarks/accelerators`."""
    state = jgrad.offload(jgrad.lion(0.1)).init({"w": jnp.ones(shape), "nothing": None})
    assert kinds(state) == ["device", place]
    program = jax.make_jaxpr(jgrad.offload(jgrad.lion(0.1)).init)({"w": jnp.ones(shape)})
    assert (program.out_avals[1].memory_space == jax.memory.Space.Host) == (place != "device")


@pytest.mark.slow(always=["tree-jit"])
@pytest.mark.parametrize(("place", "jit"), [pytest.param(lambda w: w, lambda f: f, id="tree-eager"),
    pytest.param(jgrad.pack, jax.jit, id="packed-jit"), pytest.param(lambda w: w, jax.jit,
    id="tree-jit", marks=pytest.mark.slow), pytest.param(jgrad.pack, lambda f: f, id="packed-eager",
    marks=pytest.mark.slow)])  # fmt: skip
def test_states_in_other_forms_stay_on_the_host(place, jit):
    """In and out of 8 bits and buffers: the numbers of a state on the device."""
    w = {"w": jnp.sin(jnp.arange(8192.0)).reshape(32, 256), "b": jnp.ones(7), "x": jnp.ones(())}
    make = functools.partial(jgrad.adam, 0.1)
    _, state = train(make(moment_dtype="8bit"), place(w), [place(w)] * 2)
    offloaded = host_memory.to_host(state)
    conversions = [
        jgrad.unpack,
        unquantized,
        lambda s: quantized(unquantized(s), like=s),
        lambda s: jgrad.pack(jgrad.unpack(s), like=s),
        lambda s: jgrad.pack(jgrad.unpack(unquantized(s)).mw),
    ]
    for convert in conversions:
        found = jit(convert)(offloaded)
        assert set(kinds(found)) == {"pinned_host"}
        assert_equal(found, jit(convert)(state))


def end(rate, mw, looped, around=lambda tx: tx):
    """A number that depends on the rate and on the state from which training goes on."""
    tx, w = around(jgrad.gradient_descent(rate, momentum=0.9)), {"w": jnp.ones(3)}

    def body(carry, _):
        return step_of(tx)(*carry, jax.tree.map(jnp.sin, carry[0])), None

    carry = w, tx.init(w)._replace(mw=mw)
    if looped:
        carry, _ = jax.lax.scan(body, carry, length=3)
    else:
        for _ in range(3):
            carry, _ = body(carry, None)
    return jnp.sum(carry[0]["w"])


def test_slopes():
    """As without it, also of a state in device memory; each lies where its argument does."""
    slopes = jax.jit(jax.grad(end, argnums=(0, 1)), static_argnums=(2, 3))
    mw_on_device = {"w": jnp.arange(3.0)}
    expected = slopes(0.1, mw_on_device, False)
    for mw in (mw_on_device, on_host(mw_on_device)):
        found = slopes(0.1, mw, False, jgrad.offload)
        assert kinds(found[1]) == kinds(mw)
        chex.assert_trees_all_close(jax.device_get(found), expected, rtol=1e-6)


def test_slopes_through_a_loop():
    """JAX makes no zeros in host memory, from which the slopes of what a loop carries start."""
    mw = on_host({"w": jnp.arange(3.0)})
    with pytest.raises(ValueError, match="Expected cotangent type float32<host>"):
        jax.grad(end)(0.1, mw, True, jgrad.offload)


def mesh():
    return Mesh(np.array(jax.devices()), ("data",))


def placed(tree, spec=None):
    return jax.device_put(tree, NamedSharding(mesh(), P() if spec is None else spec))


@pytest.mark.slow
def test_e47_sharded_over_devices():
    """The state is cut as `state_shardings` says, on the host where it is large, and stays so."""
    w = {"w": jnp.ones((256, 256)), "b": jnp.ones(8)}
    grads = [jax.tree.map(lambda x, i=i: jnp.sin(i + x), w) for i in range(3)]
    expected = train(ADAMW, w, grads)
    tx, found = jgrad.offload(ADAMW), placed(w)
    shardings = jgrad.state_shardings(tx, found, shard_over="data")
    plain = jgrad.state_shardings(ADAMW, found, shard_over="data")
    large = lambda x: x.with_memory_kind("pinned_host")
    moments = plain.mw | {"w": large(plain.mw["w"])}
    assert shardings == plain._replace(mw=moments, vw=moments)
    state = jax.jit(tx.init, out_shardings=shardings)(found)
    step = jax.jit(step_of(tx), donate_argnums=(0, 1))
    for g in grads:
        old = state
        found, state = step(found, state, placed(g))
        assert jax.tree.map(lambda x: x.sharding, state) == shardings
        assert all(x.is_deleted() for x in jax.tree.leaves(old))
    assert_equal((found, state), expected)


def test_e47_a_state_is_taken_as_it_lies():
    """As it was restored: on the device, in NumPy's arrays, or on the host; and so is the next one."""
    w, (g,) = params(), gradients(1)
    tx, state = jgrad.offload(ADAMW), ADAMW.init(w)
    expected = train(ADAMW, w, [g])
    for given in (state, jax.tree.map(np.asarray, state), on_host(state)):
        found = jax.jit(step_of(tx))(w, given, g)
        lies = kinds(jax.tree.map(jnp.asarray, given))
        assert kinds(found[1]) == lies
        assert_equal(on_device(found), expected)


def test_one_program_for_all_steps():
    """Counters begin committed, as moments in host memory are, where parameters are."""
    w = {"w": jnp.ones((256, 256)), "b": jnp.ones(8)}
    w = jax.device_put(w, jax.memory.Space.Device)
    tx = jgrad.offload(jgrad.skip_nonfinite(optax.chain(optax.clip(1.0), optax.trace(0.9), ADAMW)))
    state, step = tx.init(w), jax.jit(step_of(tx))
    assert all(x.committed for x in jax.tree.leaves(state))
    _, after = step(w, state, w)
    assert compilations(lambda given: step(w, given, w), after) == 0


def test_words_of_codes_that_were_restored():
    """Their shapes name the memory; arrays lie there whose types say "device", as orbax restores them."""
    w = jnp.ones((1024, 1024))
    tx = jgrad.offload(jgrad.adam(0.1, moment_dtype="8bit"))
    state = tx.init(w)
    like = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(tx.init, w),
        jgrad.state_shardings(tx, w),
    )
    target, codes = jgrad.unpack(like), jgrad.unpack(state)
    assert [x.sharding.memory_kind for x in jax.tree.leaves(target)] == kinds(codes)
    assert target.mw.codes.shape == w.shape
    assert kinds(codes.mw.codes) == ["pinned_host"]
    read = lambda x, s: jax.make_array_from_callback(
        x.shape, s.sharding, lambda i: np.asarray(x)[i]
    )
    restored = jax.tree.map(read, codes, target)
    assert not host_memory.is_on_host(restored.mw.codes)  # by its type
    packed = jgrad.pack(restored, like=like)
    assert host_memory.is_on_host(packed.mw.codes)
    assert kinds(packed) == kinds(state)
    assert_equal(on_device(packed), on_device(state))


@pytest.mark.parametrize("single", [True, False])
def test_shardings_name_the_memory(single):
    """On one device, and on a mesh: what `init` makes, without making it."""
    w = {"w": jnp.ones((256, 256)), "b": jnp.ones(8)}
    w = jax.device_put(w, jax.devices()[0]) if single else placed(w)
    state = jgrad.offload(ADAMW).init(w)
    found = jgrad.state_shardings(jgrad.offload(ADAMW), w)
    same = jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y, x.ndim), state, found)
    assert all(jax.tree.leaves(same))
    assert [x.memory_kind for x in jax.tree.leaves(found)] == kinds(state)


def test_leaves_that_are_no_arrays_stay():
    """A transformation may keep numbers of Python, keys and None."""
    x = jnp.ones((256, 256))
    state = {"number": 3, "none": None, "key": jax.random.key(0), "x": x}
    inner = optax.GradientTransformation(lambda _: state, lambda g, s, w=None: (g, s))
    tx = jgrad.offload(inner)
    first = tx.init(x)
    _, second = tx.update(x, first)
    for found in (first, second):
        assert (found["number"], found["none"]) == (3, None)
        assert kinds([found["key"], found["x"]]) == ["device", "pinned_host"]
        assert jax.random.key_data(found["key"]).tolist() == [0, 0]


def test_what_the_inner_transformation_sees():
    """Arrays on the device, and extra arguments."""
    seen = []

    def update(g, state, w=None, **extra):
        seen.append((str(jax.typeof(state).memory_space), extra))
        return g, state

    inner = optax.GradientTransformationExtraArgs(lambda w: w, update)
    tx, x = jgrad.offload(inner), jnp.ones((256, 256))
    state = tx.init(x)
    tx.update(x, state, x, value=3)
    jax.jit(tx.update)(x, state, x, value=3)
    assert [(place, set(extra)) for place, extra in seen] == [("MemorySpace.Device", {"value"})] * 2


# ---- backends without host memory --------------------------------------------------------------


class Device:
    """One with memory of some kinds."""

    def __init__(self, platform, *kinds):
        self.platform = platform
        self._kinds = kinds

    def addressable_memories(self):
        return [type("Memory", (), {"kind": kind}) for kind in self._kinds]


@pytest.fixture
def backend(monkeypatch):
    """Makes JAX have another first device."""

    def choose(*args):
        host_memory.check.cache_clear()
        monkeypatch.setattr(jax, "local_devices", lambda: [Device(*args)])

    yield choose
    monkeypatch.undo()
    host_memory.check.cache_clear()


def test_e47_an_accelerator_without_host_memory(backend):
    backend("gpu", "device", "unpinned_host")
    message = (
        "offload: the backend 'gpu': memory of the kinds 'device', 'unpinned_host', expected "
        "'pinned_host' among them."
    )
    assert_error(RuntimeError, message, lambda: jgrad.offload(ADAMW).init(jnp.ones(3)))


# ---- inside of others ---------------------------------------------------------------------------

OUTSIDE = "expected it outside everything: `offload({}(...))`."
X = jnp.ones(3)

WRAPPERS = {
    "accumulate": lambda tx: jgrad.accumulate(tx, 2),
    "master_weights": jgrad.master_weights,
    "offload": jgrad.offload,
    "pack_small": jgrad.pack_small,
    "skip_nonfinite": jgrad.skip_nonfinite,
    "stochastic_rounding": jgrad.stochastic_rounding,
    "zero": lambda tx: jgrad.zero(tx, "data"),
}


@pytest.mark.parametrize(("name", "wrap"), WRAPPERS.items(), ids=WRAPPERS)
def test_e47_inside_of_another_wrapper(name, wrap):
    """At once, and in a chain when the state is made."""
    tx = jgrad.offload(ADAMW)
    message = f"{name}: `tx`: an `offload` inside, {OUTSIDE.format(name)}"
    assert_error(ValueError, message, lambda: wrap(tx))
    chain, w = (
        wrap(optax.chain(tx, optax.identity())),
        jgrad.pack({"w": X}) if name == "zero" else X,
    )
    assert_error(ValueError, message, lambda: chain.init(w))
    assert_error(ValueError, message, lambda: jax.eval_shape(chain.init, w))
