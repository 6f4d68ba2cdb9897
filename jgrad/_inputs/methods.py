"""Each method on a whole model: rules leaf by leaf, norms over all layers at once.

The functional updates and the `init`/`update` pairs both call what is here, so that, compiled, they
agree bit for bit. Every argument may be a tree or a prefix of one (`trees.align`); the pairs hand
in lists of leaves. Results are in float32 or float64, not yet in the dtypes of state and
parameters. Where a gradient is `None` there is no step and no new moment: the result is `None`.

A *step* is what is subtracted from the weights: w' = w - step.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import leafwise, rules
from jgrad._arithmetic.leafwise import Task
from jgrad._arithmetic.numerics import Beta
from jgrad._arithmetic.rules import BiasCorrection
from jgrad._layers import norms, ratios
from jgrad._layers.layer_axes import Place
from jgrad._trees import trees
from jgrad._trees.trees import PyTree

LarsRule = Literal["paper", "decayed_gradient", "ivy"]
LARS_RULES = ("paper", "decayed_gradient", "ivy")
LambRule = Literal["paper", "ivy"]
LAMB_RULES = ("paper", "ivy")


def apply(rule: Callable[..., Any], *args: PyTree) -> PyTree:
    """`rule` on each leaf of the finest of the trees; `None` where one of them has `None`."""
    rows, unflatten = _rows(*args)
    leaves = zip(*rows, strict=True)
    return unflatten(leafwise.run([None if _any_none(xs) else (rule, xs) for xs in leaves]))


def add_decay(direction: PyTree, w: PyTree, decay: PyTree) -> PyTree:
    """direction + decay w; a decay that is the Python number 0 leaves nothing in the program."""
    rows, unflatten = _rows(direction, w, decay)
    return unflatten(leafwise.run([_decayed(*xs) for xs in zip(*rows, strict=True)]))


def momentum(
    direction: PyTree, mw: PyTree, decay: PyTree, *, nesterov: bool
) -> tuple[PyTree, PyTree]:
    """The direction with momentum, and the new buffer."""
    mw = apply(rules.momentum, mw, direction, decay)
    return (apply(rules.momentum, mw, direction, decay) if nesterov else mw), mw


def steps(direction: PyTree, lr: PyTree) -> PyTree:
    """lr direction"""
    return apply(rules.step, direction, lr)


def descend(w: PyTree, step: PyTree) -> PyTree:
    """w - step"""
    return apply(rules.descend, w, step)


class Layers(NamedTuple):
    """Where the layers of each leaf live, and whether they have a ratio of their own."""

    place: PyTree
    mask: PyTree = True


class Adam(NamedTuple):
    """The numbers that Adam's direction depends on, each one for all or a tree."""

    step: PyTree
    beta1: Beta
    beta2: Beta
    epsilon: PyTree


def adam_moments(g: PyTree, mw: PyTree, vw: PyTree, adam: Adam) -> tuple[PyTree, PyTree]:
    """The new moments, each only as fine as what it is computed from."""
    return (
        apply(rules.first_moment, g, mw, adam.beta1.value, adam.beta1.complement),
        apply(rules.second_moment, g, vw, adam.beta2.value, adam.beta2.complement),
    )


def adam_delta(mw: PyTree, vw: PyTree, adam: Adam, bias_correction: BiasCorrection) -> PyTree:
    """Adam's direction, from the new moments."""
    return apply(rules.adam_delta, mw, vw, *_adam_scalars(adam, bias_correction))


def lars_steps(
    w: PyTree,
    g: PyTree,
    rates: Sequence[PyTree],
    coefficient: PyTree,
    decay: PyTree,
    epsilon: PyTree,
    layers: Layers,
    *,
    rule: LarsRule,
) -> PyTree:
    """(product of rates) ratio (g + decay w), with LARS's local rate as the ratio.

    In Ivy's rule decay acts in the ratio alone.
    """
    rows, unflatten = _rows(w, g, coefficient, decay, epsilon, *layers, *rates)
    w, g, coefficient, decay, epsilon, *rows = rows
    own, rates = Layers(*rows[:2]), rows[2:]
    gradients = [None if x is None else (leafwise.itself, (x,)) for x in g]
    if rule == "ivy":
        ratio = ratios.lars_ratio_ivy
        return unflatten(_trusted(w, gradients, gradients, ratio, (coefficient, decay), own, rates))
    directions = [_decayed(*xs) for xs in zip(g, w, decay, strict=True)]
    measured = directions if rule == "decayed_gradient" else gradients
    below = [0.0] * len(w) if rule == "decayed_gradient" else decay
    numbers = (coefficient, below, epsilon)
    return unflatten(_trusted(w, directions, measured, ratios.lars_ratio, numbers, own, rates))


def lamb_steps(
    w: PyTree,
    mw: PyTree,
    vw: PyTree,
    adam: Adam,
    lr: PyTree,
    decay: PyTree,
    smallest: PyTree,
    largest: PyTree,
    layers: Layers,
    *,
    bias_correction: BiasCorrection,
    rule: LambRule,
) -> PyTree:
    """lr ratio (delta + decay w), from the new moments; in Ivy's rule decay is in the norm only."""
    scalars = _adam_scalars(adam, bias_correction)
    rows, unflatten = _rows(w, mw, vw, *scalars, decay, lr, smallest, largest, *layers)
    w, mw, vw, alpha, epsilon, decay, lr, smallest, largest, *rows = rows
    own = Layers(*rows)
    deltas: list[Task | None] = []
    decayed: list[Task | None] = []
    for x, m, v, a, e, lam in zip(w, mw, vw, alpha, epsilon, decay, strict=True):
        delta = None if m is None else (rules.adam_delta, (m, v, a, e))
        deltas.append(delta)
        plain = delta is None or _is_zero(lam)
        decayed.append(delta if plain else (rules.lamb_direction, (m, v, x, a, e, lam)))
    numbers = (smallest, largest)
    if rule == "ivy":
        return unflatten(_trusted(w, deltas, decayed, ratios.lamb_ratio_ivy, numbers, own, (lr,)))
    return unflatten(_trusted(w, decayed, decayed, ratios.lamb_ratio, numbers, own, (lr,)))


def trust_ratio_steps(
    w: PyTree, direction: PyTree, smallest: PyTree, largest: PyTree, layers: Layers
) -> PyTree:
    """ratio direction, with LAMB's ratio."""
    rows, unflatten = _rows(w, direction, smallest, largest, *layers)
    w, direction, smallest, largest, *rows = rows
    given = [None if d is None else (leafwise.itself, (d,)) for d in direction]
    numbers = (smallest, largest)
    return unflatten(_trusted(w, given, given, ratios.lamb_ratio, numbers, Layers(*rows), ()))


def clip(g: Sequence[Any], largest: jax.Array, places: Sequence[Place]) -> list[Any]:
    """The leaves, scaled down together where their norm is above `largest`."""
    factors = ratios.clip_ratio(*global_norm(g, places), largest)
    return leafwise.run([None if x is None else (rules.step, (x, *factors)) for x in g])


def global_norm(leaves: Sequence[Any], places: Sequence[Place]) -> norms.Parts:
    """The norm of all leaves together."""
    pairs = [(x, place) for x, place in zip(leaves, places, strict=True) if x is not None]
    pairs.sort(key=lambda pair: _alike(pair[1]))
    tasks = [(leafwise.itself, (x,)) for x, _ in pairs]
    return norms.global_norm([place for _, place in pairs], tasks)


def _trusted(
    w: Sequence[Any],
    directions: Sequence[Task | None],
    measured: Sequence[Task | None],
    ratio: Callable[..., tuple[jax.Array, ...]],
    numbers: Sequence[Sequence[Any]],
    layers: Layers,
    rates: Sequence[Sequence[Any]],
) -> list[Any]:
    """(product of rates) ratio(|w|, |measured|, *numbers) direction, layer by layer.

    The ratio is 1 where the mask is False.
    """
    factors = [[row[i] for row in rates] for i in range(len(w))]
    # A mask is a bool, or one for each layer of a packed buffer.
    given = [(i, x) for i, x in enumerate(measured) if x is not None and np.any(layers.mask[i])]
    given.sort(key=lambda pair: _alike(layers.place[pair[0]]))
    if given:
        chosen, others = zip(*given, strict=True)
        places = [layers.place[i] for i in chosen]
        weights = [(leafwise.itself, (w[i],)) for i in chosen]
        columns = norms.layer_norms(places, weights, others)
        columns += [norms.join(places, [row[i] for i in chosen]) for row in numbers]
        by_column = zip(*(ratio(*xs) for xs in zip(*columns, strict=True)), strict=True)
        each = (norms.split(places, factor) for factor in by_column)
        for i, *own in zip(chosen, *each, strict=True):
            if isinstance(layers.mask[i], np.ndarray):
                use = layers.place[i].spread(layers.mask[i])
                own = [jnp.where(use, x, jnp.ones_like(x)) for x in own]
            factors[i] = own + factors[i]
    found = zip(leafwise.run(directions), factors, strict=True)
    return leafwise.run([None if d is None else (rules.step, (d, *by)) for d, by in found])


def _alike(place: Place) -> Any:
    """Leaves with equal shapes side by side, for the norms."""
    return place.cut, place.shape, place.stacked, getattr(place, "blocks", ())


def _decayed(d: jax.Array | None, w: jax.Array | None, decay: Any) -> Task | None:
    """The task of direction + decay w."""
    if d is None:
        return None
    return (leafwise.itself, (d,)) if _is_zero(decay) else (rules.decayed, (d, w, decay))


def _adam_scalars(adam: Adam, bias_correction: BiasCorrection) -> tuple[PyTree, PyTree]:
    """Step size and epsilon for `rules.adam_delta`: two numbers for the model, or two trees."""
    rows, unflatten = _rows(adam.step, adam.beta1.log, adam.beta2.log, adam.epsilon)
    leaves = zip(*rows, strict=True)
    pairs = [
        (None, None) if _any_none(xs) else rules.adam_scalars(*xs, bias_correction=bias_correction)
        for xs in leaves
    ]
    return unflatten([alpha for alpha, _ in pairs]), unflatten([epsilon for _, epsilon in pairs])


def _rows(*args: PyTree) -> tuple[list[list[Any]], Callable[[Sequence[Any]], PyTree]]:
    """The trees side by side, and the way back from leaves to the finest of them."""
    aligned = trees.align(*args)
    assert aligned is not None, "structures are checked before arithmetic"
    return aligned.rows, aligned.structure.unflatten


def _any_none(xs: Sequence[Any]) -> bool:
    return any(x is None for x in xs)


def _is_zero(number: Any) -> bool:
    return isinstance(number, (int, float)) and number == 0
