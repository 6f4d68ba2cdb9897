"""The blocks that help to choose: setups, hyperparameters, and answers to questions."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.pages.guides.entries import after, choices, in_both_forms, nbytes, run, size
from tests.support.loops import assert_equal
from tests.support.pages import page, rows

CHOOSE = "docs/choose.md"
STARTS = "docs/hyperparameters.md"
FAQ = "docs/faq.md"
PAGES = (CHOOSE, STARTS, FAQ)


# The blocks, in the order of the page.
COMMON, FITS, STACKED, BF16, LARGE, *OTHERS = range(9)
FROZEN, BATCHES, FP16, MANY = OTHERS


def setup(index, *before, cost=None, steps=30):
    """A block that trains behind the common lines: in `steps`, half of the loss is gone.

    Args:
      index: of the block.
      before: other blocks.
      cost: bytes per parameter, the gradient included, which the page's table says.
      steps: of training.
    """

    def enter(check):
        @after(CHOOSE, index, COMMON, *before, slow=True)
        def trains(names, printed):
            params, state = jax.tree.map(jnp.copy, (names["params"], names["state"]))
            losses = []  # the step donates
            for _ in range(steps):
                params, state, loss = names["step"](params, state, names["batch"])
                losses.append(float(loss))
            assert losses[-1] < 0.5 * losses[0]
            if cost:
                found = (2 * nbytes(params) + nbytes(state)) / size(params)
                assert found == pytest.approx(cost, rel=0.01)
            check(names, params, state, losses)

    return enter


def it_trains(names, params, state, losses):
    """What it does is tested elsewhere."""


@setup(FITS, cost=16, steps=100)
def first_rate_is_zero(names, params, state, losses):
    assert losses[1] == losses[0]


setup(STACKED, cost=16)(it_trains)
setup(BF16, cost=12)(it_trains)


@setup(FP16, cost=16)
def float16(names, params, state, losses):
    """A gradient that overflows changes only the count and the scale, which halves."""
    x, y = names["batch"]
    before = jax.tree.map(jnp.copy, (params, state.skipped, state.loss_scale))
    same, state, _ = names["step"](params, state, (x, 1e30 * y))
    assert_equal(same, before[0])
    assert (int(state.skipped), float(state.loss_scale)) == (before[1] + 1, before[2] / 2)


@setup(LARGE, STACKED)
def too_large(names, params, state, losses):
    """4.03 bytes per parameter of a large stack, by either form of the step."""
    large, adam = params["layers"]["w"], state.inner.inner
    found = large.nbytes + nbytes((adam.mw["layers"]["w"], adam.vw["layers"]["w"]))
    assert found == pytest.approx(4.03 * large.size, rel=0.002)
    in_both_forms(names["step"], params, state, names["batch"])


@setup(FROZEN)
def frozen_leaves(names, params, state, losses):
    assert_equal(params["hidden"], names["params"]["hidden"])
    assert size(state) == 2 * size(params["head"]) + 1


@setup(BATCHES, steps=120)
def large_batches(names, params, state, losses):
    """Four mini-batches are one update, the first with a rate of 0."""
    changes = [i for i, (a, b) in enumerate(itertools.pairwise(losses), 1) if a != b]
    assert changes == list(range(8, 120, 4))


@after(CHOOSE, MANY, COMMON, slow=True)
def many_models_at_once(names, printed):
    """Each trains from its own parameters, with the same batch."""
    first = jnp.copy(names["params"]["head"]["b"])  # the step donates
    new, _, losses = names["step"](names["params"], names["state"], names["batch"])
    assert losses.shape == (4,)
    assert float(jnp.ptp(losses)) > 1e-3
    assert bool((new["head"]["b"] != first).all())


# The names of the calls, in the order of the table, and the updates after which a rate is largest.
PEAKS = {"gpt": 2000, "vit": 10_000, "sgd": 50_000, "lars": 782, "lamb": 2000}
CALLS = [*PEAKS, "ppo", "dit", "pinn"]
BOTH = {"kernel", "embedding"}
DECAYED = {name: {"kernel"} for name in PEAKS} | {"gpt": BOTH, "lamb": BOTH}


@after(STARTS, 0)
def hyperparameters(names, printed):
    """Each call reaches the learning rate of its row, and decays and clips as the row says.

    A bias of flax's attention has two axes.
    """
    table = rows(page(STARTS))
    assert len(table) == len(CALLS)
    w = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones((2, 1)), "embedding": jnp.ones((3, 1))}
    zeros, large = (jax.tree.map(lambda p, x=x: jnp.full_like(p, x), w) for x in (0.0, 1e3))
    for (_, _, rate, decay, _), name in zip(table, CALLS, strict=True):
        tx = jgrad.watch(names[name])
        state = tx.init(w)
        _, first = optax.tree.get_all_with_path(state, "step")[0]
        at = jnp.full_like(first, PEAKS.get(name, 0))
        state = optax.tree.set(state, step=at)
        updates, state = tx.update(zeros, state, w)
        peak, (decayed, *clipped) = float(rate.split(",")[0]), map(float, decay.split(";"))
        found = jgrad.report(state)
        assert float(found["learning_rate"]) == pytest.approx(peak, rel=1e-3), name
        assert {leaf for leaf, x in updates.items() if x.any()} == DECAYED.get(name, set()), name
        if name in ("gpt", "vit", "sgd"):
            looked_ahead = 1.9 if name == "sgd" else 1.0  # by Nesterov's momentum
            expected = -peak * decayed * looked_ahead
            np.testing.assert_allclose(updates["kernel"], expected, rtol=1e-5)
        assert bool(decayed) == (name in DECAYED), name
        state = jgrad.report(tx.update(large, tx.init(w), w)[1])
        factor = float(state.get("clip_factor", 1.0))
        assert factor == pytest.approx(clipped[0] / 3e3 if clipped else 1.0, rel=1e-5), name


def with_a_nan():
    """A gradient that is not finite in one leaf."""
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    return {"params": params, "grads": params | {"w": jnp.full((2, 3), jnp.nan)}}


@after(FAQ, 0, names=with_a_nan)
def nan_at_step_0(names, printed):
    assert names["bad"] == ["grad_norm", "grad_norm/w"]
    assert_equal(names["updates"], jax.tree.map(jnp.zeros_like, names["params"]))


def test_the_name_of_a_question():
    with pytest.raises(AttributeError, match=r"expected `jgrad\.adam` with `weight_decay=`"):
        jgrad.adamw  # noqa: B018


def test_bytes_of_wrappers_in_the_answers():
    """As the notes have them, which tests count."""
    table = rows(page("benchmarks/notes/what_wrappers_cost.md"))[::-1]  # on a CPU by the first
    moved = {row[0]: int(row[1].split(" / ")[0]) for row in table if re.match(r"\d+ / ", row[1])}
    answer = page(FAQ).partition("## Which wrapper is slow?")[2]
    adamw, skipped, clipped = (moved[x] for x in ("AdamW", "skip(AdamW)", "clip + AdamW"))
    assert f"`skip_nonfinite` adds {skipped - adamw} to AdamW's {adamw} bytes" in answer
    assert f"clipping {clipped - adamw}." in answer
    of_optax = moved["skip(optax's AdamW)"]
    assert re.search(rf"\b{of_optax}\s+bytes", answer)


@pytest.mark.parametrize("block", choices(PAGES))
def test_block(block, standard_promotion):
    run(block)
