"""The stages of a functional update: canonicalize, jit, check, compute, cast back.

`canonicalize` runs in every call, before anything is traced, and only looks at what Python knows.
The checks of `AlignedArguments` run while tracing, once per signature.

What functional updates share:

- Trees. Any argument may be a pytree, a prefix of one, or an array or number, which stands for
  every leaf below it. A result has the structure of the finest argument that it is computed from.
- Shapes. A gradient has its parameter's shape. Moments and `lr` may have any shape that broadcasts
  to it. All other arguments have one element per leaf.
- Dtypes. Weights and moments keep theirs. The arithmetic is in float32, or in float64 where an
  array is. Integer gradients, moments and numbers are read as the default float dtype; integer
  weights are an error.
- `None` as a gradient leaves its leaf, and the moments of it, unchanged.

The trees are aligned once. From then on the method works on lists with an entry per leaf, as the
`init`/`update` pairs do.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.leafwise import apply
from jgrad._arithmetic.numerics import BetaForms
from jgrad._arithmetic.rules import cast_back
from jgrad._inputs import numbers
from jgrad._inputs.functional import Arguments, Declared, Kind, Kinds, Replaced, Role
from jgrad._inputs.kinds import Beta, OptionalNumber
from jgrad._inputs.moment import Moment
from jgrad._layers import array_spec
from jgrad._layers.layer_axes import LayerAxes, as_typed, of_arrays, read_layer_axes
from jgrad._trees import checks, forms, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.explained import explained
from jgrad._trees.protocols import PyTree
from jgrad._trees.shardings import read_mesh_axes

MOMENTS = {Role.FIRST_MOMENT, Role.SECOND_MOMENT}
# They may have any shape that broadcasts to the weights.
BROADCAST = MOMENTS | {Role.RATE}
# They have an entry for each element, instead of one number per leaf.
ARRAYS = BROADCAST | {Role.WEIGHTS, Role.GRADIENT}
# They are complex if the weights are.
COMPLEX = {Role.WEIGHTS, Role.GRADIENT, Role.FIRST_MOMENT}


# Trees as `jax.jit` wants static arguments: hashable, as structure and leaves.
_StaticAxes = tuple[tuple[Any, tuple[Any, ...]], ...]


def _static_axes(function: str, given: Arguments) -> _StaticAxes:
    """`mesh_axes` and `layer_axes`."""
    mesh_axes = read_mesh_axes(function, given["mesh_axes"])
    axes = mesh_axes, read_layer_axes(function, given["layer_axes"])
    return tuple((structure, tuple(x)) for x, structure in map(trees.flatten, axes))


class AlignedArguments:
    """The checked arguments of one functional update, aligned: a list with an entry per leaf.

    Numbers are scalars, or what an `ArraySpec` makes of them beside packed weights. An absent
    number is the Python number 0.
    """

    def __init__(self, function: str, kinds: Kinds, named: dict[str, Any]) -> None:
        self._function = function
        present = {
            name: kind
            for name, kind in kinds.items()
            if kind is not OptionalNumber or named[name] is not None
        }
        names = dict(zip(kinds.values(), kinds, strict=True))
        self._gradient = names.get(Role.GRADIENT, "")
        self._reference = names.get(Role.WEIGHTS, self._gradient)
        self._trees = {
            name: _floating(function, name, named[name], kind) for name, kind in present.items()
        }
        self._packed = trees.any_packed(*self._trees.values())
        if self._packed:
            self._trees = {
                name: self._beside_packed(name, tree, present[name])
                for name, tree in self._trees.items()
            }
        aligned = checks.common_structure(function, **self._trees)
        self._structure = aligned.structure
        self._counts = dict(zip(self._trees, aligned.counts, strict=True))
        self._leaves: dict[str, Any] = {
            name: trees.repeat(trees.flatten(tree)[0], self._counts[name])
            for name, tree in self._trees.items()
        }
        self._check(present, list(self._trees.values())[aligned.finest])
        self._whole, gradients = dict(self._leaves), self._leaves[self._gradient]
        self._rows = [i for i, g in enumerate(gradients) if g is not None]
        for name, kind in kinds.items():
            if name not in present:
                self._leaves[name] = [0.0] * len(gradients)
            elif kind is Beta:
                forms = named[name]
                self._leaves[name] = BetaForms(
                    self._scalar_entries(name, self._trees[name], checked=True),
                    self._scalar_entries(name, forms.complement),
                    self._scalar_entries(name, forms.log),
                )
            elif kind not in ARRAYS:
                self._leaves[name] = self._scalar_entries(name, self._trees[name], checked=True)
        if len(self._rows) < len(gradients):  # the others stay as they are
            self._leaves = {name: leafwise.at(x, self._rows) for name, x in self._leaves.items()}

    def __getitem__(self, name: str) -> Any:
        """The entries of an argument; of a beta, `BetaForms` with a list in each field."""
        return self._leaves[name]

    def layer_axes(self, axes: _StaticAxes) -> list[LayerAxes]:
        """Where the layers of each leaf are, from `mesh_axes` and `layer_axes`."""
        # The weights may be one array for a tree of gradients: the finer of the two has the leaves.
        both = (self._reference, self._gradient)
        name = max(both, key=lambda name: len(self._counts[name]))
        tree, counts = self._trees[name], self._counts[name]
        unpacked = trees.shapes(tree)
        if self._packed:
            leaves = trees.flatten(unpacked)[0]
        else:
            leaves = _first_below(self._whole[self._reference], counts)
        reference = ArgLeaves(
            self._function, self._reference, leaves, lambda: trees.paths(unpacked)
        )

        def read(name: str, static: tuple[Any, tuple[Any, ...]]) -> ArgLeaves:
            structure, entries = static
            option = structure.unflatten(entries)
            return ArgLeaves.from_prefix(self._function, name, option, self._reference, unpacked)

        options = read("mesh_axes", axes[0]), read("layer_axes", axes[1])
        per_array = of_arrays(array_spec.specs(tree), *options, reference)
        arrays = zip(*(self[name] for name in both), strict=True)
        return as_typed(
            leafwise.at(trees.repeat(per_array, counts), self._rows), options[0], arrays
        )

    def new_weights(self, updates: list[Any], *, stop_gradients: bool) -> PyTree:
        """w + update, in the dtypes of `w`."""
        new = self.replaced(self._reference, apply(rules.add, self[self._reference], updates))
        return trees.map_leaves(jax.lax.stop_gradient, new) if stop_gradients else new

    def replaced(
        self, name: str, new: Sequence[Any], computed_from: Sequence[str] | None = None
    ) -> PyTree:
        """New values of an argument in its dtypes; the old ones where the new are `None`.

        The tree is as fine as the finest argument that the values are computed from, which by
        default is all of them.
        """
        leaves = list(self._whole[name])
        for i, x in zip(self._rows, cast_back(new, self[name]), strict=True):
            leaves[i] = x
        if trees.flatten(self._trees[name])[1] == self._structure:
            return self._structure.unflatten(leaves)  # no tree is finer
        finest = None if computed_from is None else self._finest((name, *computed_from))
        if finest is None:
            return self._structure.unflatten(leaves)
        below = _first_below(leaves, self._counts[finest])
        old = trees.broadcast(self._trees[name], self._trees[finest])
        counts = zip(self._counts[finest], below, old, strict=True)
        structure = trees.flatten(self._trees[finest])[1]
        return structure.unflatten([x if count else y for count, x, y in counts])

    def _finest(self, names: Sequence[str]) -> str | None:
        """The one of these arguments that all of them are prefixes of; None if there is none."""
        aligned = trees.align(*(self._trees[name] for name in names))
        return None if aligned is None else names[aligned.finest]

    def _beside_packed(self, name: str, tree: PyTree, kind: Kind) -> PyTree:
        """An argument in the form of packed weights.

        A number as a moment would fill the padding, so moments have to be packed.
        """
        reference = self._trees[self._reference]
        if kind is Role.RATE:
            same = trees.flatten(tree)[1] == trees.flatten(reference)[1]
            return tree if same else self._per_array(name, tree)
        if kind in ARRAYS:
            checks.same_structure(self._function, name, tree, self._reference, reference)
            return tree
        checks.one_element(ArgLeaves.from_tree(self._function, name, tree))
        return self._per_array(name, trees.map_leaves(_scalar, tree))

    def _per_array(self, name: str, tree: PyTree) -> PyTree:
        """An option for the leaves of a packed reference as one for its arrays."""
        reference = self._trees[self._reference]
        unpacked = trees.shapes(reference)
        arg = ArgLeaves.from_prefix(self._function, name, tree, self._reference, unpacked)
        specs = array_spec.specs(reference)
        for spec in specs:
            for i in spec.positions if spec.is_buffer else ():
                if arg.leaves[i] is None:
                    arg.fail(i, TypeError, "None, expected an array or a number")
        shapes = ArgLeaves.from_tree(self._function, self._reference, unpacked)
        checks.broadcastable(arg, shapes.with_arrays())
        structure = trees.flatten(reference)[1]
        return structure.unflatten([spec.per_array(arg.leaves) for spec in specs])

    def _scalar_entries(self, name: str, tree: PyTree, *, checked: bool = False) -> list[Any]:
        """A number per leaf as scalars; beside packed weights what was checked has their form."""
        if not (self._packed and checked):
            tree = trees.map_leaves(_scalar, tree)
        if self._packed and not checked:
            tree = self._per_array(name, tree)
        return trees.repeat(trees.flatten(tree)[0], self._counts[name])

    def _check(self, kinds: Kinds, finest: PyTree) -> None:
        """Checks kinds and shapes, leaf by leaf."""
        args = {
            name: ArgLeaves(self._function, name, self._leaves[name], lambda: trees.paths(finest))
            for name in kinds
        }
        gradient, reference = args[self._gradient], args[self._reference]
        _none_together(reference, gradient, list(args.values()))
        for name, kind in kinds.items():
            arg = args[name]
            if kind in COMPLEX:
                _same_kinds(arg, reference)
            if kind is Role.GRADIENT:
                checks.same_shapes(arg, reference)
            elif kind in BROADCAST:
                # Without weights, nothing can be enlarged: a moment of shape (1,) for a scalar is
                # fine.
                checks.broadcastable(arg, reference, rank_may_grow=reference is gradient)
            elif not (kind in ARRAYS or self._packed):
                given = ArgLeaves.from_tree(self._function, name, self._trees[name])
                if any(map(np.ndim, given.leaves)):
                    checks.one_element(given)


def _none_together(weights: ArgLeaves, gradient: ArgLeaves, others: Sequence[ArgLeaves]) -> None:
    """`None` is a missing gradient, or stands in all arguments at once; it is no number."""
    for i, (w, g) in enumerate(zip(weights.leaves, gradient.leaves, strict=True)):
        if w is None and g is not None:
            gradient.fail(
                i, TypeError, f"{checks.describe(g)}, expected None, as `{weights.name}` is"
            )
        for arg in others if g is not None else ():
            if arg.leaves[i] is None:
                arg.fail(i, TypeError, "None, expected an array or a number")


def _same_kinds(arg: ArgLeaves, reference: ArgLeaves) -> None:
    """Complex exactly where the reference is; `None` matches everything."""
    for i, x, r in arg.beside(reference):
        if jnp.iscomplexobj(x) != jnp.iscomplexobj(r):
            expected = "a complex dtype" if jnp.iscomplexobj(r) else "a real dtype"
            problem = f"{checks.describe(x)}, expected {expected} to match {r.dtype}"
            arg.fail(i, TypeError, problem, f" does not match `{reference.name}`")


def _first_below(leaves: Sequence[Any], counts: Sequence[int]) -> list[Any]:
    """For each leaf of a coarser tree, the first of the leaves that it stands for, if any."""
    starts = itertools.accumulate(counts[:-1], initial=0)
    return [leaves[i] if n else None for i, n in zip(starts, counts, strict=False)]


def _scalar(x: Any) -> jax.Array:
    return numerics.floating(x).reshape(())


def _floating(function: str, name: str, tree: PyTree, kind: Kind) -> PyTree:
    """Integers in the default float dtype, except as weights, where they are an error."""
    tree = tree.value if isinstance(tree, BetaForms) else tree
    leaves, structure = trees.flatten(tree)
    arg = ArgLeaves(function, name, leaves, lambda: trees.paths(tree))
    for i, x in enumerate(leaves):
        if forms.find(x) is not None:
            remedy = "make it one by `carry_over(tree, like=shapes)`"
            arg.fail(i, TypeError, f"{checks.describe(x)}, expected an array; {remedy}")
        if x is None:
            continue
        x = leaves[i] = jnp.asarray(x)
        if jnp.issubdtype(x.dtype, jnp.floating):
            continue
        if jnp.issubdtype(x.dtype, jnp.integer) and kind is not Role.WEIGHTS:
            leaves[i] = numerics.floating(x)
        elif not (jnp.issubdtype(x.dtype, jnp.complexfloating) and kind in COMPLEX):
            remedy = "; cast it, or leave it out of the update" if kind is Role.WEIGHTS else ""
            arg.fail(i, TypeError, f"{checks.describe(x)}, expected a floating dtype{remedy}")
    return structure.unflatten(leaves)


def run(declared: Declared) -> Callable[..., Any]:
    """What users call: the update, compiled as one program."""
    body, replaced, before, kinds = declared
    name, signature = body.__name__, inspect.signature(body)
    parameters = signature.parameters
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_ONLY]
    defaults = {p.name: p.default for p in parameters.values() if p.name not in positional}

    def program(named: Arguments, options: tuple[tuple[str, Any], ...]) -> Any:
        arguments = AlignedArguments(name, kinds, named)
        entries = {
            key: Moment(arguments[key]) if kind in MOMENTS else arguments[key]
            for key, kind in kinds.items()
        }
        static = dict(options)
        if "layer_axes" in static:
            static["layer_axes"] = arguments.layer_axes(static["layer_axes"])
        first = list(map(entries.pop, positional))
        results = body(*first, **entries, **static)
        return _results(arguments, kinds, replaced, results, static)

    program.__name__ = name  # what profiles show
    compiled = jax.jit(program, static_argnums=1)

    @functools.wraps(body)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) != len(positional) or not kwargs.keys() <= defaults.keys():
            return explained(body)(*args, **kwargs)  # an error
        given = defaults | dict(zip(positional, args, strict=True)) | kwargs
        checks.no_out(name, given["out"])
        if "stop_gradients" in given:  # 1 would find the program of True
            checks.boolean(name, "stop_gradients", given["stop_gradients"])
        given = given if before is None else before(given)
        named = canonicalize(name, kinds, {key: given.pop(key) for key in kinds})
        if "layer_axes" in given:
            given |= {"mesh_axes": None, "layer_axes": _static_axes(name, given)}
        options = tuple(given.items())
        try:
            hash(options)
            # A number of NumPy has a hash, and compares itself with texts as an array.
            others = (x for x in given.values() if not isinstance(x, str))
            is_static = not any(map(checks.is_array, others))
        except TypeError:
            is_static = False
        # Else the body says which option has no such values.
        return (compiled if is_static else program)(named, options)

    return call


def _results(
    arguments: AlignedArguments, kinds: Kinds, replaced: Replaced, results: Any, static: Arguments
) -> Any:
    """The results of a body as trees: one, or a tuple."""
    trees_of_results = []
    columns = zip(replaced.items(), results if len(replaced) > 1 else (results,), strict=True)
    for (key, computed_from), new in columns:
        if kinds[key] is Role.WEIGHTS:
            stop = static["stop_gradients"]
            trees_of_results.append(arguments.new_weights(new, stop_gradients=stop))
        else:
            trees_of_results.append(arguments.replaced(key, new, computed_from))
    return tuple(trees_of_results) if len(trees_of_results) > 1 else trees_of_results[0]


def canonicalize(function: str, kinds: Kinds, named: dict[str, PyTree]) -> dict[str, Any]:
    """Strongly typed arrays for arrays, and for numbers what their kind makes of them."""
    for name, kind in kinds.items():
        if kind is Role.RATE:
            # Of any sign, but finite.
            numbers.in_range(ArgLeaves.from_tree(function, name, named[name]))
    canonical: dict[str, Any] = {}
    for name, tree in lists_as_arrays(function, named).items():
        kind = kinds[name]
        if isinstance(kind, Role):
            canonical[name] = _strong_arrays(function, name, tree, kind)
        else:
            canonical[name] = kind.canonical(function, name, tree)
    return canonical


def lists_as_arrays(function: str, named: dict[str, PyTree]) -> dict[str, PyTree]:
    """A list of numbers is an array, as in Ivy; if another list holds arrays, lists are trees."""
    if {list, tuple}.isdisjoint(map(type, named.values())):
        return named
    lists = {name: tree for name, tree in named.items() if _is_list(tree)}
    if not all(map(_is_numbers, lists.values())) or (lists and trees.any_packed(*named.values())):
        return named
    as_arrays = {}
    for name, tree in lists.items():
        try:
            as_arrays[name] = np.asarray(tree)
        except ValueError:
            raise ValueError(
                f"{function}: `{name}`: {checks.describe(tree)}, expected rows of one length."
            ) from None
    return named | as_arrays


def _is_list(x: Any) -> bool:
    return type(x) in (list, tuple)  # not a NamedTuple, which would be a tree


def _is_numbers(x: Any) -> bool:
    """A list, however deep, of numbers and nothing else."""
    leaves = jax.tree.leaves(x, is_leaf=lambda node: not _is_list(node))
    return bool(leaves) and all(map(checks.is_number, leaves))


def _strong_arrays(function: str, name: str, tree: PyTree, role: Role) -> PyTree:
    if role is not Role.WEIGHTS and checks.is_number(tree):
        return numbers.strong_scalar(tree)
    if all(  # `weak_type` is not documented, checked in JAX 0.8 to 0.12
        isinstance(x, jax.Array) and not getattr(x, "weak_type", True)
        for x in jax.tree.leaves(tree)
    ):
        return tree  # the fast path: an eager call spends most of its time outside XLA here
    tree = checks.values_of(tree)
    checks.arrays_or_numbers(function, name, tree)
    if (
        role is Role.WEIGHTS
    ):  # an integer among weights is an error, and must still be seen to be one
        tree = trees.map_leaves(
            lambda x: np.asarray(x) if isinstance(x, (int, np.integer)) else x, tree
        )
    return trees.map_leaves(
        lambda x: numbers.strong_scalar(x) if checks.is_number(x) else numerics.strong(x), tree
    )
