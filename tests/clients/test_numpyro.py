"""numpyro: stochastic variational inference with `optax_to_numpyro`."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal
from numpyro.optim import optax_to_numpyro

from tests.clients.pairs import Counted, both, every_pair

pytestmark = pytest.mark.clients

DATA = jnp.array([1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0])


def model(data):
    fairness = numpyro.sample("fairness", dist.Beta(10.0, 10.0))
    with numpyro.plate("data", len(data)):
        numpyro.sample("obs", dist.Bernoulli(fairness), obs=data)


@every_pair("clip, adamw, schedule", "all wrappers")
def test_svi(pair):
    def run(tx):
        counted = Counted(model)
        svi = SVI(counted, AutoDiagonalNormal(model), optax_to_numpyro(tx), Trace_ELBO())
        found = svi.run(jax.random.key(0), 100, DATA, progress_bar=False)
        return found.losses, found.params, counted.count

    theirs, ours = both(pair, run, rtol=1e-4)
    assert theirs[2] == ours[2]
