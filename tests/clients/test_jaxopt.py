"""jaxopt: `OptaxSolver`, run to the end and step by step, and differentiated implicitly."""

import jax
import jax.numpy as jnp
import pytest
from jaxopt import OptaxSolver

from tests.clients.pairs import both, every_pair

pytestmark = pytest.mark.clients

X = jax.random.normal(jax.random.key(0), (20, 3))
Y = X @ jnp.array([1.0, -2.0, 0.5])


def ridge(params, decay, data):
    x, y = data
    residual = x @ params["w"] + params["b"] - y
    return jnp.mean(residual**2) + decay * jnp.sum(params["w"] ** 2)


START = {"w": jnp.zeros(3), "b": jnp.zeros(())}


@every_pair("all wrappers")
def test_run(pair):
    def run(tx):
        solver = OptaxSolver(opt=tx, fun=ridge, maxiter=60)
        params, state = solver.run(START, 0.1, data=(X, Y))
        return params, state.iter_num, state.error

    both(pair, run)


@every_pair("adam")
def test_step_by_step_and_derivative(pair):
    def run(tx):
        solver = OptaxSolver(opt=tx, fun=ridge, maxiter=30, implicit_diff=True)
        params, state = START, solver.init_state(START, 0.1, data=(X, Y))
        for _ in range(3):
            params, state = solver.update(params, state, 0.1, data=(X, Y))
        slope = jax.grad(lambda decay: solver.run(START, decay, data=(X, Y))[0]["w"].sum())(0.1)
        return params, slope

    both(pair, run)
