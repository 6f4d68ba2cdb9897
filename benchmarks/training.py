"""A whole train step: forward, backward and update, in one compiled function."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgrad
from benchmarks import transformer
from benchmarks.measure import in_turn
from benchmarks.methods import FORMS, METHODS
from benchmarks.programs import Program, build_in_turn
from benchmarks.results import Figures, Result

WORK = "train step of a transformer: 193 leaves, 0.6 M"
TIMED = ("Adam", "LAMB")


def compare(method: str, *, rounds: int, builds: int) -> list[Result]:
    """What each form costs, if all come to the same losses."""
    params = transformer.init(jax.random.key(0))
    programs = {form: train_step(method, form, params) for form in FORMS}
    build_in_turn(programs, builds)
    _check_losses(programs)
    figures = {
        form: Figures.of(times, programs[form]) for form, times in in_turn(programs, rounds).items()
    }
    leaves = jax.tree.leaves(params)
    return [
        Result(WORK, method, form, len(leaves), sum(x.size for x in leaves), ours, figures["optax"])
        for form, ours in figures.items()
    ]


def train_step(method: str, form: str, params: transformer.Params) -> Program:
    """A step on one batch, with parameters and state donated; the loss is carried along."""
    tx = FORMS[form].make(METHODS[method])
    params = jax.tree.map(jnp.copy, FORMS[form].pack(params))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return transformer.loss(jgrad.unpack(params), tokens)  # a tree stays as it is

    def step(carry: tuple[Any, Any, jax.Array], tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        params, state, _ = carry
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    tokens = next(transformer.batches(seed=0))
    return Program(step, (params, tx.init(params), jnp.zeros(())), tokens)


def _check_losses(programs: dict[str, Program], steps: int = 10) -> None:
    """Raises where the loss after some steps depends on the form."""
    losses = {}
    for form, program in programs.items():
        for _ in range(steps):
            *_, losses[form] = program()
    for form, found in losses.items():
        np.testing.assert_allclose(found, losses["optax"], rtol=1e-4, err_msg=form)
