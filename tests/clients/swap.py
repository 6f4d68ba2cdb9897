"""jgrad in the place of optax: a plugin for pytest, and functions with optax's signatures.

    PYTHONPATH=tests/clients JGRAD_SWAP=jgrad pytest -p swap ...

replaces what `NAMES` has in optax, before a test is imported. `python -m studies.clients` runs
the tests of others in this way, and `tests/clients/` takes its optimizers from here.
"""

import collections
import functools
import inspect
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import optax
import pytest

import jgrad

# By optax's names, options of the same meaning; any other option must have optax's default.
_MOMENTUM = {"momentum": "momentum", "nesterov": "nesterov"}
_ADAM = {"b1": "beta1", "b2": "beta2", "eps": "epsilon"}
_DECAY = {"weight_decay": "weight_decay", "mask": "weight_decay_mask"}
_LARS = ("weight_decay", "weight_decay_mask", "trust_coefficient", "trust_ratio_mask")

_lamb = functools.partial(jgrad.lamb, max_trust_ratio=None)
_lars = functools.partial(jgrad.lars, rule="decayed_gradient")

NAMES: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "adam": (jgrad.adam, _ADAM),
    "adamw": (jgrad.adam, _ADAM | _DECAY),
    "sgd": (jgrad.gradient_descent, _MOMENTUM | {"accumulator_dtype": "moment_dtype"}),
    "lamb": (_lamb, _ADAM | _DECAY),
    "lars": (_lars, _MOMENTUM | {"eps": "epsilon"} | {name: name for name in _LARS}),
    "clip_by_global_norm": (jgrad.clip_by_global_norm, {}),
}
_THEIRS = {name: getattr(optax, name) for name in NAMES}

MODES = ("optax", "jgrad", "wrappers")
MODE, REPORT = "JGRAD_SWAP", "JGRAD_SWAP_REPORT"  # variables of the environment
calls: collections.Counter[str] = collections.Counter()


def wrapped(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """All wrappers around a transformation; together they change no float32 number."""
    clipped = optax.chain(jgrad.clip_by_global_norm(1e9), jgrad.pack_small(tx), jgrad.ema(0.99))
    return jgrad.skip_nonfinite(jgrad.accumulate(jgrad.master_weights(clipped), 1))


def ours(name: str, *args: Any, **kwargs: Any) -> optax.GradientTransformation:
    """jgrad's optimizer for a call of optax's; optax's, where jgrad does not have the option."""
    make, names = NAMES[name]
    call = inspect.signature(_THEIRS[name]).bind(*args, **kwargs)
    call.apply_defaults()
    parameters = iter(call.signature.parameters.values())
    first = next(parameters).name
    given = {names[k]: v for k, v in call.arguments.items() if k in names}
    others = [x for x in parameters if x.name not in names]
    if any(call.arguments[x.name] is not x.default for x in others):
        calls[f"{name}, left to optax"] += 1
        return _THEIRS[name](*args, **kwargs)
    if given.get("momentum", 0) is None:
        given.pop("nesterov")  # which optax ignores then
    calls[name] += 1
    return make(call.arguments[first], **given)


adam, adamw, sgd, lamb, lars, clip_by_global_norm = (
    functools.partial(ours, name) for name in NAMES
)


# ---- the plugin --------------------------------------------------------------------------------


class Report:
    """What a run of pytest found, as JSON for `studies/clients.py`."""

    def __init__(self, path: str) -> None:
        self._path = pathlib.Path(path)
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps({"outcomes": self._outcomes, "calls": calls}))


def _swapped(name: str, mode: str) -> Callable[..., optax.GradientTransformation]:
    """What replaces a function of optax, under its name: names of tests have it."""

    @functools.wraps(_THEIRS[name])
    def make(*args: Any, **kwargs: Any) -> optax.GradientTransformation:
        tx = ours(name, *args, **kwargs)
        return wrapped(tx) if mode == "wrappers" and name != "clip_by_global_norm" else tx

    return make


def pytest_configure(config: pytest.Config) -> None:
    mode = os.environ.get(MODE, MODES[0])
    if mode not in MODES:
        raise pytest.UsageError(f"{MODE}: {mode!r}, expected one of {', '.join(MODES)}.")
    for name in NAMES if mode != "optax" else ():
        setattr(optax, name, _swapped(name, mode))
    if path := os.environ.get(REPORT):
        config.pluginmanager.register(Report(path))
