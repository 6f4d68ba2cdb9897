"""Derivatives through training where gradients are zero: `python -m studies.zero_gradients`.

The table of `benchmarks/notes/differentiate.md`, which `test_zero_gradients.py` compares. Two
updates of a small model, float32, at the defaults of each method, with the learning rate 0.01; the
derivatives of the loss after them, by the learning rate and by the first weights.
"""

import functools
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from absl import app

import jgrad
from benchmarks import markdown

RATE, STEPS = 0.01, 2
HEADS = "method", "some gradients are zero", "all are"

# Each optimizer of optax that is updated by gradients and parameters alone, once; not those that
# ask for a loss, or for a function that has one: lbfgs, momo, momo_adam, polyak_sgd, sophia.
OPTAX = (
    *("adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw"),
    *("adan", "amsgrad", "fromage", "lamb", "lars", "lion", "nadam", "nadamw", "noisy_sgd"),
    *("novograd", "optimistic_adam_v2", "optimistic_gradient_descent", "radam", "rmsprop"),
    *("rprop", "sgd", "sign_sgd", "signum", "sm3", "yogi"),
)
CONTRIB = (
    *("acprop", "ademamix", "adopt", "cocob", "dadapt_adamw", "dog", "dowg", "galore", "madgrad"),
    *("muon", "prodigy", "schedule_free_adamw", "schedule_free_sgd", "simplified_ademamix"),
)

_matrices = jgrad.hidden_matrices()
JGRAD: dict[str, Callable[[Any], Any]] = {
    "gradient_descent": jgrad.gradient_descent,
    "gradient_descent(momentum=0.9)": lambda rate: jgrad.gradient_descent(rate, momentum=0.9),
    "adam": jgrad.adam,
    "adam(weight_decay=0.1)": lambda rate: jgrad.adam(rate, weight_decay=0.1),
    "lion": jgrad.lion,
    "lars": jgrad.lars,
    "lamb": jgrad.lamb,
    "adafactor": jgrad.adafactor,
    "muon": lambda rate: jgrad.muon(rate, matrices=_matrices, adam_learning_rate=rate),
    'muon(rule="normuon")': lambda rate: jgrad.muon(
        rate, matrices=_matrices, adam_learning_rate=rate, rule="normuon"
    ),
    "soap": lambda rate: jgrad.soap(rate, matrices=_matrices, weight_decay=0.01),
    "schedule_free(adam)": lambda rate: jgrad.schedule_free(jgrad.adam(rate), learning_rate=rate),
    "hyperball(adam)": lambda rate: jgrad.hyperball(jgrad.adam(rate), rate, leaves=_matrices),
    "clip_by_global_norm(1.0), jgrad.adam": lambda rate: optax.chain(
        jgrad.clip_by_global_norm(1.0), jgrad.adam(rate)
    ),
}


METHODS = (
    *(f"optax.{name}" for name in OPTAX),
    *(f"optax.contrib.{name}" for name in CONTRIB),
    "optax.contrib.mechanize(adam)",
    *(f"jgrad.{name}" for name in JGRAD),
)


def factory(name: str) -> Callable[[Any], Any]:
    """That of a method, as a function of the learning rate."""
    library, _, own = name.partition(".")
    if library == "jgrad":
        return JGRAD[own]
    if own == "contrib.mechanize(adam)":
        return lambda rate: optax.contrib.mechanize(optax.adam(rate))
    return operator.attrgetter(own)(optax)


def model() -> dict[str, jax.Array]:
    """A matrix and a bias."""
    rng = np.random.default_rng(0)
    return {"w": jnp.asarray(rng.normal(size=(8, 6)), jnp.float32), "b": jnp.ones(6)}


def some(w: dict[str, jax.Array]) -> jax.Array:
    """A loss to which one of eight inputs is always black: six weights have no gradient."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, 8)), jnp.float32).at[:, 0].set(0)
    return jnp.mean(jnp.square(jnp.tanh(x @ w["w"] + w["b"]) - 1))


def none(w: dict[str, jax.Array]) -> jax.Array:
    """A loss that is flat."""
    return 0 * some(w)


def slopes(make: Callable[[Any], Any], loss: Callable[[Any], jax.Array]) -> Any:
    """The derivatives of the loss after training, by the learning rate and by the first weights."""

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def of_training(rate: jax.Array, w: Any) -> jax.Array:
        tx = make(rate)
        state = tx.init(w)
        for _ in range(STEPS):
            updates, state = tx.update(jax.grad(loss)(w), state, w)
            w = optax.apply_updates(w, updates)
        return some(w)

    return of_training(jnp.asarray(RATE), model())


def row(name: str) -> tuple[str, ...]:
    """The cells of a method."""
    cells = []
    for loss in (some, none):
        found = jax.tree.leaves(slopes(factory(name), loss))
        cells.append("finite" if all(bool(jnp.isfinite(x).all()) for x in found) else "NaN")
    return f"`{name}`", *cells


def rows() -> Iterator[tuple[str, ...]]:
    """Of all methods."""
    return map(row, METHODS)


def main(_: Any) -> None:
    """Prints the table, and how many methods have a NaN."""
    warnings.simplefilter("ignore")  # of optax, about keys and names
    found = list(rows())
    print(markdown.table(HEADS, found))
    for library in ("optax", "jgrad"):
        own = [cells for cells in found if cells[0].startswith(f"`{library}")]
        print(library, len(own), *(sum(x[i] == "NaN" for x in own) for i in (1, 2)))


if __name__ == "__main__":
    app.run(main)
