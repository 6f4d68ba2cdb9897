"""`carry_over`: a state in the form of another recipe, and an account of what became of each part.

Its old names, `quantized` and `unquantized`, work for one release.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jgrad._arithmetic import numerics
from jgrad._inputs import numbers
from jgrad._inputs.numbers import Scalar
from jgrad._inputs.transformation import arrays_of
from jgrad._packed import packing, restored
from jgrad._quantized import encoding
from jgrad._states import account as accounts, forms, matching, parts, units
from jgrad._states.account import Account
from jgrad._states.matching import Matcher, Source
from jgrad._states.parts import Keys, Part
from jgrad._states.units import Momentum
from jgrad._trees import checks, trees, values, variables
from jgrad._trees.blocks import Blocks
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.factors import Factors
from jgrad._trees.host_memory import where_it_lies
from jgrad._trees.other_names import explained
from jgrad._trees.protocols import Leaf
from jgrad._trees.renamed import warn_of_name
from jgrad._trees.trees import PyTree
from jgrad._wrappers import parameters

_NAME = "carry_over"


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
    """Converts the state of one optimizer to that of another, and returns an account of it.

        state[part, leaf] = old[part, leaf]    where `old` has it, in the form that `like` has
                          = 19 max(mw^2, its mean)   second moments, where `old` has first ones
                          = w                  `master`, `average` and `z`
                          = 0                  other moments and counters

    Parts are matched by what they mean and by the paths of their parameters, so wrappers may be
    added, removed and reordered, and `old` may be a state of jgrad or optax, or what orbax restores
    without a target. The `value` of a flax variable does not belong to a path. Arrays are converted
    to 8 bits or back, and trees are packed or unpacked. Where several parts mean the same, each
    goes to the wrapper or optimizer that is most like its own, so that a state of the same recipe
    comes back bit for bit. For two `nnx.Optimizer`s of flax, give the `opt_state` of each;
    `nnx.update(new.opt_state, nnx.state(state))` puts the result into the second.

    Moments keep the step that belongs to them. Any other counter goes on from one that has counted
    the same thing: updates inside of `accumulate`, mini-batches around it.

    The step is kept, since schedules and bias correction use it. A second moment that starts at
    zero beside a large step would make the first steps of Adam far too long. So where a first
    moment is kept, the second one is estimated: an average of gradients that are noise, with
    momentum 0.9, has 1/19 of their mean square; for sums of gradients the factor is 0.19. Where
    neither is there, both start at zero, and a note in the account says it.

    A first moment is an average of gradients, as in `adam`, a sum of them, as in
    `gradient_descent(momentum=)`, or a sum of steps, with the learning rate inside, as in `lars`.
    optax keeps steps with the opposite sign, as updates. Steps and updates become each other, and
    sums and averages of gradients do with `momentum_decay`; between gradients and steps there is no
    conversion, so what `old` has is dropped. The states of `gradient_descent` and `lars` look
    alike, and a `trace` in a chain of optax does not always show where the learning rate is: then
    both sides are assumed to be the same, a note says so, and `old_momentum` and `like_momentum`
    correct it. They also do for the matrices of `muon`, which are assumed to be averages: with a
    `fraction` they are sums, of which fraction (1 - error_decay) is an average. States of
    `optax.adamax` and `optax.contrib.adopt` look like Adam's but hold other numbers, and so do
    those of `optax.adabelief` in files: pass `reset=True`.

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
      like_momentum: what momentum in `like` holds, as `old_momentum`.
      momentum_decay: of the sums of gradients in one of both states, beside averages in the other,
        in [0, 1). A sum times 1 - momentum_decay is an average.

    Returns:
      `(state, account)`. The state has the structure, shapes and dtypes of `like`; no two of its
      leaves are one array. What needs no conversion is the array of `old`. `str(account)` has a
      line for the leaves of a part that went one way; its attributes are tuples of all names. It is
      static.

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
    old = trees.map_leaves(lambda x: jnp.asarray(x) if checks.is_number(x) else x, old)
    old = restored.with_nodes(_NAME, old, like, params)
    form = like
    old, like = map(variables.variables_of_blocks, (old, like))
    before = _parts("old", packing.shapes(old, as_stored=True), old_momentum)
    shapes = packing.shapes(like, as_stored=True)
    after = _parts("like", shapes, like_momentum)
    made = _made_by(momentum_decay)
    before = parts.renamed(_NAME, before, after, rename or {})
    chosen = () if reset is None else parts.chosen(_NAME, reset, params, shapes)
    has_decay = momentum_decay is not None
    sources, account = Matcher(_NAME, before, after, chosen, has_decay).match()
    if has_decay and not any(x.how in units.BY_DECAY for x in filter(None, sources)):
        came = f"{momentum_decay}, expected None: no sum of gradients becomes an average here"
        raise ValueError(f"{_NAME}: `momentum_decay`: {came}, nor an average a sum.")
    if strict and (lines := accounts.lost_or_new(account)):
        raise ValueError(f"{_NAME}: `strict`: True, expected nothing dropped or new:\n{lines}")
    if _is_change_of_forms(old, like, sources):  # buffers of packed trees stay as they are
        arg = ArgLeaves.from_tree(_NAME, "old", old).with_arrays()
        expected, structure = trees.flatten(like)
        new = [_in_form(arg, i, x, arg.leaves[i]) for i, x in enumerate(expected)]
        state = structure.unflatten(new)
    else:
        leaves = _Leaves(old, before, params, made)
        both = zip(after, sources, strict=True)
        new = [None if source is None else leaves.of(part, source) for part, source in both]
        state = packing.pack(trees.flatten(shapes)[1].unflatten(new), like=like)
    return variables.in_form_of(form, _without_shared_arrays(state)), account


def _parts(name: str, state: PyTree, momentum: Momentum | None) -> list[Part]:
    """The parts of a state, in the units that the user names where the state leaves them open."""
    state_parts = parts.read(state)
    for x in state_parts:
        if not (x.leaf is None or hasattr(x.leaf, "shape")):
            came = f"{checks.describe(x.leaf)}, expected an array"
            raise TypeError(f"{_NAME}: `{name}`{checks.at(x.at)}: {came}.")
    if momentum is None:
        return state_parts
    said = units.said(_NAME, f"{name}_momentum", momentum)
    matrices = parts.of_matrices(state_parts) if said == units.SUM_OF_GRADIENTS else ()
    is_open = [
        x.field == parts.MW and (units.is_open(x.name, x.unit) or (x.owner, x.keys) in matrices)
        for x in state_parts
    ]
    if not any(is_open):
        came = f"{momentum!r}, expected None: `{name}` has no momentum of which it may be said"
        raise ValueError(f"{_NAME}: `{name}_momentum`: {came}.")
    return [
        x._replace(unit=said) if is_said else x
        for x, is_said in zip(state_parts, is_open, strict=True)
    ]


def _made_by(momentum_decay: Scalar | None) -> dict[str, Callable[..., jax.Array]]:
    """What makes a new leaf of old ones, by the words of the account."""
    made: dict[str, Callable[..., jax.Array]] = {
        matching.OF_COUNT: lambda count: count.astype(jnp.float32),
        matching.ONE_LESS: lambda x: x - 1,
        matching.ONE_MORE: lambda x: x + 1,
        matching.SUM: lambda mean, count: mean * count.astype(mean.dtype),
        matching.MEAN: lambda total, count: total / jnp.maximum(count, 1).astype(total.dtype),
        matching.OF_Y_AND_Z: _average,
        units.NEGATED: operator.neg,
    }
    for how, factor in units.SQUARES_OF.items():
        made[how] = functools.partial(_mean_square, factor)
    if momentum_decay is not None:
        new = numbers.beta(_NAME, "momentum_decay", momentum_decay).complement
        made[units.AVERAGED] = lambda total: total * jnp.asarray(new).astype(total.dtype)
        made[units.SUMMED] = lambda mean: mean * jnp.asarray(1 / new).astype(mean.dtype)
    return made


def _mean_square(factor: float, x: jax.Array) -> jax.Array:
    """That of gradients, by their average or sum; finite."""
    squares = numerics.bounded_square(x)
    mean = jnp.sum(squares / max(squares.size, 1))
    return jnp.minimum(factor * jnp.maximum(squares, mean), jnp.finfo(squares.dtype).max)


def _average(z: jax.Array, b1: jax.Array, y: jax.Array, *_: jax.Array) -> jax.Array:
    """x of optax's `schedule_free`, which keeps z and steps y = b1 x + (1 - b1) z."""
    b1 = b1.astype(z.dtype)
    return (y - (1 - b1) * z) / b1


def _is_change_of_forms(old: PyTree, like: PyTree, sources: Sequence[Source | None]) -> bool:
    """Whether each leaf, or each buffer of a packed tree, is made of that in the same place."""
    (olds, old_structure), (likes, structure) = map(trees.flatten, (old, like))
    if old_structure != structure or any(
        source is not None and source[1:] != ((i,), "") for i, source in enumerate(sources)
    ):
        return False
    return all((a is None) == (b is None) for a, b in zip(olds, likes, strict=True))


def _in_form(arg: ArgLeaves, i: int, like: Leaf, x: Leaf) -> Leaf:
    """What leaf `i` of the argument became, in the form and the memory of another."""
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
      made: what makes leaves of others.
    """

    def __init__(
        self,
        old: PyTree,
        before: Sequence[Part],
        params: PyTree,
        made: Mapping[str, Callable[..., jax.Array]],
    ) -> None:
        self._arg = ArgLeaves.from_tree(_NAME, "old", packing.unpack(old)).with_arrays()
        self._params, self._made = params, made
        self._beside: dict[Keys, Leaf] = {}
        for part, x in zip(before, self._arg.leaves, strict=True):
            if x is not None and part.keys:
                self._beside.setdefault(part.keys, x)

    @functools.cached_property
    def _weights(self) -> dict[Keys, Leaf]:
        """The parameters by their paths; none if there are none."""
        return dict(parts.leaves_of(packing.unpack(self._params)))

    def of(self, part: Part, source: Source) -> Leaf:
        """A leaf of the new state."""
        like = part.leaf
        if source.how == matching.IDENTITY:
            one = jnp.eye(like.shape[-1], dtype=like.dtype)
            return forms.in_memory_of(like, jnp.array(jnp.broadcast_to(one, like.shape), copy=True))
        if source.what in (accounts.ZERO, accounts.RESET):
            beside = self._beside.get(part.keys, self._weights.get(part.keys))
            is_array = isinstance(beside, (Blocks, Factors)) or checks.is_array(beside)
            zeros = functools.partial(forms.zeros, like)
            return forms.in_memory_of(like, where_it_lies(zeros, beside if is_array else None))
        if source.what == accounts.FROM_LIKE:
            one = jnp.ones(like.shape, like.dtype) if source.how else like
            return jnp.array(one, copy=True)
        leaves = [self._arg.leaves[i] for i in source.old]
        is_of_weights = source.what == accounts.OF_WEIGHTS
        if is_of_weights and len(leaves) < (3 if source.how else 1):  # no copies in `old`
            leaves.append(self._parameter(part))
        x = leaves[0]
        if source.how:
            made = self._made[source.how]
            x = where_it_lies(lambda leaves: made(*map(_wide, leaves)), leaves)
        if not is_of_weights:
            return _in_form(self._arg, source.old[0], like, x)
        x = numerics.strong(jnp.array(_wide(x), copy=True))
        return _in_form(ArgLeaves(_NAME, "params", [x], lambda: [part.at]), 0, like, x)

    def _parameter(self, part: Part) -> Leaf:
        if self._params is None:
            came = f"None, expected the parameters: `old` has nothing for {part.at} of `like`"
            raise ValueError(f"{_NAME}: `params`: {came}.")
        x = self._weights.get(part.keys)
        shape = getattr(x, "shape", None)
        if shape != part.leaf.shape or not checks.is_array(x):
            came = f"{checks.describe(x)} at {'/'.join(part.keys)}"
            expected = f"an array of shape {tuple(part.leaf.shape)}, as `like` has at {part.at}"
            raise ValueError(f"{_NAME}: `params`: {came}, expected {expected}.")
        return x


def _wide(x: Leaf) -> jax.Array:
    """What is computed with: float32 or wider, and no codes; integers as they are."""
    if isinstance(x, Factors):
        return forms.elements(x)
    return encoding.decoded(x) if isinstance(x, Blocks) else parameters.wide(x)


def _without_shared_arrays(state: PyTree) -> PyTree:
    """A copy of each array that is the leaf of several fields, so that the state can be donated."""
    seen: set[int] = set()

    def alone(x: Leaf) -> Leaf:
        if id(x) in seen and checks.is_array(x):
            return where_it_lies(functools.partial(jnp.array, copy=True), x)
        seen.add(id(x))
        return x

    return jax.tree.map(alone, state)


# ---- old names ---------------------------------------------------------------------------------


def unquantized(state: PyTree) -> PyTree:
    """Converts arrays in 8 bits to float32. This is an old function: use `carry_over`.

        array = decode(codes) scale

    Args:
      state: any tree, such as the state of an optimizer, or its moments alone.

    Returns:
      The tree.

    Raises:
      As `carry_over`.

    Example:
      >>> params = {"w": jnp.ones((64, 256))}
      >>> state = jgrad.adam(1e-3, moment_dtype="8bit").init(params)
      >>> shapes = jax.eval_shape(jgrad.adam(1e-3).init, params)
      >>> arrays, _ = jgrad.carry_over(state, like=shapes)  # in place of `unquantized(state)`
      >>> arrays.mw["w"].shape, arrays.mw["w"].dtype.name
      ((64, 256), 'float32')
    """
    warn_of_name("unquantized", "carry_over")
    state = variables.variables_of_blocks(state)
    return carry_over(state, like=trees.map_leaves(_shape, state), strict=True)[0]


def quantized(state: PyTree, *, like: PyTree) -> PyTree:
    """Converts a state to the form of another. This is an old name of `carry_over`.

        codes, scale = encode(array), to the nearest code

    Args:
      state: a tree of arrays and `Blocks`.
      like: a tree of the same structure, such as `jax.eval_shape(tx.init, params)`.

    Returns:
      The tree.

    Raises:
      As `carry_over`.

    Example:
      >>> params = {"w": jnp.ones((64, 256))}
      >>> restored = jgrad.adam(1e-3).init(params)  # float32: a checkpoint of another recipe
      >>> tx = jgrad.adam(1e-3, moment_dtype="8bit")
      >>> like = jax.eval_shape(tx.init, params)
      >>> state, _ = jgrad.carry_over(restored, like=like)  # in place of `quantized`
      >>> state.mw["w"].codes.dtype.name, state.vw["w"].codes.dtype.name
      ('int8', 'uint8')
    """
    warn_of_name("quantized", "carry_over")
    return carry_over(state, like=like, strict=True)[0]


def _shape(x: Leaf) -> Leaf:
    if isinstance(x, Blocks):
        return jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return x
