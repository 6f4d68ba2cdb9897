"""Parameters on two meshes of the same devices: what counts for all of them lies on neither."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jgrad

MATRICES = {"flat": True, "square": True}
TXS = {
    "adam": jgrad.adam(1e-2),
    "lamb": jgrad.lamb(1e-2),
    "clip": optax.chain(jgrad.clip_by_global_norm(1.0, of="previous"), jgrad.adam(1e-2)),
    "accumulate": jgrad.accumulate(jgrad.adam(1e-2), 1),
    "skip": jgrad.skip_nonfinite(jgrad.average_params(jgrad.adam(1e-2), 0.9), loss_scale=2.0),
    "soap": jgrad.soap(1e-2, matrices=MATRICES),
}


@pytest.mark.slow(always=["adam", "skip"])
@pytest.mark.parametrize("name", TXS)
def test_a_step_of_leaves_on_two_meshes(name):
    """JAX takes the mesh of the first argument that is on one, where the others do not fit."""
    tx, devices = TXS[name], np.array(jax.devices()[:4])
    flat, square = Mesh(devices, ("data",)), Mesh(devices.reshape(2, 2), ("fsdp", "ep"))
    plain = {"flat": jnp.ones((8, 4)), "square": jnp.full((4, 4), 0.5)}
    params = {
        "flat": jax.device_put(plain["flat"], NamedSharding(flat, P("data"))),
        "square": jax.device_put(plain["square"], NamedSharding(square, P("fsdp", "ep"))),
    }
    found, _ = jax.jit(tx.update)(params, tx.init(params), params)
    expected, _ = jax.jit(tx.update)(plain, tx.init(plain), plain)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)
