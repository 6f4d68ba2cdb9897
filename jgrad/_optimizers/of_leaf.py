"""Optimizers from users' own functions of one leaf."""

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, overload

import jax
import jax.numpy as jnp

from jgrad._arithmetic import elementwise, leafwise, numerics
from jgrad._arithmetic.numerics import BetaForms
from jgrad._inputs import kinds
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.leaf_functions import LeafFunction
from jgrad._inputs.moment import Step
from jgrad._inputs.transformation import Compute, MomentOptions, OptState, transformation
from jgrad._optimizers.lion import lion
from jgrad._trees import checks
from jgrad._trees.explained import Transformation, explained
from jgrad._trees.known_names import refuse_without_effect
from jgrad._trees.protocols import FIRST, MomentField, PyTree, state_of
from jgrad._trees.trees import Structure

_NAME = "optimizer_of_leaf"
_FIRST, _SECOND = "mw", "vw"
_STEP, _BETA = "step", "beta"  # the first is no option
_NO_MOMENTS = (_STEP, "count", "index")  # a field, and what tuples have
# Options, as `lion` has them.
_DECAY = ("weight_decay", "weight_decay_mask", "weight_decay_rule")
_FORM = {"dtype": "moment_dtype", "full_precision": "full_precision", "mesh_axes": "mesh_axes"}

# Names of other options, and of what `update` knows.
_TAKEN: tuple[str, ...] = (
    *_DECAY,
    *_FORM.values(),
    "learning_rate",
    "descent",
    "emit",
    "finite",
    "weight",
    "loss",
)
_TAKEN += ("updates", "state", "params", "self")
_TAKEN += ("function", "read", "value", "grad", "value_fn")  # the last three are optax's


class _Forms(NamedTuple):
    value: Any
    complement: Any
    correction: Any


class Beta(_Forms):
    """What a function of one leaf gets for a number whose name begins with `beta`."""

    __slots__ = ()

    def _is_no_number(self, *others: Any) -> Any:
        expected = "`.value`, `.complement` or `.correction` of it"
        raise TypeError(f"{_NAME}: a number named `beta...` in arithmetic, expected {expected}.")

    # Those of a tuple would repeat it, or not say what is wrong.
    __add__ = __mul__ = __rmul__ = _is_no_number
    __radd__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _is_no_number


class LeafFactory(Protocol):
    """What `optimizer_of_leaf` makes of a function: a factory, and the type of its states."""

    State: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Transformation: ...


@overload
def optimizer_of_leaf(
    function: Callable[..., PyTree],
    /,
    *,
    magnitudes: tuple[str, ...] = (),
    stays_finite: bool = False,
) -> LeafFactory: ...


@overload
def optimizer_of_leaf(
    *, magnitudes: tuple[str, ...] = (), stays_finite: bool = False
) -> Callable[[Callable[..., PyTree]], LeafFactory]: ...


def optimizer_of_leaf(
    function: Any = None, /, *, magnitudes: tuple[str, ...] = (), stays_finite: bool = False
) -> Any:
    """Turns a function of one leaf into an optimizer; use it as a decorator.

        direction, mw', vw', ... = function(g, mw, vw, ...)
        w' = w - learning_rate (direction + weight_decay w)

    Your function must be pure and elementwise, because it may be called on a whole leaf, on a part
    of one, or on a buffer that holds many leaves. Where gradient and moments are zero, it must
    return zeros, because buffers are padded with zeros that have to stay zero. It always receives
    float32 arrays, or float64 if the gradient or a moment is, even if the moments are stored in 8
    bits.

    Args:
      function: `function(g, mw, vw, *, beta1=0.9, epsilon=1e-8, step)`, or as many of these as your
        method needs. `mw` is a moment like the gradient `g`; `vw` is a moment of magnitudes, real
        and at least 0. Any other name after `g` is a further moment like the gradient, unless
        `magnitudes` has it. After `*` come numbers with names of your choice. They become options
        of the optimizer, in [0, inf), which accept schedules or trees, as in `lion`. A number whose
        name begins with `beta` is in [0, 1). It comes with the attributes `value`, `complement`,
        which is 1 - beta, and `correction`, which is 1 - beta^step, each rounded separately. `step`
        is not an option but the number of this update, counting from 1. The function returns the
        direction or, if it has moments, a tuple of the direction and each new moment.
      magnitudes: names of further moments that are of magnitudes, as `vw` is. They are stored as
        real numbers, and in 8 bits without a sign.
      stays_finite: has no effect any more: `skip_nonfinite` checks results of any transformation
        only if you ask for it by `check_results=True`.

    Returns:
      A factory `(learning_rate, *, ...)` with the name of the function. Its options are your
      numbers, and `weight_decay`, `weight_decay_mask`, `weight_decay_rule`, `mesh_axes`,
      `moment_dtype` and `full_precision` as in `lion`. The state is `OptState(step, mw, vw)`, or
      with further moments a `NamedTuple` of `step` and the moments of the function, in their order.
      The attribute `State` of the factory is this type. It can be pickled if the function is
      decorated at the top of a module. Without a function, the result is a decorator.

    Raises:
      TypeError: the function has other parameters or results, or uses names that are taken;
        `magnitudes` has others than moments of the function.
      ValueError: the function is not elementwise, or depends on the shape of the leaf; from the
        factory, it does not return zeros for zeros.

    Example:
      >>> @jgrad.optimizer_of_leaf
      ... def signum(g, mw, *, beta=0.9):
      ...     mw = beta.value * mw + g
      ...     return jnp.sign(mw), mw
      >>> tx = signum(1e-3, weight_decay=0.1, moment_dtype="8bit")
      >>> tx.init({"w": jnp.ones((16, 256))}).mw["w"].codes.dtype.name
      'int8'
    """
    checks.boolean(_NAME, "stays_finite", stays_finite)
    if not (isinstance(magnitudes, tuple) and all(isinstance(x, str) for x in magnitudes)):
        expected = 'a tuple of names of moments, such as `("peak",)`'
        raise TypeError(f"{_NAME}: `magnitudes`: {magnitudes!r}, expected {expected}.")
    if function is None:
        return functools.partial(_factory_of, magnitudes=magnitudes)
    return _factory_of(function, magnitudes)


def _factory_of(
    function: Callable[..., PyTree], magnitudes: tuple[str, ...]
) -> Callable[..., Transformation]:
    name, moments, arguments = _read(function)
    kind = _state_type(function, moments, magnitudes)
    is_beta = {x: x.startswith(_BETA) for x in arguments}
    forms = tuple(Beta(0, 0, 0) if is_beta[x] else 0 for x in arguments)
    arrays = 1 + len(moments)
    structure: Structure = jax.tree.structure(forms)

    def results(*args: jax.Array) -> tuple[jax.Array, ...]:
        numbers = structure.unflatten(args[arrays:])
        returned = function(*args[:arrays], **dict(zip(arguments, numbers, strict=True)))
        return returned if isinstance(returned, tuple) else (returned,)

    no_kernel = elementwise.no_kernel(name, moments, results, structure.num_leaves)

    @leafwise.on_leaf(arrays=arrays)
    def rule(*args: jax.Array, index: int) -> jax.Array:
        result = results(*args)[index]
        if jnp.iscomplexobj(result) and not jnp.iscomplexobj(args[index]):
            expected = (
                f"the new `{moments[index - 1]}`, which is real where the gradient is complex"
            )
            raise TypeError(f"{name}: returned {elementwise.shown(result)}, expected {expected}.")
        return result

    rules = [functools.partial(rule, index=index) for index in range(arrays)]

    def leaf_rule(g: jax.Array, *rest: Any) -> jax.Array:
        *olds, numbers = rest
        args = g, *(moment.old for moment in olds), *jax.tree.leaves(numbers)
        for moment, rule_of_moment in zip(olds, rules[1:], strict=True):
            moment.write(rule_of_moment, *args)
        direction: jax.Array = rules[0](*args)
        return direction

    method = LeafFunction(leaf_rule, no_kernel)
    options = [x for x in arguments if x != _STEP]
    signature = _signature(function, options)

    def factory(*args: Any, **kwargs: Any) -> Transformation:
        try:
            bound = signature.bind_partial(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}: {error}.") from None
        bound.apply_defaults()
        if missing := [x for x in signature.parameters if x not in bound.arguments]:
            raise TypeError(
                f"{name}: `{missing[0]}`: missing, expected a value: it has no default."
            )
        values = bound.arguments
        descent = kinds.DescentOptions.of(values["learning_rate"], *[values[x] for x in _DECAY])
        numbers = {x: (kinds.Beta if is_beta[x] else kinds.Number)(x, values[x]) for x in options}
        form = MomentOptions(**{field: values[x] for field, x in _FORM.items()})
        descent.check(name)
        for number in numbers.values():
            number.check(name)
        if not moments and form.dtype is not None:
            refuse_without_effect(name, "moment_dtype", form.dtype, None, "without a moment")
        first = tuple(_at_first(values.get(x, 1.0), is_beta[x]) for x in arguments)
        elementwise.check_zero(name, moments, results, jax.tree.leaves(first))
        compute = _compute(descent, numbers, method, moments, arguments)
        return transformation(name, compute, has=moments, moments=form, state_type=kind)

    functools.update_wrapper(factory, function)
    factory.State = kind  # type: ignore[attr-defined]  # where a pickle finds it
    factory.__signature__ = signature  # type: ignore[attr-defined]  # what `inspect` reads
    return explained(factory)


def _compute(
    descent: kinds.DescentOptions,
    options: Mapping[str, kinds.Beta | kinds.Number],
    method: LeafFunction,
    moments: tuple[str, ...],
    arguments: tuple[str, ...],
) -> Compute:
    def compute(inputs: Inputs, step: Step) -> tuple[Any, ...]:
        descent_now = descent.read(inputs, step)
        known = {name: x.read(inputs, step) for name, x in options.items()}
        known[_STEP] = step.as_float
        numbers = tuple(_number(known[x], step) for x in arguments)
        olds = map(step.moments.__getitem__, moments)
        return method.update(inputs, inputs.g, *olds, numbers, descent=descent_now)

    return compute


def _number(x: Any, step: Step) -> Any:
    """As the function is given it."""
    if not isinstance(x, BetaForms):
        return x

    def correction(log: Any) -> Any:
        return None if log is None else numerics.once(numerics.one_minus_power(log, step.as_float))

    is_per_leaf = isinstance(x.log, list)
    corrections = [*map(correction, x.log)] if is_per_leaf else correction(x.log)
    return Beta(x.value, x.complement, corrections)


def _at_first(x: Any, is_beta: bool) -> Any:
    """In the first update; 0.5 for a number that is not known yet."""
    number = x if checks.is_number(x) else 0.5
    return Beta(number, 1.0 - number, 1.0 - number) if is_beta else number


# ---- what a user's function is -----------------------------------------------------------------


def _read(function: Any) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Its name, its moments, and its numbers."""
    if not inspect.isfunction(function):
        came = checks.describe(function)
        raise TypeError(f"{_NAME}: `function`: {came}, expected a function of one leaf.")
    name, signature = function.__name__, inspect.signature(function)
    parameters = signature.parameters.values()
    arrays = [x for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    numbers = tuple(x.name for x in parameters if x.kind is x.KEYWORD_ONLY)
    g, *moments = [x.name if x.default is x.empty else "" for x in arrays] or [""]
    if g != "g" or "" in moments or len(arrays) + len(numbers) != len(parameters):
        expected = "`g`, then its moments, such as `mw` and `vw`, then numbers behind `*`"
        raise TypeError(f"{_NAME}: the parameters of `{name}`: {signature}, expected {expected}.")
    for moment in moments:
        if moment in _NO_MOMENTS or moment.startswith((_BETA, "_")):
            expected = "another name; numbers stand behind `*`"
            raise TypeError(f"{_NAME}: a moment of `{name}`: `{moment}`, expected {expected}.")
    for number in numbers:
        if number in _TAKEN:
            expected = "another name, since this one is taken"
            raise TypeError(f"{_NAME}: a number of `{name}`: `{number}`, expected {expected}.")
    return name, tuple(moments), numbers


def _state_type(
    function: Callable[..., Any], moments: tuple[str, ...], magnitudes: tuple[str, ...]
) -> Any:
    """Of its optimizers. It can be pickled where the factory stands at the function's name."""
    choices = tuple(x for x in moments if x != _FIRST)
    if not {*magnitudes} <= {*choices}:
        whose = f"the moments of `{function.__name__}` other than `{_FIRST}`"
        expected = f"some of {choices!r}, {whose}"
        raise TypeError(f"{_NAME}: `magnitudes`: {magnitudes!r}, expected {expected}.")
    if {*moments} <= {_FIRST, _SECOND}:
        return OptState
    return _made_state_type(function.__module__, function.__qualname__, moments, magnitudes)


@functools.cache
def _made_state_type(
    module: str, name: str, moments: tuple[str, ...], magnitudes: tuple[str, ...]
) -> Any:
    """One for all functions of this name and these moments, such as those of a cell run again."""
    beside = ", ".join(moments)
    fields: dict[str, MomentField] = {
        x: MomentField(x == _SECOND or x in magnitudes, f"`{x}` of a method with {beside}")
        for x in moments
    }
    if _FIRST in fields:
        fields[_FIRST] = FIRST
    make: Any = collections.namedtuple  # mypy wants to know its fields
    kind = state_of("moments", step="step", **fields)(make("State", (_STEP, *moments)))
    last = name.rpartition(".")[2]
    kind.__doc__ = f"State of `{last}`: the number of completed updates, and moments."
    kind.__name__ = f"{last}.State"  # as messages call it
    kind.__module__, kind.__qualname__ = module, f"{name}.State"
    return kind


def _signature(function: Callable[..., Any], numbers: Iterable[str]) -> inspect.Signature:
    """That of its factory: the learning rate, its numbers, and what all optimizers have."""
    arguments, others = (inspect.signature(x).parameters for x in (function, lion))
    shared = [x for name, x in others.items() if name in (*_DECAY, *_FORM.values())]
    parameters = [others["learning_rate"], *(arguments[x] for x in numbers), *shared]
    return inspect.Signature(parameters, return_annotation=Transformation)
