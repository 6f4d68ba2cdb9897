"""Which wrapper stands around which: wrong orders are errors of `init`, through all that is between."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

import jgrad
from tests.cases import RATE
from tests.support.errors import assert_error

HALF = {"w": jnp.ones((4, 3), jnp.bfloat16), "b": jnp.zeros(3, jnp.bfloat16)}
LEAVES = {"w": True, "b": False}
SGD = jgrad.gradient_descent(RATE)

WRAPPERS = {
    "accumulate": lambda tx: jgrad.accumulate(tx, 2),
    "skip_nonfinite": jgrad.skip_nonfinite,
    "skip_nonfinite(loss_scale=)": lambda tx: jgrad.skip_nonfinite(tx, loss_scale=4.0),
    "skip_spikes": jgrad.skip_spikes,
    "optax.MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "optax.apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "master_weights": jgrad.master_weights,
    "stochastic_rounding": jgrad.stochastic_rounding,
    "schedule_free": jgrad.schedule_free,
    "hyperball": lambda tx: jgrad.hyperball(tx, 0.01, leaves=LEAVES),
    "average_params": lambda tx: jgrad.average_params(tx, 0.9),
}
SCALED = "skip_nonfinite(loss_scale=)"
ONE_OF_TWO = "one of the two"
WIDE = "what is inside sees float32 weights, and has nothing to round"
EACH_CALL = "the average would move in each call, and not in each update"
OTHER = "the updates inside are not those that move the weights"

# What is expected, and why.
REFUSED = {
    ("accumulate", SCALED): (
        "it outside: `skip_nonfinite(accumulate(tx, every), loss_scale=...)`",
        "mini-batches that overflow are left out before it sees them, so the scale never halves",
    ),
    ("skip_nonfinite", SCALED): (
        "one `skip_nonfinite`, with the `loss_scale`",
        "the outer one skips what overflows, so the scale never halves",
    ),
    (SCALED, SCALED): ("one `loss_scale`", "gradients would be divided by both"),
    ("accumulate", "accumulate"): (
        "one `accumulate`, whose `every` is the product of both",
        "each would count windows of the other",
    ),
    ("master_weights", "master_weights"): (ONE_OF_TWO, WIDE),
    ("master_weights", "stochastic_rounding"): (ONE_OF_TWO, WIDE),
    ("stochastic_rounding", "master_weights"): (ONE_OF_TWO, WIDE),
    ("stochastic_rounding", "stochastic_rounding"): (ONE_OF_TWO, WIDE),
    ("schedule_free", "master_weights"): ("it outside: `master_weights(schedule_free(tx))`", WIDE),
    ("schedule_free", "stochastic_rounding"): (
        "it outside: `stochastic_rounding(schedule_free(tx))`", WIDE,
    ),
    ("schedule_free", "schedule_free"): ("one `schedule_free`", OTHER),
    ("schedule_free", "hyperball"): (ONE_OF_TWO, "an average leaves the sphere"),
    ("schedule_free", "average_params"): (
        "it outside: `average_params(schedule_free(tx), decay)`", OTHER,
    ),
    ("schedule_free", "accumulate"): (
        "it outside: `accumulate(schedule_free(tx), every)`",
        EACH_CALL,
    ),
    ("hyperball", "master_weights"): ("it outside: `master_weights(hyperball(tx))`", OTHER),
    ("hyperball", "stochastic_rounding"): ("it outside: `stochastic_rounding(hyperball(tx))`", OTHER),
    ("hyperball", "schedule_free"): (ONE_OF_TWO, OTHER),
    ("hyperball", "hyperball"): (
        "one `hyperball`, whose `leaves`, `learning_rate` and `radius` may be trees", OTHER,
    ),
    ("hyperball", "average_params"): ("it outside: `average_params(hyperball(tx), decay)`", OTHER),
    ("average_params", "accumulate"): (
        "it outside: `accumulate(average_params(tx, decay), every)`", EACH_CALL,
    ),
    ("average_params", "skip_nonfinite"): (
        "it outside: `skip_nonfinite(average_params(tx, decay))`", EACH_CALL,
    ),
    ("average_params", SCALED): (
        "it outside: `skip_nonfinite(average_params(tx, decay), loss_scale=...)`", EACH_CALL,
    ),
    ("average_params", "skip_spikes"): (
        "it outside: `skip_spikes(average_params(tx, decay))`", EACH_CALL,
    ),
    ("average_params", "optax.MultiSteps"): (
        "it outside: `optax.MultiSteps(average_params(tx, decay), every_k_schedule)`", EACH_CALL,
    ),
    ("average_params", "optax.apply_if_finite"): (
        "it outside: `optax.apply_if_finite(average_params(tx, decay), max_consecutive_errors)`",
        EACH_CALL,
    ),
}  # fmt: skip

BETWEEN = {
    "nothing": lambda tx: tx,
    "a chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "a partition": lambda tx: optax.partition({"a": tx, "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}),
    "another wrapper": lambda tx: jgrad.watch(optax.masked(tx, LEAVES)),
    "injected": lambda tx: optax.inject_hyperparams(
        lambda rate: optax.chain(tx, optax.scale(rate))
    )(1.0),
}  # fmt: skip


def refuses(outer, inner, between):
    tx = WRAPPERS[outer](between(WRAPPERS[inner](SGD)))
    expected, reason = REFUSED[outer, inner]
    function = outer.partition("(")[0]
    message = f"{function}: `tx`: `{inner}` inside, expected {expected}, since {reason}."
    assert_error(ValueError, message, lambda: jax.eval_shape(tx.init, HALF))


@pytest.mark.parametrize(("outer", "inner"), REFUSED)
def test_wrong_orders(outer, inner):
    refuses(outer, inner, BETWEEN["nothing"])


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_through_what_is_between(between):
    refuses("accumulate", SCALED, between)


def test_all_other_orders_are_accepted():
    """Beside each other, too, and once an order was refused."""
    known = {x for pair in REFUSED for x in pair}
    for outer, inner in {*itertools.product(known, known)} - REFUSED.keys():
        jax.eval_shape(WRAPPERS[outer](WRAPPERS[inner](SGD)).init, HALF)
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
