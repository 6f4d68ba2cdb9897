"""A wrapper that rejects updates, written as CONTRIBUTING.md says, and what it has to read."""

import inspect
import pathlib
import sys
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jgrad
from jgrad._inputs.pair import counter, pair
from jgrad._trees.told import EVERY, over_shares
from jgrad._wrappers import decisions, inside
from jgrad._wrappers.hand_over import RejectingInputs
from tests.backward import models
from tests.cases import gradients, params
from tests.multi_device.meshes import mesh_of
from tests.support.loops import assert_equal, stack, step_of, train
from tests.test_house import lines_of_code

ROOT = pathlib.Path(__file__).parents[2]
LARGE = 1e3


class LargeState(NamedTuple):
    skipped: jax.Array
    inner: Any


def skip_large(tx, limit, *, mesh_axes=None):
    """Skips each step with a gradient beyond a limit: tx(g) if max |g| <= limit, else 0."""
    tx = inside.transformation("skip_large", tx)

    def init(params):
        state = LargeState(counter(params), tx.init(params))
        return decisions.as_updated("skip_large", state, update, params, mesh_axes)

    def update(updates, state, params=None, **extra_args):
        inputs = RejectingInputs("skip_large", updates, params, state.inner, extra_args)
        fits = [jnp.all(jnp.abs(g) <= limit) for g in jax.tree.leaves(inputs.g)]
        axes = decisions.mesh_axes_of(inputs, mesh_axes)
        fits = over_shares("skip_large", EVERY, decisions.agreed(jnp.all(jnp.stack(fits)), axes))
        steps, inner = inputs.accepted(tx, updates, fits)
        skipped = jnp.where(fits, state.skipped, optax.safe_increment(state.skipped))
        (skipped,) = inputs.counted((skipped,), (state.skipped,))
        return steps, LargeState(skipped, inner)

    return pair(init, update, "skip_large", LargeState)


def gradients_with_spikes(count=6, spikes=(1, 4)):
    """Some beyond the limit: a large number in one leaf, and NaN in another."""
    found = gradients(count)
    for i, bad in zip(spikes, (-2 * LARGE, float("nan")), strict=True):
        leaves, structure = jax.tree.flatten(found[i])
        leaves[i % len(leaves)] = leaves[i % len(leaves)].at[0].set(bad)
        found[i] = structure.unflatten(leaves)
    return found


def close(found, expected):
    chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=1e-6)


def without(found, spikes=(1, 4)):
    return [g for i, g in enumerate(found) if i not in spikes]


INSIDE = {
    "adam": lambda: jgrad.adam(0.1),
    "8 bits": lambda: jgrad.adam(0.1, moment_dtype="8bit"),
    "lamb": lambda: optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.lamb(0.1)),
    "of another library": lambda: optax.chain(optax.clip(0.5), optax.sgd(0.1, momentum=0.9)),
    "around another": lambda: jgrad.skip_nonfinite(jgrad.average_params(jgrad.adam(0.1), 0.9)),
}


@pytest.mark.parametrize("recipe", INSIDE)
def test_as_if_the_step_had_not_been(recipe):
    """Bit for bit in one program, and as the optimizer alone to roundings."""
    w, found, inner = params(), gradients_with_spikes(), INSIDE[recipe]()
    tx = skip_large(inner, LARGE)
    new, state = train(tx, w, found)
    expected, of_expected = train(tx, w, without(found))
    assert_equal((new, state.inner), (expected, of_expected.inner))
    close(new, train(inner, w, without(found))[0])
    assert int(state.skipped) == 2


def test_inside_of_another():
    """Of which steps are gone that either rejects."""
    found = gradients_with_spikes()
    tx = jgrad.skip_spikes(skip_large(jgrad.adam(0.1), LARGE), window=4)
    w, state = params(), tx.init(params())
    step = jax.jit(step_of(tx))
    for i, g in enumerate(found):
        w, state = step(w, state, g, loss=float("inf") if i == 2 else 1.0)
    close(w, train(jgrad.adam(0.1), params(), without(found, (1, 2, 4)))[0])
    assert (int(state.skipped), int(state.inner.skipped)) == (1, 2)


def test_a_mini_batch_is_left_out_of_its_window():
    found = gradients_with_spikes()
    tx = skip_large(jgrad.accumulate(jgrad.adam(0.1), 3), LARGE)
    new, _ = train(tx, params(), found)
    expected, _ = train(jgrad.accumulate(jgrad.adam(0.1), 2), params(), without(found))
    close(new, expected)


def test_devices_decide_alike():
    """A leaf that is sharded is too large on one of them."""
    mesh, tx = mesh_of(x=4), skip_large(jgrad.adam(0.1), LARGE, mesh_axes="x")
    w = {"a": jnp.ones((4, 2)), "b": jnp.ones(2)}
    g = {"a": jnp.ones((4, 2)).at[2, 1].set(2 * LARGE), "b": jnp.ones(2)}
    specs = {"a": P("x"), "b": P()}
    step = jax.shard_map(
        lambda w, g: step_of(tx)(w, tx.init(w), g)[0],
        mesh=mesh,
        in_specs=(specs, specs),
        out_specs=specs,
    )
    assert_equal(jax.jit(step)(w, g), w)
    moved = jax.jit(step)(w, jax.tree.map(jnp.ones_like, g))
    close(moved, jax.tree.map(lambda x: x - 0.1, w))


def test_each_model_of_a_vmap_decides():
    tx, w, both = skip_large(jgrad.adam(0.1), LARGE), params(), gradients_with_spikes()[:2]
    step = jax.jit(jax.vmap(lambda g: step_of(tx)(w, tx.init(w), g)))
    new, state = step(stack(both))
    assert state.skipped.tolist() == [0, 1]
    assert_equal(jax.tree.map(lambda x: x[1], new), w)


@pytest.mark.parametrize(("scale", "skipped"), [(1.0, 1), (1e-6, 0)])
def test_in_the_backward_pass(scale, skipped):
    """All layers together decide, and each step has the bits of the ordinary one."""
    tx, w, x = skip_large(jgrad.adam(0.1), 1e-3), models.params(), models.batch()

    def loss(w):
        return scale * models.loss(w, x)

    state = tx.init(w)
    backward = jgrad.step_in_backward(tx, loss, first_pass=True)
    new, after, _ = jax.jit(backward)(w, state)
    expected, of_expected = jax.jit(lambda w, s: step_of(tx)(w, s, jax.grad(loss)(w)))(w, state)
    assert int(after.skipped) == int(of_expected.skipped) == skipped
    close(new, expected)


def test_it_is_short_and_so_is_what_it_needs():
    """At most 60 lines, and in the files that it names 1,000."""
    own = inspect.getsource(LargeState) + inspect.getsource(skip_large)
    assert lines_of_code(own) <= 60
    named = {
        x.__module__ if hasattr(x, "__module__") else x.__name__
        for x in (counter, over_shares, decisions, inside, RejectingInputs)
    }
    assert len(named) == 5
    assert (
        sum(lines_of_code(pathlib.Path(sys.modules[x].__file__).read_text()) for x in named) <= 1000
    )


def test_contributing_names_all_of_it():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for word in (
        "RejectingInputs",
        "accepted(tx, gradients, flag)",
        "decisions.agreed",
        "inputs.counted",
        "test_rejecting.py",
    ):
        assert word in text
