"""The step of one 8-bit leaf as one JAX primitive, which each platform lowers in its own way.

The primitive holds a function of one leaf. On a TPU, this function becomes the body of a Pallas
kernel; on a GPU, it runs in two passes; anywhere else, it is called as it is. One traced program is
therefore right for every platform, and `jax.export` can store all of them in one file.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from jgrad._arithmetic.programs import ArrayType, ClosedProgram, Equation, Primitive
from jgrad._kernels import leaf_step
from jgrad._kernels.leaf_step import LeafStep, Lowering, moments_of
from jgrad._kernels.moment import CodesPass, ScalePass
from jgrad._quantized.blocks import Blocks
from jgrad._trees.protocols import PyTree
from jgrad._trees.shardings import Placement, barrier
from jgrad._trees.told import during
from jgrad._trees.unpromised import Unpromised

core = Unpromised("moments in 8 bits")

_forced: ContextVar[Lowering | None] = ContextVar("forced", default=None)


def run(
    function: Callable[..., tuple[jax.Array, ...]],
    args: PyTree,
    *,
    replaces: Sequence[jax.Array | None] = (),
    place: Placement | None = None,
    no_kernel: str = "",
) -> tuple[list[jax.Array], list[Blocks]]:
    """What a function of one leaf returns, and the new moments that it writes.

    Args:
      function: pure, elementwise in its arrays, and the same object in each call.
      args: its arguments, among which are moments in 8 bits, `in_rows`.
      replaces: for the last arrays that it returns, the one of `args` that may be overwritten with
        each; None for none.
      place: how the leaf is sharded, where types do not say it.
      no_kernel: why the function cannot be a kernel of a TPU; "" if it can.
    """
    leaves, structure = jax.tree.flatten(args)
    operands = list({id(x): x for x in leaves}.values())  # each is read once
    position = {id(x): i for i, x in enumerate(operands)}
    positions, moments = tuple(position[id(x)] for x in leaves), moments_of(args)
    replaced = tuple(None if x is None else position[id(x)] for x in replaces)
    step = LeafStep(function, structure, positions, replaced, place, no_kernel, None, ())
    traced = _traced.trace(*operands, step=step).jaxpr
    step = step._replace(traced=traced, used=(True,) * len(traced.out_avals))
    results = iter(_operation().bind(*operands, step=step))
    values = list(itertools.islice(results, len(traced.out_avals) - 2 * len(moments)))
    return values, [Blocks(next(results), next(results)) for _ in moments]


def forced(form: Lowering) -> AbstractContextManager[Lowering | None]:
    """One form on every platform, for tests; kernels one operation after the other."""
    return during(_forced, form)


# ---- the operation -----------------------------------------------------------------------------


@functools.cache
def _operation() -> Primitive:
    """Made when it is first needed, since JAX promises none of what it takes."""
    step = core.Primitive("jgrad_leaf_step")
    step.multiple_results = True
    step.def_impl(_run)
    step.def_abstract_eval(_types)
    core.primitive_batchers[step] = _batched
    core.primitive_jvps[step] = _differentiated
    core.dce_rules[step] = _without_unused
    core.register_lowering(step, functools.partial(_lowered, by_default=None))
    for platform, form in _ON_PLATFORMS.items():
        core.register_lowering(step, functools.partial(_lowered, by_default=form), platform)
    return step


def _plain(*operands: jax.Array, step: LeafStep) -> list[jax.Array]:
    return step.plain(*operands)


_traced = jax.jit(_plain, static_argnames="step")  # JAX keeps its trace


@functools.partial(jax.jit, static_argnames="traced")
def _as_traced(*operands: jax.Array, traced: ClosedProgram) -> list[jax.Array]:
    """The plain step, neither traced nor written again for each leaf that is lowered."""
    return list(core.eval_jaxpr(traced.jaxpr, traced.consts, *operands))


_is_disabled = operator.attrgetter("jax_disable_jit")  # which has a type since JAX 0.11


@functools.partial(jax.jit, static_argnames="step")
def _compiled(*operands: jax.Array, step: LeafStep) -> list[jax.Array]:
    return list(_operation().bind(*operands, step=step))


def _run(*operands: jax.Array, step: LeafStep) -> list[jax.Array]:
    if _is_disabled(jax.config):
        return step.plain(*operands)
    return _compiled(*operands, step=step)


def _types(*_: ArrayType, step: LeafStep) -> list[ArrayType]:
    return list(itertools.compress(step.types, step.used))


def _batched(
    operands: Sequence[jax.Array], axes: Sequence[int | None], *, step: LeafStep
) -> tuple[list[jax.Array], list[int]]:
    results = jax.vmap(step.plain, in_axes=tuple(axes))(*operands)
    return results, [0] * len(results)


def _differentiated(
    operands: Sequence[jax.Array], tangents: Sequence[jax.Array], *, step: LeafStep
) -> tuple[list[jax.Array], list[jax.Array]]:
    """That of the plain step. Operands without tangents are constants, also if they are codes."""
    moving = [i for i, slope in enumerate(tangents) if not isinstance(slope, core.Zero)]

    def moved(*xs: jax.Array) -> list[jax.Array]:
        replaced = dict(zip(moving, xs, strict=True))
        return step.plain(*(replaced.get(i, x) for i, x in enumerate(operands)))

    primals = tuple(operands[i] for i in moving)
    return jax.jvp(moved, primals, tuple(tangents[i] for i in moving))


def _without_unused(used: Sequence[bool], *others: Any) -> tuple[list[bool], Equation | None]:
    """Unused results are not computed, and no kernel writes them."""
    equation = others[-1]  # behind which inputs are live, since JAX 0.12
    if not any(used):
        return [False] * len(equation.invars), None
    step = equation.params["step"]
    still = iter(used)
    step = step._replace(used=tuple(is_used and next(still) for is_used in step.used))
    results = [x for x, is_used in zip(equation.outvars, used, strict=True) if is_used]
    return [True] * len(equation.invars), equation.replace(outvars=results, params={"step": step})


def _lowered(
    context: Any, *operands: object, by_default: Lowering | None, step: LeafStep
) -> Sequence[object]:
    form = _forced.get() or by_default
    around = getattr(getattr(context, "module_context", None), "axis_context", None)
    is_local = _is_on_one_device(around)
    place = None
    if form is not None:
        place = leaf_step.place_of(step, context.avals_in, form, is_local=is_local)

    def run(*operands: jax.Array) -> list[jax.Array]:
        if not isinstance(place, Placement):
            return list(itertools.compress(_as_traced(*operands, traced=step.traced), step.used))
        if form == "two passes":
            return in_two_passes(step, operands)
        from jgrad._kernels import tpu  # Pallas: a third of `import jgrad`

        interpret = _forced.get() is not None
        return tpu.run(step, operands, place, interpret=interpret)

    return core.lower_fun(run, multiple_results=True)(context, *operands)


def in_two_passes(step: LeafStep, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of a step as a GPU takes it: the scale of each block, and everything else.

    Left to itself XLA reads a leaf once for the scales of each moment, and keeps what it has
    computed for that. Here all scales of a leaf are known before its codes are read again.
    """
    _, scales = step.call(step.arguments(operands), ScalePass)
    # Without the barrier, XLA would notice that both passes begin alike, and merge them.
    new_scales, true = [moment.new for moment in scales], jnp.asarray(True)
    again, known, is_new = barrier((list(operands), new_scales, true))
    scale = iter(known)
    args = step.arguments(again)
    return step.results(*step.call(args, lambda moment: CodesPass(moment, next(scale), is_new)))


_ON_PLATFORMS: dict[str, Lowering] = {"tpu": "kernel", "cuda": "two passes", "rocm": "two passes"}


def _is_on_one_device(context: object) -> bool:
    """Whether a program is for one device, or is what each device does by itself.

    False where nothing says it: a kernel would take a shard for the leaf.
    """
    # What a lowering knows about its devices is private; checked in JAX 0.8 to 0.12.
    manual, mesh = (getattr(context, name, None) for name in ("manual_axes", "mesh"))
    if manual is not None and mesh is not None:
        return set(manual) >= {name for name, n in mesh.shape.items() if n > 1}
    count = getattr(context, "num_devices", None)
    in_pmap = count is None and hasattr(context, "axis_env")  # of JAX 0.8
    return in_pmap or count == 1
