"""jgrad in scikit-learn's own training loops, in the place of its optimizers: the same losses."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import datasets
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier, MLPRegressor, _multilayer_perceptron
from sklearn.neural_network._stochastic_optimizers import BaseOptimizer

import jgrad

CHANGED = 1e-6  # relative, as in docs/correctness.md


class Ours(BaseOptimizer):
    """What their loop asks of an optimizer; it changes the arrays of a list in place."""

    def __init__(self, tx, params):
        super().__init__()
        self._update, self._state = jax.jit(tx.update), tx.init(self._arrays(params))
        self.calls = 0

    @staticmethod
    def _arrays(params):
        return [jnp.array(p) for p in params]

    def update_params(self, params, grads):
        arrays = self._arrays(grads), self._state, self._arrays(params)
        updates, self._state = self._update(*arrays)
        self.calls += 1
        for p, x in zip(params, updates, strict=True):
            assert x.dtype == np.float64
            p += np.asarray(x)


def adam(params, learning_rate, beta1, beta2, epsilon, change=0.0):
    """Their epsilon is added to the square root before the bias correction."""
    options = {"beta1": beta1, "beta2": beta2 + change, "epsilon": epsilon}
    return Ours(jgrad.adam(learning_rate, bias_correction="step_size", **options), params)


def momentum(params, learning_rate, schedule, momentum, nesterov, power):
    assert schedule == "constant"
    options = {"momentum": momentum, "nesterov": nesterov}
    return Ours(jgrad.gradient_descent(learning_rate, **options), params)


def scaled(X, y):
    return (X - X.mean(0)) / np.maximum(X.std(0), 1e-3), y


def problems():
    """Models of theirs, and what they learn."""
    options = {"hidden_layer_sizes": (16,), "max_iter": 20, "random_state": 0}
    few = {"hidden_layer_sizes": (8, 8), "activation": "tanh"}
    diabetes = datasets.load_diabetes(return_X_y=True)
    return {
        "digits": (MLPClassifier(**options), datasets.load_digits(return_X_y=True)),
        "breast cancer": (
            MLPClassifier(**options | few),
            scaled(*datasets.load_breast_cancer(return_X_y=True)),
        ),
        "wine": (
            MLPClassifier(**options, batch_size=32),
            scaled(*datasets.load_wine(return_X_y=True)),
        ),
        "diabetes": (
            MLPRegressor(**options, learning_rate_init=0.01),
            (diabetes[0] * 10, diabetes[1] / 100),
        ),
    }


NAMES = ("digits", "breast cancer", "wine", "diabetes")


def losses(name, **options):
    model, (X, y) = problems()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.set_params(**options).fit(X, y)
    return np.array(model.loss_curve_), model._optimizer


def assert_same_losses(theirs, found):
    ours, optimizer = found
    assert isinstance(optimizer, Ours)
    assert optimizer.calls >= len(ours) == 20
    assert ours[-1] < 0.9 * ours[0]
    np.testing.assert_allclose(ours, theirs[0], rtol=CHANGED)


@pytest.mark.slow(always=["diabetes"])
@pytest.mark.parametrize("name", NAMES)
def test_adam(name, x64, monkeypatch):
    theirs = losses(name)
    monkeypatch.setattr(_multilayer_perceptron, "AdamOptimizer", adam)
    assert_same_losses(theirs, losses(name))


@pytest.mark.slow
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum(nesterov, x64, monkeypatch):
    options = {"solver": "sgd", "nesterovs_momentum": nesterov, "learning_rate_init": 0.01}
    theirs = losses("wine", **options)
    monkeypatch.setattr(_multilayer_perceptron, "SGDOptimizer", momentum)
    assert_same_losses(theirs, losses("wine", **options))
