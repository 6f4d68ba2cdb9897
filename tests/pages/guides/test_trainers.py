"""The blocks for trainers of others, each on a miniature of its trainer."""

import ast
import builtins
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from jax.sharding import PartitionSpec as P

import jgrad
from tests.pages.guides import trainers
from tests.pages.guides.entries import after, choices, it_runs, run
from tests.support.loops import assert_equal
from tests.support.pages import blocks, page, run_example

TRAINERS = "docs/trainers.md"
PAGES = (TRAINERS,)


# The blocks, in the order of the page.
MAXTEXT, SPIKES, TUNIX, LEVANTER, BRAX, PINN, VISION, EASYLM, GEMMA = range(9)
# A few roundings of half a unit in the last place in each of twelve steps, one way in the worst case.
IN_STEPS = 12 * 16 * 2.0**-24
WIDE = 8 * IN_STEPS  # sums of hundreds


after(TRAINERS, MAXTEXT, names=trainers.maxtext)(it_runs)


@after(TRAINERS, SPIKES, names=trainers.maxtext)
def maxtext(names, printed):
    """The same losses with each setting, and a NaN makes the metric true once."""
    get_optimizer, config, theirs, train = (
        names[x] for x in ("get_optimizer", "config", "theirs", "train")
    )

    def ours(changed, schedule):
        return run_example(TRAINERS, MAXTEXT, names | {"config": changed})["base_opt"]

    def losses(make, nan=None, dtype=jnp.float32, **changes):
        changed = types.SimpleNamespace(**vars(config) | changes)
        tx = get_optimizer(make(changed, trainers.SCHEDULE), names["skip_step_on_spikes"], changed)
        params = jax.tree.map(lambda x: x.astype(dtype), trainers.dense())
        return train(tx, changed, params, nan)

    changes = {}, {"adamw_mask": []}, {"adam_b2": 0.99}, {"trainable_parameters_mask": ["^head/"]}
    for change in changes:
        found, expected = (losses(make, **change)[0] for make in (ours, theirs))
        np.testing.assert_allclose(found, expected, rtol=IN_STEPS)
    found, skipped, _ = losses(ours, 6, skip_step_on_spikes=True)
    assert skipped == [i == 6 for i in range(12)]
    assert np.isfinite(np.delete(found, 6)).all()
    eager = losses(ours, skip_step_on_spikes=True, skip_step_scaling_factor=0.0)[1]
    assert sum(eager) > 2
    state = losses(ours, dtype=jnp.bfloat16, mu_dtype=jnp.dtype("bfloat16"))[2]
    assert {x.dtype for x in jax.tree.leaves(state.mw)} == {jnp.dtype("bfloat16")}


@after(TRAINERS, TUNIX, names=trainers.tunix)
def tunix(names, printed):
    """The same losses and learning rates; in bfloat16, `nnx.cond` accepts the state as it is."""
    train, trainer, make = names["train"], names["PeftTrainer"], names["Regression"]
    config = names["training_config"]
    losses, last = train(names["trainer"])
    expected, their_last = train(trainer(make(), names["theirs"], config))
    np.testing.assert_allclose(losses, expected, rtol=IN_STEPS)
    assert last.learning_rate() == their_last.learning_rate()
    half = lambda tx, restore: trainer(
        make(jnp.bfloat16), tx, types.SimpleNamespace(restore=restore)
    )
    with pytest.raises(Exception, match=r"float32\[64\].*bfloat16\[64\]"):
        train(half(names["theirs"], False))
    train(half(names["theirs"], True))
    losses, _ = train(half(names["adam"](learning_rate=names["schedule"]), False))
    assert losses[-1] < losses[0]


@after(TRAINERS, LEVANTER, names=trainers.levanter)
def levanter(names, printed):
    """The same losses; steps with spikes of the loss are left out, and the state has the rate."""
    config = names["OptimizerConfig"].choices["jgrad"]()
    expected, _, _ = names["train"](names["theirs"]())
    losses, lengths, state = names["train"](config)
    np.testing.assert_allclose(losses, expected, rtol=5 * IN_STEPS)  # five times as many steps
    assert min(lengths[1:12]) > 0
    assert float(state.hyperparams["learning_rate"]) == 0  # its schedule is over
    _, lengths, state = names["train"](config, spike={50, 51, 52})
    assert int(jgrad.report(state.inner_state)["spikes"]) == 3


@after(TRAINERS, BRAX, names=trainers.brax)
def brax(names, printed):
    """The same losses and learning rates, which go both ways; and theirs has no wrapper around it."""
    train, theirs = names["train"], names["theirs"]
    found = train(names["optimizer"], names["lr_is_adaptive_kl"])
    expected = train(theirs, True)
    np.testing.assert_allclose(found["learning_rate"], expected["learning_rate"], rtol=1e-6)
    assert len(np.unique(found["learning_rate"])) == 3
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=IN_STEPS)
    with pytest.raises(AssertionError):
        train(optax.apply_if_finite(theirs, 5), True)
    changed = {"learning_rate_schedule": None, "max_grad_norm": None}
    plain = run_example(TRAINERS, BRAX, names | changed)
    found, expected = (
        train(x, plain["lr_is_adaptive_kl"]) for x in (plain["optimizer"], optax.adam(3e-4))
    )
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=IN_STEPS)


@after(TRAINERS, PINN, names=trainers.jaxpi)
def pinn(names, printed):
    """Adam's losses are theirs, also accumulated, and SOAP trains."""
    ours, theirs, train, config = (
        names[x] for x in ("_create_optimizer", "theirs", "train", "config")
    )
    for mini_batches in (0, 2):
        config.grad_accum_steps = mini_batches
        found, expected = (train(x, config, 12) for x in (ours, theirs))
        np.testing.assert_allclose(found, expected, rtol=IN_STEPS)
    config.optimizer, config.learning_rate, config.grad_accum_steps = "SOAP", 3e-3, 0
    losses = train(ours, config, 200)
    assert losses[-1] < 1e-3 * losses[0]


def in_float32(index, names, key):
    """What a block makes without 8 bits, and its losses."""
    text = blocks(TRAINERS)[index]
    text = text.replace('{"moment_dtype": "8bit"}', "{}").replace('    moment_dtype="8bit",\n', "")
    exec(compile(text, TRAINERS, "exec"), names)
    return names[key]


def eight_bits(state):
    is_blocks = lambda x: isinstance(x, jgrad.Blocks)
    return sum(map(is_blocks, jax.tree.leaves(state, is_leaf=is_blocks)))


@after(TRAINERS, VISION, names=trainers.big_vision)
def big_vision(names, printed):
    """The losses of optax's method under the same chain; and 8 bits train."""
    train, make, params = names["train"], names["make"], trainers.dense(width=512)
    theirs = trainers.big_vision()["config"]
    expected, _ = train(make(theirs, params))
    found, state = train(make(names["config"], params))
    assert eight_bits(state) == 2
    assert found[-1] == pytest.approx(expected[-1], rel=0.02)
    config = in_float32(VISION, names | {"optax": optax}, "config")
    np.testing.assert_allclose(train(make(config, params))[0], expected, rtol=WIDE)
    del optax.jgrad


@after(TRAINERS, EASYLM, names=trainers.easylm)
def easylm(names, printed):
    """The same losses; the rule that the page names lets 8 bits be sharded, and msgpack keeps them."""
    train, chain = names["train"], names["chain"]
    wide = trainers.dense(width=2048)  # the codes of whose head lie in one row
    expected, _ = train(chain(names["theirs"]), wide)
    found, state = train(chain(names["adamw"]), wide)
    assert found[-1] == pytest.approx(expected[-1], rel=0.02)
    (rule,) = re.findall(r'\(r"(/\S+)", PS\(\)\)', page(TRAINERS))
    mesh = jax.make_mesh((1, 1), ("fsdp", "mp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def placed(rules):
        specs = names["match_partition_rules"](rules, state)
        put = lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        return jax.tree.map(put, state, specs)

    placed(((rule, jax.sharding.PartitionSpec()), *names["rules"]))
    with pytest.raises(ValueError, match="rank at least 2"):
        placed(names["rules"])
    saved = serialization.msgpack_serialize(serialization.to_state_dict(state))
    assert_equal(serialization.from_state_dict(state, serialization.msgpack_restore(saved)), state)
    ours = in_float32(EASYLM, names, "adamw")
    np.testing.assert_allclose(train(chain(ours), wide)[0], expected, rtol=WIDE)


@after(TRAINERS, GEMMA, names=trainers.gemma)
def gemma(names, printed):
    """The same losses on a mesh of explicit axes, where 8 bits keep the sharding of their weights."""
    mesh = jax.make_mesh(
        (2, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    specs = {
        "backbone": {"kernel": P(None, "fsdp"), "scale": P("fsdp")},
        "head": {"kernel": P("fsdp")},
    }
    with jax.set_mesh(mesh):
        put = lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        params = jax.tree.map(put, trainers.dense(width=1024), specs)
        expected, _ = names["train"](names["theirs"], params)
        found, state = names["train"](names["adamw"], params)
        ours, _ = names["train"](in_float32(GEMMA, names, "adamw"), params)
    assert eight_bits(state) == 4
    assert state.mw["backbone"]["kernel"].codes.sharding.spec[-1] == "fsdp"
    for a, b, c in zip(*map(jax.tree.leaves, (found, expected, ours)), strict=True):
        np.testing.assert_allclose(c, b, rtol=IN_STEPS, atol=1e-6)
        assert float(jnp.sqrt(jnp.mean((a - b) ** 2))) < 0.01


@pytest.mark.parametrize("index", range(len(trainers.FILES)))
def test_reads_only_names_of_the_file(index):
    nodes = list(ast.walk(ast.parse(blocks(TRAINERS)[index])))
    names = [x for x in nodes if isinstance(x, ast.Name)]
    own = {x.id for x in names if isinstance(x.ctx, ast.Store)}
    own |= {x.arg for x in nodes if isinstance(x, ast.arg)}
    own |= {x.name for x in nodes if isinstance(x, ast.FunctionDef)}
    read = {x.id for x in names if isinstance(x.ctx, ast.Load)}
    assert read - own - set(dir(builtins)) - trainers.FILES[index] == {"jgrad"}


@pytest.mark.parametrize("block", choices(PAGES))
def test_block(block, standard_promotion):
    run(block)
