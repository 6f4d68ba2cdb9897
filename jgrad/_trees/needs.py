"""What an option needs: one that has no effect without another one is an error that names both.

An array passes, since it may be traced, or be the default of a number, of which
`optax.inject_hyperparams` makes one. What only describes the parameters, as `layer_axes` and
`mesh_axes` do, needs nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jgrad._trees import checks
from jgrad._trees.forms import SMALLEST

_SCALARS = (bool, int, float, str, np.generic)


class Need(NamedTuple):
    """What an option needs of others, of those that its function has.

    Attributes:
      options: one of them has to be as it should.
      words: what is wrong where none is.
      is_met: by the value of one; None asks whether it is there: given, be it as 0, but not None.
    """

    options: tuple[str, ...]
    words: str
    is_met: Callable[[Any], bool] | None = None


def _is_part(fraction: Any) -> bool:
    return not (fraction is None or (checks.is_number(fraction) and fraction == 1))


_DECAY = Need(
    ("weight_decay", "adam_weight_decay"),
    "without `weight_decay`: pass both, even if the decay is 0",
)
_MOMENTUM = Need(("momentum",), "without `momentum`")

NEEDS: dict[str, tuple[Need, ...]] = {
    "weight_decay_mask": (_DECAY,),
    "weight_decay_rule": (_DECAY,),
    "nesterov": (
        _MOMENTUM,
        Need(("fraction",), "with `fraction`", lambda x: not _is_part(x)),
    ),
    "rate_in_momentum": (_MOMENTUM,),
    "moment_dtype": (_MOMENTUM,),
    "full_precision": (
        Need(("moment_dtype",), "without `moment_dtype='8bit'`", lambda x: str(x) == "8bit"),
    ),
    "normuon_beta": (Need(("rule",), "without `rule='normuon'`", lambda x: x == "normuon"),),
    "error_decay": (Need(("fraction",), "without `fraction`", _is_part),),
    "growth_interval": (Need(("loss_scale",), "without `loss_scale`"),),
    "small_apart": (
        Need(
            ("max_size",),
            f"with a `max_size` below {SMALLEST}",
            lambda x: not checks.is_number(x) or x >= SMALLEST,
        ),
    ),
}


def check_needs(function: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """An error for the first option that a call gives, and that has no effect.

    Args:
      function: what users call.
      given: the options of the call.
      defaults: of all options.
    """

    def is_met(need: Need, option: str) -> bool:
        if need.is_met is not None:
            return need.is_met(given.get(option, defaults[option]))
        if option in given:
            return given[option] is not None
        return bool(defaults[option])  # what a call leaves at 0 was forgotten

    for name, x in given.items():
        for need in NEEDS.get(name, ()):
            met = [is_met(need, option) for option in need.options if option in defaults]
            if met and not any(met) and _differs(x, defaults[name]):
                refuse_without_effect(function, name, x, defaults[name], need.words)


def refuse_without_effect(function: str, name: str, x: Any, default: Any, words: str) -> None:
    """An error for an option that has none."""
    came = repr(x) if isinstance(x, _SCALARS) else checks.describe(x)
    raise ValueError(f"{function}: `{name}`: {came}, expected {default!r} {words}.")


def _differs(x: Any, default: Any) -> bool:
    if isinstance(x, _SCALARS):
        return bool(x != default)
    return not (x is default or checks.is_array(x))
