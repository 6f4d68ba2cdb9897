"""A train step that updates each layer of a model as soon as its gradient is known."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Concatenate, Literal, Protocol, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jgrad._arithmetic import numerics
from jgrad._backward import calls, row_slices
from jgrad._backward.calls import OfGradients
from jgrad._backward.losses import Cotangents, TracedLoss
from jgrad._backward.passes import Flow, Forward, Pull
from jgrad._backward.portions import Model, Owned, Portion, Start, Whole, not_packed, with_layer
from jgrad._backward.row_slices import Sliced, updates_of_rows
from jgrad._backward.share_updates import ShareUpdate, pruned
from jgrad._forms.places import places_by_option
from jgrad._inputs.inputs import Parameters
from jgrad._trees import checks, host_memory, shardings
from jgrad._trees.annotations import MeshAxes, Params, SomeState, Value, ValueAndAux
from jgrad._trees.explained import AnyTransformation
from jgrad._trees.places import is_shard, partition_spec, whole_along
from jgrad._trees.protocols import PyTree
from jgrad._trees.shardings import Placement, read_mesh_axes
from jgrad._trees.shares import Key, Numbers
from jgrad._trees.told import during, telling
from jgrad._wrappers import inside
from jgrad._wrappers.apply_gradients import apply_gradients

_NAME = "step_in_backward"

_is_forced: ContextVar[bool] = ContextVar(_NAME, default=False)

Results = tuple[PyTree, PyTree, PyTree]
Args = tuple[PyTree, ...]
Extra = dict[str, PyTree]

_Value = TypeVar("_Value", covariant=True)
T = TypeVar("T")


class TrainStep(Protocol[Params, _Value]):
    """What `step_in_backward` returns: a step of training, to be wrapped in `jax.jit`.

    In annotations, `TrainStep[Params, jax.Array]` is one for parameters of the type `Params` and a
    loss that returns an array.

    Example:
      >>> Params = dict[str, jax.Array]
      >>> params, tx = {"w": jnp.full((8, 4, 4), 0.1)}, jgrad.adam(1e-3)
      >>> def loss(params, x):
      ...     return jnp.sum(jgrad.scan_layers(lambda layer, x: x @ layer["w"], params, x))
      >>> step: jgrad.TrainStep[Params, jax.Array] = jgrad.step_in_backward(tx, loss)
      >>> step(params, tx.init(params), jnp.ones(4))[2].shape
      ()
    """

    def __call__(
        self, params: Params, state: SomeState, *args: PyTree, **extra_args: PyTree
    ) -> tuple[Params, SomeState, _Value]:
        """New parameters, the new state, and what the loss returned."""


TrainStep.__module__ = "jgrad"  # where users import it from


@overload
def step_in_backward(
    tx: AnyTransformation,
    loss: Callable[Concatenate[Params, ...], ValueAndAux],
    *,
    first_pass: bool = False,
    has_aux: bool,
    elementwise: bool = False,
    gradients: OfGradients | None = None,
    mesh_axes: MeshAxes = None,
) -> TrainStep[Params, ValueAndAux]: ...
@overload
def step_in_backward(
    tx: AnyTransformation,
    loss: Callable[Concatenate[Params, ...], Value],
    *,
    first_pass: bool = False,
    has_aux: Literal[False] = False,
    elementwise: bool = False,
    gradients: OfGradients | None = None,
    mesh_axes: MeshAxes = None,
) -> TrainStep[Params, Value]: ...
def step_in_backward(
    tx: AnyTransformation,
    loss: Callable[Concatenate[Params, ...], PyTree],
    *,
    first_pass: bool = False,
    has_aux: bool = False,
    elementwise: bool = False,
    gradients: OfGradients | None = None,
    mesh_axes: MeshAxes = None,
) -> TrainStep[Params, PyTree]:
    """Builds a train step that updates each layer during the backward pass.

        value, g       = value_and_grad(loss)(params, *args)
        params, state  = apply_gradients(tx, gradients(g), state, params, loss=value)

    The step returns what these two lines return, but the gradients of all layers never exist
    together. In an ordinary step they do, because a scan over layers returns them as one stack,
    and XLA keeps that until the last layer is done. Here a loop goes backwards over the layers: it
    reads the weights and moments of one layer, computes its gradient, and writes the new weights
    and moments in their place. With bfloat16 weights and moments in 8 bits, weights, state and
    gradients take 4 bytes per parameter at the peak instead of 6.

    Weights and state may lie in host memory; JAX's types say what does. A layer is then fetched in
    the forward pass and again in the backward pass, and its new arrays go back. So only one layer
    is on the device, and the depth of the model costs no device memory. Place the state by
    `offload(tx)`, and weights by `jax.device_put(layers, jax.memory.Space.Host)`. Leaves outside of
    stacks, such as an embedding, are fetched whole by the loss, but updated in slices if the method
    is elementwise and the rows divide into slices of a multiple of 32. On a mesh with automatic
    axes, that needs `mesh_axes`.

    The loss calls `scan_layers` for each stack of layers that it has. All other leaves are updated
    as soon as their own gradients are known, a head before the layers and an embedding last; or
    at the end, if `tx` needs the gradients of several of them. `state` comes from `tx.init(params)`
    and keeps its structure, so a run or its checkpoint may switch between both kinds of step.
    Elementwise methods give the same results in both, including their random bits, up to how XLA
    fuses products and sums. Norms over all leaves are summed in another order.

    Methods see one layer at a time, in either kind of step: `lars`, `lamb` and `muon` need no
    `layer_axes` for stacks here, though they do in the two lines above to give the same results.
    Where the state depends on it, as in `adafactor`, `soap`, `hyperball`, `watch` and
    `rule="normuon"`, pass `layer_axes` to the factory, because `init` does not see the loss. A
    learning rate may have an entry for each layer, such as shape [layers, 1, 1] for a stack of
    matrices. Moments in 8 bits need layers of a multiple of 256 elements, or `layer_axes=0`.

    The global norm, and whether all gradients are finite, are known only after the backward pass.
    `clip_by_global_norm` and `skip_nonfinite` therefore need `first_pass=True`, which computes
    those values in a backward pass of its own before the one that updates. That costs the time of
    a backward pass and little memory. `skip_spikes` does without, because it reads the loss, which
    `tx` gets as `loss=` and as `value=`; so does `clip_by_global_norm(..., of="previous")`. With
    `skip_nonfinite(loss_scale=)`, let your loss return the scaled value: `tx` gets it divided by
    the scale of the state, and the step returns it as it is.

    Transformations that need the gradients of all layers at once are refused: `accumulate`, `zero`,
    `pack_small`, and packed trees. Options of this library that are functions are called with the
    shapes of all parameters. Functions passed to another library, such as the labels of
    `optax.partition`, see a layer as a stack of one, with None for every other leaf, so let them
    look at names.

    Inside `pmap`, and inside `shard_map` with `check_vma=False`, each device has the gradients of
    its part of the batch, and the step raises an error unless `gradients` says what to do with
    them. `gradients=lambda g: jax.lax.pmean(g, "data")` takes their mean. With `check_vma=True`
    and under `jit`, JAX sums them itself.

    On a CPU, XLA copies everything that a loop carries in each iteration. There the ordinary step
    runs instead, chosen when the program is lowered. The step in the backward pass saves nothing
    if layers are not stacked, because XLA then frees each gradient by itself, nor if activations
    fill the memory.

    Args:
      tx: any transformation. Arrays that another library computes need `elementwise=True`.
      loss: `loss(params, *args)` returns a real scalar, and calls `scan_layers` on stacks that are
        leaves of `params`, possibly cast as a whole. It may do so inside `jax.vmap`, `jax.jit` or
        `jax.checkpoint`, where the last has no effect. Only one call may read each stack, besides
        code that is not differentiated, such as a norm for logging or a call of `scan_layers` under
        `jax.lax.stop_gradient`. Compute penalties on weights inside `block`, with `has_ys=True`.
      first_pass: True first computes what depends on all gradients, such as their norm, before any
        layer is updated. A number that depends on another, such as the norm for a second clipping,
        needs one more pass.
      has_aux: whether the loss returns `(value, aux)`.
      elementwise: True promises that other libraries' transformations in `tx` are elementwise: each
        element only depends on scalars and on corresponding elements. This is checked: norms,
        random bits, and other operations that are not elementwise raise an error that names them.
      gradients: a function that is applied to gradients before anything else uses them, also in a
        first pass. It gets a tree like `params` with the gradients of one layer, as a stack of one,
        or of the leaves outside of stacks whose gradients are known at the same time; all other
        leaves are None. It returns a tree with the same structure, shapes and dtypes. Noise raises
        an error, because each layer would get the same: add it in the ordinary step.
      mesh_axes: how leaves are sharded: a PartitionSpec, the name of a mesh axis, a tuple of names,
        or None; or a prefix tree or `by_path` of these. Under `jit` on a mesh with automatic axes,
        PartitionSpecs are needed as in `apply_gradients`, and shard the gradients of a layer like
        its weights; the axis of layers must not be sharded.

    Returns:
      `step(params, state, *args, **extra_args) -> (params, state, value)`, where `value` is what
      the loss returned, and `extra_args` are keywords for `tx.update`, such as `learning_rate=`.
      Pass arguments of the loss by position. Wrap the step in `jax.jit`, and donate parameters and
      state.

    Raises:
      TypeError: an argument has the wrong type; from the step, the loss does not return a scalar,
        `tx` does not accept a keyword, or `gradients` changes a shape or dtype.
      ValueError: from the step, if `tx` or the loss is unsuitable; the message says what to do.

    Example:
      >>> params = {"layers": {"w": jnp.full((8, 4, 4), 0.1)}, "head": jnp.ones((4, 2))}
      >>> def loss(params, x):
      ...     x = jgrad.scan_layers(lambda layer, x: x @ layer["w"], params["layers"], x)
      ...     return jnp.mean((x @ params["head"]) ** 2)
      >>> tx = optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.adam(1e-3, weight_decay=0.1))
      >>> step = jax.jit(jgrad.step_in_backward(tx, loss, first_pass=True), donate_argnums=(0, 1))
      >>> step(params, tx.init(params), jnp.ones((3, 4)))[2].shape
      ()

    Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources"
      (2023), section 3, which fuses gradient and update, and also has a second pass for the norm.
    """
    tx = inside.transformation(_NAME, tx, may_be_offloaded=True)
    if not callable(loss):
        raise TypeError(f"{_NAME}: `loss`: {checks.describe(loss)}, expected a function.")
    for name, x in (("first_pass", first_pass), ("has_aux", has_aux), ("elementwise", elementwise)):
        checks.boolean(_NAME, name, x)
    if not (gradients is None or callable(gradients)):
        came = checks.describe(gradients)
        raise TypeError(f"{_NAME}: `gradients`: {came}, expected a function of gradients.")
    read_mesh_axes(_NAME, mesh_axes)

    def ordinary(
        traced: TracedLoss, params: PyTree, state: PyTree, args: Args, extra: Extra
    ) -> Results:
        old = params, state
        params, state = host_memory.to_device(old)
        result, grads = jax.value_and_grad(loss, has_aux=has_aux, allow_int=True)(params, *args)
        if gradients is not None:
            grads = calls.all_gradients(gradients, grads, traced)
        extra = calls.loss_keywords(result[0] if has_aux else result, state) | extra
        new = apply_gradients(tx, grads, state, params, mesh_axes=mesh_axes, **extra)
        params, state = host_memory.where_they_lay(new, old)
        return params, state, result

    # Without `jit`, loops have no traces, by which arrays are told apart.
    @jax.disable_jit(False)
    def in_backward(
        traced: TracedLoss, params: PyTree, state: PyTree, args: Args, extra: Extra
    ) -> Results:
        forward = Forward(traced, jax.tree.leaves(params))
        value = forward.result[0] if has_aux else forward.result
        places = [] if mesh_axes is None else places_by_option(Parameters(_NAME, params), mesh_axes)
        extra = calls.loss_keywords(value, state) | extra
        model = Model(jax.tree.leaves(params), jax.tree.leaves(state))
        whole, options = Whole(tx, params, state), (first_pass, elementwise)
        new = _Step(whole, traced, model, places, extra, gradients, *options).updated(forward)
        both = jax.tree.structure((params, state))
        return *jax.tree.unflatten(both, [*new.leaves, *new.state]), forward.result

    def step(params: PyTree, state: PyTree, *args: PyTree, **extra_args: PyTree) -> Results:
        not_packed("params", params)
        calls.check_call(tx, loss, params, state, args, extra_args)
        calls.check_is_given(gradients)
        with jax.disable_jit(False):
            traced = TracedLoss(loss, params, args, has_aux=has_aux)
        inputs = traced, params, state, args, extra_args
        try:
            with telling(stacks=traced.stacks_by_path(params)):
                if _is_forced.get():
                    return in_backward(*inputs)
                # New functions in each call, because JAX caches traces by function.
                results: Results = jax.lax.platform_dependent(
                    cpu=lambda: ordinary(*inputs), default=lambda: in_backward(*inputs)
                )
                return results
        except ValueError as error:
            remedy = "`jax.vmap` cannot slice that: keep an ensemble in device memory"
            host_memory.add_note(error, _NAME, remedy, params=params, state=state)
            raise

    return step


def forced(use: bool = True) -> AbstractContextManager[bool]:
    """The step in the backward pass on every platform, for tests; or as a platform has it."""
    return during(_is_forced, use)


class _Step:
    """One step of a model whose loss was traced."""

    def __init__(
        self,
        whole: Whole,
        traced: TracedLoss,
        model: Model,
        places: Sequence[Placement | None],
        extra: Extra,
        gradients: OfGradients | None,
        first_pass: bool,
        elementwise: bool,
    ) -> None:
        self._model, self._places, self._groups = model, places, traced.early
        self._gradients, self._structure = gradients, whole.structure
        self._first_pass = first_pass
        update = functools.partial(
            ShareUpdate, whole, model, places, extra, elementwise=elementwise
        )
        stacks = [whole.stack(call.positions, call.cuts, call.count) for call in traced.calls]
        groups = [whole.leaves(positions) if positions else None for positions in traced.early]
        rest = whole.rest([*stacks, *filter(None, groups)])
        self._stacks = [update(stack.without_those_of(rest)) for stack in stacks]
        self._read = [x.numbers_read() for x in self._stacks]
        early = [leaves and update(leaves.without_those_of(rest)) for leaves in groups]
        self._early = [x if x is not None and self._is_early(x) else None for x in early]
        updated = [x.portion for x in self._early if x is not None]
        if self._early != early:  # some wait for the end
            rest = whole.rest([*stacks, *updated])
        self._rest = update(rest)

        def sliced(leaves: ShareUpdate) -> Sliced:
            """Leaves in no stack."""
            # Slices of rows that are sharded would be gathered.
            some = [i for i in leaves.portion.positions if not self._has_sharded_rows(i)]
            rows = updates_of_rows(whole, model, some, rest, update)
            if not rows:
                return Sliced(rows, None, leaves)
            cut = [i for x in rows for i in x.portion.positions]
            as_whole = update(whole.leaves(cut).without_those_of(rest))
            if leaves is self._rest:
                others = whole.rest([*stacks, *updated, *(x.portion for x in rows)])
                return Sliced(rows, as_whole, update(others))
            positions = [i for i in leaves.portion.positions if i not in cut]
            portion = whole.leaves(positions).without_those_of(rest) if positions else None
            return Sliced(rows, as_whole, portion and update(portion))

        self._sliced = {x: sliced(x) for x in (*self._early, self._rest) if x is not None}

    def _is_early(self, leaves: ShareUpdate) -> bool:
        """Whether leaves are updated before a stack; else they wait for the end."""
        if leaves.looks_at_several:
            return False
        read = leaves.numbers_read()
        if read[None] and not self._first_pass:
            return False
        self._read.append(read)
        return True

    def updated(self, forward: Forward) -> Model:
        """New arrays of the parameters and of the state."""
        read = dict[Key | None, set[Key]]()
        for key, keys in itertools.chain(*(read_here.items() for read_here in self._read)):
            read[key] = read.get(key, set()) | keys
        known = self._measured(forward, read)
        wanted = read.keys() - known
        model, gradients, numbers = self._backward(forward, known, wanted, updates=True)
        portions, new, _ = self._updated_leaves(self._rest, gradients, known, numbers)
        for portion, owned in zip(portions, new, strict=True):
            model = model.replaced(portion, owned)
        return model

    def _measured(self, forward: Forward, read: Mapping[Key | None, set[Key]]) -> Numbers:
        """The numbers that are needed before the end.

        By a backward pass of their own; those that need others, by one more.
        """
        known = Numbers()
        missing = read[None].union(*read.values())  # also what a number needs that no layer does
        if missing and not self._first_pass:
            name = min(missing)[0]
            came = f"`{name}` needs a number from all gradients before any layer is updated"
            remedy = "expected `first_pass=True`, which computes it in a separate backward pass"
            raise ValueError(f"{_NAME}: `first_pass`: False; {came}; {remedy}.")
        while missing:
            ready = {key for key in missing if read[key] <= known.keys()}
            _, gradients, numbers = self._backward(forward, known, ready, updates=False)
            result = self._rest(self._model.start(self._rest.portion, gradients), known)
            known = known | _both(self._rest, numbers, _some(result.parts, ready))
            missing -= ready
        return known

    def _backward(
        self, forward: Forward, known: Numbers, wanted: Collection[Key | None], *, updates: bool
    ) -> tuple[Model, Cotangents, Numbers]:
        """Goes backwards over all shares but the rest.

        Args:
          forward: of the loss.
          known: numbers of all shares.
          wanted: others, which are computed of these shares.
          updates: whether they are updated, too.

        Returns:
          The model with their new arrays, the gradients of the rest, and the numbers.
        """
        model, numbers, waiting = self._model, Numbers(), dict[int, jax.Array | None]()

        def visit_leaves(leaves: ShareUpdate, gradients: Cotangents, flow: Flow) -> Flow:
            nonlocal model, numbers
            if not updates:
                parts = leaves(model.start(leaves.portion, gradients), known).parts
            else:
                # Everything that reads old weights comes before, or XLA would copy them; and the
                # layers come after, or it might keep the gradients, or what they are computed
                # from, until the end.
                gradients, flow = shardings.barrier((gradients, flow))
                portions, new, parts = self._updated_leaves(leaves, gradients, known)
                new, flow = shardings.barrier((new, flow))
                for portion, owned in zip(portions, new, strict=True):
                    model = model.replaced(portion, owned)
            numbers = _both(leaves, numbers, _some(parts, wanted))
            return flow

        def visit(k: int, gradients: Cotangents, pull: Pull, flow: Flow) -> Flow:
            nonlocal model, numbers
            leaves, stack, positions = self._early[k], self._stacks[k], self._groups[k]
            gradients = self._by_user(positions, gradients)
            if leaves is None:
                waiting.update(zip(positions, gradients, strict=True))
            else:
                flow = visit_leaves(leaves, gradients, flow)
            old = model.owned(stack.portion) if updates else None
            owned, more, flow = self._through(stack, pull, flow, known, wanted, old)
            if owned is not None:
                model = model.replaced(stack.portion, owned)
            numbers = _both(stack, numbers, more)
            return flow

        grads = forward.backward(visit)
        positions = self._rest.portion.positions
        last = [i for i in positions if i not in waiting]
        last_gradients = self._by_user(last, [self._or_zeros(i, grads[i]) for i in last])
        waiting |= zip(last, last_gradients, strict=True)
        return model, [waiting[i] for i in positions], numbers

    def _updated_leaves(
        self,
        update: ShareUpdate,
        gradients: Cotangents,
        known: Numbers,
        others: Numbers | None = None,
    ) -> tuple[list[Portion], list[Owned], Numbers]:
        """New arrays of leaves in no stack, share by share; and their parts of numbers."""
        sliced, portions, new = self._sliced[update], list[Portion](), list[Owned]()
        gradient_of = dict(zip(update.portion.positions, gradients, strict=True))
        parts = row_slices.parts(sliced, self._model, gradient_of, known)
        for rows in sliced.rows:
            gradient = gradient_of.pop(rows.portion.positions[0])
            portions.append(rows.portion)
            new.append(row_slices.updated(rows, self._model, gradient, known, _loop))
        if sliced.others is None:
            return portions, new, parts
        portion = sliced.others.portion
        combining = sliced.whole or update  # of which it is known how, since it was traced
        other_parts = None if others is None else _both(combining, others, parts)
        start = self._model.start(portion, list(gradient_of.values()))
        result = sliced.others(start, known, other_parts)
        new.append(self._model.kept(portion, result.owned))
        return [*portions, portion], new, _both(combining, parts, result.parts)

    def _has_sharded_rows(self, i: int) -> bool:
        """Whether a leaf is sharded along its first axis, as far as types or a user say it."""
        place = self._places[i] if self._places else None
        in_type = shardings.axes_of_spec(jax.typeof(self._model.leaves[i]).sharding.spec)
        return any((*in_type[:1], *((place and place.per_axis) or ())[:1]))

    def _or_zeros(self, i: int, gradient: jax.Array | None) -> jax.Array | None:
        """The gradient of a leaf that the loss need not read."""
        w = self._model.leaves[i]
        if gradient is not None or not checks.is_inexact(w):
            return gradient
        return numerics.zeros_like(host_memory.to_device(w))

    def _through(
        self,
        update: ShareUpdate,
        pull: Pull,
        flow: Flow,
        known: Numbers,
        wanted: Collection[Key | None],
        owned: Owned | None,
    ) -> tuple[Owned | None, Numbers, Flow]:
        """Goes backwards over the layers of a stack.

        Args:
          update: of a layer.
          pull: gives the gradients of a layer.
          flow: cotangents behind the last layer.
          known: numbers of all shares.
          wanted: which others are computed of the layers.
          owned: the arrays of the stack, if layers replace theirs; else None.

        Returns:
          These arrays, the numbers of all layers, and cotangents in front of the first one.
        """
        portion = update.portion
        assert portion.layers is not None
        last = portion.layers - 1

        def turn(start: Start) -> tuple[Owned | None, Numbers]:
            result = update(start, known)
            return None if owned is None else result.owned, _some(result.parts, wanted)

        def body(
            i: jax.Array, carry: tuple[Owned | None, Numbers, Flow]
        ) -> tuple[Owned | None, Numbers, Flow]:
            owned, numbers, flow = carry
            model = self._model
            if owned is not None:
                model = model.replaced(portion, owned, in_loop=True)
            layer = last - i
            # Otherwise, XLA reads the stacks twice.
            weights = shardings.barrier(model.weights_of(portion, layer))
            gradients, flow = pull(layer, weights, flow)
            gradients = self._placed(portion, gradients)
            gradients = self._by_user(portion.positions, gradients)
            start = Start(layer, gradients, weights, model.state_of(portion, layer))
            new, parts = pruned(turn, start)
            if owned is not None:
                owned = with_layer(portion, owned, self._model.kept(portion, new), layer)
            return owned, _both(update, numbers, parts), flow

        forms = _some(update.parts, wanted)
        numbers = {key: update.combines[key].neutral(form) for key, form in forms.items()}
        return _loop(last + 1, body, (owned, numbers, flow))

    def _placed(self, portion: Portion, gradients: Cotangents) -> Cotangents:
        """The gradients of a layer, sharded as its weights are."""
        placed = list(gradients)
        columns = zip(portion.positions, portion.weight_cuts, strict=True) if self._places else ()
        for k, (i, cut) in enumerate(columns):
            place, gradient = self._places[i], gradients[k]
            if place is None or gradient is None or is_shard(place):
                continue
            spec = partition_spec(whole_along(place, cut.axis).per_axis)
            sharding = NamedSharding(place.mesh, spec)
            placed[k] = jax.lax.with_sharding_constraint(gradient, sharding)
        return placed

    def _by_user(
        self, positions: Sequence[int], gradients: Sequence[jax.Array | None]
    ) -> list[jax.Array | None]:
        """What a user's function makes of the gradients of a share."""
        if self._gradients is None or not positions:
            return list(gradients)
        return calls.share_gradients(self._gradients, self._structure, positions, gradients)


def _some(numbers: Numbers, keys: Collection[Key | None]) -> Numbers:
    return {key: x for key, x in numbers.items() if key in keys}


def _both(update: ShareUpdate, a: Numbers, b: Numbers) -> Numbers:
    """The numbers of two sets of shares; one of them may have more."""
    both = {key: update.combines[key].two(a[key], b[key]) for key in a.keys() & b.keys()}
    return {**a, **b, **both}


def _loop(count: int, body: Callable[[jax.Array, T], T], carry: T) -> T:
    """`jax.lax.fori_loop`, of a carry that varies along mesh axes as a turn makes it."""

    def vary(x: jax.Array, new: jax.ShapeDtypeStruct) -> PyTree:
        return shardings.varying_over(x, shardings.varying_axes(new))

    # Where no types say it, none is to be found by tracing a turn more.
    while shardings.invariant_axes():
        typed = jax.tree.map(vary, carry, jax.eval_shape(body, jnp.int32(0), carry))
        is_same = all(map(operator.is_, *map(jax.tree.leaves, (typed, carry))))
        carry = typed
        if is_same:
            break
    return jax.lax.fori_loop(0, count, body, carry)
