"""The numbers of the ordinary step: weights, state and losses of some steps.

The truth is `jax.value_and_grad` and `apply_gradients`, which know nothing of layers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.backward import models
from tests.backward.models import assert_equal
from tests.backward.recipes import RECIPES, adam, clipped
from tests.support.private import forced

TOKENS = [models.tokens(seed) for seed in range(3)]


def batches(dtype=jnp.float32):
    return [models.batch(seed, dtype) for seed in range(3)]


def both(tx, params, batches, loss=models.loss, *, extra=None, exact=False, **options):
    """What three steps in the backward pass return, and what the ordinary ones do."""
    steps = jgrad.step_in_backward(tx, loss, **options), models.ordinary(tx, loss)
    given = params, tx.init(params), batches
    return [models.run(step, *given, exact=exact, **(extra or {})) for step in steps]


@pytest.mark.bits
@pytest.mark.slow(always=["muon"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_method_and_wrapper(name):
    recipe = RECIPES[name]
    params = models.params(recipe.dtype, **recipe.sizes)
    found, expected = both(recipe.make(), params, batches(recipe.dtype), **recipe.options)
    assert_equal(found, expected, recipe.roundings, recipe.few)


# ---- losses ------------------------------------------------------------------------------------


@pytest.mark.slow(always=["True"])
@pytest.mark.parametrize(
    "remat", [True, False, jax.checkpoint_policies.dots_saveable], ids=["True", "False", "policy"]
)
def test_two_stacks(remat):
    """And a tied embedding, an array that all blocks read, integers, and leaves without use."""
    loss = functools.partial(models.tied_loss, remat=remat)
    found, expected = both(adam(), models.tied_params(), TOKENS, loss)
    assert_equal(found, expected, 16)


@pytest.mark.slow
def test_two_stacks_and_a_norm_of_all():
    tx = jgrad.watch(clipped(adam()), layer_axes={**dict.fromkeys(models.tied_params()), **STACKS})
    found, expected = both(tx, models.tied_params(), TOKENS, models.tied_loss, first_pass=True)
    assert_equal(found, expected, 64)


STACKS = {"encoder": 0, "decoder": 0}


@pytest.mark.slow
def test_other_results_of_a_loss():
    def loss(params, x):
        return models.loss(params, x), {"inputs": x, "first": jnp.max(params["first"])}

    steps = (
        jgrad.step_in_backward(adam(), loss, has_aux=True),
        models.ordinary(adam(), loss, has_aux=True),
    )
    params = models.params()
    assert_equal(*(models.run(step, params, adam().init(params), batches()) for step in steps))


@pytest.mark.slow
def test_a_carry_of_several_arrays():
    """A tree, of a weak type where it begins."""

    def loss(params, x):
        def block(layer, carry):
            x, penalty = carry["x"], carry["penalty"]
            new = models.block(layer, x)
            return {"x": new, "penalty": penalty + jnp.mean(jnp.square(new - x))}

        x = jnp.tanh(x @ params["first"])
        carry = jgrad.scan_layers(block, params["layers"], {"x": x, "penalty": 0.0})
        return jnp.mean(jnp.square(carry["x"] @ params["last"])) + 0.1 * carry["penalty"]

    assert_equal(*both(adam(), models.params(), batches(), loss))


def test_a_carry_of_integers_and_keys():
    """As dropout is written: a number of the layer, and a key for it."""

    def loss(params, args):
        x, key = args

        def block(layer, carry):
            x, i, key = carry
            key, own = jax.random.split(key)
            keep = jax.random.bernoulli(jax.random.fold_in(own, i), 0.8, x.shape)
            return jnp.where(keep, models.block(layer, x), x), i + 1, key

        carry = jnp.tanh(x @ params["first"]), jnp.int32(0), key
        x, _, _ = jgrad.scan_layers(block, params["layers"], carry)
        return jnp.mean(jnp.square(x @ params["last"]))

    data = [(x, jax.random.key(i)) for i, x in enumerate(batches())]
    assert_equal(*both(adam(), models.params(), data, loss), 4)


def test_what_python_knows_is_read_in_each_trace():
    """A step is traced anew where its caller is: another number of a closure is another program."""
    scale = [1.0]
    step = jgrad.step_in_backward(adam(), lambda p, x: scale[0] * models.loss(p, x))
    params, x = models.params(), models.batch()

    def value(factor):
        scale[0] = factor
        return jax.jit(lambda: step(params, adam().init(params), x)[2])()

    for backward in (True, False):
        with forced(backward):
            np.testing.assert_allclose(value(3.0), 3 * value(1.0), rtol=1e-6)


@pytest.mark.slow
def test_without_traces():
    params, x, tx = models.params(), models.batch(), jgrad.gradient_descent(0.1)
    with jax.disable_jit():
        found = jgrad.step_in_backward(tx, models.loss)(params, tx.init(params), x)
    assert_equal(found, models.ordinary(tx)(params, tx.init(params), x), 16)


@pytest.mark.slow(always=["first axis", "largest"])
@pytest.mark.parametrize("mask", ["size", "first axis", "largest"])
def test_masks_see_the_whole_model(mask):
    """Not one layer, nor one share: a mask may ask for a shape, or for the largest leaf."""

    def of_shapes(params):
        largest = max(x.size for x in jax.tree.leaves(params))
        rules = {
            "size": lambda x: x.size > 1000,
            "first axis": lambda x: x.shape[0] == models.LAYERS,
            "largest": lambda x: x.size == largest,
        }
        return jax.tree.map(rules[mask], params)

    tx = jgrad.adam(1e-2, weight_decay=0.5, weight_decay_mask=of_shapes)
    assert_equal(*both(tx, models.params(), batches()), 4)


@pytest.mark.slow
def test_numbers_of_one_call():
    found, expected = both(adam(), models.params(), batches(), extra={"learning_rate": 0.3})
    assert_equal(found, expected)
    other = both(adam(), models.params(), batches())[0]
    assert not jnp.allclose(found[0]["first"], other[0]["first"])


@pytest.mark.slow
def test_without_jit():
    params, x = models.params(), models.batch()
    step = jgrad.step_in_backward(adam(), models.loss)
    found = step(params, adam().init(params), x)
    assert_equal(found, models.ordinary(adam())(params, adam().init(params), x), 4)


# ---- what is decided -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_step_that_is_not_finite():
    """It changes nothing but the counter, though the gradients of the last layers are finite."""
    tx = jgrad.skip_nonfinite(clipped(adam()))

    def loss(params, x):
        x, bad = x

        def block(layer, x):
            return models.block(layer, x) + bad * jnp.sqrt(jnp.abs(x - x))  # a slope of 1 / 0

        x = jgrad.scan_layers(block, params["layers"], x @ params["first"])
        return jnp.mean(jnp.square(x @ params["last"]))

    data = [(x, jnp.float32(bad)) for x, bad in zip(batches(), (0.0, 1.0, 0.0), strict=True)]
    first, expected = both(tx, models.params(), data, loss, first_pass=True)
    assert_equal(first, expected, 64)
    assert int(first[1].skipped) > 0


def test_a_number_that_needs_another():
    """A norm of updates, which a first norm has clipped."""
    tx = optax.chain(clipped(adam()), jgrad.clip_by_global_norm(0.01))
    found, expected = both(tx, models.params(), batches(), first_pass=True)
    assert_equal(found, expected, 64)


def test_a_number_that_needs_another_where_no_layer_needs_one():
    """A state remembers it, and layers are frozen."""
    tx = optax.chain(
        clipped(jgrad.clip_by_global_norm(0.02, of="previous")),
        jgrad.gradient_descent(0.1),
        optax.masked(optax.set_to_zero(), {"first": False, "layers": True, "last": False}),
    )
    found, expected = both(tx, models.params(), batches(), first_pass=True, elementwise=True)
    assert_equal(found, expected, 64)


@pytest.mark.slow
def test_loss_scaling():
    """In float16, where what is decided by the gradients is decided by new parameters, too."""
    tx = jgrad.skip_nonfinite(jgrad.master_weights(adam()), loss_scale=2.0**14)

    def loss(params, x, scale):
        x = jnp.tanh(x @ params["first"])
        x = jgrad.scan_layers(models.block, params["layers"], x)
        return scale * jnp.mean(jnp.square((x @ params["last"]).astype(jnp.float32)))

    def run(step):
        params = models.params(jnp.float16)
        state = tx.init(params)
        for x in batches(jnp.float16):
            params, state, _ = jax.jit(step)(params, state, 3 * x, state.loss_scale)
        return params, state

    step = jgrad.step_in_backward(tx, loss, first_pass=True)
    found, expected = run(step), run(models.ordinary(tx, loss))
    assert_equal(found, expected, 2**14)


def test_a_spike_is_left_out_whole():
    """Without a first pass, since the loss is known before."""
    tx = jgrad.skip_spikes(jgrad.stochastic_rounding(adam()), window=4)

    def loss(params, x):
        return x[1] * models.loss(params, x[0])

    factors = map(jnp.float32, (1, 1, 1, 1, 1, 50, 1))
    x = models.batch(dtype=jnp.bfloat16)
    found, expected = both(
        tx,
        models.params(jnp.bfloat16),
        [(x, factor) for factor in factors],
        loss,
        exact=True,
    )
    assert_equal(found, expected, few=1e-2)
    assert int(found[1].skipped) == 1


# ---- random bits ---------------------------------------------------------------------------------


def test_layers_have_random_bits_of_their_own():
    """Equal layers with equal gradients are rounded apart, as in the stack."""
    tx = jgrad.stochastic_rounding(jgrad.gradient_descent(1e-3))

    def loss(params, x):
        x = jgrad.scan_layers(lambda layer, x: x + jnp.sum(layer["w"]), params["layers"], x)
        return x.astype(jnp.float32)

    params = {"layers": {"w": jnp.ones((4, 300), jnp.bfloat16)}}
    step = jax.jit(jgrad.step_in_backward(tx, loss))
    (new, _, _) = step(params, tx.init(params), jnp.zeros((), jnp.bfloat16))
    moved = np.asarray(new["layers"]["w"] != 1)
    assert 0 < moved.mean() < 1
    assert len({row.tobytes() for row in moved}) == 4


# ---- where it runs -------------------------------------------------------------------------------


@pytest.mark.slow
def test_models_side_by_side():
    """Under `vmap`, with a parameter of each."""
    tx, x = clipped(adam()), models.batch()
    params = jax.tree.map(lambda p: jnp.stack([p, 0.5 * p]), models.params())
    steps = jgrad.step_in_backward(tx, models.loss, first_pass=True), models.ordinary(tx)
    state = jax.vmap(tx.init)(params)
    results = [jax.jit(jax.vmap(step, (0, 0, None)))(params, state, x) for step in steps]
    assert_equal(*results, 64)


@pytest.mark.slow
def test_double_precision(x64):
    tx = clipped(adam())
    found, expected = both(tx, models.params(jnp.float64), batches(jnp.float64), first_pass=True)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)


def lowered(step, platform):
    """The program for a platform."""
    tx, params = adam(), models.params()
    args = jax.eval_shape(lambda: (params, tx.init(params), models.batch()))
    return jax.jit(step).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def test_the_form_is_chosen_when_a_program_is_lowered():
    """On a CPU, whose XLA copies what a loop carries, the ordinary one."""
    step = jgrad.step_in_backward(adam(), models.loss)
    with forced(False):
        on_cpu, on_tpu = (lowered(step, platform) for platform in ("cpu", "tpu"))
    ordinary = lowered(models.ordinary(adam()), "cpu")
    gradients = "tensor<3x16x32xf32>"  # of all layers
    assert on_cpu.count("stablehlo.while") == ordinary.count("stablehlo.while")
    # Weights and both moments are carried, each as an argument and a result; no gradient is.
    loops = [line for line in on_tpu.splitlines() if "stablehlo.while" in line]
    assert max(line.count(gradients) for line in loops) == 3
    loops = [line for line in ordinary.splitlines() if "stablehlo.while" in line]
    assert max(line.count(gradients) for line in loops) == 2


@pytest.mark.slow
def test_a_checkpoint_fits_the_other_form():
    """Steps may change from one form to the other."""
    tx, params = optax.chain(adam()), models.params()
    backward, ordinary = jgrad.step_in_backward(tx, models.loss), models.ordinary(tx)
    state = tx.init(params)
    expected = models.run(ordinary, params, state, batches())[:2]
    half = models.run(backward, params, state, batches()[:1])[:2]
    assert_equal(models.run(ordinary, *half, batches()[1:])[:2], expected)
