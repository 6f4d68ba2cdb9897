"""What other libraries call options and functions, and what options need of each other.

The tables have names from other libraries and from earlier versions of jgrad: one of options, for
factories and for the keywords of `update`, and two of functions. An option that has no effect
without another one raises an error that names both. Arrays are accepted, because they may be
traced, or may be a default that `optax.inject_hyperparams` turned into an array. Options that only
describe the parameters, such as `layer_axes` and `mesh_axes`, need no other option.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import optax

from jgrad._trees import checks
from jgrad._trees.explained import OPTIONS_OF
from jgrad._trees.forms import SMALLEST

# ---- options without effect --------------------------------------------------------------------

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


def _is_part(fraction: object) -> bool:
    return not (fraction is None or (checks.is_number(fraction) and fraction == 1))


_DECAY = Need(
    ("weight_decay", "adam_weight_decay"),
    "without `weight_decay`: pass both, even if the decay is 0",
)
_MOMENTUM = Need(("momentum",), "without `momentum`")

NEEDS: dict[str, tuple[Need, ...]] = {
    "weight_decay_mask": (_DECAY,),
    "weight_decay_rule": (_DECAY,),
    "nesterov": (_MOMENTUM, Need(("fraction",), "with `fraction`", lambda x: not _is_part(x))),
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


def check_needs(
    function: str, options_given: Mapping[str, object], defaults: Mapping[str, object]
) -> None:
    """An error for the first option that a call gives, and that has no effect.

    Args:
      function: what users call.
      options_given: the options of the call.
      defaults: of all options.
    """

    def is_met(need: Need, option: str) -> bool:
        if need.is_met is not None:
            return need.is_met(options_given.get(option, defaults[option]))
        if option in options_given:
            return options_given[option] is not None
        return bool(defaults[option])  # what a call leaves at 0 was forgotten

    for name, x in options_given.items():
        for need in NEEDS.get(name, ()):
            met = [is_met(need, option) for option in need.options if option in defaults]
            if met and not any(met) and _differs(x, defaults[name]):
                refuse_without_effect(function, name, x, defaults[name], need.words)


def refuse_without_effect(function: str, name: str, x: object, default: object, words: str) -> None:
    """An error for an option that has none."""
    came = repr(x) if isinstance(x, _SCALARS) else checks.describe(x)
    raise ValueError(f"{function}: `{name}`: {came}, expected {default!r} {words}.")


def _differs(x: object, default: object) -> bool:
    if isinstance(x, _SCALARS):
        return bool(x != default)
    return not (x is default or checks.is_array(x))


# ---- names that are not ours -------------------------------------------------------------------

_LIKENESS = 0.8  # of a misspelt keyword, as `difflib` measures it
_LIKENESS_OF_BEGINNINGS = 0.6  # of the first words: `weightdecay` begins with one word more

# What optax, PyTorch and others call an option. A message only names options that the function has.
OPTIONS: dict[str, tuple[str, ...]] = {
    "lr": ("learning_rate",),
    "step_size": ("learning_rate",),
    "wd": ("weight_decay",),
    "weight_decay_rate": ("weight_decay",),
    "mask": ("weight_decay_mask", "leaves"),
    "b1": ("beta1",),
    "b2": ("beta2",),
    "b3": ("beta3",),
    "betas": ("beta1", "beta2", "beta3"),
    "beta": ("momentum", "beta1"),
    "eps": ("epsilon",),
    "mu_dtype": ("moment_dtype",),
    "dtype_momentum": ("moment_dtype",),
    "accumulator_dtype": ("moment_dtype",),
    "eta": ("trust_coefficient",),
    "ns_coeffs": ("coefficients",),
    "ns_coefficients": ("coefficients",),
    "adjust_lr_fn": ("scale",),
    "consistent_rms": ("scale",),
    "decoupled_weight_decay": ("weight_decay_rule",),
    "use_grad_mean": ("mean",),
    "avg_fn": ("decay",),
    "multi_avg_fn": ("decay",),
    "weight_dimension_numbers": ("matrices", "output_axes"),
    "muon_weight_dimension_numbers": ("matrices", "output_axes"),
    "max_grad_norm": ("max_norm",),
    "min_dim_size_to_factor": ("min_side",),
    "multiply_by_parameter_scale": ("scale_by_parameter",),
    "clipping_threshold": ("clip_threshold",),
    "d": ("clip_threshold",),
    "decay_rate": ("beta2_decay",),
    "precondition_frequency": ("every",),
    "max_precond_dim": ("max_side",),
    "max_precondition_dim": ("max_side",),
    "ef_decay": ("error_decay",),
    "opt": ("tx",),
    "inner": ("tx",),
    "optimizer": ("tx",),
    "base_optimizer": ("tx",),
    "every_k_schedule": ("every",),
    "init_scale": ("loss_scale",),
    "weight_lr_power": ("weight_power",),
    "axis_name": ("mesh_axes",),
    "old_momentum": ("momentum",),  # up to 1.1, as the next two
    "like_momentum": ("momentum",),
    "momentum_decay": ("momentum",),
    "norm_axes": ("mesh_axes",),  # up to 0.6, as the next three
    "cut_over": ("shard_over",),
    "share_over": ("shard_over",),
    "beta2": ("normuon_beta", "adam_beta2"),
}

_METHODS = "gradient_descent adam adan lion lars lamb adafactor muon soap"
_OPTAX = "`optax.{0}({1}=...)`, which works beside jgrad"
_CONTRIB = "`optax.contrib.{0}({1}=...)`, which works beside jgrad"
_WIDE = "nothing: it is float32, or wider where a parameter is"
# Our functions, options of optax and PyTorch that they lack, and what to use instead.
_LACKING = (
    ("adam scale_by_adam", "nesterov eps_root", _OPTAX),
    ("adam", "amsgrad", "`optax.amsgrad`, which works beside jgrad"),
    ("lamb adan scale_by_adan", "eps_root", _OPTAX),
    ("adafactor", "decay_offset", _OPTAX),
    ("adafactor", "beta2", "`beta2_decay` and `beta2_cap` in `{0}(...)`, which say how it rises"),
    ("adafactor", "factored", "a `min_side` larger than each side"),
    ("muon scale_by_muon", "adaptive preconditioning", _CONTRIB),
    ("muon", "adam_eps_root", _CONTRIB),
    ("muon scale_by_muon", "ns_steps", "`coefficients`, with a triple for each step"),
    ("scale_by_lion", "mode smooth_beta", _OPTAX),
    ("scale_by_trust_ratio", "min_norm trust_coefficient eps", _OPTAX),
    ("gradient_descent", "dampening", "`learning_rate` times 1 - {1}, the first gradient over it"),
    (_METHODS, "maximize", "`optax.chain(optax.scale(-1.0), {0}(...))`"),
    (_METHODS, "params", "them in `init`: `{0}(...).init(params)`"),
    (_METHODS, "foreach fused capturable", "nothing: `jax.jit` compiles the whole step"),
    (_METHODS, "differentiable", "nothing: JAX differentiates updates"),
    ("clip_by_global_norm", "foreach", "nothing: `jax.jit` compiles the whole step"),
    ("clip_by_global_norm", "norm_type", "nothing: the norm is the square root of a sum"),
    ("clip_by_global_norm", "error_if_nonfinite", "`skip_nonfinite` around the chain"),
    ("accumulate", "should_skip_update_fn", "`update(..., finite=flag)`"),
    ("accumulate average_params", "accumulator_dtype", _WIDE),
    ("schedule_free", "state_dtype", _WIDE),
    ("schedule_free", "b1", "`beta`"),
    ("pack_small", "small_apart", "nothing: leaves too small for 8 bits are always apart"),
    ("skip_nonfinite", "max_consecutive_errors", "nothing: all such steps are skipped"),
    ("skip_nonfinite", "growth_factor", "nothing: it is 2"),
    ("skip_nonfinite", "backoff_factor", "nothing: it is 0.5"),
)
LACKING = {
    (function, option): instead.format(function, option)
    for functions, options, instead in _LACKING
    for function in functions.split()
    for option in options.split()
}

# Other libraries' names of functions, in lower case without underscores: ours, and what to add.
FUNCTIONS = {
    "adamw": ("adam", " with `weight_decay=`"),
    "sgd": ("gradient_descent", ""),
    "clip": ("clip_by_global_norm", ", or `optax.clip` for each element"),
    "clipgradnorm": ("clip_by_global_norm", ""),
    "multisteps": ("accumulate", ""),
    "applyevery": ("accumulate", ""),
    "applyiffinite": ("skip_nonfinite", ""),
    "gradscaler": ("skip_nonfinite", " with `loss_scale=`"),
    "flatten": ("pack_small", ""),
    "averagedmodel": ("average_params", ""),
    "schedulefreeadamw": ("schedule_free", " around `jgrad.adam`"),
    "schedulefreesgd": ("schedule_free", " around `jgrad.gradient_descent`"),
}
# What jgrad itself had up to 1.1.
GONE = {
    "quantized": "`jgrad.carry_over(state, like=...)`",
    "unquantized": "`jgrad.carry_over(state, like=...)`, whose `like` has shapes in float32",
    "muon_update": "`jgrad.muon`, its method",
    "ema": "`average_params(tx, decay)`, which wraps the optimizer; `optax.ema` averages updates",
}
# What functions took up to 1.1.
GONE_OPTIONS = {
    ("pack", "matrices"): (
        "`max_size`, which leaves matrices unpacked, and `shard_over` of `muon`, which deals them "
        "out under `jit`; `unpack` a state with packed matrices in jgrad 1.1"
    )
}

# The keywords that some transformation takes in `update`.
KEYWORDS = (
    *("learning_rate", "weight_decay", "momentum", "beta1", "beta2", "beta3", "epsilon"),
    *("adam_learning_rate", "adam_weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("error_decay", "shampoo_beta", "hyperball_learning_rate", "emit", "finite", "weight", "loss"),
)
_OF_SEVERAL_WORDS = tuple(x for x in KEYWORDS if "_" in x)
_LOSS = "value_fn"  # a loss that a line search calls, with keywords of its own
_PREFIXES = ("adam", "hyperball", "muon")  # of options, which nobody else's have


# ---- options -----------------------------------------------------------------------------------


@functools.cache
def meant(name: str, known: tuple[str, ...]) -> str:
    """Which of the known names is meant by another one, in words; "" for none.

    `b1` is `beta1`, or `adam_beta1` where that alone is known, `adam_b1` is `adam_beta1`, and
    `betas` are both.

    Args:
      name: it is not known.
      known: other names.
    """
    prefix, link, last = name.rpartition("_")
    ways = [name, *OPTIONS.get(name, ()), *(f"{prefix}{link}{x}" for x in OPTIONS.get(last, ()))]
    if same := [x for x in known if x in ways]:
        return _in_words(same, "and")
    return _in_words(_ending(known, ways), "or")


def _ending(known: Iterable[str], ways: Iterable[str]) -> list[str]:
    return [x for x in known if any(x.endswith(f"_{way}") for way in ways)]


def _in_words(names: Iterable[str], link: str) -> str:
    return f" {link} ".join(map("`{}`".format, names))


def refuse_arguments(
    function: str, positions: int, keywords: Iterable[str], parameters: Sequence[inspect.Parameter]
) -> None:
    """An error for arguments that a function does not have, where it is known what is meant.

    Args:
      function: what users call.
      positions: how many arguments came by position.
      keywords: the others that came.
      parameters: of the function.
    """
    named = [x for x in parameters if x.kind is x.KEYWORD_ONLY]
    most, known = len(parameters) - len(named), tuple(x.name for x in parameters)
    if positions > most and named:
        first = min(named, key=lambda x: x.default is not x.empty).name  # required, if one is
        came = f"{positions} argument{'s' * (positions > 1)} by position"
        expected = f"at most {most}" if most else "none"
        rest = ", and all others by name too" if len(named) > 1 else ""
        raise TypeError(f"{function}: {came}, expected {expected}; write `{first}=`{rest}.")
    for keyword in [x for x in keywords if x not in known]:
        if gone := GONE_OPTIONS.get((function, keyword)):
            raise TypeError(f"{function}: `{keyword}`: gone in 2.0, expected {gone}.")
        if other := meant(keyword, known) or LACKING.get((function, keyword)):
            raise TypeError(f"{function}: `{keyword}`: an unknown argument, expected {other}.")


# ---- keywords of `update` ----------------------------------------------------------------------


def check_unasked(function: str, name: str, asked: tuple[str, ...]) -> None:
    """No keyword of a call that nothing asked for is a near miss of one, or of the factory's."""
    refuse_option(function, name)
    refuse_keyword(function, name, meant_keyword(name, asked))


def check_keywords(
    function: str, keywords: Collection[str], taken: tuple[str, ...], *, checks_options: bool
) -> None:
    """No keyword of a call is an option of the factory, or a misspelt keyword of ours.

    Others are for the rest of a chain. `taken` are those that `update` reads; `checks_options` is
    for an `update` that checks options itself.
    """
    taken = tuple(x for x in KEYWORDS if x in taken)
    for name in keywords:
        is_checked = checks_options and name in OPTIONS_OF.get(function, ())
        if name not in KEYWORDS and not is_checked:
            check_unasked(function, name, taken)
            if name == "weights" and _LOSS not in keywords:  # which losses have, and nobody else
                refuse_keyword(function, name, "`weight`")


@functools.cache
def meant_keyword(name: str, taken: tuple[str, ...]) -> str:
    """Which keyword is meant by another one, in words; "" for none.

    It may be an argument of somebody's loss, which optax's line searches hand on, or a number of
    another transformation of a chain. So what others call an option counts where it is taken, or
    with a prefix that is ours alone; and what is misspelt begins as ours, of which a name of
    several words counts everywhere, and a single word where it is taken.

    Args:
      name: it is not taken.
      taken: the keywords that the transformation takes.
    """
    if name in KEYWORDS or name in OPTIONS:
        ways = [name, *OPTIONS.get(name, ())]
        same = [x for x in taken if x in ways]
        return _in_words(same, "and") or _in_words(_ending(taken, ways), "or")
    known = (*taken, *(x for x in _OF_SEVERAL_WORDS if x not in taken))
    prefix, _, rest = name.partition("_")
    if rest and prefix in _PREFIXES:
        begin = "" if prefix == "muon" else f"{prefix}_"
        ways = [f"{begin}{x}" for x in (rest, *OPTIONS.get(rest, ()))]
        if same := [x for x in known if x in ways]:
            return _in_words(same, "and")
    alike = [x for x in known if _begin_alike(name, x)]
    return _in_words(difflib.get_close_matches(name, alike, 1, _LIKENESS), "or")


def _begin_alike(name: str, ours: str) -> bool:
    """`height` is no `weight`, nor is `actor_learning_rate` one of Adam's."""
    if "_" not in ours:
        return name[:1] == ours[0]
    first = difflib.SequenceMatcher(None, name.partition("_")[0], ours.partition("_")[0])
    return first.ratio() > _LIKENESS_OF_BEGINNINGS


def refuse_option(function: str, name: str) -> None:
    """An error for an option of a factory that it does not take in a call, or lacks itself."""
    if name in KEYWORDS:
        refuse_keyword(function, name, LACKING.get((function, name), ""))
    if name in OPTIONS_OF.get(function, ()):
        expected = f"in `{function}(...)`, since it is the same in every call"
        raise TypeError(f"{function}: `{name}`: given to `update`, expected {expected}.")


def refuse_keyword(function: str, name: str, expected: str) -> None:
    """An error where something is expected in the place of a keyword."""
    if expected:
        problem = f"`update` got the keyword `{name}`, expected {expected}"
        raise TypeError(f"{function}: {problem}.")


# ---- functions ---------------------------------------------------------------------------------


def explained_absence(name: str, public: Sequence[str]) -> str:
    """What to say of a name that the package does not have."""
    if name in GONE:
        return f"jgrad.{name}: gone in 2.0, expected {GONE[name]}."
    expected = "" if name.startswith("_") else _instead(name, public)
    if not expected:
        return f"module 'jgrad' has no attribute {name!r}"
    return f"jgrad.{name}: not a name of jgrad, expected {expected}."


def _instead(name: str, public: Sequence[str]) -> str:
    plain = _plain(name)
    if plain in FUNCTIONS:
        ours, rest = FUNCTIONS[plain]
        return f"`jgrad.{ours}`{rest}"
    for ours in public:
        if _plain(ours) == plain:
            return f"`jgrad.{ours}`"
    for module, prefix in (optax, "optax"), (optax.contrib, "optax.contrib"):
        for other, x in vars(module).items():
            if _plain(other) == plain and callable(x):
                return f"`{prefix}.{other}`, which works beside jgrad"
    return ""


def _plain(name: str) -> str:
    return name.lower().replace("_", "")
