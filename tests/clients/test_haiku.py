"""haiku: transformed functions, and the loop of its examples, with parameters in dicts."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest

from tests.clients.pairs import Counted, both, every_pair

pytestmark = pytest.mark.clients

X = jax.random.normal(jax.random.key(1), (32, 6))
LABELS = (X.sum(1) > 0).astype(int)

net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([16, 2])(x)))


@every_pair("momentum", "all wrappers")
def test_classifier(pair):
    def run(tx):
        @Counted
        def loss(params):
            logits = net.apply(params, X)
            return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()

        @jax.jit
        def step(params, state):
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        params = net.init(jax.random.key(0), X)
        state, values = tx.init(params), []
        for _ in range(20):
            params, state, value = step(params, state)
            values.append(value)
        return jnp.stack(values), loss.count

    theirs, ours = both(pair, run)
    assert ours[0][-1] < ours[0][0]
    assert theirs[1] == ours[1]
