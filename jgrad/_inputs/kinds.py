"""Kinds of options that are numbers: a factory checks each, and each update reads it.

The factory checks what it can before there are parameters, so that errors point at its call. Each
update reads the numbers again, because they may be traced and may differ from leaf to leaf.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import rules
from jgrad._arithmetic.leafwise import PerLeaf
from jgrad._arithmetic.numerics import BetaForms
from jgrad._inputs import numbers, options
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.leaf_functions import Descent
from jgrad._inputs.moment import Step
from jgrad._trees import checks, trees
from jgrad._trees.annotations import CoupledDecayRule, DecayRule, LearningRate, Mask
from jgrad._trees.protocols import Leaf, PyTree
from jgrad._trees.told import note, told

T = TypeVar("T")

DECAY_RULES: tuple[DecayRule, ...] = ("decoupled", "cautious", "independent")
COUPLED_DECAY_RULES: tuple[CoupledDecayRule, ...] = ("coupled", *DECAY_RULES)


@dataclasses.dataclass(frozen=True, eq=False)
class Option(Generic[T]):
    """A number, a schedule, or a tree of these.

    Attributes:
      name: by which users know it.
      value: as the factory was given it.
      is_optional: whether it may be None, where another option takes its place.
    """

    name: str
    value: PyTree
    is_optional: bool = False
    # What arithmetic needs of a number that was checked, and of an argument of a functional update.
    from_number: ClassVar[Any]
    canonical: ClassVar[Any]

    def check(self, function: str) -> None:
        """What a factory can; a schedule is called in each update only."""
        if not (self.is_optional and self.value is None):
            options.check(function, self.scalars, **{self.name: self.value})

    def is_given(self, step: Step) -> bool:
        """Whether the factory or this call of `update` has it."""
        return self.value is not None or step.numbers.get(self.name) is not None

    def read(self, inputs: Inputs, step: Step) -> T:
        """Of this call, or else of the factory: one number if all arrays share it, else a list."""
        is_constant = checks.is_number(self.value) and step.numbers.get(self.name) is None
        if is_constant and inputs.notes is None and not inputs.has_buffers:
            number: T = self.from_number(self.value)
            return number
        return self.per_array(inputs, step)

    def value_now(self, inputs: Inputs, step: Step) -> PyTree:
        """As it was given, with results for schedules."""
        override = step.numbers.get(self.name)
        value = self.value if override is None else override
        return options.with_results(inputs, step, self.name, value)

    def scalars(self, function: str, name: str, tree: PyTree) -> PyTree:
        """The same of numbers and arrays with one element, or of a tree of them; checks them."""
        raise NotImplementedError

    def per_array(self, inputs: Inputs, step: Step) -> T:
        """What `read` is of anything that is not one number of Python."""
        raise NotImplementedError


class Number(Option[PerLeaf]):
    """In [0, inf), one element per leaf."""

    from_number = staticmethod(numbers.strong_scalar)
    scalars = staticmethod(numbers.scalars)
    canonical = staticmethod(numbers.number)

    def per_array(self, inputs: Inputs, step: Step) -> PerLeaf:
        """One for each array, where they differ."""
        x = self.scalars(inputs.function, self.name, self.value_now(inputs, step))
        return options.per_array(inputs, self.name, x)


class OptionalNumber(Option[PerLeaf]):
    """The same in a functional update alone, or None, which compiles to nothing."""

    @staticmethod
    def canonical(function: str, name: str, tree: PyTree) -> PyTree:
        """See `Option`."""
        return None if tree is None else numbers.number(function, name, tree)


class Beta(Option[BetaForms]):
    """A decay rate in [0, 1), one element per leaf."""

    from_number = staticmethod(numbers.forms)
    scalars = staticmethod(numbers.scalar_betas)
    canonical = staticmethod(numbers.betas)

    def per_array(self, inputs: Inputs, step: Step) -> BetaForms:
        """Its forms, each of them one for each array where they differ."""
        forms = self.scalars(inputs.function, self.name, self.value_now(inputs, step))
        return BetaForms(*(options.per_array(inputs, self.name, x) for x in forms))


def momentum_of(beta: Beta, inputs: Inputs, step: Step) -> BetaForms | None:
    """That of this update; None without a buffer, where a call may have none either."""
    if beta.value is not None:
        return beta.read(inputs, step)
    if (came := step.numbers.get(beta.name)) is not None:
        expected = "None, since the factory had none, and the state has no buffer"
        begin = f"{inputs.function}: `{beta.name}`"
        raise TypeError(f"{begin}: {checks.describe(came)}, expected {expected}.")
    return None


class Rate(Option[PerLeaf]):
    """A learning rate in [0, inf), of any shape that broadcasts."""

    from_number = staticmethod(numbers.strong_scalar)
    scalars = staticmethod(numbers.number)

    def per_array(self, inputs: Inputs, step: Step) -> PerLeaf:
        """One for each array."""
        return inputs.per_array(self.leaf_values(inputs, step))

    def leaf_values(self, inputs: Inputs, step: Step) -> list[Leaf]:
        """One for each leaf of the unpacked tree."""
        option = self.scalars(inputs.function, self.name, self.value_now(inputs, step))
        arg = inputs.option(self.name, option)
        if any(map(np.ndim, arg.leaves)):
            if (share := told().share) is not None:
                arg = share.numbers_of_layer(arg, inputs.shapes)
            checks.broadcastable(arg, inputs.updated_shapes())
        if inputs.notes is not None and jax.tree_util.all_leaves([option]):
            note(inputs.notes, self.name, jnp.mean(jnp.asarray(option)))
        return list(arg.leaves)


@dataclasses.dataclass(frozen=True, eq=False)
class Decay(Option[list[Leaf]]):
    """A weight decay of some leaves, in the range of its rule.

    Attributes:
      mask: for which leaves it is; None for all.
      rule: how it is applied.
    """

    mask: Mask | None = None
    rule: CoupledDecayRule = "decoupled"

    def read(self, inputs: Inputs, step: Step) -> list[Leaf]:
        """Of each array; the Python number 0, which compiles to nothing, for none."""
        return inputs.per_array(self.leaf_values(inputs, step))

    def leaf_values(self, inputs: Inputs, step: Step) -> list[Leaf]:
        """The same of each leaf of the unpacked tree; 0, too, where it is not used."""
        use = options.mask(inputs, "weight_decay_mask", self.mask)
        option = self.value_now(inputs, step)
        if rules.is_zero(option):
            return [0.0] * len(use)
        inputs.require_params(f"`{self.name}`")
        checked = self.scalars(inputs.function, self.name, option)
        decays, structure = trees.flatten(checked)
        with_raw = zip(decays, trees.flatten(option)[0], strict=True)
        decays = [0.0 if rules.is_zero(raw) else x for x, raw in with_raw]
        entries = inputs.option(self.name, structure.unflatten(decays)).leaves
        pairs = zip(entries, use, strict=True)
        decays = [x if used and x is not None else 0.0 for x, used in pairs]
        if inputs.undecayed is not None:
            inputs.undecayed.check(inputs, self.name, decays)
        return decays

    def scalars(self, function: str, name: str, tree: PyTree) -> PyTree:
        """Where no rate multiplies a decay, 1 takes all."""
        high = 1.0 if self.rule == "independent" else math.inf
        return numbers.scalars(function, name, tree, high)


class DescentOptions(NamedTuple):
    """What makes updates of directions."""

    learning_rate: Rate
    weight_decay: Decay

    @classmethod
    def of(
        cls, learning_rate: LearningRate, decay: PyTree, mask: Mask | None, rule: CoupledDecayRule
    ) -> "DescentOptions":
        """Of the arguments of a factory, by their usual names."""
        weight_decay = Decay("weight_decay", decay, mask=mask, rule=rule)
        return cls(Rate("learning_rate", learning_rate), weight_decay)

    def check(self, function: str, rules_of_method: Sequence[str] = DECAY_RULES) -> None:
        """What a factory can."""
        decay = self.weight_decay
        self.learning_rate.check(function)
        checks.one_of(function, "weight_decay_rule", decay.rule, rules_of_method)
        decay.check(function)
        options.check_masks(function, weight_decay_mask=decay.mask)

    def read(self, inputs: Inputs, step: Step) -> Descent:
        """Those of one update; a decay of None is none."""
        rate, decay = self.learning_rate.read(inputs, step), self.weight_decay
        x, rule = decay.value, decay.rule
        per_array: PerLeaf = None
        is_special = inputs.has_buffers or inputs.undecayed is not None
        is_constant = checks.is_number(x) and step.numbers.get(decay.name) is None
        if not is_constant or decay.mask is not None or (x and is_special):
            per_array = rules.optional(decay.read(inputs, step), rule)
        elif x:
            inputs.require_params(f"`{decay.name}`")
            per_array = numbers.strong_scalar(x)
        return Descent(per_array, rate, rule)
