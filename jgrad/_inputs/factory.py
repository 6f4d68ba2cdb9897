"""The table of a factory's options, which checks and reads each of them by its kind.

The factory checks what it can before there are parameters, so that errors point at its call. Each
update reads the numbers again, because they may be traced and may differ from leaf to leaf.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax

from jgrad._arithmetic import rules
from jgrad._inputs import numbers, options
from jgrad._inputs.functional import Role
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.leaf_functions import Descent
from jgrad._inputs.moment import Step
from jgrad._inputs.transformation import MomentOptions
from jgrad._trees import checks
from jgrad._trees.shardings import read_mesh_axes

Arguments = Mapping[str, Any]


def checked(read: Callable[[str, str, Any], Any], *, optional: bool = False) -> Callable[..., None]:
    """The kind of numbers that a factory checks like others, but reads in its own way."""

    def check(function: str, name: str, x: Any) -> None:
        if not (optional and x is None):
            options.check(function, read, **{name: x})

    return check


def one_of(*choices: Any) -> Callable[[str, str, Any], None]:
    """The kind of an option that is one of some values."""
    return lambda function, name, x: checks.one_of(function, name, x, choices)


def count(low: int = 1) -> Callable[[str, str, Any], None]:
    """The kind of an int of at least `low`, which shapes the program and is no number of a call."""

    def check(function: str, name: str, x: Any) -> None:
        if isinstance(x, jax.Array):
            problem = f"{checks.describe(x)}, expected an int; {checks.INJECTED}"
            raise TypeError(f"{function}: `{name}`: {problem}.")
        checks.count(function, name, x, low)

    return check


class Reads(NamedTuple):
    """The kind of an option that a factory reads once: `Given` has what `read(function, x)` is."""

    read: Callable[[str, Any], Any]


# The arguments of a check: the names of the factory and of the option, and its value.
Kind = Role | Callable[[str, str, Any], Any] | Reads | None

_RULE = "weight_decay_rule"
# The options of all methods with weight decay, and of all with moments.
DECAY: dict[str, Kind] = {
    _RULE: one_of(*options.DECAY_RULES),
    "weight_decay": Role.DECAY,
    "weight_decay_mask": Role.MASK,
}
COUPLED_DECAY = DECAY | {_RULE: one_of("coupled", *options.DECAY_RULES)}
SHARDED: dict[str, Kind] = {"mesh_axes": lambda function, _, x: read_mesh_axes(function, x)}
FORM: dict[str, Kind] = {"moment_dtype": None, "full_precision": Role.MASK}


_NUMBERS = {Role.RATE, Role.NUMBER, Role.BETA, Role.DECAY, Role.MOMENTUM, Role.SCALAR}


class Options:
    """The options of a factory.

    Attributes:
      kinds: of each option. A function checks it, given the names of the factory and of the option
        and its value; None is for what is checked elsewhere.
    """

    def __init__(self, **kinds: Kind) -> None:
        self.kinds = kinds

    def check(self, function: str, arguments: Arguments) -> "Given":
        """The arguments of a factory, checked in the order of the table.

        Args:
          function: what users call it, for messages.
          arguments: `locals()`, taken first in the factory: each option of the table, and no other.
        """
        if unknown := arguments.keys() ^ self.kinds.keys():
            raise TypeError(
                f"{function}: {sorted(unknown)} not both in its table and its signature."
            )
        read = {}
        for name, kind in self.kinds.items():
            if kind is Role.DECAY:
                options.check_decays(function, arguments[_RULE], **{name: arguments[name]})
            elif isinstance(kind, Role):
                _CHECKS[kind](function, name, arguments[name])
            elif isinstance(kind, Reads):
                read[name] = kind.read(function, arguments[name])
            elif kind is not None:
                kind(function, name, arguments[name])
        masks = {name: arguments[name] for name, kind in self.kinds.items() if kind is Role.MASK}
        options.check_masks(function, **masks)
        return Given(self.kinds, dict(arguments) | read)


class Given:
    """The options of one transformation, each an attribute.

    Attributes:
      arguments: as a user gave them, or as their kind reads them.
    """

    def __init__(self, kinds: Mapping[str, Kind], arguments: Arguments) -> None:
        self._kinds, self.arguments = kinds, arguments

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # which Python asks for, before there are arguments
            raise AttributeError(name)
        return self.arguments[name]

    def read(self, inputs: Inputs, step: Step) -> Any:
        """The numbers of one update: an attribute for each option that is a number.

        And `descent`; None without a weight decay, whose table has the learning rate before it.
        """
        of_update = SimpleNamespace(descent=None)
        for name, kind in self._kinds.items():
            if kind not in _NUMBERS:
                continue
            x = self.arguments[name]
            is_of_factory = kind is Role.SCALAR or step.numbers.get(name) is None
            is_constant = is_of_factory and checks.is_number(x)
            match kind:
                case Role.NUMBER | Role.SCALAR if is_constant:
                    read: Any = numbers.strong_scalar(x)
                case Role.BETA if is_constant:
                    read = numbers.forms(x)
                case Role.MOMENTUM if is_constant:
                    read = numbers.forms(x).value
                case Role.RATE if is_constant and inputs.notes is None and not inputs.has_buffers:
                    read = [numbers.strong_scalar(x)] * len(inputs.specs)
                case Role.RATE:
                    read = inputs.per_array(options.rate_of_leaves(inputs, name, x, step))
                case Role.NUMBER:
                    read = options.number_per_array(inputs, step, name, x)
                case Role.BETA:
                    read = options.beta_per_array(inputs, step, name, x)
                case Role.SCALAR:
                    read = numbers.scalar(inputs.function, name, x)
                case Role.MOMENTUM if x is None:
                    options.without_momentum(inputs, step)
                    read = None
                case Role.MOMENTUM:
                    read = options.beta_per_array(inputs, step, name, x).value
                case Role.DECAY:
                    mask, rule = self.arguments["weight_decay_mask"], self.arguments[_RULE]
                    is_for_some = mask is not None or inputs.undecayed is not None
                    if is_constant and x == 0 and mask is None:
                        read, decay = [0.0] * len(inputs.specs), None
                    elif is_constant and not (inputs.has_buffers or is_for_some):
                        inputs.require_params("`weight_decay`")
                        read = decay = [numbers.strong_scalar(x)] * len(inputs.specs)
                    else:
                        use = options.mask(inputs, "weight_decay_mask", mask)
                        read = options.decay_of_leaves(inputs, name, x, use, step, rule)
                        read = inputs.per_array(read)
                        decay = rules.optional(read, rule)
                    of_update.descent = Descent(decay, of_update.learning_rate, rule)
            setattr(of_update, name, read)
        return of_update

    def moments(self, **axes: Any) -> MomentOptions:
        """How the moments are stored; `axes` are further options of `MomentOptions`."""
        form = self.arguments["moment_dtype"], self.arguments["full_precision"]
        axes = {"mesh_axes": self.arguments.get("mesh_axes")} | axes
        return MomentOptions(*form, **axes)


# ---- how a kind is checked ---------------------------------------------------------------------


_CHECKS: dict[Role, Callable[[str, str, Any], Any]] = {
    Role.RATE: checked(numbers.number),
    Role.NUMBER: checked(numbers.scalars),
    Role.BETA: checked(numbers.scalar_betas),
    Role.MOMENTUM: checked(numbers.scalar_betas, optional=True),
    Role.SCALAR: numbers.scalar,
    Role.FLAG: checks.boolean,
    Role.MASK: lambda *_: None,  # after all others
}
