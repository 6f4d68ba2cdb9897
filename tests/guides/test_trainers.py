"""The blocks for trainers of others, each on a miniature of its trainer."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.guides.entries import IMPORTED, after, choices, nbytes, run
from tests.support import trainers
from tests.support.pages import run_example

TRAINERS = "docs/trainers.md"
PAGES = (TRAINERS,)


# The blocks, in the order of the page.
MAXTEXT, TUNIX, TOKENS, LEVANTER, BRAX, OPENPI, PINN = range(7)
# A few roundings of half a unit in the last place in each of twelve steps, one way in the worst case.
IN_STEPS = 12 * 16 * 2.0**-24


@after(TRAINERS, MAXTEXT, names=trainers.maxtext)
def maxtext(names, printed):
    """The same losses; where the backbone is frozen, those of clipping the head alone."""
    ours, theirs, train, config = (names[x] for x in ("get_optimizer", "theirs", "train", "config"))

    def losses(make, dtype=jnp.float32, **changes):
        changed = types.SimpleNamespace(**vars(config) | changes)
        params = jax.tree.map(lambda x: x.astype(dtype), trainers.dense())
        return train(make, changed, params)

    replaced = {"skip_step_on_spikes": True, "gradient_clipping_threshold": 0.0}
    expected = losses(theirs)[0]
    np.testing.assert_allclose(losses(ours, **replaced)[0], expected, rtol=IN_STEPS)

    def head_alone(config, schedule, model=None):
        """Clips what is trained, as MaxText does not."""
        labels = {"backbone": "frozen", "head": "trained"}
        clipped = optax.chain(optax.clip_by_global_norm(1.0), theirs(config, schedule))
        parts = {"frozen": optax.set_to_zero(), "trained": clipped}
        return optax.partition(parts, labels)

    frozen = {"trainable_parameters_mask": ["^head/"]}
    expected = losses(head_alone, gradient_clipping_threshold=0.0)[0]
    assert not np.allclose(losses(theirs, **frozen)[0], expected, rtol=1e-2)
    np.testing.assert_allclose(losses(ours, **replaced, **frozen)[0], expected, rtol=IN_STEPS)
    moments = losses(ours, jnp.bfloat16, **replaced)[2]
    dtypes = {x.dtype for x in jax.tree.leaves(optax.tree.get(moments, "vw"))}
    assert dtypes == {jnp.dtype("float32")}


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


@after(TRAINERS, TOKENS, names=trainers.nnx_loop)
def tokens_of_mini_batches(names, printed):
    """Three windows of four mini-batches train as three batches; one of a mini-batch has no token."""
    masks = np.random.default_rng(1).uniform(size=(12, 16)) < np.linspace(0.1, 0.9, 12)[:, None]
    masks = (masks * 0.25).astype(np.float32)  # weights are fractions
    masks[5] = 0
    nnx, model = names["nnx"], names["model"]
    for batch in zip(trainers.X, trainers.Y, masks, strict=True):
        names["train_step"](model, names["optimizer"], batch)
    whole = trainers.Regression()
    optimizer = nnx.Optimizer(whole, optax.adam(names["schedule"]), wrt=nnx.Param)
    joined = [x.reshape(3, 64, *x.shape[2:]) for x in (trainers.X, trainers.Y, masks)]
    for batch in zip(*joined, strict=True):
        grads = nnx.grad(names["mean_loss"], has_aux=True)(whole, batch)[0]
        optimizer.update(whole, grads)
    assert int(names["optimizer"].opt_state.skipped[...]) == 1
    for x, y in zip(*(jax.tree.leaves(nnx.state(m)) for m in (model, whole)), strict=True):
        # Adam's first step is the sign of a gradient, and sums of 64 rows differ in their last digits.
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


@after(TRAINERS, LEVANTER, names=trainers.levanter)
def levanter(names, printed):
    """The same losses; steps with spikes of the loss are left out, and the report has the rate."""
    config = names["OptimizerConfig"].choices["jgrad"]()
    expected, _, _ = names["train"](names["theirs"]())
    losses, lengths, state = names["train"](config)
    np.testing.assert_allclose(losses, expected, rtol=5 * IN_STEPS)  # five times as many steps
    assert min(lengths[1:12]) > 0
    assert float(jgrad.report(state)["learning_rate"]) == 0  # its schedule is over
    _, lengths, state = names["train"](config, spike={50, 51, 52})
    assert int(jgrad.report(state)["spikes"]) == 3


@after(TRAINERS, BRAX, names=trainers.brax)
def brax(names, printed):
    """The same losses and learning rates, which go both ways; and theirs has no wrapper around it."""
    train, theirs, chain = names["train"], names["theirs"], names["chain"]
    _, found = train(names["optimizer"], names["minibatch_step"])
    _, expected = train(chain, theirs(chain))
    np.testing.assert_allclose(found["learning_rate"], expected["learning_rate"], rtol=1e-6)
    assert len(np.unique(found["learning_rate"])) == 3
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=IN_STEPS)
    wrapped = optax.apply_if_finite(chain, 5)
    with pytest.raises((AssertionError, TypeError, KeyError)):
        train(wrapped, theirs(wrapped))


@after(TRAINERS, OPENPI, names=trainers.openpi)
def openpi(names, printed):
    """In bfloat16, near their losses in float32; so is the average, where theirs is ten times off."""
    train, ours, theirs = names["train"], names["SixBytes"](), names["AdamW"]()
    losses, states = train(ours, jnp.bfloat16)
    (exact, wide), (_, half) = (train(theirs, x, 0.99) for x in (jnp.float32, jnp.bfloat16))
    # A weight of either layer is off by up to 2**-8 of itself, and errors are squared.
    np.testing.assert_allclose(losses, exact, rtol=4 * 2.0**-8)
    last, kernel = states[-1], lambda tree: tree["b"]["kernel"][...]
    average = optax.tree.get(last.opt_state, "average")
    assert {x.dtype for x in jax.tree.leaves(average)} == {jnp.dtype("float32")}
    assert len(jax.tree.leaves(average)) == 2  # of four parameters, as two are frozen
    true = kernel(wide[-1].ema_params)
    error = lambda found: float(jnp.mean(jnp.abs(kernel(found).astype(jnp.float32) - true)))
    assert error(average) < 0.1 * error(half[-1].ema_params)
    moments = [optax.tree.get(last.opt_state, x)["b"]["kernel"] for x in ("mw", "vw")]
    weight = kernel(last.params)
    assert (2 * weight.nbytes + nbytes(moments)) / weight.size == pytest.approx(6.03, rel=0.002)


@after(TRAINERS, PINN, names=trainers.jaxpi)
def pinn(names, printed):
    """Adam's losses are theirs, also accumulated, and SOAP trains."""
    ours, theirs, train, config = (
        names[x] for x in ("_create_optimizer", "theirs", "train", "config")
    )
    for mini_batches in (0, 2):
        config.grad_accum_steps = mini_batches
        found, expected = (train(x, config, 12)[0] for x in (ours, theirs))
        np.testing.assert_allclose(found, expected, rtol=IN_STEPS)
    config.optimizer, config.learning_rate, config.grad_accum_steps = "SOAP", 3e-3, 0
    losses = train(ours, config, 200)[0]
    assert losses[-1] < 1e-3 * losses[0]


def test_a_pinn_in_double_precision(standard_promotion, x64):
    """The losses of float64 steps: optax's Adam, and a mean of two equal gradients."""
    names = run_example(TRAINERS, PINN, IMPORTED | trainers.jaxpi())
    ours, train, config = (names[x] for x in ("_create_optimizer", "train", "config"))
    config.beta2 = 0.99
    expected = train(names["theirs"], config, 12, "float64")[0]
    with jax.numpy_rank_promotion("allow"):
        once, _ = train(ours, config, 12, "float64")
        config.grad_accum_steps = 2
        twice, state = train(ours, config, 24, "float64")
    np.testing.assert_allclose(once, expected, rtol=1e-12)
    np.testing.assert_allclose(twice[::2], expected, rtol=1e-12)
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)]
    assert all(x.dtype == jnp.float64 for x in floats)


@pytest.mark.parametrize("block", choices(PAGES))
def test_block(block, standard_promotion):
    run(block)
