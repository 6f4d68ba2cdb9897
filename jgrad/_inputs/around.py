"""What a method has to know of its wrappers: is the update kept, and what follows in its kernel.

`skip_nonfinite` could compute an update and choose between new and old arrays afterwards. But then
both the choice and the step would read each new moment, so XLA would write it to memory. Instead,
the wrapper passes a `Commit` to the transformations inside (see `told`), and each of jgrad's makes
the choice itself, before anything reads its new moments. Those of other libraries know nothing of
it.

A `Commit` lives while a program is traced, and remembers arrays by identity. Arrays are *finite* if
they are the gradients, or were computed only from such arrays by a transformation that never makes
anything non-finite. Updates and arrays of a state are *settled* if they are right whatever the
decision is, which means zero, or the old array, if the update is not committed. The wrapper checks
all others. If a transformation in between makes other arrays, or another trace, this only costs
time.

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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import leafwise
from jgrad._arithmetic.leafwise import Call, Function
from jgrad._inputs.inputs import Inputs, keeping_update
from jgrad._trees import checks
from jgrad._trees.places import Place
from jgrad._trees.protocols import PyTree
from jgrad._trees.told import trace_state


class Commit:
    """The decision about one update, and what is known of its arrays.

    Attributes:
      clips: whether what overflows in a committed update is to become the largest number; False
        where the gradients may be infinite, which would then go unnoticed.
      is_left_out: whether gradients that are not committed are left out by what is inside.
    """

    def __init__(
        self,
        gradients: PyTree,
        finite: jax.Array,
        agreed: Callable[[jax.Array], jax.Array] = lambda flag: flag,
        outer: "Commit | None" = None,
    ) -> None:
        """Of gradients that are finite where this update is committed.

        Args:
          gradients: see above.
          finite: whether they are.
          agreed: makes all devices decide alike.
          outer: the decision of a wrapper around; the update is committed if both say so.
        """
        self.clips = True
        self.is_left_out = False
        self._flag = finite
        self._agreed = agreed
        self._outer = outer
        self._is_joined = outer is None
        self._is_read = False
        self._trace = trace_state()
        self._gradients = _arrays(gradients)
        self._finite = dict(self._gradients)
        self._updates: dict[int, Any] = {}
        self._states: dict[int, tuple[Any, Any]] = {}

    @classmethod
    def by_loss(cls, gradients: PyTree, accepted: jax.Array, outer: "Commit | None") -> "Commit":
        """Of a decision that says nothing of the gradients; finite is what `outer` knows to be.

        No norm of the gradients is taken in the place of this flag.
        """
        is_known = outer is not None and outer.is_finite(gradients)
        commit = cls(gradients if is_known else (), accepted, outer=outer)
        commit.clips, commit._is_read = is_known, True
        return commit

    def leave_out(self) -> None:
        """Says that gradients which are not committed are left out of a window, here."""
        self.is_left_out = True
        if self._outer is not None:
            self._outer.leave_out()

    @property
    def flag(self) -> jax.Array:
        """Whether the update is committed, a bool scalar."""
        self._is_read = True
        if self._is_joined or self._outer is None:
            return self._flag
        flag = self._flag & self._outer.flag
        if trace_state() == self._trace:  # otherwise it is a tracer of a branch
            self._flag, self._is_joined = flag, True
        return flag

    def is_finite(self, tree: PyTree) -> bool:
        """Whether each inexact array of the tree is finite if the update is committed."""
        return _arrays(tree).keys() <= self._finite.keys() | self._updates.keys()

    def add_finite(self, new: PyTree, of: PyTree) -> None:
        """Says that new arrays are finite if those are of which they are computed."""
        if self.is_finite(of):
            self._finite |= _arrays(new)

    def has_settled(self, updates: PyTree) -> bool:
        """Whether each inexact array is finite, and zero if the update is not committed."""
        return _arrays(updates).keys() <= self._updates.keys()

    def settle(self, updates: PyTree) -> None:
        """Says that the updates are settled."""
        self._updates |= _arrays(updates)

    def settle_moved(self, new: PyTree, of: PyTree) -> None:
        """Says that new arrays are settled if others are, whose elements they have."""
        if self.has_settled(of):
            self.settle(new)

    def has_kept(self, new: Any, old: Any) -> bool:
        """Whether an array is no inexact one, or finite, and the old one if not committed."""
        return not checks.is_inexact(new) or self.is_old_or_new(new, old)

    def is_old_or_new(self, new: Any, old: Any) -> bool:
        """Whether an array is the old one if the update is not committed, of any dtype."""
        return new is old or self._states.get(id(new), (None, None))[1] is old

    def keep(self, new: Sequence[Any], old: Sequence[Any]) -> None:
        """Says that leaves of a state are settled, each in the place of its old one alone."""
        for pair in zip(new, old, strict=True):
            if pair[0] is not None:
                arrays = zip(*map(jax.tree.leaves, pair), strict=True)
                self._states |= {id(n): (n, o) for n, o in arrays}

    def take_finite(self, finite: jax.Array, tree: PyTree) -> None:
        """Says whether the arrays are finite, for a transformation that has their norm anyway.

        Taken if all gradients are among them and nothing has read the flag; then what computed the
        flag before is not in the compiled program.
        """
        if self._outer is not None:
            self._outer.take_finite(finite, tree)
        if not self._is_read and _arrays(tree).keys() >= self._gradients.keys():
            self._flag = self._agreed(finite)


def _arrays(tree: PyTree) -> dict[int, Any]:
    """By identity. The arrays are kept, so that no other gets the identity of one."""
    return {id(x): x for x in jax.tree.leaves(tree) if checks.is_inexact(x)}


# ---- what precedes -------------------------------------------------------------------------------


class _Making(NamedTuple):
    """How a traced array was made: it, a function and its arguments, none of them kept alive."""

    new: Callable[[], Any]
    function: Function
    arguments: tuple[Callable[[], Any], ...]


# By the identity of each new array, for its lifetime. A trace keeps its arrays, so it would never
# be freed if one were kept here.
_made: dict[int, _Making] = {}


def made_of(new: Any, function: Function, old: Any, *numbers: Any) -> Any:
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
        alive = weakref.ref(new, lambda _: _made.pop(key, None))
        _made[key] = _Making(alive, function, tuple(map(_held, (old, *numbers))))
    return new


def _held(x: Any) -> Callable[[], Any]:
    """Returns an argument. One that is traced is as long there as its trace needs it."""
    return weakref.ref(x) if isinstance(x, jax.core.Tracer) else lambda: x


def _making(array: Any) -> tuple[Function, list[Any]] | None:
    """What an array was made by and of; None where nothing is known."""
    made = _made.get(id(array))
    if made is None or made.new() is not array:
        return None
    arguments = [x() for x in made.arguments]
    return None if any(x is None for x in arguments) else (made.function, arguments)


def run_and_say(calls: Sequence[Call | None]) -> list[Any]:
    """The result of each call of an elementwise rule, where a kernel may compute it itself."""
    results = leafwise.run(calls)
    for call, new in zip(calls, results, strict=True):
        if call is not None and call[0] is not leafwise.identity:
            function, (old, *others) = call
            if all(x.ndim == 0 or x.shape == old.shape for x in others):
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

    arrays: tuple[Any, ...]
    functions: tuple[tuple[Function, int], ...] = dataclasses.field(metadata={"static": True})

    def array(self) -> Any:
        """The array, made again."""
        x, *numbers = self.arrays
        for function, count in self.functions:
            x, numbers = function(x, *numbers[:count]), numbers[count:]
        return x


def origin(array: Any) -> Origin:
    """Of an array; of one of which nothing was said, the array itself."""
    functions: list[tuple[Function, int]] = []
    numbers: tuple[Any, ...] = ()
    while (made := _making(array)) is not None:
        function, (array, *of_step) = made
        functions.insert(0, (function, len(of_step)))
        numbers = (*of_step, *numbers)
    return Origin((array, *numbers), tuple(functions))


def in_float32(x: jax.Array) -> jax.Array:
    """The array in float32, as transformations inside of a wrapper see it."""
    return x.astype(jnp.float32)


def narrow(array: Any) -> Any:
    """The array of which this one is the same in float32, or this one.

    XLA writes what a branch reads, as the rare one that repeats norms.
    """
    made = _making(array)
    return array if made is None or made[0] is not in_float32 else made[1][0]


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
    args: tuple[Any, ...]
    replaces: tuple[Any, ...]

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
    def both(update: jax.Array, own: Any, flag: Any, later: Any) -> tuple[jax.Array, ...]:
        *kept, new = function(update, *own)
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
        weights: Sequence[Any],
        rest: Callable[[int], Rest | None],
        places: Sequence[Place | None] = (),
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
        """The first array that was made of an update: if it is a weight, that after it."""
        return next(iter(self._results.get(id(update), (None, ()))[1]), None)

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


def rest(inputs: Inputs, i: int) -> Rest | None:
    """What a wrapper does next with the update of an array."""
    found: Rest | None = None
    if inputs.then is not None and inputs.w is not None:
        found = inputs.then.of(inputs.w[i])
    return found


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
