"""What a user does with gradients before anything looks at them: means over devices, among others.

The truth is the ordinary step, of the whole batch on one device, or of gradients that are changed by
hand; in float64, in both forms of the step.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jgrad
from tests.backward import models
from tests.backward.recipes import FIRST, adam, clipped
from tests.multi_device.meshes import mesh_of
from tests.support.errors import assert_error
from tests.support.private import forced

DEVICES = 2
both_forms = pytest.mark.parametrize("is_forced", [True, False], ids=["backward", "ordinary"])


def mean(g):
    return jax.lax.pmean(g, "d")


def replicated(tree):
    return jax.tree.map(lambda x: jnp.stack([x] * DEVICES), tree)


def in_pmap(step, *trees):
    *trees, x = trees
    run = jax.pmap(step, axis_name="d", devices=jax.devices()[:DEVICES])
    return run(*map(replicated, trees), x.reshape(DEVICES, -1, x.shape[-1]))


def in_shard_map(step, *trees, check_vma):
    """Each device's own results, one after the other."""

    def own(*args):
        results = step(*args)
        return jax.tree.map(lambda x: x[None], results)

    specs = (P(), P(), P("d"))
    mapped = jax.shard_map(
        own, mesh=mesh_of(d=DEVICES), in_specs=specs, out_specs=P("d"), check_vma=check_vma
    )
    return jax.jit(mapped)(*trees)


AROUND = {"pmap": in_pmap, "shard_map": functools.partial(in_shard_map, check_vma=False)}
CHECKED = functools.partial(in_shard_map, check_vma=True)


def skip():
    return jgrad.skip_nonfinite(clipped(adam()))


def assert_as_on_one_device(around, tx, *, loss=models.loss, is_forced=True, **options):
    """Weights and state, on each device."""
    params, x = models.params(jnp.float64), models.batch(0, jnp.float64)
    given = params, tx.init(params), x
    expected = jax.jit(models.ordinary(tx))(*given)[:2]
    step = jgrad.step_in_backward(tx, loss, **options)
    with forced(is_forced):
        found = around(lambda *args: step(*args)[:2], *given)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_array_equal(a[0], a[1])
        np.testing.assert_allclose(a[0], b, rtol=1e-11, atol=1e-15)


@pytest.mark.slow(always=["shard_map-backward"])
@both_forms
@pytest.mark.parametrize("around", AROUND)
def test_a_mean_over_devices(x64, around, is_forced):
    """Of each share, before the norm of the clip, and before it is asked whether all are finite."""
    options = FIRST | {"gradients": mean, "is_forced": is_forced}
    assert_as_on_one_device(AROUND[around], skip(), **options)


@pytest.mark.slow
def test_types_that_say_what_varies(x64):
    """There JAX has summed the gradients, and a mean of them changes nothing."""

    def loss(params, x):
        return jax.lax.pmean(models.loss(params, x), "d")

    assert_as_on_one_device(CHECKED, adam(), loss=loss)
    assert_as_on_one_device(CHECKED, skip(), loss=loss, gradients=mean, **FIRST)


# ---- what the function sees ------------------------------------------------------------------------


def unit(g):
    """Gradients of a share whose norm is 1: of a layer, or of leaves in no stack."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(g)))
    return jax.tree.map(lambda x: x / norm, g)


@pytest.mark.slow(always=["ordinary"])
@both_forms
def test_a_function_of_a_whole_layer(x64, is_forced):
    """The same in both forms, since both call it with one layer at a time."""
    params, x, tx = models.params(jnp.float64), models.batch(0, jnp.float64), jgrad.adam(1e-2)
    g = jax.device_get(jax.grad(models.loss)(params, x))
    of_layers = np.sqrt(sum(np.sum(y**2, axis=(1, 2), keepdims=True) for y in g["layers"].values()))
    by_hand = {name: g[name] / np.sqrt(np.sum(g[name] ** 2)) for name in ("first", "last")}
    by_hand["layers"] = {name: y / of_layers for name, y in g["layers"].items()}
    expected = jgrad.apply_gradients(tx, by_hand, tx.init(params), params)
    with forced(is_forced):
        found = jax.jit(jgrad.step_in_backward(tx, models.loss, gradients=unit))(
            params, tx.init(params), x
        )[:2]
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-15)


@pytest.mark.slow(always=["ordinary"])
@both_forms
def test_what_it_is_given(is_forced):
    """A layer as a stack of one beside None, and leaves in no stack by what reads them first."""
    params, tx, seen = models.tied_params(), adam(), []

    def look(g):
        seen.append({k: jax.tree.map(jnp.shape, x) for k, x in g.items() if jax.tree.leaves(x)})
        return g

    with forced(is_forced):
        step = jgrad.step_in_backward(tx, models.tied_loss, gradients=look)
        jax.eval_shape(step, params, tx.init(params), models.tokens())
    layer = {"up": (1, 16, 32), "down": (1, 32, 16)}
    rest = {"embedding": (6, 16), "gate": (1, 16), "unused": (2, 3)}
    for expected in {"decoder": layer}, {"encoder": layer | {"id": None}}, rest:
        assert expected in seen
        seen = [x for x in seen if x != expected]
    assert not seen


# ---- what it says ----------------------------------------------------------------------------------


def call(**options):
    params, tx = models.params(), adam()
    step = jgrad.step_in_backward(tx, models.loss, **options)
    return lambda: step(params, tx.init(params), models.batch())


OTHERS = {
    "dtype": (lambda g: jax.tree.map(lambda x: x.astype(jnp.bfloat16), g), TypeError,
     "`gradients(g)` at ['last']: an array of bfloat16 and shape (16, 16), expected an array of "
     "float32 and shape (16, 16), as it was given."),
    "shape": (lambda g: jax.tree.map(lambda x: x[:, 0], g), TypeError,
     "`gradients(g)` at ['last']: an array of float32 and shape (16,), expected an array of "
     "float32 and shape (16, 16), as it was given."),
    "None": (lambda g: jax.tree.map(lambda x: None, g), TypeError,
     "`gradients(g)` at ['last']: None, expected an array of float32 and shape (16, 16), as it was "
     "given."),
    "structure": (lambda g: g["layers"], ValueError,
     "`gradients(g)` does not have the structure of `g`: only `gradients(g)` has ['down']; only "
     "`gradients(g)` has ['up']; only `g` has ['first'] (and 2 more)."),
}  # fmt: skip


@pytest.mark.slow(always=["dtype-backward", "shape-backward", "shape-ordinary", "None-backward",
    "None-ordinary", "structure-backward", "structure-ordinary"])  # fmt: skip
@both_forms
@pytest.mark.parametrize("name", OTHERS)
def test_other_trees(name, is_forced):
    function, error, message = OTHERS[name]
    with forced(is_forced):
        assert_error(error, f"step_in_backward: {message}", call(gradients=function))


def with_noise(g):
    """As in private training: one key, split over the leaves."""
    leaves, structure = jax.tree.flatten(g)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    pairs = zip(keys, leaves, strict=True)
    return structure.unflatten([x + jax.random.normal(k, x.shape, x.dtype) for k, x in pairs])


def rounded(g):
    """In a branch, with a generator of XLA's own."""

    def some(x):
        bits = jax.lax.rng_uniform(jnp.zeros((), x.dtype), jnp.ones((), x.dtype), shape=x.shape)
        return jnp.floor(x + bits)

    return jax.tree.map(lambda x: jax.lax.cond(x.sum() > 0, some, jnp.floor, x), g)


@both_forms
@pytest.mark.parametrize("draws", [(with_noise, "random_bits"), (rounded, "rng_uniform")])
def test_random_bits_are_refused(draws, is_forced):
    """Each layer would have those of the first."""
    function, name = draws
    message = (
        f"step_in_backward: `gradients`: `{name}`, which draws the same random bits for each "
        "layer; expected none: add noise to all gradients at once, in the ordinary step."
    )
    with forced(is_forced):
        assert_error(ValueError, message, call(gradients=function))
        assert_error(ValueError, message, call(gradients=jax.jit(function)))


@both_forms
@pytest.mark.parametrize("around", AROUND)
def test_gradients_of_a_device_alone_are_refused(around, is_forced):
    """Where JAX does not sum them and nobody says what they are."""
    params, tx = models.params(), adam()
    step = jgrad.step_in_backward(tx, models.loss)
    message = (
        "step_in_backward: `gradients`: None inside `pmap`, or `shard_map` with "
        "`check_vma=False`, over 'd', where JAX does not sum the gradients of all devices. "
        "Expected their mean, `gradients=lambda g: jax.lax.pmean(g, 'd')`; or "
        "`gradients=lambda g: g`, which says that each device has a model of its own, or a loss "
        "whose gradients are complete."
    )
    run = functools.partial(AROUND[around], step, params, tx.init(params), models.batch())
    with forced(is_forced):
        assert_error(ValueError, message, run)


@pytest.mark.slow
def test_models_of_their_own(x64):
    """As the function says that hands gradients on, or a `pmap` without a name."""
    params, x, tx = models.params(jnp.float64), models.batch(0, jnp.float64), adam()
    given = params, tx.init(params)
    step = jgrad.step_in_backward(tx, models.loss, gradients=lambda g: g)
    unnamed = jax.pmap(jgrad.step_in_backward(tx, models.loss), devices=jax.devices()[:DEVICES])
    halves = x.reshape(DEVICES, -1, x.shape[-1])
    found = in_pmap(step, *given, x)[0], unnamed(*map(replicated, given), halves)[0]
    for i, half in enumerate(halves):
        expected = jax.jit(models.ordinary(tx))(*given, half)[0]
        for tree in found:
            for a, b in zip(*map(jax.tree.leaves, (tree, expected)), strict=True):
                np.testing.assert_allclose(a[i], b, rtol=1e-11, atol=1e-14)
