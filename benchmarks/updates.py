"""The update of a model by a method, in several forms, in turn."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jgrad
from benchmarks import pytorch
from benchmarks.measure import in_turn
from benchmarks.methods import FORMS, METHODS, RATE
from benchmarks.programs import Program, build_in_turn
from benchmarks.results import Figures, Result
from benchmarks.workloads import Shapes, Tree, equal_leaves, tree

EAGER = "eager call: 100 leaves"


def compare(
    work: str, method: str, shapes: Shapes, forms: Sequence[str], *, rounds: int, builds: int
) -> list[Result]:
    """What each form costs; those of PyTorch where there are some."""
    params, grads = tree(shapes, 0), tree(shapes, 1)
    programs = {form: program(method, form, params, grads) for form in forms if form in FORMS}
    build_in_turn(programs, builds)
    others = {
        form: step for form, step in pytorch.steps(method, params, grads).items() if form in forms
    }
    del params
    steps = in_turn({**programs, **others}, rounds)
    figures = {form: Figures.of(steps[form], own) for form, own in programs.items()}
    figures.update({form: Figures(steps[form]) for form in others})
    elements = sum(math.prod(shape) for shape in shapes.values())
    return [
        Result(
            work,
            method,
            form,
            len(shapes),
            elements,
            ours,
            figures.get("optax"),
            METHODS[method].floor * elements,
        )
        for form, ours in figures.items()
    ]


def program(method: str, form: str, params: Tree, grads: Tree) -> Program:
    """An update of a model, ready to be built."""
    step, start = update(method, form)
    return Program(step, *start(params, grads))


def update(method: str, form: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What a step does, and what makes its first carry and its gradients from trees."""
    make, pack = FORMS[form]
    tx = make(METHODS[method])

    def step(carry: tuple[Any, Any], grads: Any) -> tuple[Any, Any]:
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def start(params: Tree, grads: Tree) -> tuple[tuple[Any, Any], Any]:
        own = jax.tree.map(jnp.copy, pack(params))
        return (own, tx.init(own)), pack(grads)

    return step, start


def eager(*, rounds: int) -> list[Result]:
    """`adam_update` without jit on 100 leaves, beside optax's update and apply_updates."""
    shapes = equal_leaves(100, 32, 32)
    w, g = tree(shapes, 0), tree(shapes, 1)
    zeros = jax.tree.map(jnp.zeros_like, w)
    tx = optax.adam(RATE)
    state = tx.init(w)

    def theirs() -> object:
        updates, new = tx.update(g, state, w)
        return optax.apply_updates(w, updates), new

    ours = functools.partial(jgrad.adam_update, w, g, RATE, zeros, zeros, 1)
    steps = in_turn({"eager": ours, "optax": theirs}, rounds)
    figures = {name: Figures(times) for name, times in steps.items()}
    elements = 100 * 32 * 32
    return [
        Result(EAGER, "Adam", "eager", len(shapes), elements, figures["eager"], figures["optax"])
    ]
