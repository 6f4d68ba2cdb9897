"""A step on a mesh is traced and compiled once: an update returns a state placed as it was.

JAX compiles again where the same placement comes back in other words, as `P("x", None)` for
`P("x")`. Weights are in the words that the update returns, and `state_shardings` has to find them.
"""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jgrad
from tests.cases import CASES
from tests.multi_device.meshes import mesh_of, place, specs_of

SHAPES = {"w": (8, 12), "up": (16, 8), "wide": (16, 512), "b": (8,), "s": (6,)}
SPECS = {
    AxisType.Explicit: {"w": P("x", "y"), "up": P("x", None), "wide": P(None, "y"), "b": P("x"), "s": P(None)},
    AxisType.Auto: {"w": P("x", "y"), "up": P("x"), "wide": P(None, "y"), "b": P("x"), "s": P()},
}  # fmt: skip


def placed(kind, *without):
    """Weights on a mesh of two axes of a kind."""
    mesh, specs = mesh_of(kind, x=2, y=2), SPECS[kind]
    shapes = {name: shape for name, shape in SHAPES.items() if name not in without}
    w = {name: jnp.full(shape, 0.1, jnp.float32) for name, shape in shapes.items()}
    return mesh, place(w, mesh, {name: specs[name] for name in w})


every_row = pytest.mark.parametrize("case", [case.without_masks() for case in CASES], ids=str)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPECS, ids=lambda kind: kind.name)
@every_row
def test_one_trace_and_one_compilation(case, kind):
    tx, (mesh, w) = case.tx(), placed(kind, "wide")

    def step(w, state):
        updates, state = tx.update(w, state, w)
        return optax.apply_updates(w, updates), state

    with jax.set_mesh(mesh):
        shardings = jgrad.state_shardings(tx, w)
        # With automatic axes XLA chooses where SOAP's averages are, unless a user does.
        chooses = kind is AxisType.Auto and case.make is jgrad.soap
        out = (jax.tree.map(lambda x: x.sharding, w), shardings) if chooses else None
        run = jax.jit(chex.assert_max_traces(step, n=1), out_shardings=out)
        state = jax.device_put(tx.init(w), shardings)
        for _ in range(2):
            w, state = run(w, state)
    assert run._cache_size() == 1


@pytest.mark.slow(always=["normuon-None", "muon_dion3-None", "soap-None", "adam-8bit"])
@pytest.mark.parametrize("moment_dtype", [None, "8bit"])
@every_row
def test_specs_are_those_of_types(case, moment_dtype):
    """With explicit axes, of which JAX knows it before anything is compiled."""
    if moment_dtype is not None and not case.rounded:
        pytest.skip("has no moments")
    options = {} if moment_dtype is None else {"moment_dtype": moment_dtype}
    tx, (mesh, w) = case.tx(**options), placed(AxisType.Explicit)
    with jax.set_mesh(mesh):
        shardings = jgrad.state_shardings(tx, w)
        state = jax.device_put(tx.init(w), shardings)
        _, new = jax.eval_shape(tx.update, w, state, w)
    assert specs_of(new) == specs_of(shardings)
