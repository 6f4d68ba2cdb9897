"""Keywords of `update`: misspelt ones, and those of other libraries, are errors in every transformation."""

import functools
import inspect

import jax
import jax.numpy as jnp
import optax
import pytest

import jgrad
from jgrad._inputs.numbers import OfCall
from jgrad._trees.known_names import KEYWORDS
from tests.support.errors import assert_error
from tests.support.loops import assert_equal
from tests.support.public import EXPORTED

W = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
IS_MATRIX = {"w": True, "b": False}
ADAM = jgrad.adam(0.1)
NUMBERS_OF_ADAM = ("learning_rate", "weight_decay", "beta1", "beta2", "epsilon")
OF_MUON = {"momentum": 0.9, "error_decay": 0.9, **{f"adam_{x}": 0.5 for x in NUMBERS_OF_ADAM}}


def row(tx, *own, **needed):
    """A transformation, the keywords that it takes itself, and those that a call needs."""
    return tx, own, needed


ROWS = {
    "gradient_descent": row(jgrad.gradient_descent(0.1, momentum=0.9), "learning_rate", "weight_decay", "momentum"),
    "adam": row(ADAM, *NUMBERS_OF_ADAM),
    "adan": row(jgrad.adan(0.1), *NUMBERS_OF_ADAM, "beta3"),
    "lion": row(jgrad.lion(0.1), "learning_rate", "weight_decay", "beta1", "beta2"),
    "adafactor": row(jgrad.adafactor(0.1), "learning_rate", "weight_decay"),
    "lars": row(jgrad.lars(0.1), "learning_rate", "weight_decay", "epsilon", "momentum"),
    "lamb": row(jgrad.lamb(0.1), *NUMBERS_OF_ADAM),
    "muon": row(jgrad.muon(0.1, matrices=IS_MATRIX, adam_learning_rate=0.1, adam_weight_decay=0.1), "learning_rate",
     "weight_decay", *OF_MUON),
    "soap": row(jgrad.soap(0.1, matrices=IS_MATRIX, adam_learning_rate=0.1), *NUMBERS_OF_ADAM, "shampoo_beta",
     *(f"adam_{x}" for x in NUMBERS_OF_ADAM)),
    "scale_by_adan": row(jgrad.scale_by_adan(), "beta1", "beta2", "beta3", "epsilon"),
    "scale_by_lion": row(jgrad.scale_by_lion(), "beta1", "beta2"),
    "scale_by_adam": row(jgrad.scale_by_adam(), "beta1", "beta2", "epsilon"),
    "scale_by_muon": row(jgrad.scale_by_muon(matrices=IS_MATRIX), "momentum", "adam_beta1", "adam_beta2",
     "adam_epsilon"),
    "scale_by_trust_ratio": row(jgrad.scale_by_trust_ratio()),
    "clip_by_global_norm": row(jgrad.clip_by_global_norm(1.0)),
    "average_params": row(jgrad.average_params(ADAM, 0.9)),
    "accumulate": row(jgrad.accumulate(ADAM, 2, weighted=True), "emit", "finite", "weight", weight=2.0),
    "skip_nonfinite": row(jgrad.skip_nonfinite(ADAM)),
    "skip_spikes": row(jgrad.skip_spikes(ADAM), "loss", loss=1.0),
    "master_weights": row(jgrad.master_weights(ADAM)),
    "stochastic_rounding": row(jgrad.stochastic_rounding(ADAM)),
    "schedule_free": row(jgrad.schedule_free(ADAM), "learning_rate"),
    "hyperball": row(jgrad.hyperball(ADAM, 0.1, leaves=IS_MATRIX), "hyperball_learning_rate"),
    "offload": row(jgrad.offload(ADAM)),
    "pack_small": row(jgrad.pack_small(ADAM)),
    "watch": row(jgrad.watch(ADAM)),
}  # fmt: skip
every_row = pytest.mark.parametrize("name", ROWS)

# Words of several parts, which mean the same to everybody; and with our prefixes what they are
# called elsewhere.
EVERYWHERE = {
    **{x + x[-1]: x for x in KEYWORDS if "_" in x},
    "learningrate": "learning_rate",
    "weigth_decay": "weight_decay",
    "adam_lr": "adam_learning_rate",
    "adam_b1": "adam_beta1",
    "hyperball_lr": "hyperball_learning_rate",
    "muon_lr": "learning_rate",
}
# Without a prefix that is an error where the option is taken: in the row, or by ADAM inside.
WHERE_TAKEN = {
    "lr": "learning_rate",
    "step_size": "learning_rate",
    "wd": "weight_decay",
    "weight_decay_rate": "weight_decay",
}
ALONE = (
    "clip_by_global_norm",
    "ema",
    "scale_by_adam",
    "scale_by_adan",
    "scale_by_lion",
    "scale_by_muon",
    "scale_by_trust_ratio",
)
# Of optax's own transformations and losses; data of a loss in its line searches; of optimizers of
# several models.
OF_OTHERS = (
    *("value", "grad", "value_fn", "obj_fn", "weights", "tokens", "losses", "temperature"),
    *("mask", "height", "rate", "decay", "d_lr", "base_lr", "actor_lr", "actor_learning_rate"),
)


def test_every_transformation_has_a_row():
    """But `zero`, which needs a mesh."""
    public = {x: getattr(jgrad, x) for x in EXPORTED}
    factories = {
        name
        for name, x in public.items()
        if inspect.isfunction(x)
        and inspect.signature(x).return_annotation.startswith("Transformation")
    }
    assert factories - {"zero"} == ROWS.keys()


@functools.cache
def state_of(name):
    return jax.jit(ROWS[name][0].init)(W)


def update(name, **extra):
    """Traced: what a call refuses, it refuses there."""
    tx, _, needed = ROWS[name]
    return jax.eval_shape(lambda w, s: tx.update(w, s, w, **needed | extra), W, state_of(name))


def assert_refused(name, given, expected):
    message = f"{name}: `update` got the keyword `{given}`, expected {expected}."
    assert_error(TypeError, message, lambda: update(name, **{given: 0.5}))


@pytest.mark.slow(one_in=4)
@every_row
def test_misspelt_keywords(name):
    """Of its own each, and of all others those that nobody else can mean."""
    for own in ROWS[name][1]:
        assert_refused(name, own + own[-1], f"`{own}`")
    for given, meant in EVERYWHERE.items():
        assert_refused(name, given, f"`{meant}`")
    for given, meant in WHERE_TAKEN.items() if name not in ALONE else ():
        own = [x for x in ROWS[name][1] if x.endswith(meant)]
        by, expected = (name, own[0]) if own else ("adam", meant)
        message = f"{by}: `update` got the keyword `{given}`, expected `{expected}`."
        assert_error(TypeError, message, functools.partial(update, name, **{given: 0.5}))


@pytest.mark.parametrize("name", ["adam", "lamb", "scale_by_adam"])
def test_names_of_other_libraries(name):
    for given, meant in {"b1": "beta1", "b2": "beta2", "eps": "epsilon"}.items():
        assert_refused(name, given, f"`{meant}`")
    assert_refused(name, "betas", "`beta1` and `beta2`")


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("muon", "beta1", "`adam_beta1`"),
        ("muon", "b2", "`adam_beta2`"),
        ("muon", "beta", "`momentum`"),
        ("accumulate", "weights", "`weight`"),
        ("adam", "weights", "`weight`"),
        ("skip_spikes", "losses", "`loss`"),
    ],
)
def test_other_keywords(name, given, meant):
    assert_refused(name, given, meant)


@every_row
def test_keywords_of_others_pass(name):
    own = ROWS[name][1]
    not_passing = *(y[:4] for y in own), *inspect.signature(getattr(jgrad, name)).parameters
    passing = {x: 1.0 for x in OF_OTHERS if not x.startswith(not_passing)}
    assert len(passing) > 10
    passing |= dict.fromkeys(WHERE_TAKEN, 1.0) if name in ALONE else {}
    passing |= {"hyperball_learning_rate": None, "emit": None, "finite": None}
    assert_equal(update(name, **passing), update(name))


@pytest.mark.slow(one_in=4)
@every_row
def test_options_that_no_call_changes(name):
    """All that a factory takes, but for what its transformation, or that inside, takes in a call."""
    _, own, _ = ROWS[name]
    elsewhere = {
        "hyperball": "learning_rate",
        "adafactor": "momentum",
        "scale_by_muon": "error_decay",
    }
    options = inspect.signature(getattr(jgrad, name)).parameters.keys()
    for given in options - {*own, elsewhere.get(name)}:
        expected = f"in `{name}(...)`, since it is the same in every call"
        message = f"{name}: `{given}`: given to `update`, expected {expected}."
        assert_error(TypeError, message, functools.partial(update, name, **{given: 0.5}))


@pytest.mark.parametrize("name", ["muon", "scale_by_muon"])
def test_a_number_that_these_options_do_not_use(name):
    message = f"{name}: `error_decay`: 0.5, expected None without `fraction`."
    assert_error(ValueError, message, lambda: update(name, error_decay=0.5))


def test_no_keyword_is_missing(monkeypatch):
    """The table has what some `update` asks for, and nothing else."""
    asked = set()
    get = OfCall.get
    recorded = lambda self, name, default=None: asked.add(name) or get(self, name, default)
    monkeypatch.setattr(OfCall, "get", recorded)
    for name, (tx, own, _) in ROWS.items():
        update(name, epoch=3)  # which is nobody's
        taken = set(inspect.getclosurevars(tx.update).nonlocals["taken"])
        assert taken <= set(own)
        asked |= taken
    assert asked == set(KEYWORDS)


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: optax.chain(optax.clip(1.0), tx),
        lambda tx: optax.masked(tx, True),
        jgrad.skip_nonfinite,
        jgrad.watch,
    ],
)
def test_through_others(around):
    """The transformation that has the keyword is somewhere inside."""
    tx = around(jgrad.accumulate(optax.sgd(0.1), 2, weighted=True))
    message = "accumulate: `update` got the keyword `emits`, expected `emit`."
    assert_error(TypeError, message, lambda: tx.update(W, tx.init(W), W, emits=True))


def test_a_chain_with_keywords_of_others():
    """Data of a loss in a line search, and a number that a transformation of somebody else takes."""

    def loss(w, mask):
        return jnp.sum(mask * w["b"] ** 2) + jnp.sum(w["w"] ** 2)

    mask = jnp.array([1.0, 0.0])
    value, g = jax.value_and_grad(loss)(W, mask)
    tx = optax.chain(ADAM, optax.scale_by_backtracking_linesearch(max_backtracking_steps=3))
    given = {"value": value, "grad": g, "value_fn": loss, "mask": mask}
    updates, _ = tx.update(g, tx.init(W), W, **given)
    assert float(loss(optax.apply_updates(W, updates), mask)) < float(value)

    def scaled(updates, state, params=None, *, step_size, **_):
        return jax.tree.map(lambda u: step_size * u, updates), state

    own = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), scaled)
    clip = jgrad.clip_by_global_norm(1.0)
    tx = optax.chain(clip, own)
    expected = jax.tree.map(lambda u: 0.5 * u, clip.update(W, clip.init(W))[0])
    assert_equal(tx.update(W, tx.init(W), W, step_size=0.5)[0], expected)
