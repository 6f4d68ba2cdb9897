"""jgrad in the place of optax: a plugin for pytest, and functions with optax's signatures.

    PYTHONPATH=tests/pages/clients JGRAD_SWAP=jgrad pytest -p swap ...

replaces what `NAMES` has in optax, before a test is imported. `python -m studies.clients` runs
the tests of others in this way, and `tests/pages/clients/` takes its optimizers from here.
"""

import collections
import functools
import inspect
import json
import os
import pathlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import optax
import optax.contrib
import pytest

import jgrad

# By optax's names, options of the same meaning; any other option must have optax's default.
_MOMENTUM = {"momentum": "momentum", "nesterov": "nesterov"}
_ADAM = {"b1": "beta1", "b2": "beta2", "eps": "epsilon"}
_DECAY = {"weight_decay": "weight_decay", "mask": "weight_decay_mask"}
_LARS = ("weight_decay", "weight_decay_mask", "trust_coefficient", "trust_ratio_mask")

_lamb = functools.partial(jgrad.lamb, max_trust_ratio=None)
_lars = functools.partial(jgrad.lars, rule="decayed_gradient")


def _muon(learning_rate: Any, **options: Any) -> optax.GradientTransformation:
    """For all arrays with two axes, as optax's; one rate for both kinds of leaves."""
    matrices = functools.partial(jax.tree.map, lambda p: len(p.shape) == 2)
    return jgrad.muon(learning_rate, matrices=matrices, adam_learning_rate=learning_rate, **options)


_MUON = _DECAY | {"weight_decay_mask": "weight_decay_mask"} | {"beta": "momentum"}
_MUON |= {"nesterov": "nesterov", "adam_weight_decay": "adam_weight_decay"}
_MUON |= {"adam_b1": "adam_beta1", "adam_b2": "adam_beta2"}

NAMES: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "adam": (jgrad.adam, _ADAM),
    "adamw": (jgrad.adam, _ADAM | _DECAY),
    "sgd": (jgrad.gradient_descent, _MOMENTUM | {"accumulator_dtype": "moment_dtype"}),
    "lion": (jgrad.lion, {"b1": "beta1", "b2": "beta2", "mu_dtype": "moment_dtype"} | _DECAY),
    "lamb": (_lamb, _ADAM | _DECAY),
    "lars": (_lars, _MOMENTUM | {"eps": "epsilon"} | {name: name for name in _LARS}),
    "clip_by_global_norm": (jgrad.clip_by_global_norm, {}),
    "muon": (_muon, _MUON),
}
_THEIRS = {name: getattr(optax, name, None) or getattr(optax.contrib, name) for name in NAMES}

MODES = ("optax", "jgrad", "wrappers")
MODE, REPORT = "JGRAD_SWAP", "JGRAD_SWAP_REPORT"  # variables of the environment
calls: collections.Counter[str] = collections.Counter()


def wrapped(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """All wrappers around a transformation; together they change no float32 number."""
    clipped = jgrad.average_params(
        optax.chain(jgrad.clip_by_global_norm(1e9), jgrad.pack_small(tx)), 0.99
    )
    return jgrad.skip_nonfinite(jgrad.accumulate(jgrad.master_weights(clipped), 1))


def ours(name: str, *args: Any, **kwargs: Any) -> optax.GradientTransformation:
    """jgrad's optimizer for a call of optax's; optax's, where jgrad does not have the option."""
    return _translated(name, args, kwargs) or _THEIRS[name](*args, **kwargs)


def _translated(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> optax.GradientTransformation | None:
    """jgrad's optimizer, None where jgrad does not have the option."""
    make, names = NAMES[name]
    call = inspect.signature(_THEIRS[name]).bind(*args, **kwargs)
    call.apply_defaults()
    parameters = iter(call.signature.parameters.values())
    first = next(parameters).name
    # optax's masks are True by default in `lars`, ours are None for all leaves.
    given = {
        names[k]: None if v is True and k.endswith("_mask") else v
        for k, v in call.arguments.items()
        if k in names
    }
    others = [x for x in parameters if x.name not in names]
    if any(call.arguments[x.name] is not x.default for x in others):
        calls[f"{name}, left to optax"] += 1
        return None
    if given.get("momentum", 0) is None:
        given.pop("nesterov")  # which optax ignores then
    calls[name] += 1
    return make(call.arguments[first], **given)


adam, adamw, sgd, lion, lamb, lars, clip_by_global_norm, muon = (
    functools.partial(ours, name) for name in NAMES
)


# ---- the plugin --------------------------------------------------------------------------------


class Report:
    """What a run of pytest found, as JSON for `studies/clients.py`."""

    def __init__(self, path: str) -> None:
        self._path = pathlib.Path(path)
        self._outcomes: dict[str, str] = {}
        self._messages: dict[str, str] = {}  # of tests that fail
        self._calls: dict[str, dict[str, int]] = {}  # by the names of files
        self._before = calls.copy()

    def _count(self, nodeid: str) -> None:
        own = self._calls.setdefault(nodeid.partition("::")[0], {})
        for name, count in (calls - self._before).items():
            own[name] = own.get(name, 0) + count
        self._before = calls.copy()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._count(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._count(report.nodeid)
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.nodeid] = report.outcome
        crash = getattr(report.longrepr, "reprcrash", None)
        if report.outcome == "failed" and crash is not None:
            self._messages[report.nodeid] = crash.message

    def pytest_sessionfinish(self) -> None:
        found = {"outcomes": self._outcomes, "messages": self._messages}
        self._path.write_text(json.dumps(found | {"calls": calls, "calls of files": self._calls}))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what optax's own tests do with an optimizer that is not replaced."""
    items[:] = [x for x in items if _is_replaced(_optimizer(x))]


def _optimizer(item: pytest.Item) -> str | None:
    """The optimizer that a test of optax is given by its parameters, which absl keeps as text."""
    given = getattr(getattr(item, "function", None), "__x_params_repr__", "")
    found = re.search(r"\bopt_name='(\w+)'", given)
    return found and found[1]


def _is_replaced(name: str | None) -> bool:
    return name is None or name in (*NAMES, "sgd_mom")


def _swapped(name: str, mode: str) -> Callable[..., optax.GradientTransformation]:
    """What replaces a function of optax, under its name: names of tests have it."""

    @functools.wraps(_THEIRS[name])
    def make(*args: Any, **kwargs: Any) -> optax.GradientTransformation:
        tx = _translated(name, args, kwargs)
        if tx is None:
            return _THEIRS[name](*args, **kwargs)
        return wrapped(tx) if mode == "wrappers" and name != "clip_by_global_norm" else tx

    return make


def _modules() -> list[types.ModuleType]:
    """optax's own: its tests take a function from the file that has it."""
    return [x for name, x in sys.modules.items() if name.partition(".")[0] == "optax"]


def pytest_configure(config: pytest.Config) -> None:
    mode = os.environ.get(MODE, MODES[0])
    if mode not in MODES:
        raise pytest.UsageError(f"{MODE}: {mode!r}, expected one of {', '.join(MODES)}.")
    for name in NAMES if mode != "optax" else ():
        replacement = _swapped(name, mode)
        for module in _modules():
            if getattr(module, name, None) is _THEIRS[name]:
                setattr(module, name, replacement)
    if path := os.environ.get(REPORT):
        config.pluginmanager.register(Report(path))
