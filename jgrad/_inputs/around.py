"""What stands around a method, as far as the kernel of a leaf has to know it.

A kernel computes a whole step of a leaf: it reads the gradient, the weight and the codes once, and
writes new ones in their place. So what follows an update, as the addition to the weight, has to be
told to the method before it computes the update. A wrapper that changes weights tells a `Then` (see
`told`), and the method looks for the function of each of its leaves. The wrapper then finds what
that function returned by the update that belongs to it. If a transformation of another library
changes that, or the leaf has no kernel, it finds nothing, and computes the same afterwards. What
precedes a gradient is told the other way: a transformation that makes a gradient of another one
says so by `offer`. `optax.chain` may call both, with no wrapper around, so a record that a wrapper
makes could not hold this.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import leafwise
from jgrad._arithmetic.leafwise import Call
from jgrad._kernels.leaf_step import Place
from jgrad._trees.contexts import trace_state
from jgrad._trees.trees import PyTree


class Origin(NamedTuple):
    """How an array was made of another one, element by element.

    Attributes:
      functions: one after the other, each of an array and of so many numbers.
      arrays: the first array, and then the numbers of all functions.
    """

    functions: tuple[tuple[Callable[..., jax.Array], int], ...]
    arrays: tuple[Any, ...]


class _Making(NamedTuple):
    """How a traced array was made: it, a function and its arguments, none of them kept alive."""

    new: Callable[[], Any]
    function: Callable[..., jax.Array]
    arguments: tuple[Callable[[], Any], ...]


# By the identity of each new array, as long as that is there. A trace keeps its arrays, so it would
# never end if one were kept here.
_made: dict[int, _Making] = {}


def offer(new: Any, function: Callable[..., jax.Array], old: Any, *numbers: Any) -> None:
    """Says that an array is `function(old, *numbers)`, of what a kernel may read in its place.

    So a clipped gradient need not be written. It is remembered as long as a trace has the arrays.

    Args:
      new: the array.
      function: elementwise, and the same object in each trace.
      old: of the same shape.
      numbers: of one element, or a column with one for each row, or arrays of the same shape.
    """
    if isinstance(new, jax.core.Tracer) and new is not old:
        key = id(new)
        alive = weakref.ref(new, lambda _: _made.pop(key, None))
        _made[key] = _Making(alive, function, tuple(map(_held, (old, *numbers))))


def _held(x: Any) -> Callable[[], Any]:
    """Returns an argument. One that is traced is as long there as its trace needs it."""
    return weakref.ref(x) if isinstance(x, jax.core.Tracer) else lambda: x


def _making(array: Any) -> tuple[Callable[..., jax.Array], list[Any]] | None:
    """What an array was made by and of; None where nothing is known."""
    made = _made.get(id(array))
    if made is None or made.new() is not array:
        return None
    arguments = [x() for x in made.arguments]
    return None if any(x is None for x in arguments) else (made.function, arguments)


def offered(calls: Sequence[Call | None]) -> list[Any]:
    """The result of each call of an elementwise rule, offered where a kernel may compute it."""
    results = leafwise.run(calls)
    for call, new in zip(calls, results, strict=True):
        if call is not None and call[0] is not leafwise.identity:
            function, (old, *others) = call
            if all(x.ndim == 0 or x.shape == old.shape for x in others):
                offer(new, function, old, *others)
    return results


def origin(array: Any) -> Origin:
    """Of an array; of one of which nothing was said, the array itself."""
    functions: list[tuple[Callable[..., jax.Array], int]] = []
    numbers: tuple[Any, ...] = ()
    while (made := _making(array)) is not None:
        function, (array, *of_step) = made
        functions.insert(0, (function, len(of_step)))
        numbers = (*of_step, *numbers)
    return Origin(tuple(functions), (array, *numbers))


_CODES = (np.int8, np.uint8)  # the dtypes of moments in 8 bits


def has_codes(state: PyTree) -> bool:
    """Whether some array of a state is in 8 bits."""
    return any(getattr(x, "dtype", None) in _CODES for x in jax.tree.leaves(state))


def in_float32(x: jax.Array) -> jax.Array:
    """The array in float32, as transformations inside of a wrapper see it."""
    return x.astype(jnp.float32)


def narrow(array: Any) -> Any:
    """The array of which this one is the same in float32, or this one.

    XLA writes what a branch reads, as the rare one that repeats norms.
    """
    made = _making(array)
    return array if made is None or made[0] is not in_float32 else made[1][0]


class Rest(NamedTuple):
    """What is done with the update of one leaf after the transformation inside has computed it.

    Attributes:
      function: (update, *arrays) -> arrays; elementwise, and the same object in each trace.
      arrays: the first is the parameter as it is outside.
      weight: (*arrays) -> the parameter as it is inside.
      replaces: for each array that `function` returns the position in `arrays` of the one that may
        be overwritten with it; None for none.
    """

    function: Callable[..., tuple[jax.Array, ...]]
    arrays: tuple[Any, ...]
    weight: Callable[..., jax.Array]
    replaces: tuple[int | None, ...]

    @classmethod
    def of_wrapper(
        cls,
        function: Callable[..., tuple[jax.Array, ...]],
        arrays: tuple[Any, ...],
        weight: Callable[..., jax.Array],
        finishing: tuple[Callable[..., jax.Array], tuple[jax.Array, ...]],
        after: "Rest | None",
        replaces: tuple[int | None, ...] = (),
    ) -> "Rest":
        """What a wrapper does with an update, and then what is done with its own.

        Args:
          function: (update, *arrays) -> (*arrays of its state, its own update).
          arrays: see above.
          weight: see above.
          finishing: of its own update, see `Inputs.finishing`.
          after: what is done with that, if something is.
          replaces: of the arrays of its state.
        """
        finish, flag = finishing
        arrays = (*arrays, *flag)
        both = _both(function, finish, len(arrays), len(flag), after and after.function)
        replaces = (*replaces, None)
        if after is not None:  # the parameter, and then what it alone needs
            later = (None if i is None else i and i + len(arrays) - 1 for i in after.replaces)
            arrays, replaces = (*arrays, *after.arrays[1:]), (*replaces, *later)
        return cls(both, arrays, weight, replaces)


@functools.cache  # one function object for each choice, so that JAX's caches find it again
def _both(
    function: Callable[..., tuple[jax.Array, ...]],
    finish: Callable[..., jax.Array],
    arrays: int,
    flags: int,
    after: Callable[..., tuple[jax.Array, ...]] | None,
) -> Callable[..., tuple[jax.Array, ...]]:
    def both(update: jax.Array, *args: Any) -> tuple[jax.Array, ...]:
        flag = args[arrays - flags : arrays]
        *kept, new = function(update, *args[: arrays - flags])
        new = finish(new, *flag)
        others = () if after is None else after(new, args[0], *args[arrays:])
        return (*kept, new, *others)

    return both


class Then:
    """What a wrapper does with each update, told to the transformation inside.

    It exists while a program is traced, and remembers arrays by identity. In another trace, as that
    of a branch, nothing follows. Without moments in 8 bits nobody asks, and it knows of no array.
    """

    def __init__(
        self,
        state: PyTree,
        weights: Sequence[Any],
        rest: Callable[[int], Rest | None],
        places: Sequence[Place | None] = (),
        outer: "Then | None" = None,
        *,
        makes_weights: bool = False,
    ) -> None:
        """Of one update.

        Args:
          state: of what is inside.
          weights: the parameters as they are inside.
          rest: what is done with the update of each of them; asked by the method, when all that is
            in front of it has been traced.
          places: how each of them is sharded, where the user says it.
          outer: what a wrapper around does with the updates of this one.
          makes_weights: whether the first array that is made of an update is the new weight.
        """
        self._makes_weights = makes_weights
        self._outer, self._trace = outer, trace_state()
        self._weights, self._rest, self._places = list(weights), rest, places
        self._index: dict[int, int | None] = {}
        is_asked = has_codes(state) or any(x is not None and x.is_shard for x in places)
        for i, w in enumerate(weights if is_asked else ()):
            self._index[id(w)] = None if id(w) in self._index else i  # of two it may be either
        self._results: dict[int, tuple[Any, tuple[jax.Array, ...]]] = {}

    def of(self, weight: Any) -> Rest | None:
        """What is done with the update of a parameter."""
        i = self._index.get(id(weight))
        return None if i is None or trace_state() != self._trace else self._rest(i)

    def place_of(self, weight: Any) -> Place | None:
        """How a parameter is sharded."""
        i = self._index.get(id(weight))
        return self._places[i] if self._places and i is not None else None

    def note(self, update: Any, results: tuple[jax.Array, ...]) -> None:
        """Says what was made of an update."""
        self._results[id(update)] = update, results

    def new_weight(self, update: Any) -> jax.Array | None:
        """The weight after an update, if a kernel has made it."""
        results = self._results.get(id(update), (None, None))[1]
        return results[0] if self._makes_weights and results else None

    def results(self, update: Any, count: int = 1) -> tuple[jax.Array, ...] | None:
        """The first arrays that were made of an update; None where the wrapper has to do it.

        The last of them is an update of the wrapper itself, of which the one around is told.
        """
        results = self._results.get(id(update), (None, None))[1]
        if results is None:
            return None
        if self._outer is not None:
            self._outer.note(results[count - 1] if count else update, results[count:])
        return results[:count]
