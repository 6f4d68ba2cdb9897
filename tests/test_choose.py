"""Each block of docs/choose.md trains, and does what its text says."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.support.loops import assert_equal
from tests.test_docs import blocks, page, rows, run_example

pytestmark = pytest.mark.slow

PAGE = "docs/choose.md"
# The blocks, in the order of the page.
PRELUDE, FITS, PACKED, STACKED, MUON, BF16, LARGE, *OTHERS = range(13)
JIT, FROZEN, RATES, BATCHES, FP16, MANY = OTHERS


@pytest.fixture(autouse=True)
def _as_a_reader(standard_promotion):
    """A bias is added to a batch."""
    with jax.numpy_rank_promotion("allow"):
        yield


def after(*setups):
    """Names after the common lines and the blocks of these setups."""
    names = {}
    for index in (PRELUDE, *setups):
        run_example(PAGE, index, names)
    return names


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def trained(names, steps=30):
    """Parameters, state and losses; the step donates, so the parameters are copied."""
    params, state, values = copied(names["params"]), names["state"], []
    for _ in range(steps):
        params, state, value = names["step"](params, state, names["batch"])
        values.append(float(value))
    return params, state, values


def again(names):
    """From the start, with the program that was compiled."""
    return names | {"state": names["tx"].init(names["params"])}


def plain(tx, names, steps=30, loss="loss"):
    """The same training of `tx` on the parameters as they are, on one device."""
    own = {"step": names["make_step"](tx, names[loss]), "state": tx.init(names["params"])}
    return trained(names | own, steps)


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def size(tree):
    return sum(x.size for x in jax.tree.leaves(tree))


def learns(values):
    return values[-1] < 0.5 * values[0]


@pytest.mark.slow(always=True)
def test_the_blocks_are_those_named_here():
    assert len(blocks(PAGE)) == MANY + 1


@pytest.mark.slow(always=True)
def test_figures_stand_on_the_pages_that_are_linked():
    number = r"\d+\.\d+|\d{2,}"
    table = [row for row in rows(page(PAGE)) if len(row) == 4]
    assert len(table) == 10
    for model, _, cost, more in table:
        there = " ".join(page(f"docs/{name}") for name in re.findall(r"\((\w+\.md)\)", more))
        assert set(re.findall(number, cost)) <= set(re.findall(number, there)), model


def test_fits():
    """By a schedule whose first rate is 0."""
    names = after(FITS)
    params, state, values = trained(names, 100)
    assert learns(values)
    assert values[1] == values[0]
    assert int(state[1].step) == 100
    bare = names["loss"](params, names["batch"])
    assert float(bare) < 0.1 * values[0]


def test_many_small_arrays():
    """The numbers and the checkpoint of the tree."""
    names = after()
    expected, state, _ = plain(
        jgrad.adam(1e-2, weight_decay=1e-2, weight_decay_mask=names["is_matrix"]), names
    )
    names = after(PACKED)
    assert list(names["params"].buffers) == ["float32"]
    found = jgrad.unpack(trained(names)[:2])
    chex.assert_trees_all_close(found, (expected, state), rtol=1e-4, atol=1e-6)


def unstacked(tree):
    """With a list of layers."""
    layers = [jax.tree.map(lambda x, i=i: x[i], tree["layers"]) for i in range(4)]
    return tree | {"layers": layers}


def loss_of_a_list(names):
    stack = lambda layers: jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
    return lambda params, batch: names["deep_loss"](
        params | {"layers": stack(params["layers"])}, batch
    )


@pytest.mark.parametrize(
    "setup",
    [(STACKED,), pytest.param((STACKED, MUON), marks=pytest.mark.slow)],
    ids=["lamb", "muon"],
)
def test_stacked_layers(setup):
    """A stack trains as a list of layers does, without `layer_axes`."""
    names = after(*setup)
    found, _, values = trained(names, 10)
    assert values[-1] < values[0]
    names["list_loss"] = loss_of_a_list(names)
    if setup == (STACKED,):
        decays = names["decays"] | {"layers": [names["decays"]["layers"]] * 4}
        tx = jgrad.lamb(1e-2, weight_decay=1e-2, weight_decay_mask=decays)
    else:
        tx = jgrad.muon(0.02, matrices=jgrad.hidden_matrices(), adam_learning_rate=3e-3)
        assert names["state"].vw["layers"]["w"] is None
    names["params"] = unstacked(names["params"])
    expected, _, _ = plain(tx, names, 10, loss="list_loss")
    chex.assert_trees_all_close(unstacked(found), expected, rtol=1e-3, atol=1e-5)


def test_bfloat16():
    """12 bytes per parameter, the gradient included."""
    names = after(BF16)
    params, state, values = trained(names)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    assert 2 * nbytes(params) + nbytes(state) == pytest.approx(12 * size(params), rel=0.01)
    assert learns(values)


def test_too_large():
    """6.03 bytes per parameter of a large leaf, with the state on the host."""
    names = after(LARGE)
    params, state, values = trained(names)
    large, own = params["hidden"]["w"], state.inner.inner
    found = (2 * large.nbytes + nbytes((own.mw["hidden"]["w"], own.vw["hidden"]["w"]))) / large.size
    assert found == pytest.approx(6.03, abs=0.01)
    if hasattr(jax, "memory"):
        assert {x.sharding.memory_kind for x in jax.tree.leaves(state)} == {"pinned_host"}
    assert learns(values)


def test_many_devices():
    """The numbers of one device; each has its part of the moments."""
    names = after()
    expected, _, losses = plain(jgrad.adam(1e-2, weight_decay=1e-2), names)
    names = after(JIT)
    params, state, values = trained(names)
    n = jax.device_count()
    assert n == 8
    for x in jax.tree.leaves((state.mw, state.vw)):
        share = x.addressable_shards[0].data.size
        assert share == (x.size if x.shape == (1,) else x.size // n)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(params))
    np.testing.assert_allclose(values, losses, rtol=1e-3)
    chex.assert_trees_all_close(jgrad.unpack(params), expected, rtol=1e-3, atol=1e-4)


def test_frozen_leaves():
    names = after(FROZEN)
    params, state, values = trained(names)
    assert values[-1] < values[0]
    assert_equal(params["hidden"], names["params"]["hidden"])
    assert size(state) == 2 * size(params["head"]) + 1


def test_a_rate_for_each_leaf():
    """Adam's first step is the rate, whatever the gradient; a rate of 0 freezes."""
    names = after(RATES)
    before = copied(names["params"])
    assert learns(trained(names)[2])
    params, _, _ = trained(again(names), 1)
    far = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), params, before)
    assert far["hidden"]["w"] == pytest.approx(1e-3, rel=1e-2)
    assert far["head"]["b"] == pytest.approx(1e-2, rel=1e-2)
    tx = jgrad.adam({"hidden": 0.0, "head": 1e-2}, weight_decay=1e-2)
    params, _, _ = plain(tx, names, 3)
    assert_equal(params["hidden"], before["hidden"])


def test_large_batches():
    """Four mini-batches are one update for all of their examples."""
    names = after(BATCHES)
    parts = [jax.tree.map(lambda x, i=i: x[8 * i : 8 * i + 8], names["batch"]) for i in range(4)]
    params, state = copied(names["params"]), names["state"]
    for i in range(12):
        before = copied(params)
        params, state, _ = names["step"](params, state, parts[i % 4])
        same = all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), before, params)))
        assert same == (i % 4 < 3 or i < 4), i  # the first rate is 0
    masks = names["masks"]
    whole = optax.chain(
        jgrad.clip_by_global_norm(1.0), jgrad.lamb(names["schedule"], weight_decay=1e-2, **masks)
    )
    expected, _, _ = plain(whole, names, 3)
    chex.assert_trees_all_close(params, expected, rtol=1e-4, atol=1e-6)
    assert learns(trained(again(names), 120)[2])


def test_float16():
    """A batch that overflows changes nothing but the scale and the count."""
    names = after(FP16)
    params, state, values = trained(names)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.float16)}
    assert 2 * nbytes(params) + nbytes(state) == pytest.approx(16 * size(params), rel=0.01)
    assert learns(values)
    skipped, scale, before = int(state.skipped), float(state.loss_scale), copied(params)
    bad = jax.tree.map(lambda x: jnp.full_like(x, 1e30), names["batch"])
    params, state, _ = names["step"](params, state, bad)
    assert int(state.skipped) == skipped + 1
    assert float(state.loss_scale) == scale / 2
    assert_equal(params, before)


def test_many_models_at_once():
    """Each client trains as it would alone, and the round is their mean."""
    names = after(MANY)
    own = after() | {"tx": jgrad.adam(1e-2)}
    own["step"], alone = own["make_step"](own["tx"]), []
    for i in range(4):
        own["batch"] = jax.tree.map(lambda x, i=i: x[i], names["clients"])
        alone.append(trained(again(own), 5)[0])
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *alone)
    chex.assert_trees_all_close(names["models"], stacked, rtol=1e-4, atol=1e-6)
    assert float(jnp.ptp(names["models"]["head"]["b"])) > 1e-3
    chex.assert_trees_all_close(
        names["params"], jax.tree.map(lambda x: x.mean(0), stacked), rtol=1e-4, atol=1e-6
    )
    np.testing.assert_array_equal(names["states"].step, [5] * 4)
