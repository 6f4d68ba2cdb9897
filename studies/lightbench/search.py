"""Methods in three forms, and a fixed random search over their rates and betas."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgrad
from studies.lightbench.problems import Array, Params, Problem

EIGHT_BITS = 4096  # elements of a leaf, from which on its moments are stored in 8 bits


class Setting(NamedTuple):
    """One choice of the search, or all of them as arrays."""

    rate: Any
    beta1: Any
    beta2: Any


Make = Callable[..., optax.GradientTransformation]


class Column(NamedTuple):
    """A method in one form.

    Attributes:
      method: its name.
      form: what is stored.
      make: the optimizer for a setting.
      dtype: of the weights.
    """

    method: str
    form: str
    make: Callable[[Setting], optax.GradientTransformation]
    dtype: Any = jnp.float32


def settings(count: int, *, seed: int = 0) -> Setting:
    """Drawn once, the logarithm of each uniform, one in each of `count` parts of its range."""
    rng = np.random.default_rng(seed)

    def draw(low: float, high: float) -> np.ndarray:
        parts = (rng.permutation(count) + rng.random(count)) / count
        return (low * (high / low) ** parts).astype(np.float32)

    return Setting(draw(1e-4, 10.0), 1 - draw(1e-2, 1.0), 1 - draw(1e-3, 1.0))


def _adam(s: Setting, **options: Any) -> optax.GradientTransformation:
    return jgrad.adam(s.rate, beta1=s.beta1, beta2=s.beta2, **options)


def _lamb(s: Setting, **options: Any) -> optax.GradientTransformation:
    return jgrad.lamb(s.rate, beta1=s.beta1, beta2=s.beta2, **options)


def _muon(s: Setting, **options: Any) -> optax.GradientTransformation:
    return jgrad.muon(
        s.rate,
        matrices=jgrad.hidden_matrices(),
        momentum=s.beta1,
        scale="match_rms_adamw",
        adam_beta1=s.beta1,
        adam_beta2=s.beta2,
        **options,
    )


def _hyperball(s: Setting, **options: Any) -> optax.GradientTransformation:
    return jgrad.hyperball(_adam(s, **options), s.rate, leaves=jgrad.hidden_matrices())


def _schedule_free(s: Setting, **options: Any) -> optax.GradientTransformation:
    inner = jgrad.adam(s.rate, beta1=0.0, beta2=s.beta2, bias_correction="moments", **options)
    return jgrad.schedule_free(inner, beta=s.beta1)


_METHODS: dict[str, Make] = {
    "adam": _adam,
    "lamb": _lamb,
    "muon": _muon,
    "hyperball": _hyperball,
    "schedule_free": _schedule_free,
}


def _columns() -> list[Column]:
    found = []
    for name, make in _METHODS.items():
        stochastic = functools.partial(lambda make, s: jgrad.stochastic_rounding(make(s)), make)
        found += [
            Column(name, "float32", make),
            Column(name, "8 bits", functools.partial(make, moment_dtype="8bit")),
            Column(name, "bfloat16", stochastic, jnp.bfloat16),
        ]
    own = Column("optax.adam", "float32", lambda s: optax.adam(s.rate, s.beta1, s.beta2))
    return [*found, own]


COLUMNS = _columns()


def applies(column: Column, params: Params) -> bool:
    """Whether the column's own rule has a leaf to act on; if not, it is that beside it."""
    leaves = jax.tree.leaves(params)
    if column.form == "8 bits" and not any(x.size >= EIGHT_BITS for x in leaves):
        return False
    return column.method not in ("muon", "hyperball") or any(x.ndim > 1 for x in leaves)


def wins(
    problem: Problem, column: Column, search: Setting, *, steps: int, seeds: int
) -> np.ndarray:
    """Whether each setting (rows) and seed (columns) won before one of the steps."""

    def loss(params: Params, key: Array) -> Array:
        return problem.loss(jax.tree.map(_wide, params), key)

    def train(key: Array, setting: Setting) -> Array:
        tx = column.make(setting)
        first, rest = jax.random.split(key)
        params = jax.tree.map(lambda x: x.astype(column.dtype), problem.init(first))

        def step(carry: Any, key: Array) -> tuple[Any, None]:
            params, state, won = carry
            value, grads = jax.value_and_grad(loss)(params, key)
            at = params
            if column.method == "schedule_free":
                at = optax.tree.get(state, "average")
                value = loss(at, key)
            won |= problem.win(jax.tree.map(_wide, at), value)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state, won), None

        carry = params, tx.init(params), jnp.array(False)
        return jax.lax.scan(step, carry, jax.random.split(rest, steps))[0][2]

    keys = jax.random.split(jax.random.key(0), seeds)
    of_setting = jax.vmap(train, (None, 0))
    of_seed = jax.jit(jax.vmap(of_setting, (0, None), out_axes=1))
    return np.asarray(of_seed(keys, search))


def passes(won: np.ndarray, needed: int = 2) -> bool:
    """Whether at one of the settings so many seeds won."""
    return bool((won.sum(axis=1) >= needed).any())


def _wide(x: Array) -> Array:
    return x.astype(jnp.float32)
