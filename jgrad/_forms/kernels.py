"""The step of a leaf whose moments are in 8 bits, as one operation, which is a kernel on a TPU.

If nothing else of the method comes after it, this operation may also do what follows: leave out a
skipped step, and add the update to the weight for `apply_gradients`.
"""

import functools

import jax

from jgrad._arithmetic import leafwise
from jgrad._arithmetic.leafwise import Call, Function
from jgrad._inputs.around import Origin, Rest, finishing, in_float32, origin, rest as rest_of
from jgrad._inputs.inputs import Finished, Inputs
from jgrad._inputs.leaf_functions import LeafFunction
from jgrad._inputs.moment import Moment
from jgrad._kernels import platforms
from jgrad._kernels.leaf_step import in_memory
from jgrad._trees import checks
from jgrad._trees.places import is_shard
from jgrad._trees.protocols import Leaf, PyTree
from jgrad._trees.shardings import Placement


class Kernels:
    """Those of a function of one leaf in one update."""

    def __init__(self, function: LeafFunction, args: tuple[PyTree, ...]) -> None:
        """`args` are those of the function, of all leaves."""
        if Kernels not in function.made:  # one for each choice, so that JAX's caches find it again
            kernel = functools.partial(_kernel, function.no_kernel)
            function.made[Kernels] = functools.cache(kernel)
        self._make = function.made[Kernels]
        self._moments = [x for x in args if isinstance(x, Moment)]
        self._told: list[int] = []
        self._later: dict[int, tuple[Leaf, ...]] = {}  # XLA fuses it with what reads the update

    def update(
        self,
        inputs: Inputs,
        i: int,
        program: Function,
        arguments: tuple[PyTree, ...],
        steps: tuple[Leaf, ...],
        alone: Function,
    ) -> Call:
        """The call of one leaf, whose result is its update, or what `finish` makes one.

        Args:
          inputs: of the method.
          i: see above.
          program: makes an update of arguments and `steps`.
          arguments: see above.
          steps: weight, decay and rate; none where the direction is the update.
          alone: makes the direction of the arguments.
        """
        w, rest = None if inputs.w is None else inputs.w[i], rest_of(inputs, i)
        if rest is None or not in_memory(w, jax.tree.leaves(rest.args)[0]):
            if steps:
                self._later[i] = steps
            return self.call(i, alone, arguments)
        self._told.append(i)
        arguments = (*arguments, *steps)
        return self.call(i, program, arguments, finishing(inputs, i), rest, w)

    def finish(self, inputs: Inputs, updates: list[PyTree], update: Function | None) -> None:
        """Makes updates of what the calls returned; `update` of directions."""
        for i in self._told:
            new, *others = updates[i]
            if inputs.then is not None:
                inputs.then.note(new, tuple(others))
            updates[i] = Finished(new)
        if update is not None:
            calls: list[Call] = [
                (update, (updates[i], None, *steps)) for i, steps in self._later.items()
            ]
            for i, new in zip(self._later, leafwise.run(calls), strict=True):
                updates[i] = new

    def call(
        self,
        i: int,
        function: Function,
        arguments: tuple[PyTree, ...],
        ending: tuple[Function | None, tuple[jax.Array, ...]] = (None, ()),
        rest: Rest | None = None,
        w: jax.Array | None = None,
    ) -> Call:
        """The call of one leaf in a kernel.

        Args:
          i: which leaf.
          function: what is made of it.
          arguments: those of the function.
          ending: what makes an update of its results, with a flag; nothing if this is all.
          rest: what follows the update.
          w: the weight.
        """
        (finish, flag), (g, *others) = ending, arguments
        follows, rest_args, replaces = rest or (None, (), ())
        read = (_as_read(g), *(_as_read(x) if x is w else x for x in others))
        kernel = self._make(function, finish, follows, self._place(i))
        return kernel, (read, flag, rest_args, replaces)

    def _place(self, i: int) -> Placement | None:
        """How the leaf is sharded, if the user says it."""
        places = [x.random.places[i] for x in self._moments if x.random and x.random.places]
        return next((x for x in reversed(places) if x is not None and not is_shard(x)), None)


def _as_read(x: PyTree) -> PyTree:
    """What a kernel reads in the place of a gradient or a weight."""
    if not checks.is_array(x):
        return x
    sources = origin(x)
    if in_memory(sources.arrays[0]):
        return sources
    return x if in_memory(x) else in_float32(x)  # what reads it is not in the kernel


def _kernel(
    no_kernel: str,
    function: Function,
    finish: Function | None,
    follows: Function | None,
    place: Placement | None,
) -> Function:
    """A function of one leaf in 8 bits, with all that follows it, as one operation.

    `no_kernel` says why a TPU cannot have the function as a kernel; "" if it can.
    """

    def step(
        arguments: tuple[PyTree, ...], flag: tuple[jax.Array, ...], rest_args: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        results, _ = function(*(x.array() if isinstance(x, Origin) else x for x in arguments))
        if finish is None or follows is None:
            return results if isinstance(results, tuple) else (results,)
        update = finish(results, *flag)
        return (update, *follows(update, *rest_args))

    def call(*args: PyTree) -> tuple[PyTree, list[Leaf]]:
        values, moments = platforms.run(
            step, args[:3], replaces=args[3], place=place, no_kernel=no_kernel
        )
        return values[0] if len(values) == 1 and finish is None else tuple(values), moments

    return call
