"""jgrad against real Ivy, case by case, and each departure by name."""

import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from tests.support import ivy_oracle as ivy
from tests.support.choice import mostly_slow

UPDATES = [
    "adam_step",
    "optimizer_update",
    "gradient_descent_update",
    "lars_update",
    "adam_update",
    "lamb_update",
]
GRADIENTS = ["execute_with_gradients", "grad", "value_and_grad", "jac"]

# Where jgrad departs on purpose: the exception, and a word of its message.
ERRORS = {
    "adam_step-050": (ValueError, "`step`: -1"),  # a negative step
    "adam_step-060": (ValueError, "`beta2`: 1.0"),  # a beta outside [0, 1)
    "adam_step-070": (ValueError, "does not broadcast"),  # (3,) and (2, 1) would make (2, 3)
    "adam_step-076": (ValueError, "structure"),  # different keys
    "optimizer_update-023": (ValueError, "does not broadcast"),  # lr would enlarge w
    "optimizer_update-029": (ValueError, "does not match"),  # the gradient would enlarge w
    "optimizer_update-030": (TypeError, "int32"),  # integer weights
    "optimizer_update-031": (TypeError, "int32"),
    "lars_update-021": (ValueError, "does not match"),  # a (1,) gradient for every leaf
    "lars_update-025": (ValueError, "does not match"),
    "adam_update-028": (ValueError, "does not broadcast"),  # (1,) moments would enlarge a scalar w
    "adam_update-029": (ValueError, "does not match"),
    "adam_update-034": (ValueError, "does not match"),
    "lamb_update-037": (ValueError, "does not match"),
    "lamb_update-042": (ValueError, "does not match"),
    "execute_with_gradients-074": (ValueError, "one element"),  # an output of several elements
    "execute_with_gradients-102": (ValueError, "bool"),  # bool inputs
    "grad-028": (ValueError, "one element"),
    "grad-029": (TypeError, "int32"),
    "jac-023": (TypeError, "int32"),
}
# Ivy sets non-finite gradients to zero; jgrad returns them.
NON_FINITE = {
    "execute_with_gradients-094": [np.inf, 0.25],
    "execute_with_gradients-095": [np.inf, 0.5],
    "execute_with_gradients-097": [np.nan, 1.6931471805599454],
}
# 0 / 0 without an epsilon: Ivy has NaN, jgrad 0.
ZERO_OVER_ZERO = "adam_step-058"
# An infinite gradient makes v infinite in Ivy, and delta NaN. Here it counts in v as 2^63, in float64
# as 2^511, whose squares are finite; m and delta show it.
INFINITE = "adam_step-062"


def cases(*functions, every=1):
    """All cases of these functions; by default each n-th, and each departure."""
    found = ivy.load(*functions)
    departures = [
        case for case in found if case["id"] in {*ERRORS, *NON_FINITE, ZERO_OVER_ZERO, INFINITE}
    ]
    marked = mostly_slow(found, *found[::every], *departures) if every > 1 else found
    return pytest.mark.parametrize("case", marked, ids=lambda case: case["id"])


def arguments(case, double):
    args = [ivy.decode(x, double=double) for x in case["args"]]
    kwargs = {k: ivy.decode(x, double=double) for k, x in case.get("kwargs", {}).items()}
    return args, kwargs


def compare(found, wanted, rtol=None):
    chex.assert_trees_all_equal_structs(found, wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a = jnp.asarray(a)
        assert a.shape == np.shape(b)
        tolerance = (
            rtol or {2: 1e-2, 4: 2e-5, 8: 1e-12}[a.dtype.itemsize // (1 + jnp.iscomplexobj(a))]
        )
        wide = np.complex128 if jnp.iscomplexobj(a) else np.float64
        np.testing.assert_allclose(
            np.asarray(a).astype(wide),
            b,
            rtol=tolerance,
            atol=1e-7 * (a.dtype.itemsize < 8) + 1e-15,
        )


@pytest.mark.slow(one_in=12)
@pytest.mark.parametrize("double", mostly_slow([False, True], True), ids=["float32", "float64"])
@cases(*UPDATES, every=3)
def test_update(case, double, x64):
    """Ivy's numbers under Ivy's rules, from the inputs as they are, and in float64."""
    args, kwargs = arguments(case, double)
    if case["fn"] in ("lars_update", "lamb_update"):
        kwargs["rule"] = "ivy"
    function = getattr(jgrad, case["fn"])
    if case["id"] in ERRORS:
        error, words = ERRORS[case["id"]]
        with pytest.raises(error, match=words):
            function(*args, **kwargs)
        return
    # Ivy rounds a fractional Python step to float32.
    steps = {"adam_step": 3, "adam_update": 5, "lamb_update": 5}
    if isinstance(step := args[steps.get(case["fn"], 0)], float):
        args[steps[case["fn"]]] = float(np.float32(step))
    wanted = ivy.expected(case["expected"])
    if case["id"] == ZERO_OVER_ZERO:
        wanted = (np.zeros(3), *wanted[1:])
    if case["id"] == INFINITE:
        square = 2.0 ** (2 * 63) if args[0].dtype == np.float32 else 2.0 ** (2 * 511)
        delta, mw, vw = (np.array(x) for x in wanted)
        delta[1], vw[1] = np.inf, 0.001 * square
        wanted = delta, mw, vw
    loose = case["id"] in (
        "adam_step-068",
        "optimizer_update-043",
    )  # Ivy made float32 of Python numbers
    compare(function(*args, **kwargs), wanted, rtol=1e-6 if loose else None)


@pytest.mark.slow(always=["lars_update-021", "lamb_update-034"])
@cases("lars_update", "lamb_update", every=6)
def test_paper_rule_without_decay(case, x64):
    """Without decay, and with norms that are not zero, the papers' rules are Ivy's.

    Ivy adds 1e-12 to a norm; that is seen in the eleventh digit where norms are small.
    """
    args, kwargs = arguments(case, double=True)
    norms = [np.linalg.norm(np.ravel(x)) for x in jax.tree.leaves(args[:2])]
    if case["id"] in ERRORS or kwargs.get("decay_lambda") or min(norms) < 1e-6:
        return
    function = getattr(jgrad, case["fn"])
    low = any(x.dtype.itemsize < 8 for x in jax.tree.leaves(args[0]))
    compare(function(*args, **kwargs), ivy.expected(case["expected"]), rtol=1e-2 if low else 1e-10)


@pytest.mark.slow(one_in=3)
@cases("trajectory")
def test_trajectory(case, x64):
    """Several steps in a row, moments from zero and steps from 1."""
    name, w, gradients, lr = (ivy.decode(x, double=True) for x in case["args"])
    kwargs = {k: ivy.decode(x, double=True) for k, x in case.get("kwargs", {}).items()}
    if name in ("lars_update", "lamb_update"):
        kwargs["rule"] = "ivy"
    function = getattr(jgrad, name)
    mw, vw = jax.tree.map(jnp.zeros_like, w), jax.tree.map(jnp.zeros_like, w)
    for t, g in enumerate(gradients, start=1):
        if name in ("adam_update", "lamb_update"):
            w, mw, vw = function(w, g, lr, mw, vw, t, **kwargs)
        else:
            w = function(w, g, lr, **kwargs)
    moments = (mw, vw) if name in ("adam_update", "lamb_update") else ()
    compare((w, *moments), ivy.expected(case["expected"]), rtol=1e-11)


def _xp():
    """The array module that a case's function is given."""
    names = [
        "mean",
        "square",
        "sum",
        "sin",
        "cos",
        "tanh",
        "exp",
        "sqrt",
        "log",
        "reshape",
        "stack",
    ]
    xp = types.SimpleNamespace(**{name: getattr(jnp, name) for name in names})
    for name in [*UPDATES, "stop_gradient"]:
        setattr(xp, name, getattr(jgrad, name))
    xp.lars_update = lambda *args, **kwargs: jgrad.lars_update(*args, rule="ivy", **kwargs)
    xp.lamb_update = lambda *args, **kwargs: jgrad.lamb_update(*args, rule="ivy", **kwargs)
    return xp


@pytest.mark.slow(one_in=10)
@cases(*GRADIENTS, every=3)
def test_gradients(case, x64):
    args, kwargs = arguments(case, double=False)
    call = case.get("call", {})
    body = eval(case["func"])  # a lambda of the oracle's
    func = lambda *xs: body(_xp(), *xs)
    if case["fn"] == "execute_with_gradients":
        run = lambda: jgrad.execute_with_gradients(func, *args, **kwargs)
    else:
        for _ in range(call.get("nth", 1)):
            argnums = {"argnums": call["argnums"]} if "argnums" in call else {}
            func = getattr(jgrad, case["fn"])(func, **argnums)
        run = lambda: func(*args)
    if case["id"] in ERRORS:
        error, words = ERRORS[case["id"]]
        with pytest.raises(error, match=words):
            run()
        return
    wanted = ivy.expected(case["expected"])
    if case["id"] in NON_FINITE:
        wanted = (wanted[0], np.array(NON_FINITE[case["id"]]))
    low = any(x.dtype.itemsize < 8 for x in jax.tree.leaves(args) if hasattr(x, "dtype"))
    compare(run(), wanted, rtol=2e-5 if low else 1e-12)


@cases("stop_gradient")
def test_stop_gradient(case):
    (x,), kwargs = arguments(case, double=False)
    found = jgrad.stop_gradient(x, **kwargs)
    wanted = ivy.expected(case["expected"])
    if isinstance(x, list):  # to Ivy a list is an array, to JAX a tree
        found = np.array(found)
    compare(found, wanted, rtol=1e-6)


@cases("inplace_update", "inplace_increment", "inplace_decrement")
def test_inplace(case):
    args, _ = arguments(case, double=False)
    compare(getattr(jgrad, case["fn"])(*args), ivy.expected(case["expected"]))


def test_every_case_is_used():
    """Of the oracle only `stable_divide` is left out, which jgrad does not have."""
    functions = [*UPDATES, *GRADIENTS, "stop_gradient", "trajectory"]
    inplace = ["inplace_update", "inplace_increment", "inplace_decrement"]
    assert len(ivy.load(*functions, *inplace)) == 377 - len(ivy.load("stable_divide")) == 373
    known = {case["id"] for case in ivy.load(*functions)}
    assert {*ERRORS, *NON_FINITE, ZERO_OVER_ZERO, INFINITE} <= known
