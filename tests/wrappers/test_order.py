"""Which wrapper stands around which: wrong orders are errors of `init`, through all that is between."""

import contextlib
import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

import jgrad
from tests.cases import RATE
from tests.support import messages
from tests.support.errors import assert_error

HALF = {"w": jnp.ones((4, 3), jnp.bfloat16), "b": jnp.zeros(3, jnp.bfloat16)}
IN_32_BITS = jax.tree.map(jnp.float32, HALF)
LEAVES = {"w": True, "b": False}
SGD = jgrad.gradient_descent(RATE)

WRAPPERS = {
    "accumulate": lambda tx: jgrad.accumulate(tx, 2),
    "skip_nonfinite": jgrad.skip_nonfinite,
    "skip_nonfinite(loss_scale=)": lambda tx: jgrad.skip_nonfinite(tx, loss_scale=4.0),
    "skip_spikes": jgrad.skip_spikes,
    "optax.MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "optax.apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "optax.conditionally_mask": lambda tx: optax.conditionally_mask(tx, lambda step: step > 3),
    "master_weights": jgrad.master_weights,
    "stochastic_rounding": jgrad.stochastic_rounding,
    "schedule_free": jgrad.schedule_free,
    "hyperball": lambda tx: jgrad.hyperball(tx, 0.01, leaves=LEAVES),
    "average_params": lambda tx: jgrad.average_params(tx, 0.9),
}
SCALED = "skip_nonfinite(loss_scale=)"
BETWEEN = {
    "nothing": lambda tx: tx,
    "a chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "a partition": lambda tx: optax.partition({"a": tx, "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}),
    "another wrapper": lambda tx: jgrad.watch(optax.masked(tx, LEAVES)),
    "a wrapper of optax": lambda tx: optax.apply_if_finite(tx, 3),
    "injected": lambda tx: optax.inject_hyperparams(
        lambda rate: optax.chain(tx, optax.scale(rate))
    )(1.0),
}  # fmt: skip


def init(outer, inner, between=BETWEEN["nothing"]):
    return jax.eval_shape(WRAPPERS[outer](between(WRAPPERS[inner](SGD))).init, HALF)


ROWS = list(messages.read("orders"))
test_wrong_orders = messages.test_of("orders", globals())


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_through_what_is_between(between):
    texts = {name: text for name, _, text, _ in ROWS}
    for inner in (SCALED, "optax.MultiSteps"):
        call = functools.partial(init, "accumulate", inner, between)
        assert_error(ValueError, texts[f"accumulate around {inner}"], call)


def test_all_other_orders_are_accepted():
    """Beside each other, too, and once an order was refused."""
    refused = {tuple(name.split(" around ")) for name, *_ in ROWS}
    known = {x for pair in refused for x in pair}
    for outer, inner in {*itertools.product(known, known)} - refused:
        init(outer, inner)
    for beside in itertools.combinations(known, 2):
        first, second = (WRAPPERS[x](SGD) for x in beside)
        tx = optax.partition({"a": first, "b": second}, {"w": "a", "b": "b"})
        jax.eval_shape(tx.init, HALF)


def test_the_recipe_of_the_guide():
    """docs/wrappers.md, all at once."""
    tx = jgrad.average_params(
        optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.hyperball(SGD, 0.01, leaves=LEAVES)), 0.9
    )
    tx = jgrad.accumulate(jgrad.master_weights(jgrad.pack_small(tx)), 2)
    tx = jgrad.watch(jgrad.skip_spikes(jgrad.skip_nonfinite(tx, loss_scale=4.0)))
    jax.eval_shape(jgrad.offload(tx).init, HALF)


@pytest.mark.parametrize("of", ["current", "previous"])
def test_a_clip_before_the_loss_scale(of):
    """A chain has no `init` of its own, so the first trace of an update refuses it."""
    clip = jgrad.clip_by_global_norm(1.0, of=of)
    message = (
        "skip_nonfinite: `updates`: gradients that `clip_by_global_norm` clipped before the loss scale was divided out, "
        "expected the clip inside: `skip_nonfinite(optax.chain(clip, tx), loss_scale=...)`."
    )
    for tx in (
        optax.chain(clip, WRAPPERS[SCALED](SGD)),
        jgrad.watch(optax.chain(clip, WRAPPERS[SCALED](SGD))),
    ):
        call = lambda w, tx=tx: tx.update(w, tx.init(w), w)
        assert_error(ValueError, message, lambda call=call: jax.eval_shape(call, HALF))
    for tx in (
        optax.chain(clip, WRAPPERS["skip_nonfinite"](SGD)),
        WRAPPERS[SCALED](optax.chain(clip, SGD)),
        optax.chain(WRAPPERS[SCALED](SGD), clip),
    ):
        jax.eval_shape(lambda w, tx=tx: tx.update(w, tx.init(w), w), HALF)


# ---- a direction where a step is needed ----------------------------------------------------------

RATE_AFTER = optax.scale_by_learning_rate(RATE)
IN_STEPS = {
    "average_params": "average_params({}, decay)",
    "schedule_free": "schedule_free({})",
    "hyperball": "hyperball({})",
    "master_weights": "master_weights({})",
    "stochastic_rounding": "stochastic_rounding({})",
}
OURS = {
    "scale_by_adam": jgrad.scale_by_adam(moment_dtype=jnp.bfloat16),
    "scale_by_lion": jgrad.scale_by_lion(),
    "scale_by_muon": jgrad.scale_by_muon(matrices=LEAVES),
    "scale_by_trust_ratio": jgrad.scale_by_trust_ratio(),
}
# Of optax, what may follow a learning rate, and what its state does not tell from that.
NOT_KNOWN = {
    "scale_by_backtracking_linesearch", "scale_by_cocob", "scale_by_distance_over_gradients",
    "scale_by_galore", "scale_by_learning_rate", "scale_by_madgrad", "scale_by_optimistic_gradient",
    "scale_by_param_block_norm", "scale_by_param_block_rms", "scale_by_polyak", "scale_by_schedule",
    "scale_by_sign", "scale_by_trust_ratio", "scale_by_zoom_linesearch",
}  # fmt: skip


def refuses_direction(function, name, tx):
    right = IN_STEPS[function].format("optax.chain(tx, optax.scale_by_learning_rate(rate))")
    message = (
        f"{function}: `tx`: `{name}` inside, expected a learning rate after it, inside too: `{right}`, "
        f"since nothing may change updates after `{function}`."
    )
    made = WRAPPERS[function](tx)
    assert_error(ValueError, message, lambda: jax.eval_shape(made.init, HALF))


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("function", IN_STEPS)
def test_a_direction_is_no_step(function, name):
    refuses_direction(function, name, OURS[name])
    wrapped = WRAPPERS[function]
    for tx in (wrapped(optax.chain(OURS[name], RATE_AFTER)), optax.chain(OURS[name], wrapped(SGD))):
        jax.eval_shape(tx.init, HALF)


AROUND_BOTH = {
    "a chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "a named chain": lambda tx: optax.named_chain(("clip", optax.clip(1.0)), ("last", tx)),
    "a partition": lambda tx: optax.partition({"a": tx, "b": SGD}, {"w": "a", "b": "b"}),
    "a mask": lambda tx: optax.masked(tx, LEAVES),
    "injected": lambda tx: optax.inject_hyperparams(lambda rate: optax.chain(optax.scale(rate), tx))(1.0),
    "wrappers": lambda tx: jgrad.watch(jgrad.skip_nonfinite(optax.apply_if_finite(tx, 3))),
    "windows": lambda tx: jgrad.accumulate(optax.chain(tx), 2),
    "windows of optax": lambda tx: optax.MultiSteps(tx, 2),
    "pack_small": lambda tx: jgrad.pack_small(tx),
}  # fmt: skip


@pytest.mark.parametrize("around", AROUND_BOTH.values(), ids=AROUND_BOTH)
def test_a_direction_in_what_is_around(around):
    ours, of_optax = OURS["scale_by_adam"], optax.scale_by_rms()
    refuses_direction("stochastic_rounding", "scale_by_adam", around(ours))
    refuses_direction("stochastic_rounding", "optax.ScaleByRmsState", around(of_optax))
    step = around(optax.chain(ours, of_optax, RATE_AFTER))
    jax.eval_shape(jgrad.stochastic_rounding(step).init, HALF)


def transformations_of_optax():
    """(name, transformation), as far as a number is all that a factory needs."""
    for module in optax, optax.contrib:
        for name, factory in vars(module).items():
            if inspect.isfunction(factory):
                parameters = inspect.signature(factory).parameters.values()
                required = [x.name for x in parameters if x.default is x.empty and x.kind < 2]
                with contextlib.suppress(Exception):
                    tx = factory(*[1] * len(required))
                    jax.eval_shape(tx.init, IN_32_BITS)
                    yield name, tx


def is_refused(tx):
    try:
        jax.eval_shape(jgrad.average_params(tx, 0.9).init, IN_32_BITS)
    except ValueError as error:
        return str(error).startswith("average_params: `tx`: `optax.")
    return False


def test_directions_of_optax(standard_promotion):
    """Of all that its modules have, among them whole methods, which end in a learning rate."""
    found = dict(transformations_of_optax())
    refused = {name for name, tx in found.items() if is_refused(tx)}
    assert refused == {name for name in found if name.startswith("scale_by_")} - NOT_KNOWN
    assert len(refused) > 15
    assert found.keys() >= {"adam", "adamw", "lamb", "lars", "lbfgs", "muon", "prodigy", "sgd"}


# JAX says of it that branches of a `cond` differ, and names none of both.
test_offload_in_windows_of_optax = messages.test_of("offload_in_windows", globals())


def test_windows_of_optax_in_offload():
    jgrad.offload(optax.MultiSteps(SGD, 2)).init(HALF)
