"""What people run: an optimizer with decay, clipping, skipping, accumulation, or several of them.

`benchmarks/notes/what_wrappers_cost.md` quotes the figures, and `tests/everywhere/test_recipes.py`
asserts the counts.
"""

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jgrad
from benchmarks.measure import in_turn
from benchmarks.programs import Program, build_in_turn
from benchmarks.results import Figures, Result
from benchmarks.workloads import Shapes, equal_leaves, tree


class Recipe(NamedTuple):
    """A transformation of jgrad, and what comes nearest to it in optax.

    Attributes:
      ours: makes jgrad's.
      optaxs: makes optax's; None where it has none.
      dtype: of parameters and gradients.
      options: of each `update` of ours.
    """

    ours: Callable[[], optax.GradientTransformation]
    optaxs: Callable[[], optax.GradientTransformation] | None = None
    dtype: Any = jnp.float32
    options: Mapping[str, Any] = MappingProxyType({})


RATE = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 1000)


def matrices(params: Any) -> Any:
    """The usual mask: biases and scales of norms, which have one axis in all of these models."""
    return jax.tree.map(lambda x: len(x.shape) > 1, params)


def rates(params: Any) -> Any:
    """A rate for each leaf, as a Python number."""
    count = len(jax.tree.leaves(params))
    return jax.tree.unflatten(jax.tree.structure(params), [1e-3 / (i + 1) for i in range(count)])


_MASKS: dict[str, Any] = {"weight_decay_mask": matrices, "trust_ratio_mask": matrices}

momentum = functools.partial(jgrad.gradient_descent, RATE, momentum=0.9, weight_decay=1e-4)
adamw = functools.partial(jgrad.adam, RATE, weight_decay=1e-2, weight_decay_mask=matrices)
lars = functools.partial(jgrad.lars, RATE, weight_decay=1e-4, **_MASKS)
lamb = functools.partial(jgrad.lamb, RATE, weight_decay=1e-2, **_MASKS)


def clipped(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Behind clipping by the global norm."""
    return optax.chain(jgrad.clip_by_global_norm(1.0), tx)


def stack() -> optax.GradientTransformation:
    """All of README's stack."""
    tx = jgrad.average_params(optax.chain(jgrad.clip_by_global_norm(1.0), lamb()), 0.999)
    return jgrad.skip_nonfinite(jgrad.accumulate(jgrad.master_weights(tx), 4))


_optax_adamw = functools.partial(optax.adamw, RATE, weight_decay=1e-2, mask=matrices)


def _optax_momentum(**options: Any) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(RATE, momentum=0.9, **options))


def _optax_clipped(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def _optax_skip(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.apply_if_finite(tx, 5)


_BF16 = jnp.bfloat16

RECIPES = {
    "momentum, decay": Recipe(momentum, _optax_momentum),
    "Nesterov, decay": Recipe(
        functools.partial(momentum, nesterov=True),
        functools.partial(_optax_momentum, nesterov=True),
    ),
    "AdamW": Recipe(adamw, _optax_adamw),
    "clip + AdamW": Recipe(lambda: clipped(adamw()), lambda: _optax_clipped(_optax_adamw())),
    "skip(AdamW)": Recipe(
        lambda: jgrad.skip_nonfinite(adamw()), lambda: _optax_skip(_optax_adamw())
    ),
    "skip(clip + AdamW)": Recipe(
        lambda: jgrad.skip_nonfinite(clipped(adamw())),
        lambda: _optax_skip(_optax_clipped(_optax_adamw())),
    ),
    "skip(optax's AdamW)": Recipe(
        lambda: jgrad.skip_nonfinite(_optax_adamw()), lambda: _optax_skip(_optax_adamw())
    ),
    "skip(optax's AdamW, branch=True)": Recipe(
        lambda: jgrad.skip_nonfinite(_optax_adamw(), branch=True),
        lambda: _optax_skip(_optax_adamw()),
    ),
    "accumulate(clip + AdamW)": Recipe(
        lambda: jgrad.accumulate(clipped(adamw()), 4),
        lambda: optax.MultiSteps(_optax_clipped(_optax_adamw()), 4).gradient_transformation(),
    ),
    "accumulate, emit=False": Recipe(
        lambda: jgrad.accumulate(clipped(adamw()), 4), options={"emit": False}
    ),
    "AdamW + ema": Recipe(lambda: jgrad.average_params(adamw(), 0.999)),
    "LARS": Recipe(lars, functools.partial(optax.lars, RATE, weight_decay=1e-4, **_MASKS)),
    "clip + LAMB": Recipe(
        lambda: clipped(lamb()),
        lambda: _optax_clipped(optax.lamb(RATE, weight_decay=1e-2, mask=matrices)),
    ),
    "bf16: AdamW": Recipe(adamw, functools.partial(_optax_adamw, mu_dtype=jnp.float32), _BF16),
    "bf16: AdamW, bf16 moments": Recipe(
        functools.partial(adamw, moment_dtype=_BF16), _optax_adamw, _BF16
    ),
    "bf16: master(AdamW)": Recipe(lambda: jgrad.master_weights(adamw()), dtype=_BF16),
    "bf16: skip(master(clip + AdamW))": Recipe(
        lambda: jgrad.skip_nonfinite(jgrad.master_weights(clipped(adamw()))), dtype=_BF16
    ),
    "bf16: skip(accumulate(master(clip + LAMB + ema)))": Recipe(stack, dtype=_BF16),
}


def program(
    tx: optax.GradientTransformation, params: Any, grads: Any, options: Mapping[str, Any]
) -> Program:
    """A step with update and apply, whose parameters and state are donated."""
    tx = optax.with_extra_args_support(tx)

    def step(carry: tuple[Any, Any], grads: Any) -> tuple[Any, Any]:
        params, state = carry
        updates, state = tx.update(grads, state, params, **options)
        return optax.apply_updates(params, updates), state

    own = jax.tree.map(jnp.copy, params)
    return Program(step, (own, tx.init(own)), grads)


def shapes() -> Shapes:
    """A transformer of width 512 with six layers: 49 leaves, 21 M elements."""
    width = 512
    found: Shapes = {"embedding": (4096, width)}
    for i in range(6):
        found |= {f"{i}/qkv": (width, 3 * width), f"{i}/out": (width, width)}
        found |= {f"{i}/up": (width, 4 * width), f"{i}/down": (4 * width, width)}
        found |= {f"{i}/up_bias": (4 * width,), f"{i}/down_bias": (width,)}
        found |= {f"{i}/norm_1": (width,), f"{i}/norm_2": (width,)}
    return found


WORK = "recipes on a transformer: 49 leaves, 21 M"
GROWTH = (20, 40, 80, 160)  # leaves
GROWING = ("AdamW", "clip + AdamW", "skip(clip + AdamW)", "accumulate(clip + AdamW)", "clip + LAMB")


def compare(name: str, *, rounds: int, builds: int) -> list[Result]:
    """A step of the recipe on the tree and packed, beside optax."""
    programs = _programs(name, shapes(), packed=True)
    build_in_turn(programs, builds)
    steps = in_turn(programs, rounds)
    figures = {form: Figures.of(steps[form], own) for form, own in programs.items()}
    return _results(WORK, name, shapes(), figures)


def growth(name: str) -> list[Result]:
    """Seconds of tracing and compiling, against the number of leaves."""
    found = []
    for count in GROWTH:
        leaves = equal_leaves(count, 16, 24)
        programs = _programs(name, leaves, packed=False)
        build_in_turn(programs, 1)
        figures = {form: Figures.of([], own) for form, own in programs.items()}
        found += _results("building", name, leaves, figures)
    return found


def _programs(name: str, leaves: Shapes, *, packed: bool) -> dict[str, Program]:
    recipe = RECIPES[name]
    params, grads = (
        jax.tree.map(lambda x: (0.01 * x).astype(recipe.dtype), tree(leaves, seed))
        for seed in (0, 1)
    )
    programs = {"tree": program(recipe.ours(), params, grads, recipe.options)}
    if packed:
        forms = jgrad.pack(params), jgrad.pack(grads)
        programs["packed"] = program(recipe.ours(), *forms, recipe.options)
    if recipe.optaxs:
        programs["optax"] = program(recipe.optaxs(), params, grads, {})
    return programs


def _results(work: str, name: str, leaves: Shapes, figures: dict[str, Figures]) -> list[Result]:
    elements = sum(math.prod(shape) for shape in leaves.values())
    return [
        Result(work, name, form, len(leaves), elements, own, figures.get("optax"))
        for form, own in figures.items()
    ]
