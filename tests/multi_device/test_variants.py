"""chex's variants: an optimizer of each kind under pmap; the whole matrix has the others."""

import chex
import jax
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from jax.sharding import PartitionSpec as P

import jgrad
from tests.cases import CASES, DECAYED, ONE_EACH, RATE, gradients, params

pytestmark = pytest.mark.slow

KINDS = [case for case in CASES if case.name in {*ONE_EACH, *DECAYED}]


class VariantsTest(chex.TestCase):
    """The first two steps, against the reference."""

    @chex.variants(with_pmap=True)
    @parameterized.named_parameters((case.name, case) for case in KINDS)
    def test_transformation(self, case):
        # Of matrices in `pmap`, which may have parts of them, Muon wants to know that they are whole.
        options = {"mesh_axes": P()} if case.make is jgrad.muon else {}
        tx, w, grads = case.tx(**options), params(), gradients(2)

        @self.variant
        def step(w, state, g):
            updates, state = tx.update(g, state, w)
            return optax.apply_updates(w, updates), state

        state = self.variant(tx.init)(w)
        expected = case.trajectory(w, grads)
        for g, wanted in zip(grads, expected, strict=True):
            w, state = step(w, state, g)
            for a, b in zip(jax.tree.leaves(w), wanted, strict=True):
                np.testing.assert_allclose(
                    a, b, rtol=1e-5, atol=1e-5 * np.max(np.abs(b), initial=0)
                )

    @chex.variants(with_pmap=True)
    @parameterized.named_parameters((case.name, case) for case in KINDS if case.step is not None)
    def test_functional_update(self, case):
        w, (g,) = params(), gradients(1)
        m = jax.tree.map(lambda x: 0 * x, w)
        found, _, _ = self.variant(lambda w, g: case.step(w, g, RATE, m, m, 1))(w, g)
        (expected,) = case.trajectory(w, [g])
        for a, b in zip(jax.tree.leaves(found), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.max(np.abs(b), initial=0))

    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    def test_gradients(self):
        x = np.array([1.0, 2.0, 3.0], np.float32)
        f = lambda x: (x**3).sum()
        np.testing.assert_allclose(self.variant(jgrad.grad(f))(x), 3 * x**2)
        np.testing.assert_allclose(self.variant(jgrad.jac(jgrad.grad(f)))(x), np.diag(6 * x))
        value, grads = self.variant(lambda x: jgrad.execute_with_gradients(f, x))(x)
        np.testing.assert_allclose(value, 36)
        np.testing.assert_allclose(grads, 3 * x**2)
