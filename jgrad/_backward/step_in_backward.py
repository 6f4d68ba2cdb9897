"""A train step that updates each layer of a model as soon as its gradient is known."""

import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jgrad._backward import portions
from jgrad._backward.losses import Arrays, Forward, SavedCall, TracedLoss
from jgrad._backward.portions import FIRST, Portion
from jgrad._backward.share_updates import Numbers, ShareUpdate, pruned
from jgrad._inputs.inputs import Parameters
from jgrad._kernels.leaf_step import Place
from jgrad._layers.layer_axes import read_mesh_axes
from jgrad._trees import checks, shardings, values
from jgrad._trees.shares import Combine, Key
from jgrad._trees.trees import PyTree
from jgrad._wrappers import inside
from jgrad._wrappers.apply_gradients import apply_gradients

_NAME = "step_in_backward"

# For tests: on a CPU, too, the step is taken in the backward pass.
on_every_platform: contextvars.ContextVar[bool] = contextvars.ContextVar(_NAME, default=False)

TrainStep = Callable[..., tuple[PyTree, PyTree, Any]]


def step_in_backward(
    tx: optax.GradientTransformation,
    loss: Callable[..., Any],
    *,
    first_pass: bool = False,
    has_aux: bool = False,
    elementwise: bool = False,
    mesh_axes: PyTree = None,
) -> TrainStep:
    """A train step whose layers are updated in the backward pass, one after the other.

        value, g       = value_and_grad(loss)(params, *args)
        params, state  = apply_gradients(tx, g, state, params, loss=value)

    The numbers are those of these two lines, but there is never a gradient of all layers. A step
    as it is usually written holds one for each parameter, because XLA keeps what a scan over layers
    returns until the last layer is done. Here a plain loop goes backwards over the layers: it takes
    the weights and the moments of one, computes its gradient, and writes new ones in their place.
    With bfloat16 weights and moments in 8 bits a whole step has 4 bytes per parameter at its peak,
    in place of 8.

    The loss says by `scan_layers` where its layers are, as often as it has stacks of them. All
    other leaves, as embeddings and heads, are updated at the end. `state` is `tx.init(params)`, and
    what comes back is what `tx.update` would return, so that a run, or its checkpoint, may change
    from one form of the step to the other. Methods that compute each element by itself round alike
    in both, random rounding among it, as far as XLA joins the same products and sums; norms of all
    leaves are added in another order.

    A method with norms, ratios or matrices of layers needs `layer_axes=0` for each stack, and so
    do moments in 8 bits whose layers have no multiple of 256 elements. The global norm, or whether
    all gradients are finite, is known when the backward pass is done, so `clip_by_global_norm` and
    `skip_nonfinite` need `first_pass=True`: a first backward pass computes that number and updates
    nothing. It costs the time of one more backward pass, and no memory. `skip_spikes` needs none,
    because the loss is known before; it is given to `tx` as `loss=`.

    What needs the gradients of all layers themselves is refused: `accumulate`, `zero`,
    `pack_small`, `offload`, and packed trees.

    On a CPU, XLA copies all that a loop carries in each turn. There the step is the ordinary one,
    chosen when a program is lowered. Nor does this pay where layers are not stacked, for XLA then
    frees each gradient by itself, or where activations are what fills the memory.

    Args:
      tx: any transformation. Those of other libraries are refused without `elementwise=True`.
      loss: `loss(params, *args)` returns a real scalar, and calls `scan_layers` on stacks that are
        leaves of `params`, outside of other JAX transformations. Each stack is read by one call.
      first_pass: True computes numbers of all gradients before any layer is updated.
      has_aux: whether the loss returns `(value, aux)`.
      elementwise: says that the transformations of other libraries in `tx` compute each element by
        itself, from scalars and from what stands beside it.
      mesh_axes: under `jit` on a mesh with automatic axes, the PartitionSpec of each leaf, or a
        prefix tree of those, as for `apply_gradients`. The gradient of a layer is then sharded as
        its weights are; the first axis of a stack is not sharded.

    Returns:
      `step(params, state, *args, **extra_args) -> (params, state, value)`, where `value` is what the
      loss returned, and `extra_args` are for `tx.update`, as `learning_rate=`. Wrap it in `jax.jit`,
      and donate parameters and state.

    Raises:
      TypeError: an argument of the wrong kind; from the step, a loss that returns no scalar.
      ValueError: from the step, where `tx` or the loss does not fit, with the remedy.

    Example:
      >>> params = {"layers": {"w": jnp.full((8, 4, 4), 0.1)}, "head": jnp.ones((4, 2))}
      >>> def loss(params, x):
      ...     x = jgrad.scan_layers(lambda layer, x: x + x @ layer["w"], params["layers"], x)
      ...     return jnp.mean((x @ params["head"]) ** 2)
      >>> tx = jgrad.skip_nonfinite(
      ...     optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.adam(1e-3, weight_decay=0.1))
      ... )
      >>> step = jgrad.step_in_backward(tx, loss, first_pass=True)
      >>> step = jax.jit(step, donate_argnums=(0, 1))
      >>> params, state, value = step(params, tx.init(params), jnp.ones((3, 4)))
      >>> value.shape, params["layers"]["w"].shape
      ((), (8, 4, 4))

    Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources"
      (2023), section 3, which fuses gradient and update; its second pass for the norm is theirs,
      too.
    """
    tx = inside.transformation(_NAME, tx)
    if not callable(loss):
        raise TypeError(f"{_NAME}: `loss`: {checks.describe(loss)}, expected a function.")
    for name, x in (("first_pass", first_pass), ("has_aux", has_aux), ("elementwise", elementwise)):
        values.boolean(_NAME, name, x)
    read_mesh_axes(_NAME, mesh_axes)

    def ordinary(params: PyTree, state: PyTree, args: Any, extra: dict[str, Any]) -> Any:
        result, grads = jax.value_and_grad(loss, has_aux=has_aux, allow_int=True)(params, *args)
        extra = {"loss": result[0] if has_aux else result} | extra
        return *apply_gradients(tx, grads, state, params, mesh_axes=mesh_axes, **extra), result

    def in_backward(params: PyTree, state: PyTree, args: Any, extra: dict[str, Any]) -> Any:
        traced = TracedLoss(loss, params, args, has_aux=has_aux)
        places = [None] * len(jax.tree.leaves(params))
        if mesh_axes is not None:
            places = Parameters(_NAME, params).places(mesh_axes)
        forward = traced.forward(jax.tree.leaves(params))
        extra = {"loss": forward.result[0] if has_aux else forward.result} | extra
        step = _Step(tx, traced, params, state, places, extra, elementwise=elementwise)
        known = step.measured(forward) if step.needs(first_pass=first_pass) else {}
        return *step.updated(forward, known), forward.result

    def step(
        params: PyTree, state: PyTree, *args: Any, **extra_args: Any
    ) -> tuple[PyTree, PyTree, Any]:
        portions.check_trees(params, state)
        inputs = params, state, args, extra_args
        if on_every_platform.get():
            return in_backward(*inputs)
        return jax.lax.platform_dependent(*inputs, cpu=ordinary, default=in_backward)

    return step


class _Step:
    """One step of a model whose loss was traced."""

    def __init__(
        self,
        tx: optax.GradientTransformationExtraArgs,
        traced: TracedLoss,
        params: PyTree,
        state: PyTree,
        places: Sequence[Place | None],
        extra: dict[str, Any],
        *,
        elementwise: bool,
    ) -> None:
        self._leaves, structure = jax.tree.flatten(params)
        self._state, self._of_state = jax.tree.flatten(state)
        self._structure, self._places = structure, places
        stacks = [
            portions.of_stack(tx, params, state, call.positions, call.count)
            for call in traced.calls
        ]
        rest = portions.of_rest(tx, params, state, stacks)

        def update(portion: Portion) -> ShareUpdate:
            axes = None
            if any(places):
                axes = [_spec(places[i], portion.count) for i in portion.positions]
            return ShareUpdate(tx, portion, structure, axes, extra, elementwise=elementwise)

        self._stacks, self._rest = list(map(update, stacks)), update(rest)
        self._needed: set[Key] = set()

    def needs(self, *, first_pass: bool) -> bool:
        """Whether some layer needs a number of all gradients, for which there is a first pass."""
        others: set[Key] = set()
        for update in self._stacks:
            args = jax.eval_shape(lambda update=update: self._example(update))
            needed, by_needed = update.numbers(0, *args)
            self._needed |= needed
            others |= by_needed
        names = sorted({name for name, _ in self._needed})
        if names and not first_pass:
            came = f"`{names[0]}` computes a number of all gradients, before any layer is updated"
            remedy = "expected `first_pass=True`, which computes it by a backward pass of its own"
            raise ValueError(f"{_NAME}: `first_pass`: False; {came}; {remedy}.")
        if others:
            name = min(others)[0]
            came = f"a number of all gradients that `{name}` reads needs another one of them"
            remedy = "expected no more than one such number before an update, or the ordinary step"
            raise ValueError(f"{_NAME}: `tx`: {came}, {remedy}.")
        return bool(self._needed)

    def _example(self, update: ShareUpdate) -> tuple[Arrays, Arrays, Arrays]:
        """The arrays of a layer, with weights for gradients."""
        layer = [FIRST.out_of(self._leaves[i], 0) for i in update.portion.positions]
        return layer, layer, self._state_of(update.portion, 0, self._state)

    def _state_of(self, portion: Portion, layer: Any, state: Arrays) -> Arrays:
        return [
            state[i] if cut is None else cut.out_of(state[i], layer) for i, cut in portion.places
        ]

    def measured(self, forward: Forward) -> Numbers:
        """The numbers that are needed before an update, by a backward pass of their own."""
        total: Numbers = {}

        def visit(k: int, saved: SavedCall, after: Arrays) -> tuple[Arrays, Arrays]:
            update = self._stacks[k]

            def body(i: Any, carry: Any) -> Any:
                numbers, after, of_others = carry
                layer = update.portion.count - 1 - i
                gradients, weights, before, more = self._pulled(
                    update, saved, layer, after, self._leaves
                )
                state = self._state_of(update.portion, layer, self._state)
                parts = pruned(
                    lambda *args: self._parts(update, *args), layer, gradients, weights, state
                )
                return self._both(update, numbers, parts), before, _sum(of_others, more)

            nothing = self._nothing(update)
            carry = nothing, after, _zeros(saved.others)
            numbers, before, of_others = _loop(update.portion.count, body, carry)
            total.update(self._both(update, total, numbers) if total else numbers)
            return before, of_others

        grads = self._of_rest(forward.backward(visit))
        parts = self._parts(self._rest, None, *grads, self._state_of(self._rest.portion, 0, self._state))
        return self._both(self._rest, total, parts)

    def _parts(self, update: ShareUpdate, *args: Any) -> Numbers:
        return {k: x for k, x in update(*args, {}).parts.items() if k in self._needed}

    def _nothing(self, update: ShareUpdate, *, needed: bool = True) -> Numbers:
        """What no share has said yet of the numbers that are needed, or of all others."""
        args = jax.eval_shape(lambda: self._example(update))
        forms = jax.eval_shape(lambda args: update(0, *args, {}).parts, args)
        return {
            key: update.combines[key].neutral(x)
            for key, x in forms.items()
            if (key in self._needed) == needed
        }

    @staticmethod
    def _both(update: ShareUpdate, a: Numbers, b: Numbers) -> Numbers:
        """The numbers of two sets of shares; one of them may have more."""
        both = {key: update.combines[key].two(a[key], b[key]) for key in a.keys() & b.keys()}
        return {**a, **b, **both}

    def updated(self, forward: Forward, known: Numbers) -> tuple[PyTree, PyTree]:
        """New parameters and the new state."""
        leaves, state = list(self._leaves), list(self._state)
        said: Numbers = {}

        def visit(k: int, saved: SavedCall, after: Arrays) -> tuple[Arrays, Arrays]:
            update = self._stacks[k]
            portion = update.portion
            cuts = portion.cuts

            def body(i: Any, carry: Any) -> Any:
                stacks, moments, numbers, after, of_others = carry
                layer = portion.count - 1 - i
                here, of_state = list(leaves), list(state)
                for j, x in zip(portion.positions, stacks, strict=True):
                    here[j] = x
                for (j, _), x in zip(cuts, moments, strict=True):
                    of_state[j] = x
                gradients, weights, before, more = self._pulled(update, saved, layer, after, here)
                arrays = self._state_of(portion, layer, of_state)

                def run(*args: Any) -> Any:
                    new = update(*args, known)
                    own = zip(new.state, portion.places, strict=True)
                    own = [x for x, (_, cut) in own if cut is not None]
                    parts = {k: x for k, x in new.parts.items() if k in numbers}
                    return new.weights, own, parts

                w, s, parts = pruned(run, layer, gradients, weights, arrays)
                stacks = [FIRST.put(x, new, layer) for x, new in zip(stacks, w, strict=True)]
                moments = [
                    cut.put(x, new, layer)
                    for (_, cut), x, new in zip(cuts, moments, s, strict=True)
                ]
                numbers = self._both(update, numbers, parts)
                return stacks, moments, numbers, before, _sum(of_others, more)

            carry = (
                [leaves[j] for j in portion.positions],
                [state[j] for j, _ in cuts],
                self._nothing(update, needed=False),
                after,
                _zeros(saved.others),
            )
            stacks, moments, numbers, before, of_others = _loop(portion.count, body, carry)
            for j, x in zip(portion.positions, stacks, strict=True):
                leaves[j] = x
            for (j, _), x in zip(cuts, moments, strict=True):
                state[j] = x
            said.update(self._both(update, said, numbers))
            return before, of_others

        gradients, weights = self._of_rest(forward.backward(visit))
        portion = self._rest.portion
        arrays = self._state_of(portion, 0, self._state)
        new = self._rest(None, gradients, weights, arrays, known, said)
        for j, x in zip(portion.positions, new.weights, strict=True):
            leaves[j] = x
        for (j, _), x in zip(portion.places, new.state, strict=True):
            state[j] = x
        return self._structure.unflatten(leaves), self._of_state.unflatten(state)

    def _pulled(
        self, update: ShareUpdate, saved: SavedCall, layer: Any, after: Arrays, leaves: Arrays
    ) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        """Gradients and weights of a layer, cotangents in front of it, and of what else it reads."""
        positions = update.portion.positions
        # Else XLA reads the stacks twice.
        weights = shardings.barrier([FIRST.out_of(leaves[i], layer) for i in positions])
        of_layer, before, others = saved.pull(layer, [w[0] for w in weights], after)
        gradients = [
            None if g.dtype == jax.dtypes.float0 else _placed(g, self._places[i])[None]
            for i, g in zip(positions, of_layer, strict=True)
        ]
        return gradients, weights, before, others

    def _of_rest(self, grads: Arrays) -> tuple[Arrays, Arrays]:
        """Gradients and weights of all leaves in no stack; zeros where the loss reads none."""
        weights = [self._leaves[i] for i in self._rest.portion.positions]
        gradients = [grads[i] for i in self._rest.portion.positions]
        is_floating = map(checks.is_inexact, weights)
        return [
            jnp.zeros_like(w) if g is None and use else g
            for g, w, use in zip(gradients, weights, is_floating, strict=True)
        ], weights


def _spec(place: Place | None, count: int | None) -> PartitionSpec | None:
    """How a leaf of a share is sharded: a layer keeps the first axis, which is of length 1."""
    if place is None:
        return None
    return PartitionSpec(*place.spec if count is None else (None, *place.spec[1:]))


def _placed(gradient: jax.Array, place: Place | None) -> jax.Array:
    """The gradient of a layer, sharded as its weights are."""
    if place is None:
        return gradient
    sharding = NamedSharding(place.mesh, PartitionSpec(*place.spec[1:]))
    placed: jax.Array = jax.lax.with_sharding_constraint(gradient, sharding)
    return placed


def _loop(count: int | None, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`jax.lax.fori_loop`, of a carry that varies along mesh axes as a turn makes it."""
    assert count is not None

    def vary(x: jax.Array, new: jax.ShapeDtypeStruct) -> Any:
        return shardings.varying_over(x, shardings.varying_axes(new))

    while True:
        typed = jax.tree.map(vary, carry, jax.eval_shape(body, 0, carry))
        is_same = all(a is b for a, b in zip(*map(jax.tree.leaves, (typed, carry)), strict=True))
        carry = typed
        if is_same:
            return jax.lax.fori_loop(0, count, body, carry)


def _zeros(arrays: Arrays) -> Arrays:
    """Of what the cotangents of arrays are summed in; None for what has none."""
    return [jnp.zeros_like(x) if checks.is_inexact(x) else None for x in arrays]


def _sum(total: Arrays, more: Arrays) -> Arrays:
    return [None if t is None else t + x for t, x in zip(total, more, strict=True)]
