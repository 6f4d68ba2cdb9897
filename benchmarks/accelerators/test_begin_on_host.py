"""States that begin in host memory, compiled: what of a model is on a TPU meanwhile."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jgrad
from benchmarks.accelerators import llama
from benchmarks.accelerators.program import Program, mesh, on_one_device
from tests.support.private import host_memory

# Bytes for each element of the largest matrix of a layer: of its slice of the state; and where the
# state has copies of weights, of its weights.
LIMITS = {
    "bfloat16": (lambda: jgrad.adam(1e-3, moment_dtype=jnp.bfloat16), 2.05),
    "float32": (lambda: jgrad.adam(1e-3), 4.05),
    "8bit": (lambda: jgrad.adam(1e-3, moment_dtype="8bit"), 1.2),
    "master_weights": (lambda: jgrad.master_weights(jgrad.adam(1e-3)), 6.05),
}


def placed(target, tree):
    """What is large on the host, and the rest on the device."""
    kind = lambda x: host_memory.KIND if host_memory.is_large_shape(x.shape) else None
    return jax.tree.map(lambda x: on_one_device(target, x, kind(x)), tree)


@pytest.mark.accelerators
@pytest.mark.parametrize("target", ["v5e"], indirect=True)
@pytest.mark.parametrize("name", LIMITS)
def test_one_matrix_of_a_layer(name, target):
    """Of 70 billion parameters with weights on the host."""
    make, limit = LIMITS[name]
    params = placed(target, llama.shapes(llama.FAMILY["Llama 2 70B"], jnp.bfloat16))
    _, rows, columns = params["layers"]["up"].shape
    counts = Program(target, jgrad.offload(make()).init, (params,)).counts
    assert counts.arguments + counts.temporaries < limit * rows * columns


@pytest.mark.accelerators
@pytest.mark.parametrize("target", ["v5e"], indirect=True)
def test_on_a_mesh(target):
    """Eight chips have an eighth of it each, also of an embedding whole, and send nothing."""
    on_mesh = mesh(target, "v5e:4x2", d=8)

    def sharded(x):
        kind = host_memory.KIND if host_memory.is_large_shape(x.shape) else "device"
        spec = (
            P(None, "d") if x.ndim > 2 else P("d") if host_memory.is_large_shape(x.shape) else P()
        )
        sharding = NamedSharding(on_mesh, spec, memory_kind=kind)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    shapes = llama.shapes(llama.FAMILY["Llama 2 70B"], jnp.bfloat16)
    params, tx = jax.tree.map(sharded, shapes), jgrad.offload(jgrad.adam(1e-3))
    shardings = jgrad.state_shardings(tx, params)
    counts = Program(target, tx.init, (params,), out_shardings=shardings).counts
    assert counts.collectives == {}
    assert counts.arguments + counts.temporaries < 0.6e9


def make_layers(key):
    """Those of `docs/larger_than_device.md`."""

    def one(key):
        layer = {"w": jax.random.normal(key, (1024, 4096)), "norm": jnp.ones(1024)}
        return jax.tree.map(
            lambda x: jax.device_put(x, jax.memory.Space.Host) if x.ndim > 1 else x, layer
        )

    return jax.lax.map(one, jax.random.split(key, 16))


@pytest.mark.accelerators
@pytest.mark.parametrize("target", ["v5e"], indirect=True)
def test_layers_one_by_one(target):
    """Two arrays of a layer at most: random bits, and what is made of them."""
    key = on_one_device(target, jax.eval_shape(jax.random.key, 0))
    counts = Program(target, make_layers, (key,)).counts
    assert counts.arguments + counts.temporaries < 2.1 * 4 * 1024 * 4096
