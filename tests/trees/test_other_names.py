"""What other libraries call functions and options, and what jgrad did: errors say what to use."""

import functools
import inspect
import pathlib
import re
import types

import jax.numpy as jnp
import optax
import pytest

import jgrad
from jgrad._trees.known_names import LACKING, OPTIONS
from tests.support import messages
from tests.support.errors import assert_error
from tests.support.public import EXPORTED

FUNCTIONS = {name: x for name, x in vars(jgrad).items() if inspect.isfunction(x)}
FACTORIES = {
    name: x
    for name, x in FUNCTIONS.items()
    if name in EXPORTED and inspect.signature(x).return_annotation.startswith("Transformation")
}
# Names of others that stand for several of ours.
BOTH = ("betas", "beta2", "weight_dimension_numbers", "muon_weight_dimension_numbers")


def named(factory):
    return inspect.signature(factory).parameters


def test_every_factory_is_found():
    assert {
        "adam",
        "muon",
        "scale_by_muon",
        "average_params",
        "accumulate",
        "offload",
    } <= FACTORIES.keys()
    assert len(FACTORIES) == 27


# ---- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FACTORIES)
def test_names_of_others(name):
    """Each factory says which of its own options was meant."""
    factory, checked = FACTORIES[name], 0
    for other, ours in OPTIONS.items():
        own = [x for x in ours if x in named(factory)]
        if not own or other in named(factory):
            continue
        expected = " and ".join(f"`{x}`" for x in (own if other in BOTH else own[:1]))
        message = f"{name}: `{other}`: an unknown argument, expected {expected}."
        assert_error(TypeError, message, functools.partial(factory, **{other: 1}))
        checked += 1
    assert checked or not named(factory).keys() & {x for ours in OPTIONS.values() for x in ours}


@pytest.mark.parametrize("name", FACTORIES)
def test_an_unknown_option_is_pythons_error(name):
    with pytest.raises(TypeError, match=r"\(\) got an unexpected keyword argument 'zzz'"):
        FACTORIES[name](zzz=1)


# Factories of optax, of which each option is one of ours, or has a word.
OF_OPTAX = {
    "gradient_descent": optax.sgd,
    "adam": optax.adamw,
    "adan": optax.adan,
    "lion": optax.lion,
    "lars": optax.lars,
    "lamb": optax.lamb,
    "adafactor": optax.adafactor,
    "muon": optax.contrib.muon,
    "scale_by_adam": optax.scale_by_adam,
    "scale_by_adan": optax.scale_by_adan,
    "scale_by_lion": optax.scale_by_lion,
    "scale_by_muon": optax.contrib.scale_by_muon,
    "scale_by_trust_ratio": optax.scale_by_trust_ratio,
    "clip_by_global_norm": optax.clip_by_global_norm,
    "accumulate": optax.MultiSteps,
    "skip_nonfinite": optax.apply_if_finite,
    "schedule_free": optax.contrib.schedule_free,
    "average_params": optax.ema,
}
# The same of PyTorch, beside those that are ours.
OF_TORCH = {
    "gradient_descent": "params lr dampening maximize foreach differentiable fused",
    "adam": "params lr betas eps amsgrad foreach maximize capturable differentiable fused "
    "decoupled_weight_decay",
    "adafactor": "params lr eps d foreach maximize",
    "muon": "params lr ns_coefficients eps ns_steps adjust_lr_fn",
    "clip_by_global_norm": "norm_type error_if_nonfinite foreach",
    "skip_nonfinite": "init_scale growth_factor backoff_factor",
    "average_params": "avg_fn multi_avg_fn",
}


@pytest.mark.parametrize("name", OF_OPTAX)
def test_each_option_of_others_is_explained(name):
    factory = FACTORIES[name]
    theirs = {*inspect.signature(OF_OPTAX[name]).parameters, *OF_TORCH.get(name, "").split()}
    for option in theirs - named(factory).keys():
        with pytest.raises(TypeError) as caught:
            factory(**{option: 1})
        assert f"{name}: `{option}`: an unknown argument, expected " in str(caught.value)


@pytest.mark.skipif(
    tuple(map(int, optax.__version__.split(".")[:3])) < (0, 2, 8),
    reason="What is named there is of newer versions of optax.",
)
def test_what_is_lacking_is_there():
    """In functions of jgrad that have no such option, and in optax."""
    for (name, option), instead in LACKING.items():
        assert option not in named(FACTORIES[name])
        for path, its in re.findall(r"`optax\.([\w.]+)\((\w+)=", instead):
            theirs = functools.reduce(getattr, path.split("."), optax)
            assert its in inspect.signature(theirs).parameters


MUON = functools.partial(jgrad.muon, 0.1, matrices=True)


@pytest.mark.parametrize("name", ["hidden_matrices", "by_path"])
@pytest.mark.parametrize("mask", ["leaves", "matrices", "weight_decay_mask", "learning_rate"])
def test_a_function_that_was_not_called(name, mask):
    """`leaves=jgrad.hidden_matrices` for `leaves=jgrad.hidden_matrices()`."""
    makes = {
        "leaves": lambda x: jgrad.hyperball(optax.sgd(0.1), 0.1, leaves=x),
        "matrices": lambda x: jgrad.muon(0.1, matrices=x, adam_learning_rate=0.1),
        "weight_decay_mask": lambda x: jgrad.adam(0.1, weight_decay=0.1, weight_decay_mask=x),
        "learning_rate": jgrad.adam,
    }
    function = {"leaves": "hyperball", "matrices": "muon"}.get(mask, "adam")
    message = f"{function}: `{mask}`: the function `jgrad.{name}`, expected what it returns: call it, `{mask}=jgrad.{name}(...)`."
    assert_error(TypeError, message, lambda: makes[mask](getattr(jgrad, name)))


def test_a_function_of_no_module():
    """As those are that a user makes of code, by `exec` or `types.FunctionType`."""
    schedule = types.FunctionType((lambda step: 0.1).__code__, {})
    assert schedule.__module__ is None
    jgrad.adam(schedule).init(jnp.ones(2))


# ---- functions ---------------------------------------------------------------------------------

test_functions_of_others = messages.test_of("names_of_others", globals())


@pytest.mark.parametrize("name", ["zzz", "_adamw", "__adamw__", "acumulate"])
def test_other_names_are_pythons_error(name):
    message = f"module 'jgrad' has no attribute {name!r}"
    assert_error(AttributeError, message, lambda: getattr(jgrad, name))
    assert not hasattr(jgrad, name)


DOCS = pathlib.Path(__file__).parents[2] / "docs"
ROWS = re.findall(
    r"^\| `(?:optax|torch\.optim|optax\.contrib)\.(\w+)\(.*?\)` \| `jgrad\.(\w+)\(",
    "".join((DOCS / f"from_{x}.md").read_text() for x in ("optax", "elsewhere")),
    re.MULTILINE,
)


OF_SEVERAL = ("chain", "inject_hyperparams")  # around any optimizer


@pytest.mark.parametrize(("theirs", "ours"), sorted({x for x in ROWS if x[0] not in OF_SEVERAL}))
def test_the_guides_say_the_same(theirs, ours):
    """Each function in a left column of the guides leads to that of the right one."""
    if theirs == ours:
        assert hasattr(jgrad, ours)
    else:
        with pytest.raises(AttributeError, match=f"expected `jgrad.{ours}`"):
            getattr(jgrad, theirs)


test_message = messages.test_of("other_names", globals())
