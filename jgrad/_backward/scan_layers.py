"""The layers of a model in a loss: a scan over them, which `step_in_backward` takes apart."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import jax

from jgrad._trees import checks
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.told import during
from jgrad._trees.trees import PyTree

_NAME = "scan_layers"

# (layer, carry) -> carry
Block = Callable[[PyTree, PyTree], PyTree]
# True, False, or a policy of `jax.checkpoint`.
Remat = bool | Callable[..., Any]
# Takes the place of the scan.
Recorder = Callable[[Block, PyTree, PyTree, Remat, int], PyTree]

_recorder: ContextVar[Recorder | None] = ContextVar(_NAME, default=None)


def scan_layers(block: Block, layers: PyTree, carry: PyTree, *, remat: Remat = True) -> PyTree:
    """Runs a carry through a stack of layers, and tells `step_in_backward` where they are.

        carry = block(layer, carry)    for each layer of `layers`, from the first to the last

    By itself this is `jax.lax.scan` with `jax.checkpoint` around the block, differentiable in any
    mode. In the loss of `step_in_backward` it also says where the layers are. They are then updated
    one by one, each as soon as its gradient is known, so that there is never a gradient of all of
    them.

    Args:
      block: a layer of the model. It returns a carry of the structure, shapes and dtypes of the one
        that it is given. It may read other arrays, such as a mask or a table of rotations, and
        those are differentiated, too.
      layers: a tree of arrays whose first axis is that of the layers.
      carry: a tree of arrays, such as the activations.
      remat: True computes the inside of a block again in the backward pass, so that only the
        carries are kept; False keeps what the backward pass reads; a policy of
        `jax.checkpoint_policies` says what is kept.

    Returns:
      The carry behind the last layer.

    Raises:
      ValueError: leaves of `layers` have no first axis, or axes of different lengths.
      TypeError: a leaf is not an array, or `remat` is neither a bool nor a function; as from
        `jax.lax.scan`, a carry of another structure (in `step_in_backward` a ValueError), shape or
        dtype.

    Example:
      >>> params = {"layers": {"w": jnp.full((8, 4, 4), 0.1)}, "head": jnp.ones((4, 2))}
      >>> def loss(params, x):
      ...     x = jgrad.scan_layers(lambda layer, x: x + x @ layer["w"], params["layers"], x)
      ...     return jnp.mean((x @ params["head"]) ** 2)
      >>> loss(params, jnp.ones((3, 4))).shape
      ()

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), section 4, for the
      carries that are kept.
    """
    count = count_of(layers)
    if not (isinstance(remat, bool) or callable(remat)):
        expected = "a bool, or a policy of `jax.checkpoint_policies`"
        raise TypeError(f"{_NAME}: `remat`: {checks.describe(remat)}, expected {expected}.")
    layers, carry = checks.values_of(layers), checks.values_of(carry)
    recorder = _recorder.get()
    if recorder is not None:
        return recorder(block, layers, carry, remat, count)
    body = rematerialised(block, remat)
    return jax.lax.scan(lambda x, layer: (body(layer, x), None), carry, layers)[0]


def rematerialised(block: Block, remat: Remat) -> Block:
    """The block, whose inside is computed again in the backward pass."""
    if remat is False:
        return block
    # A scan keeps XLA from joining both computations; a barrier for it would cost time.
    policy = None if remat is True else remat
    again: Block = jax.checkpoint(block, prevent_cse=False, policy=policy)
    return again


def count_of(layers: PyTree) -> int:
    """The number of layers of a stack."""
    arg = ArgLeaves.from_tree(_NAME, "layers", layers)
    known = [i for i, x in enumerate(arg.leaves) if x is not None]
    if not known:
        raise ValueError(f"{_NAME}: `layers`: no arrays, expected a tree of stacked arrays.")
    for i in known:
        if not checks.is_array(x := arg.leaves[i]):
            arg.fail(i, TypeError, f"{checks.describe(x)}, expected an array")
        if not x.ndim:
            arg.fail(i, ValueError, "shape (), expected a first axis, that of the layers")
    count: int = arg.leaves[known[0]].shape[0]
    for i in known:
        if (length := arg.leaves[i].shape[0]) != count:
            first = f"{count}, as those of the first leaf{checks.at(arg.paths()[known[0]])}"
            arg.fail(i, ValueError, f"{length} layers along the first axis, expected {first}")
    return count


def recorded(recorder: Recorder) -> AbstractContextManager[Recorder | None]:
    """Hands each call to a recorder, which is given the block, not what `remat` makes of it."""
    return during(_recorder, recorder)
