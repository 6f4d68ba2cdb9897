"""The layers of a model in a loss: a scan, which `step_in_backward` runs layer by layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jgrad._arithmetic.programs import Equation
from jgrad._trees import checks, host_memory, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import PyTree

_NAME = "scan_layers"

# (layer, carry) -> carry, or with `xs` and `has_ys` (layer, carry, x) -> (carry, y)
Block = Callable[..., PyTree]
# True, False, or a policy of `jax.checkpoint`.
Remat = bool | Callable[..., bool]

# The innermost scope of a scan over layers, with the number of its stacked leaves. A jaxpr shows it
# even after `vmap` and inside `jit`, whose traces may be cached from earlier calls.
_SCOPE = re.compile(r"jgrad:scan_layers\[(\d+)\]\)*$")


def leaves_of_call(equation: Equation) -> int | None:
    """How many stacked leaves a scan over layers has; None for any other operation."""
    if equation.primitive.name != "scan":
        return None
    scope = _SCOPE.search(str(equation.source_info.name_stack))
    return None if scope is None else int(scope[1])


def scan_layers(
    block: Block,
    layers: PyTree,
    carry: PyTree,
    *,
    xs: PyTree = None,
    has_ys: bool = False,
    axis: PyTree = 0,
    remat: Remat = True,
) -> PyTree:
    """Scans over the stacked layers of a model, and shows `step_in_backward` where they are.

        carry, y_i = block(layer_i, carry, x_i)    for each layer i, from the first to the last

    On its own, this is `jax.lax.scan` with `jax.checkpoint` around `block`, differentiable in any
    mode. In a loss for `step_in_backward`, it also marks the layers. They are then updated one by
    one, each as soon as its gradient is known, so the gradients of all layers never exist at the
    same time.

    Layers and `xs` may lie in host memory. Each layer is fetched when its turn comes, so that a
    forward pass, as in evaluation or generation, has one layer on the device. In an ordinary
    `jax.grad`, it is fetched again in the backward pass, and the gradients of the layers lie on the
    host, too.

    In such a loss, each leaf of `layers` has to be one of the parameters, either as it is, or cast,
    transposed or reshaped as a whole: `w.reshape(6, 2, *w.shape[1:])` makes six layers of two
    each out of twelve. Calls that are not differentiated, as under `jax.lax.stop_gradient`, may
    read any stack. You can call the model inside `jax.jit`, `jax.checkpoint`, or
    `jax.vmap` over its inputs, but only `remat` decides what is recomputed. Inside `block`, you can
    use all of JAX; for micro-batches, for example, use a `jax.lax.map` of a `jax.checkpoint`.

    Args:
      block: a function that applies one layer, called as `block(layer, carry)`, or with `xs` as
        `block(layer, carry, x)`. It returns a carry with the same structure, shapes and dtypes as
        its input; with `has_ys`, the pair `(carry, y)`. It may close over other arrays, such as a
        mask or rotary embeddings, which are differentiated as well.
      layers: a tree of arrays, the stacked parameters of the layers.
      carry: a tree of arrays, such as the activations.
      xs: a tree of arrays of any dtype with an entry for each layer along the first axis, such as
        keys for dropout, layer indices, caches or frozen weights. They are not updated layer by
        layer. If they are computed from parameters, they are differentiated, with gradients as
        large as themselves.
      has_ys: whether `block` returns `(carry, y)`, where y may be an auxiliary loss, metrics, or
        activations for other layers. The y of all layers are stacked along a new first axis, and
        are differentiated.
      axis: the axis along which layers are stacked, such as 1 in MaxText: an int, or a prefix tree
        of these.
      remat: True stores only the carries and recomputes everything else in the backward pass; False
        stores everything that the backward pass needs; a policy from `jax.checkpoint_policies`
        chooses what to store, and where. To store the carries in host memory, begin `block` with
        `x = checkpoint_name(x, "input")`, from `jax.ad_checkpoint`, and offload that name by
        `save_and_offload_only_these_names`.

    Returns:
      The carry after the last layer; with `has_ys`, the pair `(carry, ys)`.

    Raises:
      ValueError: a leaf of `layers` does not have the axis, the number of layers differs between
        leaves of `layers` or `xs`, or a leaf is known to be sharded along the axis.
      TypeError: a leaf is not an array, an option has the wrong type, or `block` does not return a
        pair; from `jax.lax.scan`, the carry changes its structure, shape or dtype.

    Example:
      >>> params = {"layers": {"w": jnp.full((8, 4, 4), 0.1)}, "head": jnp.ones((4, 2))}
      >>> def block(layer, x, key):
      ...     return x + jax.random.uniform(key) * (x @ layer["w"]), jnp.mean(x**2)
      >>> def loss(params, x, keys):
      ...     x, squares = jgrad.scan_layers(block, params["layers"], x, xs=keys, has_ys=True)
      ...     return jnp.mean((x @ params["head"]) ** 2) + 1e-3 * jnp.sum(squares)
      >>> loss(params, jnp.ones((3, 4)), jax.random.split(jax.random.key(0), 8)).shape
      ()

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), section 4, for
      storing only the carries.
    """
    layers, carry, xs = map(checks.values_of, (layers, carry, xs))
    stacked = ArgLeaves.from_tree(_NAME, "layers", layers)
    axes = ArgLeaves.from_prefix(_NAME, "axis", axis, "layers", layers)
    for i, (k, x) in enumerate(zip(axes.leaves, stacked.leaves, strict=True)):
        if x is not None and (not isinstance(k, int) or isinstance(k, bool)):
            axes.fail(i, TypeError, f"{checks.describe(k)}, expected an int")
    count = _length(stacked, axes.leaves)
    if not count:
        came = "no arrays, expected a tree of stacked arrays"
        came = came if count is None else "no layers, expected at least one"
        raise ValueError(f"{_NAME}: `layers`: {came}.")
    xs_leaves = ArgLeaves.from_tree(_NAME, "xs", xs)
    _length(xs_leaves, [0] * len(xs_leaves.leaves), count)
    checks.boolean(_NAME, "has_ys", has_ys)
    checks.on_device(_NAME, "carry", carry, "it on the device: only layers and `xs` are fetched")
    if not (isinstance(remat, bool) or callable(remat)):
        expected = "a bool, or a policy of `jax.checkpoint_policies`"
        raise TypeError(f"{_NAME}: `remat`: {checks.describe(remat)}, expected {expected}.")

    def body(carry: PyTree, turn: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        layer, x = map(host_memory.to_device, turn)
        result = block(layer, carry) if xs is None else block(layer, carry, x)
        is_pair = isinstance(result, tuple) and len(result) == 2
        if not has_ys:
            if is_pair and trees.flatten(result)[1] != trees.flatten(carry)[1]:
                expected = "a new carry; with `has_ys=True`, it returns `(carry, y)`"
                raise TypeError(f"{_NAME}: `block` returns a pair, expected {expected}.")
            return result, None
        if not is_pair:
            came = "an array" if checks.is_array(result) else type(result).__name__
            expected = "`(carry, y)`, as `has_ys=True` says"
            raise TypeError(f"{_NAME}: `block` returns {came}, expected {expected}.")
        return result

    if remat is not False:
        # A scan keeps XLA from merging both computations; a barrier would cost time.
        policy = None if remat is True else remat
        body = jax.checkpoint(body, prevent_cse=False, policy=policy)
    leaves, structure = trees.flatten(layers)
    pairs = zip(leaves, axes.leaves, strict=True)
    layers = structure.unflatten(
        jnp.moveaxis(x, k, 0) if k and x is not None else x for x, k in pairs
    )
    with jax.named_scope(f"jgrad:scan_layers[{len(jax.tree.leaves(layers))}]"):
        try:
            carry, ys = jax.lax.scan(body, carry, (layers, xs))
        except ValueError as error:
            remedy = "`block` may not close over one: pass it as `xs`, or move it to the device"
            host_memory.add_note(error, _NAME, remedy)
            raise
    return (carry, ys) if has_ys else carry


def _length(arg: ArgLeaves, axes: Sequence[int], count: int | None = None) -> int | None:
    """The number of layers, which all leaves have along their axes; None if there are no leaves."""
    expected = f"{count}, as there are layers"
    for i, (x, k) in enumerate(zip(arg.leaves, axes, strict=True)):
        if x is None:
            continue
        if not (isinstance(x, jax.Array) or checks.is_numeric(x)):  # keys of JAX, too
            arg.fail(i, TypeError, f"{checks.describe(x)}, expected an array")
        if not -x.ndim <= k < x.ndim:
            what = f"an axis {k}" if k else "a first axis"
            arg.fail(i, ValueError, f"shape {x.shape}, expected {what}, that of the layers")
        length = x.shape[k]
        if count is None:
            count, first = length, checks.at(arg.paths()[i])
            expected = f"{length}, as those of the first leaf{first}"
        if length != count:
            along = f"axis {k}" if k else "the first axis"
            arg.fail(i, ValueError, f"{length} layers along {along}, expected {expected}")
        names = (*jax.typeof(x).sharding.spec, *[None] * x.ndim)[k % x.ndim]
        if names is not None:  # with explicit axes; with automatic ones, types don't say it
            came = f"sharded over {names!r} along the axis of the layers, which a scan cuts"
            arg.fail(i, ValueError, f"{came}, expected another axis, or none")
    return count
