"""flowjax: `fit_to_data` takes an optimizer, and has parameters behind wrappers of its own."""

import jax
import jax.numpy as jnp
import pytest
from flowjax.distributions import Normal
from flowjax.train import fit_to_data

from tests.clients.pairs import both, every_pair

pytestmark = pytest.mark.clients


@every_pair("clip, adamw, schedule", "all wrappers")
def test_fit(pair):
    data = 2 + 3 * jax.random.normal(jax.random.key(1), (64, 2))

    def run(tx):
        key, start = jax.random.key(0), Normal(jnp.zeros(2), jnp.ones(2))
        options = {"max_epochs": 4, "batch_size": 16, "show_progress": False}
        fitted, losses = fit_to_data(key, start, data, optimizer=tx, **options)
        return losses, fitted.log_prob(data[:4])

    both(pair, run)
