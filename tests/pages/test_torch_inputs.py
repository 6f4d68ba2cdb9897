"""The inputs of PyTorch's own tests of SGD, Adam, AdamW and Muon: the same weights, and the same errors.

`tests/pages/torch_inputs.py` says how PyTorch's numbers were made. What is left out, and what is no
error here, is named in this file with its reason, and nothing else is.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.pages import torch_inputs

RECORDED = json.loads(torch_inputs.DATA.read_text())

# Options that have no equal, by the methods that have them.
LEFT_OUT = {
    "amsgrad": "optax has it, and it works inside the wrappers",
    "dampening": "another rate and first gradient, see test_dampening in test_from_pytorch.py",
}
# Error inputs that are none here.
TREES = {
    "invalid param type": "an array is a tree of parameters",
    "a param group cannot have duplicate parameters": "leaves are values: equal ones are two",
    "duplicate parameters should not occur across param groups either": "likewise",
}
KINDS = {
    "lr as Tensor doesn't work with foreach & not capturable": "a limit of an implementation",
    "betas must be either both floats or both Tensors": "each is read on its own",
    r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True": "a limit",
}
MATRICES = {
    "only support 2D parameters": "the inputs of a kernel are all axes but the output's",
    "does not support complex parameters": "X X^T is X X^H",
}
NO_ERRORS = {"SGD": TREES, "Adam": TREES | KINDS, "AdamW": TREES | KINDS, "Muon": TREES | MATRICES}


def rows(kind):
    return {
        f"{method}, {i}, {row['desc']}": (method, row)
        for method, group in RECORDED[kind].items()
        for i, row in enumerate(group)
    }


INPUTS, ERRORS = rows("inputs"), rows("errors")


def number(x):
    return jnp.asarray(x["tensor"]) if isinstance(x, dict) else x


def sgd(lr=1e-3, **kwargs):
    return jgrad.gradient_descent(lr, **kwargs)


def adam(lr=1e-3, weight_decay=0.0, **kwargs):
    """Its decay is part of the gradient."""
    own = adamw(lr, weight_decay=0.0, **kwargs)
    if weight_decay < 0:
        return adamw(lr, weight_decay=weight_decay, **kwargs)
    return optax.chain(optax.add_decayed_weights(weight_decay), own) if weight_decay else own


def adamw(lr=1e-3, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-8):
    beta1, beta2 = map(number, betas)
    return jgrad.adam(lr, beta1=beta1, beta2=beta2, epsilon=eps, weight_decay=weight_decay)


def muon(
    lr=1e-3, ns_steps=5, ns_coefficients=(3.4445, -4.775, 2.0315), adjust_lr_fn=None, **kwargs
):
    scales = {None: "original", "spectral_unclamped": "spectral"}
    return jgrad.muon(
        lr,
        matrices=True,
        output_axes=0,
        coefficients=[ns_coefficients] * ns_steps,
        scale=scales.get(adjust_lr_fn, adjust_lr_fn),
        adam_learning_rate=0.0,
        **{"weight_decay": 0.1} | kwargs,
    )


def ours(method, kwargs):
    """jgrad's transformation; the negated gradients of `maximize` come before all else."""
    kwargs = {k: number(v) for k, v in kwargs.items() if k not in torch_inputs.FLAGS}
    maximize = kwargs.pop("maximize", False)
    tx = {"SGD": sgd, "Adam": adam, "AdamW": adamw, "Muon": muon}[method](**kwargs)
    return optax.chain(optax.scale(-1.0), tx) if maximize else tx


def left_out(row):
    return any(row["kwargs"].get(name) for name in LEFT_OUT)


@pytest.mark.slow(one_in=64)
@pytest.mark.parametrize("name", [k for k, (_, row) in INPUTS.items() if not left_out(row)])
def test_same_weights(name, x64, standard_promotion):
    method, row = INPUTS[name]
    w, grads = jax.tree.map(jnp.asarray, torch_inputs.problem(method))
    kwargs = {k: v for k, v in row["kwargs"].items() if k not in LEFT_OUT}
    tx, found = ours(method, kwargs), []
    state, update = tx.init(w), jax.jit(tx.update)
    for g in grads:
        updates, state = update(g, state, w)
        w = optax.apply_updates(w, updates)
        found.append(np.concatenate([np.ravel(w[k]) for k in "wb"]))
    np.testing.assert_allclose(found[:: len(found) - 1], row["weights"], rtol=1e-12, atol=1e-13)


def test_what_is_left_out():
    """By its descriptions; each has an option of `LEFT_OUT`, and no other input has."""
    found = {(method, row["desc"]) for method, row in INPUTS.values() if left_out(row)}
    ams = ("", "capturable, ", "Tensor lr with capturable and ")
    ams = [f"{x}amsgrad" for x in ams] + ["Tensor lr, Tensor betas, with capturable and amsgrad"]
    adams = {(method, x) for method in ("Adam", "AdamW") for x in ams}
    assert found == adams | {("SGD", "dampening")}
    counts = {method: len(group) for method, group in RECORDED["inputs"].items()}
    assert counts == {"SGD": 11, "Adam": 16, "AdamW": 16, "Muon": 11}


def parameters(x):
    """A tree of ones, by shapes and dtypes."""
    if isinstance(x, dict) and "shape" in x:
        return jnp.ones(x["shape"], x["dtype"])
    if isinstance(x, dict):
        return {k: parameters(v) for k, v in x.items()}
    return [parameters(v) for v in x] if isinstance(x, list) else x


def raised(method, row):
    w = parameters(row["params"])
    try:
        tx = ours(method, row["kwargs"])
        tx.update(w, tx.init(w), w)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


@pytest.mark.slow
def test_errors(x64, standard_promotion):
    """What PyTorch refuses is refused here, but for what is named above."""
    for name, (method, row) in ERRORS.items():
        assert (raised(method, row) is None) == (row["desc"] in NO_ERRORS[method]), name
    named = {(method, desc) for method, group in NO_ERRORS.items() for desc in group}
    assert named <= {(method, row["desc"]) for method, row in ERRORS.values()}


def test_messages_name_the_option(x64, standard_promotion):
    rows = {row["desc"]: (method, row) for method, row in ERRORS.values()}
    for desc, option in {
        "momentum should be between 0 and 1": "gradient_descent: `momentum`: -0.5",
        "beta1 should be between 0 and 1": "adam: `beta1`: 1.0",
        "weight_decay should > 0": "adam: `weight_decay`: -1",
        "unsupported adjust_lr_fn": "muon: `scale`: 'arbitrary'",
    }.items():
        assert raised(*rows[desc]).startswith(option)
