"""The `init`/`update` pair of a method: its state, so that it only writes its arithmetic."""

import collections
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jgrad._arithmetic import rules
from jgrad._arithmetic.leaf_moment import is_rounded
from jgrad._inputs.inputs import OTHER_FORM, Inputs, Parameters
from jgrad._inputs.moment import Moment, Shapes, Step, zeros
from jgrad._inputs.numbers import OfCall
from jgrad._inputs.options import check_masks
from jgrad._inputs.pair import counter, pair
from jgrad._trees import checks, forms, trees
from jgrad._trees.annotations import Mask, MomentDType
from jgrad._trees.explained import Transformation
from jgrad._trees.protocols import FIRST, SECOND, MomentField, PyTree, state_of
from jgrad._trees.shardings import read_mesh_axes
from jgrad._trees.told import told


@state_of("moments", step="step", mw=FIRST, vw=SECOND)
class OptState(NamedTuple):
    """State of every optimizer except `soap`; fields that a method does not use are `None`.

    Field names are part of the checkpoint format. The attributes `count`, `mu` and `nu` return the
    same arrays by optax's names; `optax.tree.get` only finds fields, so use `"step"` there.

    Attributes:
      step: number of completed updates, an int32 scalar; it saturates.
      mw: first moment, or momentum: a tree like the parameters, with `Blocks` for 8-bit arrays.
      vw: second moment, real: a tree like `mw`.

    Example:
      >>> state = jgrad.adam(1e-3).init({"w": jnp.ones((3, 2)), "b": jnp.zeros(2)})
      >>> state.step.dtype.name, state.mw["w"].shape, state.vw["b"].dtype.name
      ('int32', (3, 2), 'float32')
      >>> state.mu is state.mw, optax.tree.get(state, "step") is state.step
      (True, True)
    """

    step: jax.Array
    mw: PyTree
    vw: PyTree

    @property
    def count(self) -> jax.Array:  # type: ignore[override]  # hides `tuple.count`
        """optax's name for `step`."""
        return self.step

    @property
    def mu(self) -> PyTree:
        """optax's name for `mw`."""
        return self.mw

    @property
    def nu(self) -> PyTree:
        """optax's name for `vw`."""
        return self.vw


@state_of("adafactor", step="step", mw=FIRST, vw=SECOND)
class AdafactorState(OptState):
    """State of `adafactor`: an `OptState` whose `mw` averages steps, learning rate included.

    It is a separate type so that `carry_over` doesn't mistake `mw` for averages of gradients.

    Attributes:
      step: number of completed updates, an int32 scalar.
      mw: averages of steps: a tree like the parameters, or None without momentum.
      vw: averages of squared gradients, with `Factors` for matrices.

    Example:
      >>> state = jgrad.adafactor(1e-2, momentum=0.9).init({"w": jnp.ones((3, 2))})
      >>> type(state).__name__, isinstance(state, jgrad.OptState)
      ('AdafactorState', True)
    """

    __slots__ = ()


Kinds = Mapping[str, MomentField]  # of the moments of a state, by their names


class MomentOptions(NamedTuple):
    """What a user gave.

    Attributes:
      dtype: `moment_dtype`.
      full_precision: leaves that "8bit" leaves alone.
      layer_axes: axes over which layers are stacked, each of which starts on a block.
      mesh_axes: how leaves are sharded, where their types do not say it.
      of_first: whether this is said of first moments alone, and second ones have full precision.
    """

    dtype: MomentDType
    full_precision: Mask | None = None
    layer_axes: PyTree = None
    mesh_axes: PyTree = None
    of_first: bool = False

    def check(self, function: str) -> None:
        """What a factory can. A dtype has the range of float32."""
        check_masks(function, full_precision=self.full_precision)
        read_mesh_axes(function, self.mesh_axes)
        if self.dtype is not None and forms.named(self.dtype) is None:
            others = " or ".join(map(repr, forms.names()))
            expected = f"a real floating dtype with the range of float32, or {others}"
            checks.floating_dtype(
                function, "moment_dtype", self.dtype, expected, least_exponent=128
            )

    def init(self, params: Parameters, shapes: Shapes, kinds: Kinds) -> tuple[PyTree, ...]:
        """Step and moments before the first update; they share no buffer, for donation."""
        say_if_lost(params)
        moments: dict[str, PyTree] = dict.fromkeys(kinds)
        is_used = False  # the form, by some leaf
        positions = [spec.positions[0] for spec in params.specs]
        matrices = {k: shapes.matrices[i] for k, i in enumerate(positions) if i in shapes.matrices}
        for name, tree in shapes.moments.items():
            if tree is None:
                continue
            chosen = AS_PARAMETERS if self.of_first and kinds[name].is_real else self
            form = forms.named(chosen.dtype)
            layouts = form.layouts(params, tree, chosen) if form is not None else None
            is_used = is_used or any(x is not None for x in layouts or ())
            moments[name] = zeros(
                params.function,
                params.tree,
                chosen.dtype if form is None else None,
                shapes=tree,
                mesh_axes={k: axes.sharded_over for k, axes in matrices.items()},
                form=form,
                layouts=layouts,
                real=kinds[name].is_real,
            )
        if (form := forms.named(self.dtype)) is not None and not is_used:
            form.say_if_unused(params, self)
        return counter(params.tree), *moments.values()

    def read(
        self,
        inputs: Inputs,
        state: Any,
        shapes: Shapes,
        numbers: Mapping[str, Any],
        kind: Any,
    ) -> Step:
        """What an update starts from; an error where moments are of another method or form."""
        kinds: Kinds = kind.__jgrad_fields__.moments
        for name in kinds:
            is_expected = shapes.moments.get(name) is not None
            if (getattr(state, name) is not None) != is_expected:
                without = "without" if is_expected else "with"
                came = f"{trees.with_article(kind.__name__)} {without} `{name}`"
                origin = "from another method or other options"
                expected = checks.made_by_init(inputs.function, kind)
                raise TypeError(f"{inputs.function}: `state`: {came}, {origin}, {expected}")
        step = optax.safe_increment(jnp.asarray(state.step))
        bits = functools.cache(functools.partial(forms.random, step))  # if something is rounded
        moments: dict[str, Moment] = {}
        for name, tree in shapes.moments.items():
            if tree is None:  # no such moment, or the only parameter has none
                moments[name] = Moment([None] * len(inputs.specs))
                continue
            real, is_whole = kinds[name].is_real, tree is inputs.tree
            chosen = AS_PARAMETERS if self.of_first and real else self
            field, came = f"state.{name}", getattr(state, name)
            old = inputs.moment(field, came, None if is_whole else tree, real=real)
            if forms.named(chosen.dtype) is not None or forms.some(old):
                chosen._check_forms(inputs, field, old, tree)
            random = None
            if any(map(is_rounded, old)):
                random = bits().of_moment(inputs, old, chosen.mesh_axes, is_whole=is_whole)
            moments[name] = Moment(old, random, inputs.commit, has_form=True)
        return Step(step, state.step, moments, shapes.matrices, numbers)

    def _check_forms(self, inputs: Inputs, name: str, old: list[Any], shapes: PyTree) -> None:
        """Each leaf has the form that the user chose for it."""
        arg, form = inputs.reference._replace(name=name, leaves=old), forms.named(self.dtype)
        layouts = [None] * len(old) if form is None else form.layouts(inputs, shapes, self)
        for i, (x, layout) in enumerate(zip(old, layouts, strict=True)):
            came = None if forms.is_of_method(x) else forms.find(x)
            if not inputs.is_updated[i] or came is (None if layout is None else form):
                continue
            if form is not None and came is form and form.may_be(inputs, i, self):
                continue
            if came is not None:
                shown = f"{came.kind.__name__} of shape {x.shape}"
            else:
                shown = checks.describe(x)
            expected = "an array"
            if form is not None and layout is not None:
                expected = f"{form.kind.__name__}, {form.words}"
            arg.fail(i, TypeError, f"{shown}, expected {expected}; {OTHER_FORM}")


AS_PARAMETERS = MomentOptions(None)


_LOG = logging.getLogger("jgrad")
_seen: collections.deque[Any] = collections.deque(maxlen=128)  # models, not to repeat it


def say_if_lost(params: Parameters) -> None:
    """Where weights are in 8 bits, to which most updates are rounded away."""
    dtypes = {x.dtype for x in params.reference.leaves if checks.is_inexact(x)}
    for dtype in sorted((x for x in dtypes if x.itemsize == 1), key=str):
        lost = float(jnp.finfo(dtype).eps) / 4
        say_once(
            params,
            f"`params` in {dtype}: updates below {lost:g} times a weight are lost to rounding; put "
            f"`master_weights` around `{params.function}`.",
        )


def say_once(params: Parameters, message: str) -> None:
    """Once for these shapes. A share says nothing, of whose model the whole was looked at.

    To a log and not as a warning, which would be an error in the tests of users with a small model,
    where nothing is wrong.
    """
    shapes = [None if x is None else x.shape for x in params.updated_shapes().leaves]
    key = params.function, message, shapes
    if told().share is None and key not in _seen:
        _seen.append(key)
        _LOG.warning(f"{params.function}: {message} Said once for these shapes.")


# ---- the pair of a method ----------------------------------------------------------------------

# (inputs, step) -> (updates, new moments), in the order of their names, as a function of one leaf
# returns them that was given those of `step.moments`. Updates are added to the parameters. Other
# fields of the state follow in order.
Compute = Callable[[Inputs, Step], tuple[Any, ...]]

# (parameters) -> the shapes of the moments.
ShapesOf = Callable[[Parameters], Shapes]


class MoreFields(NamedTuple):
    """What a state has beside step and moments, in the fields behind those of `OptState`.

    Attributes:
      init: the other fields before the first update.
      read: what an update starts from, checked: `step.more`.
    """

    init: Callable[[Parameters, Shapes], tuple[PyTree, ...]]
    read: Callable[[Inputs, Shapes, Any], Any]


def transformation(
    name: str,
    compute: Compute,
    *,
    has: Sequence[str] = (),
    shapes_of: ShapesOf | None = None,
    moments: MomentOptions = AS_PARAMETERS,
    params_for: str | None = None,
    more: MoreFields | None = None,
    state_type: Any = OptState,
) -> Transformation:
    """An optimizer with the state `OptState(step, mw, vw)`, or with one that has other fields.

    Args:
      name: what users call it, for messages.
      compute: the method. It returns updates, which are added to the parameters.
      has: the names of its moments, of those that the state type has.
      shapes_of: in its place, of a method whose moments have other shapes than the parameters.
      moments: in which form they are stored.
      params_for: what in the method needs the parameters, for the error without them.
      more: what the state has beside.
      state_type: of the state, with fields for step, moments and what it has beside; an `OptState`
        is taken for one of a subtype.
    """
    moments.check(name)
    kind: Any = OptState if issubclass(state_type, OptState) else state_type
    kinds: Kinds = kind.__jgrad_fields__.moments

    def init(params: PyTree) -> Any:
        inputs = Parameters(name, params)
        checks.parameters(inputs.reference)
        moment_shapes = shapes_of(inputs) if shapes_of else Shapes(dict.fromkeys(has, inputs.tree))
        others = () if more is None else more.init(inputs, moment_shapes)
        return state_type(*moments.init(inputs, moment_shapes, kinds), *others)

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **numbers: Any
    ) -> tuple[PyTree, Any]:
        inputs = Inputs(name, updates, params, told())
        if params_for is not None:
            inputs.require_params(params_for)
        moment_shapes = shapes_of(inputs) if shapes_of else Shapes(dict.fromkeys(has, inputs.tree))
        numbers_of_call = OfCall(numbers) if numbers else None
        step = moments.read(inputs, state, moment_shapes, numbers_of_call or {}, kind)
        if more is not None:
            step = step._replace(more=more.read(inputs, moment_shapes, state))
        old = step.moments
        if not all(inputs.is_updated):
            inputs = inputs.updated()
            step = step._replace(moments={name: x.at(inputs.rows) for name, x in old.items()})
        values, *computed = compute(inputs, step)
        if numbers_of_call is not None:
            numbers_of_call.check_names(name)
        new, others = computed[: len(old)], computed[len(old) :]
        stored = dict.fromkeys(kinds) | _in_state(inputs, old, new, state)
        return inputs.directions(values), type(state)(step.number, *stored.values(), *others)

    return pair(init, update, name, kind, checks_options=True)


def _in_state(
    inputs: Inputs, moments: Mapping[str, Moment], new: Sequence[Any], state: Any
) -> dict[str, PyTree]:
    """The new moments as the state has them, which have to be what `write` stored."""
    name = inputs.function
    if len(new) != len(moments):
        expected = ", ".join(f"`{field}`" for field in moments) or "none"
        raise TypeError(f"{name}: {len(new)} new moments, expected {expected}.")
    stored: dict[str, PyTree] = {}
    for (field, moment), values in zip(moments.items(), new, strict=True):
        if not isinstance(values, list):
            came, expected = type(values).__name__, "what a function of one leaf wrote into it"
            raise TypeError(f"{name}: new moments `{field}`: {came}, expected {expected}.")
        values = inputs.put_back(values, moment.old)  # which stay if there are no new ones
        for x, old in zip(values, moment.old, strict=True):
            if type(x) is not type(old) and (form := forms.find(old)) is not None:
                problem = f"a moment in {form.words}: {checks.describe(x)}"
                expected = f"expected {form.kind.__name__}, as `Moment.write` makes them"
                raise TypeError(f"{name}: {problem}, {expected}.")
        structure = trees.flatten(getattr(state, field))[1]
        stored[field] = structure.unflatten(rules.cast_back(values, moment.old))
    return stored
