"""Options that optimizers share have one name, one order and one default."""

import inspect
import re
import typing

import pytest

import jgrad
from tests.cases import METHODS
from tests.support.pages import docstring
from tests.support.public import EXPORTED

PAIRS = [method.__name__ for method in METHODS]
UPDATES = [name for name in EXPORTED if name.endswith("_update") and "inplace" not in name]
# Pieces of a method, or its other face, with the whole: by their names, and two that have others.
_NAMES = {form.format(x): x for x in PAIRS for form in ("scale_by_{}", "{}_step", "{}_update")}
PARTS = {name: whole for name, whole in _NAMES.items() if name in EXPORTED}
PARTS |= {"scale_by_trust_ratio": "lamb", "orthogonalize": "muon"}
FUNCTIONS = [name for name in EXPORTED if inspect.isfunction(getattr(jgrad, name))]

# What makes the method, then decay, layers and devices, and in which form moments are stored.
ORDER = [
    *("trust_coefficient", "matrices", "momentum", "nesterov", "beta1", "beta2", "beta3"),
    *("beta2_decay", "beta2_cap", "shampoo_beta", "every", "epsilon"),
    *("max_side", "clip_threshold", "scale_by_parameter", "min_side"),
    *("weight_decay", "decay_lambda", "weight_decay_mask", "weight_decay_rule"),
    *("max_trust_ratio", "min_trust_ratio", "trust_ratio_mask"),
    *("first_step", "bias_correction", "rate_in_momentum", "scale", "coefficients"),
    *("rule", "normuon_beta", "fraction", "error_decay"),
    *("output_axes", "split", "mesh_axes", "layer_axes", "shard_over", "compute_dtype"),
    # Of the leaves that Muon leaves to Adam.
    *("adam_learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "adam_weight_decay"),
    *("moment_dtype", "full_precision", "stop_gradients", "out"),
]
# Ivy's own options come first, in its order.
IVY = {
    "lars_update": ["decay_lambda"],
    "lamb_update": ["beta1", "beta2", "epsilon", "max_trust_ratio", "decay_lambda"],
}
# Defaults that are others than elsewhere, and why.
DIFFERENT = {
    # That of gradient descent and LARS is "coupled": in PyTorch, optax and LARS' paper decay is part
    # of the gradient, and so of momentum.
    **{
        (name, "weight_decay_rule"): "decoupled"
        for name in ("adafactor", "adam", "adan", "lion", "lamb", "muon", "soap")
    },
    ("lion", "beta2"): "its paper's: one moment, which looks further back than the direction",
    **{("adan", key): "its authors'" for key in ("beta1", "beta2")},
    ("lars", "momentum"): "the method is one of momentum",
    ("lars", "epsilon"): "of another denominator, to which the paper adds nothing",
    ("muon", "momentum"): "its author's",
    ("muon", "nesterov"): "its author's",
    ("muon", "rule"): "rules of its own",
    ("adafactor", "epsilon"): "two numbers, and the paper's",
    ("lamb", "epsilon"): "its paper's, and optax's",
    **{("soap", key): "its authors'" for key in ("beta1", "beta2")},
    **{
        ("soap", f"adam_{key}"): "its own Adam has these numbers: None is the same"
        for key in ("beta1", "beta2", "epsilon")
    },
    ("lars_update", "trust_coefficient"): "Ivy has none",
    **{
        (name, key): "Ivy's; the pairs have the field's"
        for name in ("adam_step", "adam_update", "lamb_update")
        for key in ("epsilon", "bias_correction")
    },
}


def options(name):
    """Defaults of the keyword-only parameters."""
    parameters = inspect.signature(getattr(jgrad, name)).parameters.values()
    return {x.name: x.default for x in parameters if x.kind is x.KEYWORD_ONLY}


@pytest.mark.parametrize("name", [*PAIRS, *UPDATES, *PARTS])
def test_shared_options_have_one_order(name):
    found, first = list(options(name)), IVY.get(name, [])
    assert found[: len(first)] == first
    assert found[len(first) :] == sorted(found[len(first) :], key=ORDER.index)


def test_shared_options_have_one_default():
    defaults, different = {}, set()
    for name in PAIRS:
        for key, value in options(name).items():
            if defaults.setdefault(key, value) != value:
                different.add((name, key))
    assert different == {pair for pair in DIFFERENT if pair[0] in PAIRS}


@pytest.mark.parametrize(("part", "whole"), PARTS.items())
def test_a_part_has_the_options_of_the_whole(part, whole):
    """By the same names, with the same defaults; decay has Ivy's name in an update."""
    others = {"decay_lambda", "stop_gradients", "out"}
    own = {key: value for key, value in options(part).items() if key not in others}
    different = {key for key, value in own.items() if options(whole)[key] != value}
    assert different == {key for name, key in DIFFERENT if name == part}


@pytest.mark.parametrize("name", UPDATES)
def test_updates_take_the_same_by_position(name):
    """Weights, gradient, rate; then moments and step."""
    parameters = inspect.signature(getattr(jgrad, name)).parameters.values()
    found = [x.name for x in parameters if x.kind is x.POSITIONAL_ONLY]
    gradient = "effective_grad" if name == "optimizer_update" else "dcdw"
    further = ["dw_tm1", "gw_tm1"] if name == "adan_update" else []
    expected = ["w", gradient, "lr", "mw_tm1", "vw_tm1", *further, "step"]
    assert found == expected[: len(found)]
    assert len(found) >= 3


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_are_documented_in_their_order(name):
    thing = getattr(jgrad, name)
    text = docstring(name, thing).partition("\nArgs:\n")[2].partition("\n\n")[0]
    names = [*inspect.signature(thing).parameters]
    if other := re.match(r"  As `(\w+)`", text):  # which has them all, and documents them
        theirs = inspect.signature(getattr(jgrad, other[1])).parameters
        assert names == [x for x in theirs if x in names]
    else:
        assert re.findall(r"^  (\w+): ", text, re.MULTILINE) == names


@pytest.mark.parametrize("name", EXPORTED)
def test_annotations_can_be_read(name):
    """By people, whom `help` shows names of types; and by programs, which evaluate them."""
    assert typing.get_type_hints(getattr(jgrad, name)) is not None
    if name in FUNCTIONS:
        signature = inspect.signature(getattr(jgrad, name))
        shown = [x.annotation for x in signature.parameters.values()]
        assert max(map(len, [*shown, signature.return_annotation])) <= 70


# What has a default and may be given by position: arguments, and options of others' functions.
BY_POSITION = {
    **{(name, "argnums"): "JAX's" for name in ("grad", "value_and_grad", "jac", "value_and_jac")},
    ("is_variable", "exclusive"): "Ivy's",
    ("optimizer_of_leaf", "function"): "a decorator's",
    ("state_shardings", "params_shardings"): "of the parameters before it",
}


def test_options_are_given_by_name():
    found = {
        (name, x.name)
        for name in FUNCTIONS
        for x in inspect.signature(getattr(jgrad, name)).parameters.values()
        if x.default is not x.empty and x.kind is not x.KEYWORD_ONLY
    }
    assert found == BY_POSITION.keys()
