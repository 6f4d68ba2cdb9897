"""A state in the form of another recipe, and an account of what became of each part."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jgrad._arithmetic import numerics
from jgrad._inputs import numbers
from jgrad._inputs.numbers import Scalar
from jgrad._inputs.transformation import arrays_of
from jgrad._packed import packing, restored
from jgrad._quantized import encoding
from jgrad._states import account as accounts, forms, matching, parts, paths, units
from jgrad._states.account import Account, Source
from jgrad._states.matching import Matcher
from jgrad._states.parts import Keys, Part
from jgrad._states.units import Momentum
from jgrad._trees import checks, trees, values, variables
from jgrad._trees.blocks import Blocks
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.host_memory import where_it_lies
from jgrad._trees.other_names import explained
from jgrad._trees.trees import PyTree
from jgrad._wrappers import parameters

_NAME = "carry_over"
_BY_DECAY = (units.AVERAGED, units.SUMMED)


@explained
def carry_over(
    old: PyTree,
    *,
    like: PyTree,
    params: PyTree = None,
    strict: bool = False,
    rename: Mapping[str, str] | None = None,
    reset: PyTree | Callable[[PyTree], PyTree] = None,
    old_momentum: Momentum | None = None,
    like_momentum: Momentum | None = None,
    momentum_decay: Scalar | None = None,
) -> tuple[PyTree, Account]:
    """The state of one recipe in the form of another, and an account of it.

        state[part, leaf] = old[part, leaf]    where `old` has it, in the form that `like` has
                          = 19 max(mw^2, its mean)   second moments, where `old` has first ones
                          = w                  `master`, `average` and `z`
                          = 0                  other moments and counters

    Parts are matched by what they mean and by the paths of their parameters, so wrappers may be
    added, removed and reordered, and `old` may be a state of jgrad or optax, or what orbax restores
    without a target. The `value` of a flax variable does not belong to a path. Arrays become 8 bits
    or come back, and trees are packed or unpacked. Where several parts mean the same, each goes to
    the wrapper or optimizer that is most like its own, so that a state of the same recipe comes
    back bit for bit. Of an `nnx.Optimizer` of flax, give the `opt_state` of two;
    `nnx.update(new.opt_state, nnx.state(state))` puts the result into the second.

    Moments keep the step that belongs to them. Any other counter goes on from one that has counted
    the same thing: updates inside of `accumulate`, mini-batches around it.

    The step is kept: schedules and bias correction count it. A second moment that starts at zero
    beside a large step would make the first steps of Adam far too long. So where a first moment is
    kept, the second one is estimated: an average of gradients that are noise, with momentum 0.9,
    has 1/19 of their mean square; for sums of gradients the factor is 0.19. Where neither is there,
    both start at zero, and a note in the account says it.

    A first moment is an average of gradients, as in `adam`, a sum of them, as in
    `gradient_descent(momentum=)`, or a sum of steps, with the learning rate inside, as in `lars`.
    optax keeps steps with the opposite sign, as updates. Steps and updates become each other, and
    sums and averages of gradients do with `momentum_decay`; between gradients and steps there is no
    conversion, so what `old` has is dropped. The states of `gradient_descent` and `lars` look
    alike, and a `trace` in a chain of optax does not always show where the learning rate is: then
    both sides are taken for the same, a note says it, and `old_momentum` and `like_momentum` say
    better. States of `optax.adamax` and `optax.contrib.adopt` look like Adam's, in files those of
    `optax.adabelief` do, and hold other numbers: give `reset=True`.

    Args:
      old: a state, of arrays.
      like: what the new `tx.init(params)` returns, or the shapes of it by
        `jax.eval_shape(tx.init, params)`. Of arrays, only numbers of a wrapper that `old` does not
        have are read, such as a loss scale.
      params: the parameters, where the state has copies or averages of weights that `old` does not
        have. Copies in float32 are made of those in `old`, if it has some. The averages of a state
        of `optax.contrib.schedule_free`, which it does not store, are made of these and its z.
      strict: an error where anything is dropped or new.
      rename: the new path of each old one, of leaves or of whole subtrees: {"encoder/l0":
        "encoder/layers/0"}. Keys are joined by slashes.
      reset: moments to set to zero: a prefix tree of bools, `by_path`, or a function of the
        parameters' `jax.ShapeDtypeStruct`s that returns one. Without `params`, the shapes are those
        of the first tree of moments in `like`. True resets all of them: so you keep the step where
        no moment fits, which is an error otherwise.
      old_momentum: what momentum in `old` holds, where the state leaves it open: "gradients" or
        "averages" of them; "scaled gradients" by trust ratios, as with `lars(rate_in_momentum=
        False)`; "steps", as in `lars`; or "updates", their negative, as in `optax.lars`.
      like_momentum: likewise, in `like`.
      momentum_decay: of the sums of gradients in one of both states, beside averages in the other,
        in [0, 1). A sum times 1 - momentum_decay is an average.

    Returns:
      `(state, account)`. The state has the structure, shapes and dtypes of `like`; no two of its
      leaves are one array. What needs no conversion is the array of `old`. `str(account)` has a
      line for each subtree that went one way; its attributes are tuples of names. It is static.

    Raises:
      ValueError: a leaf has another shape, nothing fits, both states have moments and none is kept,
        parameters are missing, a path in `rename` is not there, momentum is said to hold what it
        does not; with `strict`, anything is dropped or new. A moment whose unit cannot become the
        new one is no error: it is dropped, and its line in the account says why.
      TypeError: `like` is a transformation, or a leaf is of another kind.

    Example:
      >>> params = {"w": jnp.ones((64, 128))}
      >>> rate = optax.linear_schedule(0.1, 0.0, 90)
      >>> old = optax.lars(rate).init(params)
      >>> like = jax.eval_shape(jgrad.lars(rate, rule="decayed_gradient").init, params)
      >>> state, account = jgrad.carry_over(old, like=like, like_momentum="steps")
      >>> print(account)
      kept       step
      converted  mw/w: -mw, a sum of updates for one of steps or the reverse
    """
    if hasattr(like, "init") and hasattr(like, "update"):
        remedy = "expected a state: `jax.eval_shape(tx.init, params)`"
        raise TypeError(f"{_NAME}: `like`: a transformation, {remedy}.")
    values.boolean(_NAME, "strict", strict)
    params = None if params is None else arrays_of(params)
    old = _with_arrays(restored.with_nodes(_NAME, old, like, params))
    form = like
    old, like = map(variables.variables_of_blocks, (old, like))
    shapes = packing.shapes(like, as_stored=True)
    has_decay = momentum_decay is not None
    before = parts.read(packing.shapes(old, as_stored=True))
    before = _with_units("old", before, old_momentum, has_decay)
    after = _with_units("like", parts.read(shapes), like_momentum, has_decay)
    factors = _factors(momentum_decay)
    _check("old", before)
    _check("like", after)
    named = paths.renamed(_NAME, before, after, rename or {})
    chosen = () if reset is None else paths.chosen(_NAME, reset, params, shapes)
    found = Matcher(_NAME, named, after, chosen).match()
    if has_decay and not any(x.how in _BY_DECAY for x in filter(None, found.sources)):
        came = f"{momentum_decay}, expected None: no sum of gradients becomes an average here"
        raise ValueError(f"{_NAME}: `momentum_decay`: {came}, nor an average a sum.")
    account = Account.of_entries(found.entries, found.notes)
    if strict and (lines := accounts.lost_or_new(account)):
        raise ValueError(f"{_NAME}: `strict`: True, expected nothing dropped or new:\n{lines}")
    if _is_change_of_forms(old, like, found.sources):
        state = _converted(old, like)
    else:
        leaves = _Leaves(old, named, params, factors).of_sources(after, found.sources)
        state = packing.pack(trees.flatten(shapes)[1].unflatten(leaves), like=like)
    return variables.in_form_of(form, _without_shared_arrays(state)), account


def _with_arrays(tree: PyTree) -> PyTree:
    return trees.map_leaves(lambda x: jnp.asarray(x) if checks.is_number(x) else x, tree)


def _check(name: str, state: list[Part]) -> None:
    """Arrays or their shapes, and no other leaves."""
    for part in state:
        if not (part.leaf is None or hasattr(part.leaf, "shape")):
            came = f"{checks.describe(part.leaf)}, expected an array"
            raise TypeError(f"{_NAME}: `{name}`{checks.at(part.path)}: {came}.")


def _with_units(
    name: str, state: list[Part], momentum: Momentum | None, has_decay: bool
) -> list[Part]:
    """With the units of first moments that the user names, where the state leaves them open."""
    new = units.said(_NAME, f"{name}_momentum", momentum)
    firsts = [
        (i, x.unit) for i, x in enumerate(state) if x.field == parts.MW and x.unit is not None
    ]
    is_open = {i for i, unit in firsts if new is not None and units.is_open(state[i].name, unit)}
    if new is not None and not is_open:
        came = f"{momentum!r}, expected None: `{name}` has no momentum of which it may be said"
        raise ValueError(f"{_NAME}: `{name}_momentum`: {came}.")
    state = list(state)
    for i, unit in firsts:
        own = new if new is not None and i in is_open else unit
        state[i] = state[i]._replace(unit=own._replace(has_decay=has_decay))
    return state


def _factors(momentum_decay: Scalar | None) -> dict[str, Any]:
    """By which first moments are multiplied that become others."""
    if momentum_decay is None:
        return {units.NEGATED: -1.0}
    new = numbers.beta(_NAME, "momentum_decay", momentum_decay).complement
    return {units.NEGATED: -1.0, units.AVERAGED: new, units.SUMMED: 1 / new}


def _is_change_of_forms(old: PyTree, like: PyTree, sources: list[Source | None]) -> bool:
    """Whether each leaf, or each buffer of a packed tree, is that in the same place."""
    if trees.flatten(old)[1] != trees.flatten(like)[1]:
        return False
    same = (x is None or x[1:] == (i, "") for i, x in enumerate(sources))
    return all(same) and _places(old) == _places(like)


def _places(tree: PyTree) -> list[bool]:
    return [x is None for x in trees.flatten(tree)[0]]


def _converted(old: PyTree, like: PyTree) -> PyTree:
    """Leaf by leaf; buffers of packed trees as they are."""
    arg = ArgLeaves.from_tree(_NAME, "old", old).with_arrays()
    expected, structure = trees.flatten(like)
    pairs = enumerate(zip(arg.leaves, expected, strict=True))
    return structure.unflatten([_in_form(arg, i, own, x) for i, (x, own) in pairs])


def _in_form(arg: ArgLeaves, i: int, like: Any, x: Any) -> Any:
    if like is None:
        return None
    new = where_it_lies(functools.partial(forms.converted, arg, i, like), x)
    return forms.in_memory_of(like, new)


class _Leaves:
    """Makes the leaves of the new state, as a tree that is not packed.

    Args:
      old: the old state.
      before: its parts, by their paths in the new one.
      params: the parameters, or None.
      factors: of moments that become others.
    """

    def __init__(
        self, old: PyTree, before: list[Part], params: PyTree, factors: Mapping[str, Any]
    ) -> None:
        tree = packing.unpack(old)
        self._arg = ArgLeaves.from_tree(_NAME, "old", tree).with_arrays()
        self._parts, self._params, self._factors = before, params, factors
        self._beside: dict[Keys, Any] = {}
        for part, x in zip(before, self._arg.leaves, strict=True):
            if x is not None and part.keys:
                self._beside.setdefault(part.keys, x)

    @functools.cached_property
    def _weights(self) -> dict[Keys, Any]:
        """The parameters by their paths."""
        tree = packing.unpack(self._params)
        return {keys: x for _, keys, x in parts.leaves_of(tree)}

    def of_sources(self, after: list[Part], sources: list[Source | None]) -> list[Any]:
        """A leaf for each source."""
        pairs = zip(after, sources, strict=True)
        return [None if source is None else self._leaf(part, source) for part, source in pairs]

    def _leaf(self, part: Part, source: Source) -> Any:
        like, i = part.leaf, source.old
        if source.what == accounts.OF_WEIGHTS:
            x = self._parameter(part) if i is None else self._arg.leaves[i]
            if i is not None and source.how:
                x = where_it_lies(functools.partial(self._average, part, i), x)
            x = numerics.strong(jnp.array(parameters.wide(x), copy=True))
            arg = ArgLeaves(_NAME, "params", [x], lambda: [part.path])
            return _in_form(arg, 0, like, x)
        if source.what in (accounts.ZERO, accounts.RESET):
            zeros = functools.partial(forms.zeros, like)
            return forms.in_memory_of(like, where_it_lies(zeros, self._like_leaf(part)))
        if source.what == accounts.FROM_LIKE:
            one = jnp.ones(like.shape, like.dtype) if source.how else like
            return jnp.array(one, copy=True)
        assert i is not None
        x = self._arg.leaves[i]
        if source.how:
            x = where_it_lies(functools.partial(self._made, source.how, i), x)
        return _in_form(self._arg, i, like, x)

    def _like_leaf(self, part: Part) -> Any:
        """An array of the parameter, from which zeros take their sharding."""
        found = self._beside.get(part.keys)
        if found is None and self._params is not None:
            found = self._weights.get(part.keys)
        return found if isinstance(found, Blocks) or checks.is_array(found) else None

    def _parameter(self, part: Part) -> Any:
        if self._params is None:
            came = f"None, expected the parameters: `old` has nothing for {part.path} of `like`"
            raise ValueError(f"{_NAME}: `params`: {came}.")
        x = self._weights.get(part.keys)
        shape = getattr(x, "shape", None)
        if shape != part.leaf.shape or not checks.is_array(x):
            came = f"{checks.describe(x)} at {'/'.join(part.keys)}"
            expected = f"an array of shape {tuple(part.leaf.shape)}, as `like` has at {part.path}"
            raise ValueError(f"{_NAME}: `params`: {came}, expected {expected}.")
        return x

    def _average(self, part: Part, i: int, z: Any) -> Any:
        """x of optax's `schedule_free`, which keeps z and steps y = b1 x + (1 - b1) z."""
        master = self._masters.get(part.keys)
        y = self._parameter(part) if master is None else self._arg.leaves[master]
        y, z = parameters.wide(y), parameters.wide(z)
        b1 = self._arg.leaves[self._numbers[self._parts[i].owner, "b1"]].astype(z.dtype)
        return (y - (1 - b1) * z) / b1

    @functools.cached_property
    def _numbers(self) -> Mapping[tuple[Keys, str], int]:
        return matching.numbers(self._parts)

    @functools.cached_property
    def _masters(self) -> dict[Keys, int]:
        """Where the first float32 copies are, by the paths of their parameters."""
        found = [(i, x) for i, x in enumerate(self._parts) if x.role == (parts.MASTER, "master")]
        return {x.keys: i for i, x in reversed(found) if x.leaf is not None}

    def _made(self, how: str, i: int, x: Any) -> Any:
        """What is neither the array of before nor another form of it."""
        if how == matching.OF_COUNT:
            return x.astype(jnp.float32)
        if how in (matching.ONE_LESS, matching.ONE_MORE):
            return x + 1 if how == matching.ONE_MORE else x - 1
        x = encoding.decoded(x) if isinstance(x, Blocks) else parameters.wide(x)
        if how in units.SQUARES_OF:
            return _mean_square(x, units.SQUARES_OF[how])
        if how in self._factors:
            return x * jnp.asarray(self._factors[how]).astype(x.dtype)
        count = jnp.asarray(self._arg.leaves[self._counts[self._parts[i].owner]]).astype(x.dtype)
        return x * count if how == matching.SUM else x / jnp.maximum(count, jnp.ones_like(count))

    @functools.cached_property
    def _counts(self) -> dict[Keys, int]:
        """Where the number of mini-batches in an open window is, by the owner of the window."""
        found = enumerate(self._parts)
        counts = [(matching.COUNTS.index(x.role), i) for i, x in found if x.role in matching.COUNTS]
        return {self._parts[i].owner: i for _, i in sorted(counts, reverse=True)}


def _mean_square(x: jax.Array, factor: float) -> jax.Array:
    """That of gradients, by their average or sum; finite."""
    squares = numerics.bounded_square(x)
    mean = jnp.sum(squares / max(squares.size, 1))
    return jnp.minimum(factor * jnp.maximum(squares, mean), jnp.finfo(squares.dtype).max)


def _without_shared_arrays(state: PyTree) -> PyTree:
    """A copy of each array that stands in several places, so that the state can be donated."""
    seen: set[int] = set()

    def own(x: Any) -> Any:
        if id(x) in seen and checks.is_array(x):
            return where_it_lies(functools.partial(jnp.array, copy=True), x)
        seen.add(id(x))
        return x

    return jax.tree.map(own, state)
