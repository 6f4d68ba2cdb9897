"""What optimizer state in few bits keeps, needs during a step, and costs in time.

Each recipe beside jgrad's float32 AdamW in the same form, and built beside its own float32 recipe.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jgrad
from benchmarks.measure import Ratio, in_turn
from benchmarks.programs import Program, build_in_turn
from benchmarks.recipes import RATE, clipped, program
from benchmarks.results import Figures
from benchmarks.workloads import Shapes, equal_leaves, tree


class Recipe(NamedTuple):
    """A transformation whose state is counted.

    Attributes:
      make: makes it.
      peer: the recipe beside which it is built.
      dtype: of parameters and gradients.
    """

    make: Callable[[], optax.GradientTransformation]
    peer: str
    dtype: Any = jnp.float32


class Held(NamedTuple):
    """What was measured of a recipe on a model.

    Attributes:
      work: the model, in words.
      recipe: its name.
      form: "tree" or "packed".
      elements: of the model.
      state_bytes: between steps.
      peak_bytes: of a step: arguments, temporaries, and outputs that alias no argument.
      ours: steps and building.
      step: beside float32 AdamW.
      trace: beside the float32 recipe.
      build: the same, with compiling.
    """

    work: str
    recipe: str
    form: str
    elements: int
    state_bytes: int
    peak_bytes: int
    ours: Figures
    step: Ratio
    trace: Ratio
    build: Ratio


_BASE = "AdamW"

adamw = functools.partial(jgrad.adam, RATE, weight_decay=1e-2)
momentum = functools.partial(jgrad.gradient_descent, RATE, momentum=0.9, weight_decay=1e-4)
lamb = functools.partial(jgrad.lamb, RATE, weight_decay=1e-2)


def _guarded(**options: Any) -> optax.GradientTransformation:
    return jgrad.skip_nonfinite(clipped(adamw(**options)))


def _stochastic(**options: Any) -> optax.GradientTransformation:
    return jgrad.stochastic_rounding(adamw(**options))


_BF16: Any = jnp.bfloat16
_EIGHT: dict[str, Any] = {"moment_dtype": "8bit"}

RECIPES = {
    _BASE: Recipe(adamw, _BASE),
    "AdamW, bf16 moments": Recipe(functools.partial(adamw, moment_dtype=_BF16), _BASE),
    "AdamW, 8bit": Recipe(functools.partial(adamw, **_EIGHT), _BASE),
    "skip(clip + AdamW)": Recipe(_guarded, "skip(clip + AdamW)"),
    "skip(clip + AdamW, 8bit)": Recipe(functools.partial(_guarded, **_EIGHT), "skip(clip + AdamW)"),
    "momentum": Recipe(momentum, "momentum"),
    "momentum, 8bit": Recipe(functools.partial(momentum, **_EIGHT), "momentum"),
    "LAMB": Recipe(lamb, "LAMB"),
    "LAMB, 8bit": Recipe(functools.partial(lamb, **_EIGHT), "LAMB"),
    "bf16: master(AdamW)": Recipe(lambda: jgrad.master_weights(adamw()), _BASE, _BF16),
    "bf16: stochastic(AdamW)": Recipe(_stochastic, _BASE, _BF16),
    "bf16: stochastic(AdamW, 8bit)": Recipe(functools.partial(_stochastic, **_EIGHT), _BASE, _BF16),
}

# Ten million elements each: more than caches hold.
WORKS: dict[str, Shapes] = {
    "memory: 20 leaves of 1024 x 512": equal_leaves(20, 1024, 512),
    "memory: 80 leaves of 256 x 512": equal_leaves(80, 256, 512),
    "memory: 300 leaves of 128 x 256": equal_leaves(300, 128, 256),
}


def compare(work: str, name: str, *, rounds: int, builds: int) -> list[Held]:
    """A step of the recipe on the tree and packed."""
    leaves, names = WORKS[work], dict.fromkeys((name, _BASE, RECIPES[name].peer))
    found = []
    for form, pack in (("tree", lambda x: x), ("packed", jgrad.pack)):
        programs = {own: _program(RECIPES[own], leaves, pack) for own in names}
        build_in_turn(programs, builds)
        timed = {own: programs[own] for own in dict.fromkeys((name, _BASE))}
        steps = in_turn(timed, rounds)
        ours, peer = programs[name], programs[RECIPES[name].peer]
        figures = Figures.of(steps[name], ours)
        held = Held(
            work,
            name,
            form,
            elements=sum(math.prod(shape) for shape in leaves.values()),
            state_bytes=sum(x.nbytes for x in jax.tree.leaves(ours.carry[1])),
            peak_bytes=ours.peak_bytes,
            ours=figures,
            step=Ratio.of(steps[name], steps[_BASE]),
            trace=Ratio.of(ours.traces, peer.traces),
            build=Ratio.of(figures.builds, Figures.of([], peer).builds),
        )
        found.append(held)
    return found


def _program(recipe: Recipe, leaves: Shapes, pack: Callable[[Any], Any]) -> Program:
    """As recipes have it: update and apply, with parameters and state donated."""
    params, grads = (
        pack(jax.tree.map(lambda x: (0.01 * x).astype(recipe.dtype), tree(leaves, seed)))
        for seed in (0, 1)
    )
    return program(recipe.make(), params, grads, {})
