"""What docs/scanned_layers.md and its script say of haiku; tests/pages/guides has the other frameworks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from tests.pages.guides.test_scanned_layers import HAIKU, assert_trains_as_ordinary, variants, whole

pytestmark = pytest.mark.clients


def test_haiku():
    assert_trains_as_ordinary(HAIKU)


@pytest.mark.parametrize("name", ["layers", None])
def test_dropout_in_haiku(name):
    """The masks of `layer_stack`, which takes one key more."""
    import haiku as hk

    def block(x):
        return x + hk.dropout(hk.next_rng_key(), 0.5, hk.Linear(4)(x))

    def old(x):
        return hk.layer_stack(3, name=name)(block)(x)

    def new(x):
        hk.next_rng_key()
        names = {"hk": hk, "jax": jax, "jgrad": jgrad, "block": block, "x": x}
        (default,) = re.findall(r'"__\w+"', whole(HAIKU))
        exec(variants(HAIKU)[0].replace('"layers"', f'"{name}"' if name else default), names)
        return names["x"]

    key, x = jax.random.key(0), jnp.ones((2, 4))
    params = hk.transform(old).init(key, x)
    found, expected = (hk.transform(f).apply(params, key, x) for f in (new, old))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
