"""Loops of libraries that take an optimizer: with jgrad's they find what they find with optax's.

Each is imported by its own loop, so that a missing one fails by its name, and alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.pages.clients import swap
from tests.pages.clients.pairs import PAIRS, Counted, X, Y, both, repeated

pytestmark = pytest.mark.clients

START = {"a": jnp.array([-0.5, 0.5]), "b": jnp.array([0.3, 0.9])}


def log_density(x):
    return -0.5 * jnp.sum((x["a"] - 1) ** 2) - jnp.sum((x["b"] + 2) ** 2)


def blackjax_vi(tx):
    import blackjax

    algorithm = blackjax.meanfield_vi(log_density, tx, num_samples=8)
    keys = jax.random.split(jax.random.key(0), 20)
    body = lambda state, key: algorithm.step(key, state)
    state, info = jax.jit(jax.lax.scan, static_argnums=0)(body, algorithm.init(START), keys)
    return state.mu, info.elbo


def blackjax_svgd(tx):
    import blackjax

    algorithm = blackjax.svgd(jax.grad(log_density), tx)
    particles = jax.tree.map(lambda x: x + jnp.linspace(-1, 1, 10)[:, None], START)
    step = jax.jit(lambda state: (algorithm.step(state), None))
    return repeated(step, algorithm.init(particles), 5)[0].particles


def flowjax_fit(tx):
    """Parameters stand behind wrappers of its own."""
    from flowjax.distributions import Normal
    from flowjax.train import fit_to_data

    data = 2 + 3 * jax.random.normal(jax.random.key(1), (64, 2))
    key, start = jax.random.key(0), Normal(jnp.zeros(2), jnp.ones(2))
    options = {"max_epochs": 4, "batch_size": 16, "show_progress": False}
    fitted, losses = fit_to_data(key, start, data, optimizer=tx, **options)
    return losses, fitted.log_prob(data[:4])


def haiku_training(tx):
    """The loop of its examples, with parameters in dicts."""
    import haiku as hk

    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([16, 1])(x)[:, 0]))
    loss = Counted(lambda params: jnp.mean((net.apply(params, X) - Y) ** 2))

    @jax.jit
    def step(carry):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    params = net.init(jax.random.key(0), X)
    return repeated(step, (params, tx.init(params)), 20)[1], loss.count


def ridge(w, decay):
    return jnp.mean((X @ w["a"] + w["b"].sum() - Y) ** 2) + decay * jnp.sum(w["a"] ** 2)


def jaxopt_run(tx):
    from jaxopt import OptaxSolver

    params, state = OptaxSolver(opt=tx, fun=ridge, maxiter=60).run(START, 0.1)
    return params, state.iter_num, state.error


def jaxopt_steps(tx):
    """And implicit differentiation."""
    from jaxopt import OptaxSolver

    solver = OptaxSolver(opt=tx, fun=ridge, maxiter=30, implicit_diff=True)
    step = lambda carry: (solver.update(*carry, 0.1), None)
    (params, _), _ = repeated(step, (START, solver.init_state(START, 0.1)), 3)
    return params, jax.grad(lambda decay: solver.run(START, decay)[0]["a"].sum())(0.1)


def numpyro_svi(tx):
    import numpyro.distributions as dist
    from numpyro import optim, plate, sample
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoDiagonalNormal

    data = jnp.array([1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0])

    def model(data):
        fairness = sample("fairness", dist.Beta(10.0, 10.0))
        with plate("data", len(data)):
            sample("obs", dist.Bernoulli(fairness), obs=data)

    counted = Counted(model)
    svi = SVI(counted, AutoDiagonalNormal(model), optim.optax_to_numpyro(tx), Trace_ELBO())
    found = svi.run(jax.random.key(0), 100, data, progress_bar=False)
    return found.losses, found.params, counted.count


@pytest.mark.parametrize(
    ("loop", "pair"),
    [
        (blackjax_vi, "all wrappers"),
        (blackjax_svgd, "pack_small"),
        (flowjax_fit, "clip, adamw, schedule"),
        (flowjax_fit, "all wrappers"),
        (haiku_training, "momentum"),
        (haiku_training, "all wrappers"),
        (jaxopt_run, "all wrappers"),
        (jaxopt_steps, "adam"),
        (numpyro_svi, "clip, adamw, schedule"),
        (numpyro_svi, "all wrappers"),
    ],
)
def test_loop(loop, pair):
    both(pair, loop, rtol=1e-4 if loop is numpyro_svi else 1e-5)


def rosenbrock(y, scale):
    return jnp.sum(scale * (y["b"] - y["a"] ** 2) ** 2 + (1 - y["a"]) ** 2)


def minimise(tx, scale=1.0):
    """What optimistix found, in how many steps, and how often the function was traced."""
    import optimistix as optx

    solver = optx.OptaxMinimiser(tx, rtol=1e-5, atol=1e-5)
    f = Counted(rosenbrock)
    found = optx.minimise(f, solver, START, args=scale, max_steps=300, throw=False)
    return found.value, found.stats["num_steps"], f.count


@pytest.mark.parametrize(
    "pair", ["clip, adamw, schedule", "momentum", "pack_small", "all wrappers"]
)
def test_optimistix(pair):
    """With a schedule among them, a closure, which optimistix turns into a module."""
    theirs, ours = map(minimise, PAIRS[pair]())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, atol=1e-3), theirs[0], ours[0])
    assert abs(int(theirs[1]) - int(ours[1])) <= 2  # the last changes are close to the tolerance
    assert theirs[2] == ours[2]


def test_derivative_of_a_minimum():
    """By implicit differentiation, of the value found with respect to an argument."""
    best = lambda adam: jax.grad(lambda s: minimise(adam(0.05), s)[0]["b"].sum())(2.0)
    np.testing.assert_allclose(best(swap.adam), best(optax.adam), atol=1e-2)
