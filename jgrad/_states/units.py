"""What moments hold: gradients or steps, as sums or as averages, and how one becomes another.

A state of jgrad says it by its second moments: beside some there are averages. One of optax says it
by what stands before and behind it in its chain: `trace` behind the learning rate sums updates.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jgrad._trees import trees, values
from jgrad._trees.factors import Factors
from jgrad._trees.path_rules import keys_of
from jgrad._trees.trees import PyTree

Momentum = Literal["gradients", "averages", "scaled gradients", "steps", "updates"]
GRADIENTS, SCALED, STEPS, UPDATES = "gradients", "scaled gradients", "steps", "updates"
PRECONDITIONED, SQUARES = "preconditioned gradients", "squares of gradients"
_ANY = ""  # the state does not say it

_ACCUMULATORS = {"trace", "ema"}  # of whatever comes along

# What an array is made of, as accounts say it.
NEGATED = "-mw, a sum of updates for one of steps or the reverse"
AVERAGED, SUMMED = "(1 - momentum_decay) mw", "mw / (1 - momentum_decay)"
BY_DECAY = (AVERAGED, SUMMED)
# The mean square of gradients, by an average of them with momentum 0.9 or by such a sum. Of noise
# with variance v the average has the variance v (1 - 0.9) / (1 + 0.9), and the sum v / (1 - 0.9^2).
# An element may be near 0 by chance, so none is below the mean of its leaf.
_OF_AVERAGES, _OF_SUMS = "19 max(mw^2, its mean)", "0.19 max(mw^2, its mean)"
SQUARES_OF = {_OF_AVERAGES: 19.0, _OF_SUMS: 0.19}

_OPEN = (
    "mw: {states} not say whether momentum is {choice}. It is taken for {taken}; {arguments} what "
    "it is."
)
_OF_SUM = "a sum of gradients (`gradient_descent`) or of steps (`lars`)"
_OF_AVERAGE = "an average of gradients (`adam`) or of what another link makes of them"
_SUMS = (
    "mw: sums of gradients in `old`, averages in `like`: too large at first, by 1 / (1 - momentum)."
    " `momentum_decay=` converts them."
)
_AVERAGES = (
    "mw: averages of gradients in `old`, sums in `like`: first too small by 1 - beta1."
    " `momentum_decay=` converts them."
)


class Chain(NamedTuple):
    """A chain that a state stands in.

    Attributes:
      links: the states in it; () where their order is not known.
      position: which of them it is.
      is_whole: whether the last links are known.
    """

    links: Sequence[PyTree]
    position: int
    is_whole: bool


class Unit(NamedTuple):
    """What a moment holds.

    Attributes:
      of: what it is a sum or an average of.
      is_mean: an average, in which a new gradient has weight 1 - beta; in a sum it has 1.
      is_certain: the state says it; else it is presumed.
    """

    of: str
    is_mean: bool
    is_certain: bool = True

    def __str__(self) -> str:
        return f"{'averages' if self.is_mean else 'sums'} of {self.of}"


_AVERAGE, _SQUARE = Unit(GRADIENTS, True), Unit(SQUARES, True)
SUM_OF_GRADIENTS = Unit(GRADIENTS, False)
_OPEN_SUM = Unit(_ANY, False, False)  # gradients, scaled ones or steps
_SAID = {
    name: _AVERAGE if name == "averages" else Unit(name, False)
    for name in (GRADIENTS, "averages", SCALED, STEPS, UPDATES)
}


# ---- what a state says -------------------------------------------------------------------------


def of_fields(
    state: PyTree, fields: Mapping[str, PyTree], chains: Sequence[Chain]
) -> dict[str, Unit]:
    """The unit of each field that holds moments.

    Args:
      state: of one transformation.
      fields: of it, by their names.
      chains: that it is in, the innermost one last.
    """
    units = {"mu": _AVERAGE, "nu": _SQUARE, "vw": _SQUARE}
    units["mw"] = _OPEN_SUM if fields.get("vw") is None else _AVERAGE
    if any(isinstance(x, Factors) for x in trees.flatten(fields.get("vw"))[0]):
        units["mw"] = Unit(STEPS, True)  # of Adafactor
    for name in _ACCUMULATORS & fields.keys():
        units[name] = _of_accumulator(chains, is_mean=name == "ema")
    return units | _of_others(state, fields)


def _of_others(state: PyTree, fields: Mapping[str, PyTree]) -> dict[str, Unit]:
    """Of optax's states with `mu` and `nu` that are none of Adam."""
    mu, nu = fields.get("mu"), fields.get("nu")
    if "hessian_fn_state" in fields:
        return {"nu": Unit("a Hessian", True)}
    if mu is not None and nu is not None:
        if trees.flatten(mu)[1] != trees.flatten(nu)[1]:  # SM3, whose `nu` is its momentum
            return {"mu": Unit("largest squares", False), "nu": Unit(PRECONDITIONED, True)}
        both = zip(jax.tree.leaves(mu), jax.tree.leaves(nu), strict=True)
        if any(len(m.shape) > len(n.shape) for m, n in both):  # NovoGrad, a number per leaf
            return {"mu": Unit(PRECONDITIONED, False), "nu": Unit("squares of norms", True)}
    if isinstance(state, Mapping):  # of a file, which has no types
        return {"nu": Unit(_ANY, True, False)}
    is_belief = type(state).__name__ == "ScaleByBeliefState"
    return {"nu": Unit("squares of deviations", True)} if is_belief else {}


def chains_of(node: PyTree, children: Sequence[tuple[object, PyTree]]) -> list[tuple[Chain, ...]]:
    """The chain of each child, if the node is one.

    A pure dictionary of flax's nnx has numbers as keys, and no links that hold nothing. That of
    `optax.named_chain` has names, which JAX sorts.
    """
    names = [keys_of((key,))[0] for key, _ in children]
    is_whole = isinstance(node, tuple | list)
    if not is_whole and not all(map(str.isdecimal, names)):
        return [(Chain((), 0, False),) if len(children) > 1 else ()] * len(children)
    numbers = [*range(len(children))] if is_whole else [*map(int, names)]
    links: list[PyTree] = [()] * (max(numbers, default=-1) + 1)
    for i, (_, child) in zip(numbers, children, strict=True):
        links[i] = child
    return [(Chain(links, i, is_whole),) for i in numbers]


def _of_accumulator(chains: Sequence[Chain], *, is_mean: bool) -> Unit:
    """Of optax's `trace` or `ema`, which takes whatever comes along its chain.

    The learning rate is before it where nothing comes behind it, as in `optax.lars`, or where a
    schedule is before it and none behind. Most links have no state, and the rate may be outside of
    the chain: then this is a presumption.
    """
    sides = [_without_averages(chain.links, chain.position) for chain in chains]
    before = [link for links, _ in sides for link in links]
    behind = [link for _, links in sides for link in links] or not all(x.is_whole for x in chains)
    # Of the innermost chain in which there is something else.
    near_before, near_behind = next((x for x in reversed(sides) if any(x)), ([], []))
    by_schedule = any(map(_is_rate, near_before)) and not any(map(_is_rate, near_behind))
    # Of a chain inside a chain one link before is more often a clipping than the rate.
    is_last = not near_behind and (not behind or len(near_before) > 1)
    if near_before and (is_last or by_schedule):
        return Unit(UPDATES, is_mean, not behind and bool(jax.tree.leaves(before)))
    if any(map(_preconditions, before)):
        return Unit(PRECONDITIONED, is_mean, False)
    return Unit(GRADIENTS, is_mean, not before and all(x.links for x in chains))


def _without_averages(links: Sequence[PyTree], i: int) -> tuple[list[PyTree], list[PyTree]]:
    """What stands before and behind a link; averages of the weights only look at them."""

    def is_seen(link: PyTree) -> bool:
        return {keys_of((key,))[0] for key, _ in trees.children(link) or ()} != {"done", "average"}

    return list(filter(is_seen, links[:i])), list(filter(is_seen, links[i + 1 :]))


def _is_rate(link: PyTree) -> bool:
    """Whether it is a schedule, which is that of the learning rate in most chains."""
    fields = [keys_of(path)[:1] for path, _ in jax.tree_util.tree_leaves_with_path(link)]
    return fields == [["count"]] and type(link).__name__ != "WeightDecaySchedule"


def _preconditions(link: PyTree) -> bool:
    """Whether it has arrays beside momentum, as what scales each element by itself has."""
    return any(
        x.shape and jnp.issubdtype(x.dtype, jnp.inexact) and _ACCUMULATORS.isdisjoint(keys_of(path))
        for path, x in jax.tree_util.tree_leaves_with_path(link)
        if hasattr(x, "dtype")
    )


# ---- what a user says --------------------------------------------------------------------------


def is_open(name: str, unit: Unit | None) -> bool:
    """Whether a user may say what a first moment holds, by the name of its field."""
    return unit is not None and (name in _ACCUMULATORS or not unit.is_certain)


def said(function: str, name: str, momentum: Momentum) -> Unit:
    """The unit that a user names."""
    values.one_of(function, name, momentum, tuple(_SAID))
    return _SAID[momentum]


# ---- from one to the other ---------------------------------------------------------------------


def conversion(was: Unit | None, now: Unit | None) -> str | None:
    """How one becomes the other; "" where it stays as it is, None where it cannot.

    What is no moment has no unit, and stays. Between sums and averages it takes their decay.
    """
    if was is None or now is None:
        return ""
    if {was.of, now.of} == {PRECONDITIONED, _ANY}:
        return None
    of, to = _taken(was, now)
    if of == to and was.is_mean == now.is_mean:
        return ""
    if of == to == GRADIENTS:
        return AVERAGED if now.is_mean else SUMMED
    if {of, to} == {STEPS, UPDATES} and was.is_mean == now.is_mean:
        return NEGATED
    return None


def _taken(was: Unit, now: Unit) -> tuple[str, str]:
    """What both are of, where one that does not say it is taken for what the other one is."""
    return was.of or _as_of_jgrad(now.of), now.of or _as_of_jgrad(was.of)


def _as_of_jgrad(of: str) -> str:
    return STEPS if of == UPDATES else of


def squares_of(unit: Unit | None) -> str:
    """How squares of gradients are estimated by a first moment; "" where it has no gradients."""
    if unit is None or unit.of not in (GRADIENTS, _ANY):
        return ""
    return _OF_AVERAGES if unit.is_mean else _OF_SUMS


def lost(was: Unit | None, now: Sequence[Unit | None]) -> str:
    """Why a moment is dropped, for its line in an account; "" where its unit is not the reason."""
    if not now or any(conversion(was, unit) is not None for unit in now):
        return ""
    return f"{was}, where `like` has {' and '.join(dict.fromkeys(map(str, now)))}"


def notes(was: Unit, now: Unit, how: str) -> Iterator[str]:
    """What is said of a first moment that is kept, with its new unit and how it was made."""
    sides = zip(("old", "like"), (was, now), _taken(was, now), strict=True)
    presumed = [(name, unit.is_mean, of) for name, unit, of in sides if not unit.is_certain]
    for is_mean in dict.fromkeys(x for _, x, _ in presumed):
        names = [name for name, x, _ in presumed if x == is_mean]
        of = next(of for _, x, of in presumed if x == is_mean)
        states, arguments = (
            " and ".join(form.format(x) for x in names) for form in ("`{}`", "`{}_momentum=`")
        )
        yield _OPEN.format(
            states=f"{states} {'does' if len(names) == 1 else 'do'}",
            choice=_OF_AVERAGE if is_mean else _OF_SUM,
            taken=f"{'an average' if is_mean else 'a sum'} of {of}" if of else "the same in both",
            arguments=f"{arguments} {'says' if len(names) == 1 else 'say'}",
        )
    if was.is_mean != now.is_mean and not how:
        yield _AVERAGES if was.is_mean else _SUMS
