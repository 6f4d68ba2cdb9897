"""A share of an update: one layer of a stack, or leaves that are in no stack.

`step_in_backward` updates a layer as soon as its gradient is known. It calls a transformation with
the leaves of one share, and None for all others, while `told` returns this `Share`. Anything that
is computed from all leaves together asks it for the number of all shares (`told.over_shares`), and
stochastic rounding asks it for the position of a layer in its stack. Anything that needs the
gradients of the whole model at once raises an error (`told.refuse`).
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import KeyPath, PyTree
from jgrad._trees.told import IN_PARTS, STEP, Combine, stacked_leaves, told, trace_state

# A function of the library, and which of its numbers it is.
Key = tuple[str, int]
# By key, each a tree of arrays.
Numbers = dict[Key, PyTree]


class Share:
    """One share, while its update is traced.

    Attributes:
      layer: the number of the layer, which may be traced; None for what is in no stack.
      parts: this share's part of each number of all shares.
    """

    def __init__(
        self,
        layer: jax.Array | int | None = None,
        known: Numbers | None = None,
        others: Numbers | None = None,
        *,
        shapes: Mapping[KeyPath, jax.ShapeDtypeStruct],
        begins: bool = False,
        marks: bool = False,
    ) -> None:
        """Of one update.

        Args:
          layer: see above.
          known: the numbers of all shares, where they are.
          others: those of all other shares; the number is then that of both.
          shapes: of all parameters of the model, by path.
          begins: whether it is an `init`, which has no gradients.
          marks: whether operations are marked, as this library's or as those of others.
        """
        self.layer = layer
        self.parts: dict[Key, tuple[Combine, PyTree]] = {}
        self._known, self._others, self._shapes = known or {}, others or {}, shapes
        self._marks = marks
        self._begins, self._trace = begins, trace_state()

    def number(self, function: str, combine: Combine, part: PyTree) -> PyTree:
        """The number of all shares."""
        if self._begins:
            return part
        if trace_state() != self._trace:
            raise ValueError(
                f"{STEP}: `tx`: `{function}` computes a number from all gradients inside a "
                "branch, expected it outside: `branch=False` in `skip_nonfinite`, `every=1` in "
                "`watch`."
            )
        index = sum(name == function for name, _ in self.parts)
        key = (function, index)
        self.parts[key] = combine, part
        if key in self._known:
            return self._known[key]
        return combine.two(self._others[key], part) if key in self._others else part

    def _shape(self, path: KeyPath, here: jax.ShapeDtypeStruct | None) -> object:
        """That of a parameter in the whole model, in the dtype that it has here."""
        whole = self._shapes.get(path)
        if here is None or whole is None:
            return here if whole is None else whole
        return jax.ShapeDtypeStruct(whole.shape, here.dtype)

    def whole_shapes(self, shapes: PyTree) -> PyTree:
        """The shapes of all parameters, for those of the share."""
        return jax.tree_util.tree_map_with_path(self._shape, shapes, is_leaf=lambda x: x is None)

    def numbers_of_layer(self, arg: ArgLeaves, shapes: PyTree) -> ArgLeaves:
        """Numbers for the elements of each leaf; where a layer is updated by itself, those of it.

        Args:
          arg: the numbers.
          shapes: of the leaves of the share.
        """
        if self.layer is None:
            return arg
        leaves = list(arg.leaves)
        for i, x, stack in stacked_leaves(shapes):
            axis = np.ndim(leaves[i]) - x.ndim + stack.axis
            if axis >= 0 and np.shape(leaves[i])[axis] == stack.layers * stack.length:
                first = self.layer * stack.length
                leaves[i] = jax.lax.dynamic_slice_in_dim(leaves[i], first, stack.length, axis)
        return arg._replace(leaves=leaves)

    def check(self, function: str) -> None:
        """An error in the trace of another library, which may be kept for the next share."""
        if trace_state() not in (self._trace, told().trace):  # the latter in a branch of ours
            raise ValueError(
                f"{STEP}: `tx`: `{function}` is called inside a branch of another library, or "
                "`jax.jit`; wrap the whole step in `jax.jit`, use `jgrad.skip_nonfinite` for "
                f"`optax.apply_if_finite`, and for `optax.MultiSteps` {IN_PARTS}, or use the "
                "ordinary step."
            )

    def within(self, *, is_own: bool) -> AbstractContextManager[object]:
        """Marks operations as this library's own, or as those of what is inside, if it marks."""
        return jax.named_scope(_OWN if is_own else _OTHERS) if self._marks else nullcontext()


_OWN, _OTHERS = "jgrad:own", "jgrad:others"


def is_others(scopes: str) -> bool | None:
    """Whether an operation in named scopes is one of another library; None if nothing says it."""
    last_own, last_others = scopes.rfind(_OWN), scopes.rfind(_OTHERS)
    return None if last_own == last_others else last_others > last_own


def in_stack(keys: np.ndarray, size: int) -> np.ndarray | jax.Array:
    """The keys of an array's random bits, where it is a layer of so many elements.

    Its elements then have the bits that they have in the stack: the hash is one of the first key
    and the number of an element, added.
    """
    share: Share | None = told().share
    if share is None or share.layer is None:
        return keys
    before = jnp.asarray(share.layer).astype(jnp.uint32) * jnp.uint32(size % 2**32)
    return jnp.stack([jnp.asarray(keys[0]) + before, jnp.asarray(keys[1])])


def shapes_of(params: PyTree) -> dict[KeyPath, jax.ShapeDtypeStruct]:
    """Of all parameters, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {path: jax.ShapeDtypeStruct(np.shape(x), x.dtype) for path, x in leaves}
