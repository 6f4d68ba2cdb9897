"""optimistix: `OptaxMinimiser`, which turns what it is given into a module, closures too."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
import pytest

from tests.clients import swap
from tests.clients.pairs import PAIRS, Counted, every_pair

pytestmark = pytest.mark.clients


def rosenbrock(y, scale):
    a, b = y["a"], y["b"]
    return jnp.sum(scale * (b - a**2) ** 2 + (1 - a) ** 2)


START = {"a": jnp.array([-0.5, 0.5]), "b": jnp.array([0.3, 0.9])}


def minimise(tx, scale=1.0):
    """What it found, in how many steps, and how often the function was traced."""
    solver = optx.OptaxMinimiser(tx, rtol=1e-5, atol=1e-5)
    f = Counted(rosenbrock)
    found = optx.minimise(f, solver, START, args=scale, max_steps=300, throw=False)
    return found.value, found.stats["num_steps"], f.count


@every_pair("clip, adamw, schedule", "momentum", "pack_small", "all wrappers")
def test_minimise(pair):
    """With a schedule among them, a closure, which optimistix turns into a module."""
    theirs, ours = map(minimise, PAIRS[pair]())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, atol=1e-3), theirs[0], ours[0])
    assert abs(int(theirs[1]) - int(ours[1])) <= 2  # the last changes are close to the tolerance
    assert theirs[2] == ours[2]


def test_derivative_of_the_minimum():
    """By implicit differentiation, of the value found with respect to an argument."""
    best = lambda adam: jax.grad(lambda s: minimise(adam(0.05), s)[0]["b"].sum())(2.0)
    np.testing.assert_allclose(best(swap.adam), best(optax.adam), atol=1e-2)
