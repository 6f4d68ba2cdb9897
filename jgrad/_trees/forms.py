"""Forms in which a state stores an array that counts as one leaf: what is asked of each.

A form is a type of nodes, such as `Blocks`, and a `Form` that answers for it. Whoever adds one
writes a class with these methods and registers it; the rest of the house asks, and tests no type.
"""

from collections.abc import Callable, Hashable, Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jgrad._trees.protocols import Leaf, PyTree

SMALLEST = 4096  # elements from which few bits per element gain something
SCOPE = "jgrad:words"  # of operations that make `to_words` and `to_codes`, and mix no elements


class Form:
    """The answers of one form. Those that raise `NotImplementedError` have to be given.

    Attributes:
      kind: of the nodes, a `NamedTuple` of arrays with `shape` and `dtype`.
      name: as users ask for it by `moment_dtype`; "" where a method chooses it.
      words: as messages call it.
      is_rounded: whether it is rounded at random when it is written.
      precision: relative rounding error, of which a few updates leave less than half.
      named_part: the part that a box of flax names as the array; None where all together are.
      loses: why no other form can be made of it, for an error; "" where one can.
    """

    kind: type[Any]
    name = ""
    words = ""
    is_rounded = False
    precision = 0.0
    named_part: int | None = 0
    loses = ""

    # ---- in an update

    def array(self, x: Leaf) -> jax.Array:
        """The array for which it stands."""
        raise NotImplementedError

    def check(self, arg: Any, i: int, x: Leaf, like: Leaf, *, real: bool, remedy: str) -> None:
        """An error where leaf `i` of a state is not as an update needs it.

        Args:
          arg: all leaves, an `ArgLeaves`.
          i: which of them.
          x: the leaf.
          like: what has its shape.
          real: whether it is a second moment.
          remedy: what to say of another form.
        """
        raise NotImplementedError

    def zeros(
        self, p: Leaf, like: Leaf, layout: Any, zeros: Callable[[Leaf], Leaf], real: bool
    ) -> Leaf:
        """Zeros of a moment.

        Args:
          p: the parameter, or a part of it of the right shape.
          like: what has the shape, in this form where a method chooses it.
          layout: what `layouts` says of it, where a user chose the form.
          zeros: an ordinary array of zeros of a shape.
          real: whether it is a second moment.
        """
        raise NotImplementedError

    def write(
        self, moment: Any, rule: Callable[..., jax.Array], args: tuple[Leaf, ...]
    ) -> jax.Array:
        """What `LeafMoment.write` returns; what is stored becomes `moment.new`."""
        raise NotImplementedError

    def kernels(self, x: Leaf) -> Any:
        """What makes the step of a leaf one operation on accelerators; None for ordinary steps."""
        return None

    # ---- where users choose it

    def layouts(self, params: Any, shapes: PyTree, options: Any) -> list[Any]:
        """For each array how it is stored in this form; None where it is not."""
        raise NotImplementedError

    def may_be(self, params: Any, i: int, options: Any) -> bool:
        """Whether an array may be stored in this form, although its shape does not say so."""
        return False

    def say_if_unused(self, params: Any, options: Any) -> None:
        """Where a user chose the form, and no array is stored in it."""

    # ---- in states

    def array_dtype(self, x: Leaf) -> np.dtype:
        """The dtype of `array(x)`."""
        return np.dtype(np.float32)

    def describe(self, x: Leaf) -> str:
        """What came, in a few words."""
        return f"{self.kind.__name__} of {x.dtype} and shape {x.shape}"

    def is_made_of(self, *parts: Leaf) -> bool:
        """Whether such arrays, restored from a file under the names of the parts, are one."""
        raise NotImplementedError

    def check_stored(self, arg: Any, i: int, x: Leaf) -> None:
        """An error where leaf `i` of a state is none that can be read."""

    def form_of(self, x: Leaf) -> tuple[Hashable, ...]:
        """What equal ones have in common, of which the first is as accounts call it."""
        return (self.words, *((part.shape, part.dtype) for part in x))

    def made_of(self, arg: Any, i: int, like: Leaf, x: Leaf) -> Leaf:
        """Leaf `i`, an array or in any form, in the form and the parts of another one."""
        raise NotImplementedError

    def shardings(self, x: Leaf, part_sharding: Callable[..., Leaf]) -> Leaf:
        """Its shardings, by parts.

        Args:
          x: the leaf.
          part_sharding: that of the parameter for a part, along the axes that both have. With
            `leaf` and `axis`, of the leaf whose elements along an axis are some to one of the part.
        """
        return self.kind(*map(part_sharding, x))

    # ---- in host memory

    def to_words(self, x: Leaf) -> Leaf:
        """As it lies in host memory."""
        return x

    def to_codes(self, x: Leaf) -> Leaf:
        """As an update reads it."""
        return x

    def as_stored(self, x: Leaf, like: Leaf) -> Leaf:
        """As another one lies."""
        return x

    def belong_on_host(self, x: Leaf, is_large: Callable[[Leaf], bool]) -> list[bool]:
        """Which of its arrays do."""
        return list(map(is_large, jax.tree.leaves(x)))


# ---- the table ---------------------------------------------------------------------------------

BY_KIND: dict[type, Form] = {}  # by the type of a leaf; others only look whether it is there
_BY_NAME: dict[str, Form] = {}
_RANDOM: list[Callable[[jax.Array], Any]] = []
_BOXES: list[ModuleType] = []


def register(form: Form) -> None:
    """Adds a form."""
    BY_KIND[form.kind] = form
    if form.name:
        _BY_NAME[form.name] = form


def rounds_by(random: Callable[[jax.Array], Any]) -> None:
    """Adds what rounds at random: `random(step)` has `rounding(inputs, old, mesh_axes)`."""
    _RANDOM[:] = [random]


def boxed_by(boxes: ModuleType) -> None:
    """Adds what knows the boxes in which flax holds arrays: `variables.py`."""
    _BOXES[:] = [boxes]


def find(x: Leaf) -> Form | None:
    """The form of a leaf; None for an array, or what else is none."""
    return BY_KIND.get(type(x))


def known(x: Leaf) -> Form:
    """That of a leaf which is in one."""
    return BY_KIND[type(x)]


def named(name: object) -> Form | None:
    """The form that users call so; None for a dtype."""
    return _BY_NAME.get(name) if isinstance(name, str) else None


def names() -> list[str]:
    """All that users may ask for."""
    return list(_BY_NAME)


def makers() -> list[tuple[type[Any], Callable[..., bool]]]:
    """Each kind, and what says whether parts from a file are one."""
    return [(form.kind, form.is_made_of) for form in BY_KIND.values()]


def is_of_method(x: Leaf) -> bool:
    """Whether a leaf is in a form that a method chose, and no user."""
    form = find(x)
    return form is not None and not form.name


def some(leaves: Sequence[Leaf]) -> bool:
    """Whether one of them is in a form."""
    return not BY_KIND.keys().isdisjoint(map(type, leaves))


def boxes_of(leaves: Sequence[Leaf]) -> Any:
    """What knows the boxes of flax that parts of leaves may be in; None if none is in a form."""
    return _BOXES[0] if some(leaves) else None


def random(step: jax.Array) -> Any:
    """What rounds at random in one update."""
    return _RANDOM[0](step)


# ---- in trees ----------------------------------------------------------------------------------


def is_one(x: Leaf) -> bool:
    """Whether a leaf is in a form."""
    return type(x) in BY_KIND


def map_forms(f: Callable[[Form, Leaf], Leaf], tree: PyTree) -> PyTree:
    """The tree with `f(form, leaf)` for what is in a form."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_one)
    return jax.tree.unflatten(
        structure, [f(BY_KIND[type(x)], x) if is_one(x) else x for x in leaves]
    )


def to_words(tree: PyTree) -> PyTree:
    """The tree, each leaf as it lies in host memory."""
    return map_forms(lambda form, x: form.to_words(x), tree)


def to_codes(tree: PyTree) -> PyTree:
    """The tree, each leaf as an update reads it, in the memory where it lies."""
    return map_forms(lambda form, x: form.to_codes(x), tree)


def as_stored(new: PyTree, old: PyTree) -> PyTree:
    """A tree, each leaf as the one of another tree lies."""
    leaves, structure = jax.tree.flatten(new, is_leaf=is_one)
    pairs = zip(leaves, jax.tree.leaves(old, is_leaf=is_one), strict=True)
    return jax.tree.unflatten(
        structure, [BY_KIND[type(x)].as_stored(x, y) if is_one(x) else x for x, y in pairs]
    )


def belong_on_host(tree: PyTree, is_large: Callable[[Leaf], bool]) -> list[bool]:
    """Which arrays do."""
    on_host: list[bool] = []
    for x in jax.tree.leaves(tree, is_leaf=is_one):
        on_host += BY_KIND[type(x)].belong_on_host(x, is_large) if is_one(x) else [is_large(x)]
    return on_host
