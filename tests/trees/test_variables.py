"""Variables of flax and boxes of linen: paths, and arrays in 8 bits."""

import chex
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import jgrad
from jgrad._trees import leaf_names, trees, variables
from tests.multi_device.meshes import mesh_of
from tests.support.memory import on_device

# Where flax has kept the names of mesh axes.
KEYS = ("sharding", "out_sharding", "optimizer_sharding")


class Attention(eqx.Module):
    """With an attribute that has the name of that of variables."""

    query: jax.Array
    value: jax.Array


TREES = {
    "variables": lambda: nnx.State({"a": nnx.Param(jnp.ones(2)), "value": nnx.Param(jnp.ones(3))}),
    "boxes": lambda: {"a": nn.Partitioned(jnp.ones(2), ("x",)), "value": jnp.ones(3)},
    "a variable of a tree": lambda: {"a": nnx.Param({"w": jnp.ones(2)})},
    "attributes": lambda: Attention(jnp.ones(2), jnp.ones(3)),
}
NAMES = {
    "variables": (["a", "value"], ["a", "value"]),
    "boxes": (["a", "value"], ["a/value", "value"]),  # the second as in reports of 1.0
    "a variable of a tree": (["a/w"], ["a/w"]),
    "attributes": (["query", "value"], ["query", "value"]),
}


@pytest.mark.parametrize("name", TREES)
def test_paths(name):
    tree, (paths, names) = TREES[name](), NAMES[name]
    found = variables.leaves_with_paths(tree)
    assert [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found] == paths
    assert all(x is y for (_, x), y in zip(found, jax.tree.leaves(tree), strict=True))
    assert leaf_names.names(tree) == names


def box_of(kind, x, names):
    if kind == "linen":
        return nn.Partitioned(x, names)
    return nnx.Param.from_metadata(
        x, {kind: names, "hijax": False, "is_hijax": False, "ref": False}
    )


def names_in(kind, box):
    return box.names if kind == "linen" else box.get_metadata()[kind]


# Of blocks along the last axis, of a flattened array, of layers that are flattened.
SCALES = {
    ((8, 1024), None): ((8, 4), ("x", None)),
    ((8, 1000), None): ((32,), (None,)),
    ((8, 10, 100), 0): ((8, 1, 1, 4), ("x", None, None, None)),
}


@pytest.mark.parametrize("kind", ["linen", *KEYS])
@pytest.mark.parametrize("case", SCALES, ids=str)
def test_sharding_of_scales(kind, case):
    """Named where both have an axis: along that of blocks a shard might have a part of one."""
    (shape, layers), (of_scale, expected) = case, SCALES[case]
    names = ("x", "y", None)[: len(shape)]
    if layers is None:
        tx = jgrad.adam(1e-3, moment_dtype="8bit")
    else:
        tx = jgrad.lamb(1e-3, moment_dtype="8bit", layer_axes=layers)
    params = {"w": box_of(kind, jnp.zeros(shape), names)}
    state = tx.init(params)
    codes, scale = state.mw["w"]
    assert (names_in(kind, codes), names_in(kind, scale)) == (names, expected)
    assert jax.tree.map(jnp.shape, jax.tree.leaves((codes, scale))) == [shape, of_scale]
    inside = variables.variables_of_blocks(state)
    assert isinstance(jax.tree.leaves(inside.mw, is_leaf=trees.is_leaf)[0], jgrad.Blocks)
    assert jax.tree.structure(params) == jax.tree.structure(inside.mw, is_leaf=trees.is_leaf)
    assert jax.tree.structure(variables.in_form_of(state, inside)) == jax.tree.structure(state)


@pytest.mark.not_in_jax_0_8("host memory")
@pytest.mark.parametrize("kind", ["linen", "out_sharding"])
def test_words_in_host_memory(kind):
    """In variables, as they are in arrays: with the names of codes, through steps, and in files."""
    tx = jgrad.adam(1e-3, moment_dtype="8bit")
    arrays = {"w": jnp.sin(jnp.arange(2.0**19)).reshape(1024, 512)}
    params = {"w": box_of(kind, arrays["w"], ("x", "y"))}
    there = jgrad.offload(tx)
    state, plain = there.init(params), tx.init(params)
    for part in ("codes", "scale"):
        found, expected = (names_in(kind, getattr(x.mw["w"], part)) for x in (state, plain))
        assert found == expected
    new = jax.jit(there.update)(params, state, params)[1]
    assert jax.tree.structure(new) == jax.tree.structure(state) == jax.tree.structure(plain)
    assert [x.dtype for x in jax.tree.leaves(new)][1::2] == [jnp.int32, jnp.uint32]
    _, expected = jax.jit(jgrad.offload(tx).update)(arrays, jgrad.offload(tx).init(arrays), arrays)
    chex.assert_trees_all_equal(jax.tree.leaves(new), jax.tree.leaves(expected))
    new = jax.jit(tx.update)(params, plain, params)[1]
    moved, _ = jgrad.carry_over(new, like=state)
    chex.assert_trees_all_equal(jgrad.pack(new, like=state), on_device(moved))
    chex.assert_trees_all_equal(on_device(jgrad.unpack(moved)), new)
    assert jgrad.leaf_programs(there, params) == jgrad.leaf_programs(tx, params)
    sharding = NamedSharding(mesh_of(x=8), P(None, "x"))
    codes, scale = jax.tree.leaves(jgrad.state_shardings(there, params, sharding).mw)
    assert (codes.spec, codes.memory_kind, scale.spec) == (P(None, "x"), "pinned_host", P())


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("linen", ("x", "y")),
        ("linen", ("x",)),
        *[("out_sharding", names) for names in (("x", None), P("x", "y"), None)],
    ],
)
def test_names_of_rows_and_columns(kind, names):
    """Inside of an update one box holds both, with the names that the parameter has."""
    tx, params = jgrad.adafactor(1e-3), {"w": box_of(kind, jnp.ones((256, 512)), names)}
    state = tx.init(params)
    inside = variables.variables_of_blocks(state)
    assert jax.tree.structure(params) == jax.tree.structure(inside.vw, is_leaf=trees.is_leaf)
    assert jax.tree.structure(variables.in_form_of(state, inside)) == jax.tree.structure(state)
    assert jax.tree.structure(tx.update(params, state, params)[1]) == jax.tree.structure(state)


def test_sharding_of_other_kinds():
    """Names in a spec or a sharding, and what names no axes."""
    mesh = mesh_of(x=2, y=4)
    kinds = {
        P("x", "y"): P("x", None),
        NamedSharding(mesh, P("x", "y")): NamedSharding(mesh, P("x", None)),
        None: None,
    }
    for given, expected in kinds.items():
        params = {"w": box_of("out_sharding", jnp.zeros((8, 1024)), given)}
        scale = jgrad.adam(1e-3, moment_dtype="8bit").init(params).mw["w"].scale
        assert names_in("out_sharding", scale) == expected


def test_state_shardings():
    """They have the structure of the state, and codes follow the parameter."""
    sharding = NamedSharding(mesh_of(d=8), P("d"))
    params = {"w": nnx.Param(jnp.zeros((16, 512)))}
    tx = jgrad.adam(1e-3, moment_dtype="8bit")
    shardings = jgrad.state_shardings(tx, params, sharding)
    assert jax.tree.structure(shardings) == jax.tree.structure(tx.init(params))
    codes, scale = jax.tree.leaves(shardings.mw)
    assert codes.spec == scale.spec == P("d")


def test_leaf_programs():
    params = {"w": nnx.Param(jnp.zeros((16, 512)))}
    found = jgrad.leaf_programs(jgrad.adam(1e-3, moment_dtype="8bit"), params)
    assert [*found.values()] == ["one kernel"] * 2
