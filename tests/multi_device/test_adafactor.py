"""Adafactor on meshes: rows, columns and layers of sharded leaves are those of whole leaves."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jgrad
from tests.multi_device.meshes import mesh_of, place, update_in_shard_map
from tests.support import draws
from tests.support.errors import assert_error
from tests.support.loops import step_of, train

AXES = {"w": None, "conv": None, "layers": 0, "b": None, "x": None}
SHAPES = {"w": (16, 12), "conv": (3, 8, 10), "layers": (4, 12, 8), "b": (8,), "x": ()}
SPECS = {
    "rows": {"w": P("a", "b"), "conv": P(None, "a"), "layers": P("a", "b"), "b": P("b"), "x": P()},
    "columns": {"w": P(None, ("a", "b")), "conv": P(None, "b", "a"), "layers": P("b", None, "a")}
    | {"b": P(("a", "b")), "x": P()},
    "layers": {"w": P(), "conv": P(), "layers": P(("a",)), "b": P(), "x": P()},
}
OPTIONS = {"layer_axes": AXES, "min_side": 8, "momentum": 0.9, "weight_decay": 0.01}

every_spec = pytest.mark.parametrize("name", SPECS)


draw = functools.partial(draws.normal, SHAPES)


def expected(**options):
    return train(jgrad.adafactor(0.05, **(OPTIONS | options)), draw(0), [draw(1), draw(2)])


def close(found, wanted):
    chex.assert_trees_all_close(jax.device_get(found), wanted, rtol=2e-6, atol=1e-7)


@pytest.mark.slow
@every_spec
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_under_jit(name, kind):
    """Rows and columns lie as the weights do along the axes that they have."""
    mesh = mesh_of(kind, a=2, b=2)
    tx = jgrad.adafactor(0.05, **OPTIONS)
    with jax.set_mesh(mesh):
        w = place(draw(0), mesh, SPECS[name])
        shardings = jgrad.state_shardings(tx, w)
        state = jax.jit(tx.init, out_shardings=shardings)(w)
        step = jax.jit(step_of(tx))
        for t in (1, 2):
            w, state = step(w, state, place(draw(t), mesh, SPECS[name]))
    close((w, state), expected())
    if name == "rows":
        of_w, of_layers = shardings.vw["w"], shardings.vw["layers"]
        lie = [(x, 2) for x in of_w] + [(x, 3) for x in of_layers]
        specs = P(None, "b"), P("a"), P("a"), P("a", "b")
        for (found, axes), spec in zip(lie, specs, strict=True):
            assert found.is_equivalent_to(jax.sharding.NamedSharding(mesh, spec), axes)


@pytest.mark.slow(always=["True-paper-layers"])
@every_spec
@pytest.mark.parametrize("rule", ["paper", "torch"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map(name, rule, check_vma):
    mesh, specs = mesh_of(a=2, b=2), SPECS[name]
    tx = jgrad.adafactor(0.05, mesh_axes=specs, rule=rule, **OPTIONS)
    w = place(draw(0), mesh, specs)
    step, state = update_in_shard_map(tx, w, mesh, specs, step=step_of(tx), check_vma=check_vma)
    for t in (1, 2):
        w, state = step(w, state, place(draw(t), mesh, specs))
    close((w, state), expected(rule=rule))


def test_a_part_of_a_matrix():
    """Nothing says whether a device has all of it."""
    mesh, specs = mesh_of(a=2), {"w": P("a")}
    tx = jgrad.adafactor(0.05, min_side=4)
    w = place({"w": jnp.ones((16, 12))}, mesh, specs)
    step, state = update_in_shard_map(tx, w, mesh, specs, step=step_of(tx))
    message = (
        "adafactor: `mesh_axes` at ['w']: None inside `shard_map` or `pmap`, where a device may have "
        "a part of a matrix along 'a', expected the PartitionSpec of the leaf; where each device has "
        "whole matrices, `mesh_axes=PartitionSpec()`."
    )
    assert_error(ValueError, message, lambda: step(w, state, w))
