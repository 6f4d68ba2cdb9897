"""Leaves that are alike are traced once, and nothing of that is left in the compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from jgrad._arithmetic import leafwise


def double(x):
    return 2 * x


def nested_calls(jaxpr):
    return sum(eqn.primitive.name == "jit" for eqn in jaxpr.eqns)


@pytest.mark.parametrize("count", [1, 16, 17, 40])
def test_results_are_in_order(count):
    """Shapes in turn: each result is that of its own call."""
    rng = np.random.default_rng(count)
    shapes = [(), (3,), (2, 2)]
    arrays = [jnp.asarray(rng.normal(size=shapes[i % 3]), jnp.float32) for i in range(count)]
    for x, y in zip(arrays, leafwise.run([(double, (x,)) for x in arrays]), strict=True):
        np.testing.assert_array_equal(y, 2 * np.asarray(x))


def test_sixteen_leaves_are_one_call():
    arrays = [jnp.ones(3)] * 32 + [jnp.ones(4)] * 16
    jaxpr = jax.make_jaxpr(lambda xs: leafwise.run([(double, (x,)) for x in xs]))(arrays)
    assert nested_calls(jaxpr.jaxpr) == len(jaxpr.jaxpr.eqns) == 3


def test_equal_leaves_share_one_trace():
    traces = []

    def counted(x):
        traces.append(x.shape)
        return 2 * x

    arrays = [jnp.ones(3)] * 64 + [jnp.ones((4, 4))] * 64
    jax.jit(lambda xs: leafwise.run([(counted, (x,)) for x in xs]))(arrays)
    assert sorted(set(traces)) == [(3,), (4, 4)]
    assert len(traces) <= 2 * 16  # one column of each shape


def test_xla_inlines_every_call():
    """The optimized program of a whole update has no function calls left."""
    w = {f"{i}": jnp.ones((4, 4)) for i in range(40)}
    tx = jgrad.adam(0.1)
    compiled = jax.jit(tx.update).lower(w, tx.init(w), w).compile()
    assert " call(" not in compiled.as_text()


def test_jit_static_kwargs_keeps_the_signature_and_static_options():
    @leafwise.jit_static_kwargs
    def scale(x, *, by):
        """Documented."""
        assert isinstance(by, int)
        return x * by

    np.testing.assert_array_equal(scale(jnp.ones(2), by=3), [3.0, 3.0])
    assert (scale.__name__, scale.__doc__) == ("scale", "Documented.")
