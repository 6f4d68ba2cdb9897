"""blackjax: variational inference and Stein's method, which take an optimizer."""

import blackjax
import jax
import jax.numpy as jnp
import pytest

from tests.clients.pairs import both, every_pair

pytestmark = pytest.mark.clients

log_density = lambda x: -0.5 * jnp.sum((x["a"] - 1) ** 2) - jnp.sum((x["b"] + 2) ** 2)
START = {"a": jnp.zeros(2), "b": jnp.zeros(3)}


def states(algorithm, state, steps=20):
    def body(state, key):
        state, info = algorithm.step(key, state)
        return state, info

    return jax.jit(
        lambda state: jax.lax.scan(body, state, jax.random.split(jax.random.key(0), steps))
    )(state)


@every_pair("all wrappers")
def test_meanfield_vi(pair):
    def run(tx):
        algorithm = blackjax.meanfield_vi(log_density, tx, num_samples=8)
        state, info = states(algorithm, algorithm.init(START))
        return state.mu, info.elbo

    both(pair, run)


@every_pair("pack_small")
def test_svgd(pair):
    def run(tx):
        algorithm = blackjax.svgd(jax.grad(log_density), tx)
        particles = jax.tree.map(lambda x: x + jnp.linspace(-1, 1, 10)[:, None], START)
        step, state = jax.jit(algorithm.step), algorithm.init(particles)
        for _ in range(5):
            state = step(state)
        return state.particles

    both(pair, run)
