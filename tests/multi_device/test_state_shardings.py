"""`state_shardings(shard_over=)`: under `jit`, each device has a shard of the state."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jgrad
from tests.multi_device.meshes import mesh_of
from tests.support import messages
from tests.support.errors import assert_error

# Shape, spec of the parameter, spec of its moments when cut over "a" (4 devices) too.
SPECS = {
    "first": ((8, 3), P(), P("a")),
    "second": ((3, 8), P(), P(None, "a")),
    "none": ((3, 5), P(), P()),
    "scalar": ((), P(), P()),
    "further": ((8, 3), P("b"), P(("b", "a"))),
    "beside": ((6, 4), P("b"), P("b", "a")),
    "before": ((4, 2), P(None, "b"), P("a", "b")),
    "already": ((8, 8), P(None, "a"), P(None, "a")),
    "both": ((8, 8), P(("a", "b")), P(("a", "b"))),
    "empty": ((0, 4), P(), P()),
}


grid = functools.partial(mesh_of, a=4, b=2)


@pytest.mark.parametrize("name", SPECS)
def test_specs(name):
    shape, own, expected = SPECS[name]
    w = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(grid(), own))
    found = jgrad.state_shardings(jgrad.adam(0.1), w, shard_over="a")
    assert (found.step.spec, found.mw.spec, found.vw.spec) == (P(), expected, expected)


def test_several_axes():
    w = jax.ShapeDtypeStruct((3, 16), jnp.float32, sharding=NamedSharding(grid(), P()))
    found = jgrad.state_shardings(jgrad.adam(0.1), w, shard_over=("b", "a"))
    assert found.mw.spec == P(None, ("b", "a"))


@pytest.mark.slow
def test_memory():
    """Moments stay on the host with their parameters."""
    own = NamedSharding(grid(), P(), memory_kind="unpinned_host")
    w = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=own)
    found = jgrad.state_shardings(jgrad.adam(0.1), w, shard_over="a")
    assert found.mw == NamedSharding(grid(), P("a"), memory_kind="unpinned_host")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Normalisation:
    """A layer with running averages, as users name them."""

    buffers: Any
    scale: Any


class Averages(NamedTuple):
    """What it may hold."""

    mean: Any
    variance: Any


MODELS = {
    "a list of buffers": lambda x: Normalisation([x, x], x),
    "a tuple of buffers": lambda x: Normalisation((x,), x),
    "a NamedTuple of buffers": lambda x: Normalisation(Averages(x, x), x),
    "a dict of buffers": lambda x: Normalisation({"float32": x, "leaf 0": x}, x),
    "an array of buffers": lambda x: Normalisation(x, x),
    "keys": lambda x: {"buffers": {"leaf 1": x, "leaf 3": [x]}, "leaf 0": x, "float32": x},
}


@pytest.mark.parametrize("packs", ["", "small", "nothing"])
@pytest.mark.parametrize("name", MODELS)
def test_names_of_users(name, packs):
    """A model may call its parts as jgrad calls those of a `Packed`: moments follow all the same."""
    tx = jgrad.adam(0.1)
    if packs:  # all leaves in a buffer, or each as it is
        tx = jgrad.pack_small(tx, max_size=100 if packs == "small" else 1)
    own, further = NamedSharding(grid(), P()), NamedSharding(grid(), P(None, "a"))
    w = MODELS[name](jax.ShapeDtypeStruct((3, 8), jnp.float32, sharding=own))
    found = jgrad.state_shardings(tx, w, shard_over="a")
    assert jax.tree.structure(found) == jax.tree.structure(jax.eval_shape(tx.init, w))
    expected = own if packs == "small" else further
    assert set(jax.tree.leaves((found.mw, found.vw))) == {expected}
    if packs != "small":
        assert len(jax.tree.leaves(found.mw)) == len(jax.tree.leaves(w))


def test_arrays_of_other_shapes():
    """One number for each row lies as the rows do; an array of another width is replicated."""
    tx = optax.with_extra_args_support(optax.identity())
    tx = tx._replace(init=lambda w: [{"w": jnp.zeros((8, n))} for n in (1, 4)])
    w = {
        "w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(grid(), P("a", "b")))
    }
    rows, others = jgrad.state_shardings(tx, w)
    assert (rows["w"].spec, others["w"].spec) == (P("a"), P())


def test_rows_of_buffers():
    """Along no other axis, since rows are what `zero` divides; large leaves as others."""
    w = {
        "small": jnp.ones((3, 5)),
        "large": jnp.ones((3, 400)),
        "empty": jnp.ones((0, 4), "bfloat16"),
    }
    for multiple_of, expected in ((4, P("a")), (1, P())):
        packed = jgrad.pack(w, multiple_of=multiple_of, max_size=1000)
        found = jgrad.state_shardings(
            jgrad.adam(0.1), packed, NamedSharding(grid(), P()), shard_over="a"
        )
        specs = {name: s.spec for name, s in found.mw.buffers.items()}
        assert specs == {"float32": expected, "bfloat16": P(), "leaf 1": P(None, "a")}


def test_numbers():
    """A parameter may be a number of Python, or an array of NumPy in double precision."""
    w, where = {"w": np.ones((4, 2)), "x": 1.5}, NamedSharding(grid(), P())
    found = jgrad.state_shardings(jgrad.adam(0.1), w, where, shard_over="a")
    assert {name: s.spec for name, s in found.mw.items()} == {"w": P("a"), "x": P()}
    message = f"state_shardings: `params_shardings` at ['x']: {P('a')}, expected a spec that fits shape ()."
    wrong = {"w": where, "x": NamedSharding(grid(), P("a"))}
    assert_error(ValueError, message, lambda: jgrad.state_shardings(jgrad.adam(0.1), w, wrong))


def over(axes):
    w = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(grid(), P()))
    return jgrad.state_shardings(jgrad.adam(0.1), w, shard_over=axes)


test_an_axis_that_is_not_there = messages.test_of("shard_over", globals())
