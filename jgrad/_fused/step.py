"""A step whose leaves in 8 bits are kernels where its program is lowered for a TPU.

Everywhere else, and for each leaf that no kernel can take, the program is the plain one. So one
traced step is right for every platform, and `jax.export` has each in one file.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jgrad._fused.planned import Form, Planned
from jgrad._quantized import regions
from jgrad._trees.blocks import Blocks
from jgrad._trees.trees import PyTree

T = TypeVar("T")

# Of collectives inside `shard_map`: no order is lost. A private name, checked in JAX 0.7 to 0.12.
_OF_AXES = "NamedAxisEffect"

_is_inside: ContextVar[bool] = ContextVar("is_inside", default=False)
_forced: ContextVar[Form | None] = ContextVar("forced", default=None)


def call(f: Callable[..., PyTree], *args: PyTree, replaced: Callable[[PyTree], PyTree]) -> PyTree:
    """`f(*args)`, with kernels on a TPU for leaves in 8 bits.

    Args:
      f: a pure function.
      args: its arguments.
      replaced: a function from what `f` returns to a tuple like `args`: the results that may be
        written where these arguments were, and None for others.
    """
    flat, structure = jax.tree.flatten(args)
    traced_args = [i for i, x in enumerate(flat) if isinstance(x, jax.core.Tracer)]
    if _is_inside.get() or not traced_args or not _has_codes(args):
        return f(*args)  # eagerly there is no program

    found: list[Any] = []  # structure and leaves of the results, some of which are no arrays

    def on_tracers(*tracers: Any) -> list[Any]:
        leaves = list(flat)
        for i, x in zip(traced_args, tracers, strict=True):
            leaves[i] = x
        with _set(_is_inside, True):  # what a step calls is a part of it
            results = f(*jax.tree.unflatten(structure, leaves))
        found[:] = [jax.tree.structure(results), jax.tree.leaves(results)]
        return [x for x in found[1] if isinstance(x, jax.Array)]

    arguments = [flat[i] for i in traced_args]
    traced = jax.make_jaxpr(on_tracers)(*arguments)
    if any(type(effect).__name__ != _OF_AXES for effect in traced.effects):
        return f(*args)
    of_results, leaves = found
    is_array = [isinstance(x, jax.Array) for x in leaves]
    closed_over = [x for x in traced.consts if isinstance(x, jax.core.Tracer)]
    if closed_over:
        traced = _with_arguments(traced, arguments)
    positions = {i: len(closed_over) + n for n, i in enumerate(traced_args)}
    results = _step.bind(
        *closed_over,
        *arguments,
        jaxpr=traced,
        replaced=_replaced(args, of_results, is_array, replaced, positions),
        forced=_forced.get(),
    )
    arrays = iter(results)
    whole = [next(arrays) if is_one else x for x, is_one in zip(leaves, is_array, strict=True)]
    return jax.tree.unflatten(of_results, whole)


@contextlib.contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def inside() -> contextlib.AbstractContextManager[None]:
    """What is called here makes no operation of its own, as if it were a part of a larger step."""
    return _set(_is_inside, True)


def forced(form: Form) -> contextlib.AbstractContextManager[None]:
    """One form on every platform, for tests; kernels one operation after the other."""
    return _set(_forced, form)


def _has_codes(args: PyTree) -> bool:
    leaves = jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, Blocks))
    return any(isinstance(x, Blocks) and regions.is_possible(x) for x in leaves)


def _with_arguments(traced: ClosedJaxpr, arguments: Sequence[Any]) -> ClosedJaxpr:
    """The function with what it closes over as its first arguments."""
    is_tracer = [isinstance(x, jax.core.Tracer) for x in traced.consts]

    def f(*args: Any) -> list[Any]:
        rest = iter(args)
        pairs = zip(traced.consts, is_tracer, strict=True)
        consts = [next(rest) if is_one else x for x, is_one in pairs]
        return jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, consts))(*rest)

    closed_over = [x for x, is_one in zip(traced.consts, is_tracer, strict=True) if is_one]
    return jax.make_jaxpr(f)(*closed_over, *arguments)


def _replaced(
    args: PyTree,
    of_results: Any,
    is_array: Sequence[bool],
    replaced: Callable[[PyTree], PyTree],
    positions: dict[int, int],
) -> tuple[int | None, ...]:
    """For each array among the results the position of the argument that it may replace."""
    numbers = itertools.count()
    results = [next(numbers) if is_one else -1 for is_one in is_array]
    pairs = zip(args, replaced(jax.tree.unflatten(of_results, results)), strict=True)
    found: dict[int, int | None] = {}
    start = 0
    for arg, new in pairs:
        before: Any = jax.tree.structure(arg)
        if before == jax.tree.structure(new):
            found |= {x: positions.get(start + i) for i, x in enumerate(jax.tree.leaves(new))}
        start += before.num_leaves
    return tuple(map(found.get, range(sum(is_array))))


# ---- the step as one operation of JAX ----------------------------------------------------------

# `jax.extend` and `jax.interpreters` may change with any release: checked in JAX 0.7 to 0.12.

_step = Primitive("jgrad_step")
_step.multiple_results = True


def _plain(*args: Any, jaxpr: ClosedJaxpr, **_: Any) -> list[Any]:
    return jaxpr_as_fun(jaxpr)(*args)


def _run(*args: Any, **params: Any) -> list[Any]:
    return jax.jit(functools.partial(_step.bind, **params))(*args)


def _types(*_: Any, jaxpr: ClosedJaxpr, **__: Any) -> list[Any]:
    return list(jaxpr.out_avals)


def _batched(args: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    results = jax.vmap(functools.partial(_plain, **params), in_axes=tuple(axes))(*args)
    return results, [0] * len(results)


def _differentiated(args: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    slopes = map(ad.instantiate_zeros, tangents)
    return jax.jvp(functools.partial(_plain, **params), tuple(args), tuple(slopes))


_step.def_impl(_run)
_step.def_abstract_eval(_types)
batching.primitive_batchers[_step] = _batched
ad.primitive_jvps[_step] = _differentiated


def _lowered(
    context: Any,
    *args: Any,
    by_default: Form | None,
    jaxpr: ClosedJaxpr,
    replaced: tuple[int | None, ...],
    forced: Form | None,
) -> Any:
    form = forced or by_default
    if form is None:
        return mlir.lower_fun(_plain, multiple_results=True)(context, *args, jaxpr=jaxpr)
    is_local = _is_on_one_device(context.module_context.axis_context)

    def run(*args: Any) -> list[Any]:
        planned = Planned.of(jaxpr, replaced, form, is_local=is_local)
        return planned.run(args, interpret=forced is not None)

    return mlir.lower_fun(run, multiple_results=True)(context, *args)


mlir.register_lowering(_step, functools.partial(_lowered, by_default=None))
_ON_PLATFORMS: dict[str, Form] = {"tpu": "kernel", "cuda": "two passes", "rocm": "two passes"}
for _platform, _form in _ON_PLATFORMS.items():
    mlir.register_lowering(_step, functools.partial(_lowered, by_default=_form), _platform)


def _is_on_one_device(context: Any) -> bool:
    """Whether a program is for one device, or is what each device does by itself."""
    # What a lowering knows of its devices is private, checked in JAX 0.7 to 0.12.
    manual = getattr(context, "manual_axes", None)
    if manual is not None:
        return set(manual) >= {name for name, n in context.mesh.shape.items() if n > 1}
    return bool(getattr(context, "num_devices", 1) == 1)
