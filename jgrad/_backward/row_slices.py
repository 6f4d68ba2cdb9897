"""Leaves in no stack that lie in host memory, or whose state does: updated in slices of rows.

A loop fetches each slice inside of itself, so neither old nor new moments of a whole embedding are
ever on the device, and none of them is fetched early: XLA moves copies in front of a barrier, but
not out of a loop that needs the gradient.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from jgrad._backward.portions import Model, Owned, Portion, Whole, with_layer
from jgrad._backward.share_updates import ShareUpdate, pruned
from jgrad._trees import host_memory
from jgrad._trees.shares import Numbers

# (first, body, what it carries) -> what it carried in the end
Loop = Callable[[int, Callable[[jax.Array, Owned], Owned], Owned], Owned]


class Sliced(NamedTuple):
    """The leaves of a share as several shares: some are sliced, and the others are not.

    Attributes:
      rows: the update of a slice of each leaf that is sliced.
      whole: that of these leaves as they are, for their parts of numbers; None if there are none.
      others: that of all others; None if there are none.
    """

    rows: list[ShareUpdate]
    whole: ShareUpdate | None
    others: ShareUpdate | None


def updates_of_rows(
    whole: Whole,
    model: Model,
    positions: Sequence[int],
    rest: Portion,
    update_of: Callable[[Portion], ShareUpdate],
) -> list[ShareUpdate]:
    """The updates of slices, of those leaves whose method is elementwise, and that can be cut so.

    Args:
      whole: the transformation, and all parameters.
      model: where arrays lie.
      positions: of leaves in no stack, whose rows are not sharded.
      rest: owns what is of no leaf.
      update_of: that of a share.
    """
    portions = [x.without_those_of(rest) for x in map(whole.rows, positions) if x is not None]
    on_host = [x for x in portions if host_memory.place_on_host(model.owned(x)) is not None]
    return [x for x in map(update_of, on_host) if x.is_elementwise()]


def parts(
    leaves: Sliced, model: Model, gradients: Mapping[int, jax.Array | None], known: Numbers
) -> Numbers:
    """The parts of numbers that are not known yet, of the leaves that are sliced, as they are."""
    if leaves.whole is None:
        return {}
    update, portion = leaves.whole, leaves.whole.portion

    def numbers_of(gradients_given: list[jax.Array | None]) -> Numbers:
        # The parts read no state, so that it is not fetched.
        result = update(model.start(portion, gradients_given), known)
        return {key: x for key, x in result.parts.items() if key not in known}

    numbers: Numbers = pruned(numbers_of, [gradients[i] for i in portion.positions])
    return numbers


def updated(
    update: ShareUpdate, model: Model, gradient: jax.Array | None, known: Numbers, loop: Loop
) -> Owned:
    """A leaf, of which one slice after the other is updated."""
    portion = update.portion
    assert portion.layers is not None
    (cut,) = portion.weight_cuts

    def body(i: jax.Array, owned: Owned) -> Owned:
        now = model.replaced(portion, owned, in_loop=True)
        gradient_slice = None if gradient is None else cut.out_of(gradient, i)
        start = now.start(portion, [gradient_slice], i)
        new = pruned(lambda start: update(start, known).owned, start)
        return with_layer(portion, owned, model.kept(portion, new), i)

    return loop(portion.layers, body, model.owned(portion))
