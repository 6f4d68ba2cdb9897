"""What a method has to know of its wrappers: is the update kept, and what follows in its kernel.

A wrapper that rejects updates chooses between new and old arrays after the update. Whatever writes
updates and moments in jgrad is told the decision by a `Commit`, and chooses by itself, before
anything reads its new arrays: where a norm or a second pass reads them, XLA would otherwise write
both, and a kernel writes in place. It says which arrays are *settled*, right whatever the decision
is, so that the wrapper chooses only the others, as those of other libraries.

A kernel computes the whole step of a leaf: it reads the gradient, the weight and the codes once,
and overwrites weight and codes. Whatever follows the update, such as its addition to the weight,
therefore has to be known before the method computes the update. A wrapper that changes weights
passes a `Then` (see `told`), in which the method looks up the function for each of its leaves.
Afterwards, the wrapper looks up the result of this function by the update that belongs to it. If a
transformation of another library changed the update, or the leaf has no kernel, it finds nothing
and computes the same itself. What precedes a gradient or a weight is passed on in the other
direction: whoever makes one from another array calls `made_of`. A record in a wrapper could not
hold this, because `optax.chain` may call both without any wrapper. `benchmarks/notes/eight_bits.md`
shows what each of these saves.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import leafwise
from jgrad._arithmetic.leafwise import Call, Function
from jgrad._inputs.inputs import Inputs, keeping_update
from jgrad._trees import checks
from jgrad._trees.protocols import Leaf, PyTree
from jgrad._trees.shardings import Placement
from jgrad._trees.told import trace_state

T = TypeVar("T")


class Commit:
    """The decision about one update, told to whatever writes arrays.

    It lives while a program is traced, and remembers arrays by identity. A transformation of
    another library that makes other arrays, or another trace, only costs time.

    Attributes:
      by_this: whether the wrapper itself commits the update.
      clips: whether what overflows in a committed update is to become the largest number.
      left_out: by identity, the gradients that something inside leaves out of a window if they are
        not committed; None if nothing does.
    """

    def __init__(
        self,
        flag: jax.Array,
        outer: "Commit | None" = None,
        *,
        clips: bool,
        judged: PyTree = None,
        agreed: Callable[[jax.Array], jax.Array] = lambda flag: flag,
    ) -> None:
        """Of one update.

        Args:
          flag: whether the wrapper commits it.
          outer: the decision of a wrapper around; the update is committed if both say so.
          clips: see above.
          judged: gradients, if the flag is whether they are finite, which others may know, too.
          agreed: makes all devices decide alike.
        """
        self.by_this, self._outer, self._agreed, self._trace = flag, outer, agreed, trace_state()
        self.clips: bool = clips or (outer is not None and outer.clips)
        self._joined: jax.Array | None = None
        self._judged = judged
        # With the arrays, so that no others get their identities.
        self._settled: dict[int, tuple[Leaf, Leaf]] = {}
        self.left_out: dict[int, Leaf] | None = None

    @property
    def flag(self) -> jax.Array:
        """Whether the update is committed, a bool scalar; by all wrappers around."""
        self._judged = None  # what is read stays
        if self._joined is not None or self._outer is None:
            return self.by_this if self._joined is None else self._joined
        flag = self.by_this & self._outer.flag
        if trace_state() == self._trace:  # otherwise it is a tracer of a branch
            self._joined = flag
        return flag

    def take_finite(self, finite: jax.Array, gradients: Sequence[jax.Array]) -> None:
        """Says whether gradients are finite, for a transformation that has their norm anyway.

        Taken if nothing has read the flag, and all gradients are among these; what computed it
        before is then not in the program. XLA would not always join the two passes.
        """
        if self._outer is not None:
            self._outer.take_finite(finite, gradients)
        if self._judged is not None:
            judged = filter(checks.is_inexact, jax.tree.leaves(self._judged))
            if set(map(id, judged)) <= set(map(id, gradients)):
                self.by_this = self._agreed(finite)

    def settle(self, new: PyTree, old: PyTree = None) -> None:
        """Says that arrays are right whatever the decision is.

        Args:
          new: updates, or a part of a state.
          old: this part before; each array is right in the place of its old one alone.
        """
        arrays = jax.tree.leaves(new)
        places = [None] * len(arrays) if old is None else jax.tree.leaves(old)
        for x, place in zip(arrays, places, strict=True):
            self._settled[id(x)] = x, place
        if self._outer is not None:
            self._outer.settle(new, old)

    def has_settled(self, new: Leaf, old: Leaf = None) -> bool:
        """Whether an array is right whatever the decision is, in the place of an old one."""
        settled = self._settled.get(id(new))
        return settled is not None and settled[1] is old

    def leave_out(self, gradients: PyTree) -> None:
        """Says that these are left out of a window, here, if they are not committed."""
        left_out = self.left_out = self.left_out or {}
        for g in jax.tree.leaves(gradients):
            source = origin(g).arrays[0]
            left_out[id(source)] = source
        if self._outer is not None:
            self._outer.leave_out(gradients)


# ---- what precedes -------------------------------------------------------------------------------


class _Making(NamedTuple):
    """How a traced array was made: it, a function and its arguments, none of them kept alive."""

    new: Callable[[], Leaf]
    function: Function
    arguments: tuple[Callable[[], Leaf], ...]


# By the identity of each new array, for its lifetime. A trace keeps its arrays, so it would never
# be freed if one were kept here.
_makings: dict[int, _Making] = {}


def made_of(new: T, function: Function, old: Leaf, *numbers: Leaf) -> T:
    """Says that an array is `function(old, *numbers)`, of what a kernel may read in its place.

    So a clipped gradient need not be written. It is remembered as long as a trace has the arrays.

    Args:
      new: the array, which is returned.
      function: elementwise, and the same object in each trace.
      old: of the same shape.
      numbers: of one element, or a column with one for each row, or arrays of the same shape.
    """
    if isinstance(new, jax.core.Tracer) and new is not old:
        key = id(new)
        alive = weakref.ref(new, lambda _: _makings.pop(key, None))
        _makings[key] = _Making(alive, function, tuple(map(_held, (old, *numbers))))
    return new


def _held(x: Leaf) -> Callable[[], Leaf]:
    """Returns an argument. One that is traced is as long there as its trace needs it."""
    return weakref.ref(x) if isinstance(x, jax.core.Tracer) else lambda: x


def _making(array: Leaf) -> tuple[Function, list[Leaf]] | None:
    """What an array was made by and of; None where nothing is known."""
    making = _makings.get(id(array))
    if making is None or making.new() is not array:
        return None
    arguments = [x() for x in making.arguments]
    return None if any(x is None for x in arguments) else (making.function, arguments)


def run_and_say(calls: Sequence[Call]) -> list[Leaf]:
    """The result of each call of an elementwise rule, where a kernel may compute it itself."""
    results = leafwise.run(calls)
    for call, new in zip(calls, results, strict=True):
        function, (old, *others) = call
        is_like_old = all(x.ndim == 0 or x.shape == old.shape for x in others)
        if function is not leafwise.identity and is_like_old:
            made_of(new, function, old, *others)
    return results


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Origin:
    """How an array was made of another one, element by element.

    Attributes:
      arrays: the first array, and then the numbers of all functions.
      functions: one after the other, each of an array and of so many numbers.
    """

    arrays: tuple[Leaf, ...]
    functions: tuple[tuple[Function, int], ...] = dataclasses.field(metadata={"static": True})

    def array(self) -> Leaf:
        """The array, made again."""
        x, *numbers = self.arrays
        for function, count in self.functions:
            x, numbers = function(x, *numbers[:count]), numbers[count:]
        return x


def origin(array: Leaf) -> Origin:
    """Of an array; of one of which nothing was said, the array itself."""
    functions: list[tuple[Function, int]] = []
    numbers: tuple[Leaf, ...] = ()
    while (making := _making(array)) is not None:
        function, (array, *numbers_here) = making
        functions.insert(0, (function, len(numbers_here)))
        numbers = (*numbers_here, *numbers)
    return Origin((array, *numbers), tuple(functions))


def in_float32(x: jax.Array) -> jax.Array:
    """The array in float32, as transformations inside of a wrapper see it."""
    return x.astype(jnp.float32)


def narrow(array: Leaf) -> Leaf:
    """The array of which this one is the same in float32, or this one.

    XLA writes what a branch reads, as the rare one that repeats norms.
    """
    making = _making(array)
    return array if making is None or making[0] is not in_float32 else making[1][0]


# ---- what follows --------------------------------------------------------------------------------


class Rest(NamedTuple):
    """What is done with the update of one leaf after the transformation inside has computed it.

    Attributes:
      function: (update, *args) -> arrays; elementwise, and the same object in each trace.
      args: trees of arrays, the first of which is the parameter as it is outside.
      replaces: for each array that `function` returns the one of `args` that may be overwritten
        with it; None for none.
    """

    function: Callable[..., tuple[jax.Array, ...]]
    args: tuple[PyTree, ...]
    replaces: tuple[jax.Array | None, ...]

    def followed_by(
        self, finishing: tuple[Function, tuple[jax.Array, ...]], after: "Rest | None"
    ) -> "Rest":
        """This, whose last array is an update, and then what is done with that, if something is.

        `finishing` is that of this update, see below.
        """
        (finish, flag), later = finishing, after or Rest(_nothing, (), ())
        both = _both(self.function, finish, later.function)
        return Rest(both, (self.args, flag, later.args), (*self.replaces, *later.replaces))


def _nothing(update: jax.Array) -> tuple[jax.Array, ...]:
    return ()


@functools.cache  # one function object for each choice, so that JAX's caches find it again
def _both(function: Function, finish: Function, after: Function) -> Function:
    def both(
        update: jax.Array, args: PyTree, flag: tuple[jax.Array, ...], later: PyTree
    ) -> tuple[jax.Array, ...]:
        *kept, new = function(update, *args)
        new = finish(new, *flag)
        return (*kept, new, *after(new, *later))

    return both


class Then:
    """What a wrapper does with each update, told to the transformation inside.

    It exists while a program is traced, and remembers arrays by identity. In another trace, as that
    of a branch, nothing follows.
    """

    def __init__(
        self,
        weights: Sequence[Leaf],
        rest: Callable[[int], Rest | None],
        places: Sequence[Placement | None] = (),
        outer: "Then | None" = None,
    ) -> None:
        """Of one update.

        Args:
          weights: the parameters as they are inside.
          rest: what is done with the update of each of them; asked by the method, when all that is
            in front of it has been traced.
          places: how each of them is sharded, where the user says it.
          outer: what a wrapper around does with the updates of this one.
        """
        self._outer, self._trace = outer, trace_state()
        self._weights, self._rest, self._places = list(weights), rest, places
        self._index: dict[int, int | None] = {}
        for i, w in enumerate(self._weights):
            self._index[id(w)] = None if id(w) in self._index else i  # of two it may be either
        self._results: dict[int, tuple[Leaf, tuple[jax.Array, ...]]] = {}

    def of(self, weight: Leaf) -> Rest | None:
        """What is done with the update of a parameter."""
        i = self._index.get(id(weight))
        return None if i is None or trace_state() != self._trace else self._rest(i)

    def place_of(self, weight: Leaf) -> Placement | None:
        """How a parameter is sharded."""
        i = self._index.get(id(weight))
        return self._places[i] if self._places and i is not None else None

    def note(self, update: Leaf, results: tuple[jax.Array, ...]) -> None:
        """Says what was made of an update."""
        self._results[id(update)] = update, results

    def new_weight(self, update: Leaf) -> jax.Array | None:
        """The first array that was made of an update: if it is a weight, that after it."""
        return next(iter(self._results.get(id(update), (None, ()))[1]), None)

    def results(self, update: Leaf, count: int = 1) -> tuple[jax.Array, ...] | None:
        """The first arrays that were made of an update; None where the wrapper has to do it.

        The last of them is an update of the wrapper itself, of which the one around is told.
        """
        results = self._results.get(id(update), (None, None))[1]
        if results is None:
            return None
        if self._outer is not None:
            self._outer.note(results[count - 1] if count else update, results[count:])
        return results[:count]


def rest(inputs: Inputs, i: int) -> Rest | None:
    """What a wrapper does next with the update of an array."""
    follows: Rest | None = None
    if inputs.then is not None and inputs.w is not None:
        follows = inputs.then.of(inputs.w[i])
    return follows


def finishing(inputs: Inputs, i: int) -> tuple[Function, tuple[jax.Array, ...]]:
    """What makes of an update of an array what `directions` would: (update, *arrays) -> update.

    And these arrays: the flag of the commit.
    """
    dtype = inputs.reference.leaves[i].dtype
    if inputs.commit is None:
        return _finished(dtype, None), ()
    return _finished(dtype, inputs.commit.clips), (inputs.commit.flag,)


@functools.cache
def _finished(dtype: np.dtype, clips: bool | None) -> Function:
    def finished(update: jax.Array, *flag: jax.Array) -> jax.Array:
        kept = update if clips is None else keeping_update(dtype, clips)(update, *flag)
        return kept if kept.dtype == dtype else kept.astype(dtype)

    return finished
