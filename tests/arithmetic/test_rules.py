"""Rules that several methods share, at the ends of the range of float32."""

import jax.numpy as jnp
import numpy as np
import pytest

from jgrad._arithmetic import rules
from jgrad._inputs.moment import Moment
from jgrad._optimizers import lars

LARGEST = float(jnp.finfo(jnp.float32).max)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_does_not_overflow(nesterov):
    """From finite numbers; infinity and NaN are seen."""
    direction = [jnp.asarray([LARGEST, -LARGEST, 1.0, jnp.inf, jnp.nan], jnp.float32)]
    old = [jnp.asarray([LARGEST, -LARGEST, 2.0, 1.0, 1.0], jnp.float32)]
    decay = jnp.float32(0.9)
    (found,), (mw,) = lars._momentum_of_leaf(direction, Moment(old), decay, nesterov=nesterov)
    for x in (found, mw):
        np.testing.assert_array_equal(np.isfinite(x), [True, True, True, False, False])
    assert mw[2] == np.float32(np.float32(0.9) * 2 + 1)


def test_decay_does_not_overflow():
    direction = jnp.asarray([LARGEST, -LARGEST, 3.0, jnp.inf, jnp.nan], jnp.float32)
    w = jnp.asarray([LARGEST, -LARGEST, 2.0, 1.0, 1.0], jnp.float32)
    found = rules.decayed(direction, w, jnp.float32(0.5))
    np.testing.assert_array_equal(np.isfinite(found), [True, True, True, False, False])
    assert found[2] == 4


def test_average():
    """The weight of the old average is beta."""
    assert rules.average(*map(jnp.float32, (1.0, 3.0, 0.75, 0.25))) == 2.5
