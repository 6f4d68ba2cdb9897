"""Sharding rules by path, as EasyLM has them, for a whole state: what docs/devices.md says of them."""

import ast
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jgrad
from tests.multi_device.meshes import mesh_of
from tests.support.public import PACKAGE

RULES = [("w./kernel", P("mp", "fsdp")), (".*", P())]
# Of 256 columns, where blocks lie along rows, and of others, where a leaf is flattened.
PARAMS = {
    "wi": {"kernel": jnp.linspace(-1.0, 1.0, 64 * 256).reshape(64, 256)},
    "wo": {"kernel": jnp.linspace(-1.0, 1.0, 128 * 64).reshape(128, 64)},
    "ln": {"scale": jnp.ones(64)},
}
MADE = {
    "adam": jgrad.adam(1e-2, moment_dtype="8bit"),
    "lion": jgrad.lion(1e-2, moment_dtype="8bit"),
    "adafactor": jgrad.adafactor(1e-2, min_side=32),
    "normuon": jgrad.muon(1e-2, matrices=jgrad.hidden_matrices(), adam_learning_rate=1e-2, rule="normuon"),
    "soap": jgrad.soap(1e-2, matrices=jgrad.hidden_matrices()),
}  # fmt: skip


def first_rule():
    """The one of the page."""
    text = (PACKAGE.parent / "docs/devices.md").read_text()
    pattern = re.search(r'`\((r"[^`]*"), P\(\)\)` first', text)[1]
    return ast.literal_eval(pattern), P()


def by_path(tree, rules):
    """As `match_partition_rules` of EasyLM."""
    mesh = mesh_of(fsdp=2, mp=2)

    def sharding(path, x):
        keys = (getattr(key, "key", getattr(key, "name", getattr(key, "idx", ""))) for key in path)
        name = "/".join(map(str, keys))
        spec = P() if x.size == 1 else next(spec for rule, spec in rules if re.search(rule, name))
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, tree)


def trained(tx, params, of_state=None):
    """The weights after two steps, on one device or with these shardings of the state."""
    shardings = None if of_state is None else (jax.tree.map(lambda x: x.sharding, params), of_state)

    def step(params, state):
        updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init, out_shardings=of_state)(params)
    for _ in range(2):
        params, state = jax.jit(step, out_shardings=shardings)(params, state)
        jax.block_until_ready(params)
    return params


@pytest.mark.slow(always=["adam"])
@pytest.mark.parametrize("name", ["adam", "lion", "adafactor"])
def test_the_first_rule_is_for_arrays_of_other_shapes(name):
    tx = MADE[name]
    shapes = jax.eval_shape(tx.init, PARAMS)
    with pytest.raises(ValueError, match="NamedSharding"):
        jax.jit(tx.init, out_shardings=by_path(shapes, RULES))(PARAMS)
    placed = jax.device_put(PARAMS, by_path(PARAMS, RULES))
    found = trained(tx, placed, by_path(shapes, [first_rule(), *RULES]))
    assert found["wo"]["kernel"].sharding.spec == P("mp", "fsdp")
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6), found, trained(tx, PARAMS)
    )


@pytest.mark.parametrize("name", MADE)
def test_rules_for_the_parameters_alone(name):
    """With these, `state_shardings` knows what each method's arrays are."""
    tx, own = MADE[name], by_path(PARAMS, RULES)
    state = jax.jit(tx.init, out_shardings=jgrad.state_shardings(tx, PARAMS, own))(PARAMS)
    moments = [x for x in jax.tree.leaves(state) if x.shape == (128, 64)]
    assert all(x.sharding.spec == P("mp", "fsdp") for x in moments)
    assert moments or name == "adafactor"
