"""The layers of a model in a loss: a scan over them, which `step_in_backward` takes apart."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jgrad._trees import checks, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import PyTree

_NAME = "scan_layers"

# (layer, carry) -> carry, or with `xs` and `has_ys` (layer, carry, x) -> (carry, y)
Block = Callable[..., PyTree]
# True, False, or a policy of `jax.checkpoint`.
Remat = bool | Callable[..., Any]

# The innermost scope of a scan over layers, and how many stacked leaves it has. It is seen in a
# jaxpr after `vmap` and inside `jit`, whose traces JAX may have kept from calls before.
_SCOPE = re.compile(r"jgrad:scan_layers\[(\d+)\]\)*$")


def leaves_of_call(equation: Any) -> int | None:
    """How many stacked leaves a scan over layers has; None for any other operation."""
    if equation.primitive.name != "scan":
        return None
    found = _SCOPE.search(str(equation.source_info.name_stack))
    return None if found is None else int(found[1])


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
    """Runs a carry through a stack of layers, and tells `step_in_backward` where they are.

        carry, y_i = block(layer_i, carry, x_i)    for each layer i, from the first to the last

    By itself this is `jax.lax.scan` with `jax.checkpoint` around the block, differentiable in any
    mode. In the loss of `step_in_backward` it also says where the layers are. They are then updated
    one by one, each as soon as its gradient is known, so that there is never a gradient of all of
    them.

    There each leaf of `layers` is one of the parameters, as it is, or cast or transposed as a
    whole. The model may be called in `jax.jit`, `jax.checkpoint`, or `jax.vmap` over its inputs;
    `remat` alone says what is computed again. Inside of a block all of JAX may be used: micro-
    batches, for example, are a `jax.lax.map` of a `jax.checkpoint` there.

    Args:
      block: a layer of the model, called as `block(layer, carry)`, or with `xs` as
        `block(layer, carry, x)`. It returns a carry of the structure, shapes and dtypes of the one
        that it is given; with `has_ys`, the pair `(carry, y)`. It may read other arrays, such as a
        mask or a table of rotations, and those are differentiated, too.
      layers: a tree of stacked arrays, the parameters of the layers.
      carry: a tree of arrays, such as the activations.
      xs: a tree of arrays with an entry for each layer along their first axis, which are not
        updated layer by layer: keys for dropout, numbers of layers, states, frozen weights. Of any
        dtype; differentiated where they are computed from parameters, then with gradients of their
        size.
      has_ys: whether the block returns `(carry, y)`. The y of all layers are stacked along a new
        first axis: auxiliary losses, metrics, activations for other layers. They are
        differentiated.
      axis: the axis of `layers` along which the layers are, such as 1 for MaxText: an int, or a
        prefix tree of those.
      remat: True computes the inside of a block again in the backward pass, so that only the
        carries are kept; False keeps what the backward pass reads; a policy of
        `jax.checkpoint_policies` says what is kept.

    Returns:
      The carry behind the last layer; with `has_ys`, the pair `(carry, ys)`.

    Raises:
      ValueError: leaves of `layers` have no such axis, or axes of different lengths, or those of
        `xs` another one; or a type says that they are sharded along it.
      TypeError: a leaf is not an array, an option is of the wrong kind, or the block returns no
        pair; as from `jax.lax.scan`, a carry of another structure, shape or dtype.

    Example:
      >>> params = {"layers": {"w": jnp.full((8, 4, 4), 0.1)}, "head": jnp.ones((4, 2))}
      >>> def block(layer, x, key):
      ...     return x + jax.random.uniform(key) * (x @ layer["w"]), jnp.mean(x**2)
      >>> def loss(params, x, keys):
      ...     x, squares = jgrad.scan_layers(block, params["layers"], x, xs=keys, has_ys=True)
      ...     return jnp.mean((x @ params["head"]) ** 2) + 1e-3 * jnp.sum(squares)
      >>> loss(params, jnp.ones((3, 4)), jax.random.split(jax.random.key(0), 8)).shape
      ()

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), section 4, for the
      carries that are kept.
    """
    layers, carry, xs = map(checks.values_of, (layers, carry, xs))
    of_layers = ArgLeaves.from_tree(_NAME, "layers", layers)
    of_axis = ArgLeaves.from_prefix(_NAME, "axis", axis, "layers", layers)
    for i, (k, x) in enumerate(zip(of_axis.leaves, of_layers.leaves, strict=True)):
        if x is not None and (not isinstance(k, int) or isinstance(k, bool)):
            of_axis.fail(i, TypeError, f"{checks.describe(k)}, expected an int")
    count = _length(of_layers, of_axis.leaves)
    if not count:
        came = "no arrays, expected a tree of stacked arrays"
        came = came if count is None else "no layers, expected at least one"
        raise ValueError(f"{_NAME}: `layers`: {came}.")
    of_xs = ArgLeaves.from_tree(_NAME, "xs", xs)
    _length(of_xs, [0] * len(of_xs.leaves), count)
    checks.boolean(_NAME, "has_ys", has_ys)
    if not (isinstance(remat, bool) or callable(remat)):
        expected = "a bool, or a policy of `jax.checkpoint_policies`"
        raise TypeError(f"{_NAME}: `remat`: {checks.describe(remat)}, expected {expected}.")

    def body(carry: PyTree, given: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        layer, x = given
        result = block(layer, carry) if xs is None else block(layer, carry, x)
        if not has_ys:
            return result, None
        if not (isinstance(result, tuple) and len(result) == 2):
            came = "an array" if checks.is_array(result) else type(result).__name__
            expected = "`(carry, y)`, as `has_ys=True` says"
            raise TypeError(f"{_NAME}: `block` returns {came}, expected {expected}.")
        return result

    if remat is not False:
        # A scan keeps XLA from joining both computations; a barrier for it would cost time.
        policy = None if remat is True else remat
        body = jax.checkpoint(body, prevent_cse=False, policy=policy)
    leaves, structure = trees.flatten(layers)
    pairs = zip(leaves, of_axis.leaves, strict=True)
    layers = structure.unflatten(
        jnp.moveaxis(x, k, 0) if k and x is not None else x for x, k in pairs
    )
    with jax.named_scope(f"jgrad:scan_layers[{len(jax.tree.leaves(layers))}]"):
        carry, ys = jax.lax.scan(body, carry, (layers, xs))
    return (carry, ys) if has_ys else carry


def _length(arg: ArgLeaves, axes: Sequence[int], count: int | None = None) -> int | None:
    """The number of layers, which all leaves have along their axes; None if there are no leaves."""
    expected = f"{count}, as there are layers"
    for i, (x, k) in enumerate(zip(arg.leaves, axes, strict=True)):
        if x is None:
            continue
        if not checks.is_array(x):
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
        if names is not None:  # with explicit axes: with automatic ones no type says it
            came = f"sharded over {names!r} along the axis of the layers, which a scan cuts"
            arg.fail(i, ValueError, f"{came}, expected another axis, or none")
    return count
