"""Whether a function is elementwise, and whether it can run inside a kernel."""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jgrad._arithmetic.leafwise import Function
from jgrad._arithmetic.programs import ClosedProgram, Equation, Program
from jgrad._trees.checks import in_short
from jgrad._trees.unpromised import Unpromised

core = Unpromised("functions of one leaf")

_REASON = "since the function may see part of a leaf, or several leaves"
_LEAF = jax.ShapeDtypeStruct((2, 3), jnp.float32)  # of what is traced when a function is given

# Elementwise JAX primitives, which a function may apply to a leaf.
_ELEMENTWISE = {
    *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh"),
    *("bessel_i0e", "bessel_i1e", "bitcast_convert_type", "broadcast_in_dim", "cbrt", "ceil"),
    *("clamp", "clz", "complex", "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh"),
    *("digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor"),
    *("ge", "gt", "igamma", "igamma_grad_a", "igammac", "imag", "integer_pow", "is_finite", "le"),
    *("le_to", "lgamma", "log", "log1p", "log2", "logistic", "lt", "lt_to", "max", "min", "mul"),
    *("mulhi", "ne", "neg", "nextafter", "not", "one_minus_square", "optimization_barrier", "or"),
    *("polygamma", "polynomial", "population_count", "pow", "pvary", "real", "reduce_precision"),
    *("regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "shift_left"),
    *("shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square"),
    *("stop_gradient", "sub", "tan", "tanh", "xor", "zeta"),
}
# Primitives that call the programs inside them.
_CALLS = {
    *("checkpoint", "closed_call", "cond", "custom_jvp_call", "custom_vjp_call"),
    *("jit", "remat", "remat2", "while"),
}
# Primitives that kernels support, on scalars and tiles, in every version of JAX.
_IN_KERNELS = {
    *("abs", "add", "and", "broadcast_in_dim", "clamp", "convert_element_type", "div", "eq", "ge"),
    *("gt", "integer_pow", "jit", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or"),
    *("select_n", "square", "sub"),
}
_IN_KERNELS_OF_TILES = _IN_KERNELS | {"exp", "log", "rsqrt", "sqrt", "tanh"}


def no_kernel(name: str, moments: tuple[str, ...], function: Function, numbers: int) -> str:
    """Why a TPU cannot have it as a kernel; "" if it can. An error where it mixes elements."""
    traced, results = _traced(function, _LEAF, 1 + len(moments), numbers)
    came = [shown(x) for x in results]
    if came != [shown(_LEAF)] * (1 + len(moments)):
        expected = " and ".join(["the direction", *(f"the new `{x}`" for x in moments)])
        came_of = f"{', '.join(came) or None} of a leaf of {shown(_LEAF)}"
        raise TypeError(f"{name}: returned {came_of}, expected {expected}, each like the leaf.")
    absent = set()
    has_float16 = False
    for equation in inner_equations(traced.jaxpr.eqns):
        primitive = equation.primitive.name
        if mixes(equation, lambda shape: bool(shape == _LEAF.shape)):
            problem = f"`{primitive}` mixes elements, expected elementwise operations"
            raise ValueError(f"{name}: {problem}, {_REASON}.")
        is_of_tile = any(x.aval.shape == _LEAF.shape for x in equation.outvars)
        if primitive not in (_IN_KERNELS_OF_TILES if is_of_tile else _IN_KERNELS):
            absent.add(primitive)
        has_float16 |= any(x.aval.dtype == jnp.float16 for x in equation.outvars)
    flat = jax.ShapeDtypeStruct((5,), jnp.float32)
    if _operations(traced) != _operations(_traced(function, flat, 1 + len(moments), numbers)[0]):
        problem = "operations that depend on the shape of the leaf, expected the same for all"
        raise ValueError(f"{name}: {problem}, {_REASON}.")
    if traced.consts:
        return "no kernel has arrays from outside of the function"
    if has_float16:
        return "a kernel has no arrays of float16"
    return f"no kernel has `{min(absent)}`" if absent else ""


def check_zero(
    name: str, moments: tuple[str, ...], function: Function, numbers: list[float]
) -> None:
    """An error where it returns something else than zeros for zeros, as that of padding is.

    If a function uses a traced number from outside, its results are unknown.
    """
    with jax.ensure_compile_time_eval(), jax.debug_nans(False), jax.debug_infs(False):
        zeros = [jnp.zeros(_LEAF.shape, _LEAF.dtype)] * (1 + len(moments))
        results = function(*zeros, *(jnp.asarray(x, jnp.float32) for x in numbers))
        if any(isinstance(x, jax.core.Tracer) for x in results):
            return
        largest = [float(jnp.max(abs(x))) for x in results]
    for what, x in zip(
        ("the direction", *(f"the new `{x}`" for x in moments)), largest, strict=True
    ):
        if x != 0:
            where = "where gradient and moments are zero"
            expected = "zeros there, since the padding of buffers is zero and has to stay zero"
            remedy = "add an epsilon to the divisor to avoid 0 / 0" if x != x else ""
            problem = f"{x:g} for {what} {where}, expected {expected}"
            raise ValueError(f"{name}: returned {'; '.join(filter(None, (problem, remedy)))}.")


def _traced(
    function: Function, leaf: jax.ShapeDtypeStruct, leaves: int, numbers: int
) -> tuple[ClosedProgram, tuple[jax.ShapeDtypeStruct, ...]]:
    """The program of a function of leaves and numbers, and the types of its results."""
    number = jax.ShapeDtypeStruct((), jnp.float32)
    trace: Any = jax.make_jaxpr(function, return_shape=True)
    return trace(*[leaf] * leaves, *[number] * numbers)


def shown(x: object) -> str:
    """The type of an array, or of what should be one."""
    return in_short(x) if hasattr(x, "dtype") else type(x).__name__


def mixes(equation: Equation, is_leaf: Callable[[Sequence[int]], bool]) -> bool:
    """Whether an operation is none of the elements of a leaf, each by itself, or of numbers.

    Args:
      equation: one of a jaxpr; of one with programs inside, what it does beside these.
      is_leaf: whether an array of a shape may be a leaf, or one of its size.
    """
    primitive, arrays = equation.primitive.name, (*equation.invars, *equation.outvars)
    if primitive in _CALLS:
        return False
    if primitive == "scan":  # a loop may carry a leaf, but not iterate over its rows
        (body,) = programs(equation)
        pairs = zip(arrays, (*body.invars, *body.outvars), strict=True)
        cut = [x.aval.shape for x, y in pairs if x.aval.shape != y.aval.shape]
        return any(map(is_leaf, cut))
    shapes = {x.aval.shape for x in arrays}
    is_elementwise = primitive in _ELEMENTWISE and len(shapes - {()}) == 1
    return any(map(is_leaf, shapes)) and not is_elementwise


def _operations(traced: ClosedProgram) -> list[tuple[Hashable, ...]]:
    return list(map(operation, inner_equations(traced.jaxpr.eqns)))


def operation(equation: Equation) -> tuple[Hashable, ...]:
    """What it is, with the numbers in it."""
    numbers = (repr(x.val) for x in equation.invars if isinstance(x, core.Literal))
    return (equation.primitive.name, *numbers)


def inner_equations(
    equations: Sequence[Equation], known: Collection[str] = ()
) -> Iterator[Equation]:
    """Those of a program, each behind those of the programs in it; none of known primitives."""
    for equation in equations:
        if equation.primitive.name not in known:
            for inner in programs(equation):
                yield from inner_equations(inner.eqns, known)
            yield equation


def programs(equation: Equation) -> list[Program]:
    """Those in an operation."""
    parameters = jax.tree.leaves(list(equation.params.values()))
    inner: Iterator[Any] = (getattr(x, "jaxpr", x) for x in parameters)  # of a closed program, that
    return [x for x in inner if hasattr(x, "eqns")]
