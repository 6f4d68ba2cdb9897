"""`studies/soap.py`: its equations, and the search for a rate. `benchmarks/notes/soap.md` has its long form."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from studies import soap


@pytest.mark.parametrize("viscosity", [0.03, 0.006])
def test_the_solution_of_burgers_solves_it(viscosity):
    """By finite differences, whose error is h^2; and at first it is the wave."""
    u, h = functools.partial(soap.burgers_exact, viscosity=viscosity), 1e-3
    t, x = np.array([0.2, 0.5, 0.8]), np.array([0.3, -0.6, 0.1])
    dt, dx = (
        (b - a) / (2 * h) for a, b in ((u(t - h, x), u(t + h, x)), (u(t, x - h), u(t, x + h)))
    )
    ddx = (u(t, x + h) - 2 * u(t, x) + u(t, x - h)) / h**2
    np.testing.assert_allclose(dt, viscosity * ddx - u(t, x) * dx, atol=1e-3)
    np.testing.assert_allclose(u(0 * t, x), -np.sin(np.pi * x), atol=1e-12)


def test_the_solution_has_no_error(x64, monkeypatch):
    """It stands in the place of the perceptron, without the factor around that; the ends are zero."""
    exact = lambda x: jnp.sin(2 * jnp.pi * x) + jnp.sin(9 * jnp.pi * x) / 10
    monkeypatch.setattr(soap, "_output", lambda _, x: exact(x[0]) / (1 - x[0] ** 2 + 1e-300))
    task = soap.poisson()
    assert float(task.error(None)) < 1e-12


def test_rates_are_tried_until_the_best_is_inside():
    asked = []

    def error(rate):
        asked.append(rate)
        return abs(np.log2(rate / 8))

    assert soap.tuned(error, 1.0)[0] == 8
    assert sorted(asked) == [0.5, 1, 2, 4, 8, 16]
