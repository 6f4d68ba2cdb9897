"""An optimizer from a function of one leaf that a user wrote."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr  # may change, checked in JAX 0.7 to 0.12

from jgrad._arithmetic import leafwise, numerics
from jgrad._arithmetic.numerics import BetaForms
from jgrad._inputs.aligned import Role
from jgrad._inputs.factory import DECAY, FORM, Given, Options
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.leaf_functions import LeafFunction
from jgrad._inputs.moment import Step
from jgrad._inputs.transformation import Compute, transformation
from jgrad._optimizers.lion import lion
from jgrad._trees import checks, values
from jgrad._trees.other_names import explained

_NAME = "optimizer_of_leaf"
_MOMENTS = ("mw", "vw")
_STEP = "step"  # is no option
_SHARED: dict[str, Any] = {**DECAY, "mesh_axes": None, **FORM}  # options, as `lion` has them
_LEAF = jax.ShapeDtypeStruct((2, 3), jnp.float32)  # of what is traced when a function is given

# Names of other options, and of what `update` and its wrappers know.
_TAKEN = (*_SHARED, "learning_rate", "descent", "emit", "finite", "weight", "loss")
_TAKEN += ("commit", "notes", "undecayed", "then")

# Primitives that mix elements and keep the shape.
_MIXING = ("cum", "fft", "iota", "rev", "sort")
# Those that a kernel has, of scalars and of tiles, in each version of JAX and lowered anywhere.
_IN_KERNELS = {
    *("abs", "add", "and", "broadcast_in_dim", "clamp", "convert_element_type", "div", "eq", "ge"),
    *("gt", "integer_pow", "jit", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or"),
    *("pjit", "select_n", "square", "sub"),
}
_IN_KERNELS_OF_TILES = _IN_KERNELS | {"exp", "log", "rsqrt", "sqrt", "tanh"}


class Beta(NamedTuple):
    """What a function of one leaf is given for a number whose name begins with `beta`."""

    value: Any
    complement: Any
    correction: Any


def optimizer_of_leaf(
    function: Callable[..., Any], /, *, stays_finite: bool = False
) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """Makes an optimizer from a function of one leaf that you write; use it as a decorator.

        direction, mw', vw' = function(g, mw, vw)
        w' = w - learning_rate (direction + weight_decay w)

    The function has to be pure and elementwise, because it may be given a leaf, a buffer with many
    leaves, or a part of one. Where gradient and moments are zero it has to return zeros, because
    the padding of buffers is zero and stays so. It is given arrays of float32, or of float64 where
    the gradient or a moment is, in whatever form moments are stored.

    Args:
      function: `function(g, mw, vw, *, beta1=0.9, epsilon=1e-8, step)`, or as much of it as the
        method has. `mw` is a moment of the kind of the gradient `g`; `vw` is one of magnitudes,
        real and at least 0. What follows `*` are numbers with names of your own, which become
        options of the optimizer, in [0, inf), and which may be functions or trees, as in `lion`. A
        number whose name begins with `beta` is in [0, 1), and is given as `beta.value`,
        `beta.complement`, which is 1 - beta, and `beta.correction`, which is 1 - beta^step, each
        rounded by itself. `step` is the number of this update, counted from 1, and no option. The
        function returns the direction; with moments a tuple, of the direction and each new moment.
      stays_finite: True promises that the function makes no NaN of finite numbers, so that
        `skip_nonfinite` need not look at its results: that costs less, and a NaN would stay.

    Returns:
      A factory with the name of the function, `(learning_rate, *, ...)`: the options are these
      numbers, and `weight_decay`, `weight_decay_mask`, `weight_decay_rule`, `mesh_axes`,
      `moment_dtype` and `full_precision` as in `lion`. The state is `OptState(step, mw, vw)`.

    Raises:
      TypeError: other parameters or results, or numbers whose names are taken.
      ValueError: the function is not elementwise.

    Example:
      >>> @jgrad.optimizer_of_leaf
      ... def signum(g, mw, *, beta=0.9):
      ...     mw = beta.value * mw + g
      ...     return jnp.sign(mw), mw
      >>> tx = signum(1e-3, weight_decay=0.1, moment_dtype="8bit")
      >>> tx.init({"w": jnp.ones((16, 256))}).mw["w"].codes.dtype.name
      'int8'
    """
    values.boolean(_NAME, "stays_finite", stays_finite)
    name, moments, own = _read(function)
    is_beta = {x: x.startswith("beta") for x in own}
    forms = tuple(Beta(0, 0, 0) if is_beta[x] else 0 for x in own)
    arrays = 1 + len(moments)
    structure: Any = jax.tree.structure(forms)

    def results(*args: Any) -> tuple[Any, ...]:
        numbers = structure.unflatten(args[arrays:])
        found = function(*args[:arrays], **dict(zip(own, numbers, strict=True)))
        return found if isinstance(found, tuple) else (found,)

    no_kernel = _check(name, moments, results, structure.num_leaves)

    @leafwise.on_leaf(arrays=arrays)
    def rule(*args: jax.Array, index: int) -> Any:
        return results(*args)[index]

    def of_leaf(g: jax.Array, *rest: Any) -> jax.Array:
        *olds, numbers = rest
        args = g, *(moment.old for moment in olds), *jax.tree.leaves(numbers)
        for index, moment in enumerate(olds, start=1):
            moment.write(leafwise.fixed(rule, index=index), *args)
        direction: jax.Array = rule(*args, index=0)
        return direction

    method = LeafFunction(of_leaf, no_kernel)
    kinds = {x: Role.BETA if is_beta[x] else Role.NUMBER for x in own if x != _STEP}
    options = Options(learning_rate=Role.RATE, **kinds, **_SHARED)
    signature = _signature(function, kinds)

    def factory(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        try:
            bound = signature.bind_partial(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}: {error}.") from None
        bound.apply_defaults()
        if missing := [x for x in signature.parameters if x not in bound.arguments]:
            raise TypeError(
                f"{name}: `{missing[0]}`: missing, expected a value: it has no default."
            )
        given = options.check(name, bound.arguments)
        form = given.moments(mesh_axes=bound.arguments["mesh_axes"])
        compute = _compute(given, method, moments, own)
        has_mw, has_vw = (x in moments for x in _MOMENTS)
        return transformation(
            name, compute, mw=has_mw, vw=has_vw, moments=form, stays_finite=stays_finite
        )

    functools.update_wrapper(factory, function)
    factory.__signature__ = signature  # type: ignore[attr-defined]  # what `inspect` reads
    return explained(factory)


def _compute(
    given: Given, method: LeafFunction, moments: tuple[str, ...], own: tuple[str, ...]
) -> Compute:
    def compute(inputs: Inputs, step: Step) -> tuple[Any, ...]:
        n = given.read(inputs, step)
        setattr(n, _STEP, step.as_float)
        numbers = tuple(_number(getattr(n, x), step) for x in own)
        olds = (getattr(step, x) for x in moments)
        updates, *new = method.update(inputs, inputs.g, *olds, numbers, descent=n.descent)
        of_moments = dict(zip(moments, new, strict=True))
        return updates, *map(of_moments.get, _MOMENTS)

    return compute


def _number(x: Any, step: Step) -> Any:
    """As the function is given it."""
    if not isinstance(x, BetaForms):
        return x

    def correction(log: Any) -> Any:
        return None if log is None else numerics.once(numerics.one_minus_power(log, step.as_float))

    of_leaves = isinstance(x.log, list)
    corrections = [*map(correction, x.log)] if of_leaves else correction(x.log)
    return Beta(x.value, x.complement, corrections)


# ---- what a user's function is -----------------------------------------------------------------


def _read(function: Any) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Its name, its moments, and its numbers."""
    if not inspect.isfunction(function):
        came = checks.describe(function)
        raise TypeError(f"{_NAME}: `function`: {came}, expected a function of one leaf.")
    name, signature = function.__name__, inspect.signature(function)
    parameters = signature.parameters.values()
    numbers = tuple(x.name for x in parameters if x.kind is x.KEYWORD_ONLY)
    g, *moments = (*signature.parameters, "")[: len(parameters) - len(numbers)] or ("",)
    variadic = any(x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD) for x in parameters)
    if variadic or g != "g" or moments != [x for x in _MOMENTS if x in moments]:
        expected = "`g`, then `mw` and `vw` or what it has of them, then numbers behind `*`"
        raise TypeError(f"{_NAME}: the parameters of `{name}`: {signature}, expected {expected}.")
    for number in numbers:
        if number in _TAKEN:
            expected = "another name, since this one is taken"
            raise TypeError(f"{_NAME}: a number of `{name}`: `{number}`, expected {expected}.")
    return name, tuple(moments), numbers


def _signature(function: Callable[..., Any], numbers: Iterable[str]) -> inspect.Signature:
    """That of its factory: the learning rate, its numbers, and what all optimizers have."""
    own, others = (inspect.signature(x).parameters for x in (function, lion))
    shared = [x for name, x in others.items() if name in _SHARED]
    parameters = [others["learning_rate"], *(own[x] for x in numbers), *shared]
    return inspect.Signature(parameters, return_annotation=optax.GradientTransformationExtraArgs)


def _check(name: str, moments: tuple[str, ...], function: Callable[..., Any], numbers: int) -> str:
    """That it is elementwise, and why a TPU cannot have it as a kernel; "" if it can."""
    number = jax.ShapeDtypeStruct((), jnp.float32)
    leaves = [_LEAF] * (1 + len(moments))
    traced = jax.make_jaxpr(function)(*leaves, *[number] * numbers)
    came = [f"{x.dtype}{list(x.shape)}" for x in traced.out_avals]
    if came != ["float32[2, 3]"] * len(leaves):
        expected = " and ".join(["the direction", *(f"the new `{x}`" for x in moments)])
        came_of = f"{', '.join(came) or None} of a leaf of float32[2, 3]"
        raise TypeError(f"{name}: returned {came_of}, expected {expected}, each like the leaf.")
    absent = set()
    for equation in _equations(traced.jaxpr):
        primitive, shapes = equation.primitive.name, {x.aval.shape for x in equation.outvars}
        is_of_tile = shapes == {_LEAF.shape}
        mixes = not is_of_tile and any(x.aval.shape == _LEAF.shape for x in equation.invars)
        if mixes or primitive.startswith(_MIXING):
            expected = "elementwise operations, since it may see a part of a leaf, or several"
            raise ValueError(f"{name}: `{primitive}` mixes elements, expected {expected}.")
        if primitive not in (_IN_KERNELS_OF_TILES if is_of_tile else _IN_KERNELS):
            absent.add(primitive)
    return f"no kernel has `{min(absent)}`" if absent else ""


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Those of a program, each behind those of the programs in it."""
    for equation in jaxpr.eqns:
        for x in jax.tree.leaves(list(equation.params.values())):
            inner = x.jaxpr if isinstance(x, ClosedJaxpr) else x
            if isinstance(inner, Jaxpr):
                yield from _equations(inner)
        yield equation
