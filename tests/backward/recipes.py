"""Transformations of which a step in the backward pass has the numbers of the ordinary one."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jgrad
from tests.backward.models import AXES

BF16: Any = jnp.bfloat16
FIRST = MappingProxyType({"first_pass": True})
NONE: Mapping[str, Any] = MappingProxyType({})
WIDE = MappingProxyType({"width": 32, "hidden": 256})  # from 4096 elements on there are 8 bits
NORMS = 64  # roundings of norms that are added in another order, after a few steps


class Recipe(NamedTuple):
    """A transformation.

    Attributes:
      make: makes it.
      options: of the step.
      dtype: of the weights.
      sizes: of the model.
      roundings: by how many units in the last place both forms may differ; 0 where all is
        elementwise, and XLA joins the same products and sums.
      few: the share of elements that may differ by more, since they are rounded at random.
    """

    make: Any
    options: Mapping[str, Any] = NONE
    dtype: Any = jnp.float32
    sizes: Mapping[str, int] = NONE
    roundings: int = 0
    few: float = 0.0


def adam(learning_rate=1e-2, **options):
    return jgrad.adam(learning_rate, weight_decay=0.1, **options)


def eight_bits():
    return adam(moment_dtype="8bit")


def muon(**options):
    matrices = jgrad.hidden_matrices(layer_axes=AXES, exclude=("first", "last"))
    return jgrad.muon(1e-2, matrices=matrices, layer_axes=AXES, adam_learning_rate=1e-3, **options)


def adafactor():
    return jgrad.adafactor(1e-2, layer_axes=AXES, min_side=4, momentum=0.9, weight_decay=0.1)


def clipped(tx, max_norm=0.05, **options):
    return optax.chain(jgrad.clip_by_global_norm(max_norm, **options), tx)


def watched(tx, **options):
    return jgrad.watch(tx, layer_axes=AXES, **options)


def hyperball():
    leaves = {name: axes is not None for name, axes in AXES.items()}
    return jgrad.hyperball(jgrad.adam(1.0), 1e-2, leaves=leaves, layer_axes=AXES)


def momentum():
    tx = jgrad.gradient_descent(1e-2, momentum=0.9, moment_dtype=BF16)
    return jgrad.stochastic_rounding(tx)


def partition():
    """A norm of leaves that are in no stack: no layer needs it."""

    def labels(params):
        return {name: "layers" if AXES[name] == 0 else "rest" for name in params}

    return optax.partition({"layers": adam(), "rest": clipped(adam())}, labels)


RECIPES = {
    "adam": Recipe(adam),
    "8 bits": Recipe(eight_bits, sizes=WIDE, roundings=4, few=1e-3),
    "bfloat16 moments": Recipe(lambda: adam(moment_dtype=BF16), roundings=4, few=1e-3),
    "stochastic": Recipe(lambda: jgrad.stochastic_rounding(eight_bits()), dtype=BF16, sizes=WIDE, few=1e-3),
    "momentum": Recipe(momentum, dtype=BF16, few=1e-3),
    "master": Recipe(lambda: jgrad.master_weights(adam()), dtype=BF16),
    "ema": Recipe(lambda: jgrad.average_params(adam(), decay=0.9)),
    "schedule": Recipe(lambda: adam(optax.linear_schedule(1e-2, 0.0, 5))),
    "by_path": Recipe(lambda: jgrad.adam(jgrad.by_path({"first": 1e-2, "**/down": 1e-3}, rest=1e-4))),
    "mask": Recipe(lambda: adam(weight_decay_mask=lambda p: jax.tree.map(lambda x: x.ndim > 2, p))),
    "schedule_free": Recipe(lambda: jgrad.schedule_free(adam(beta1=0.0), learning_rate=1e-2), roundings=4),
    "skip_spikes": Recipe(lambda: jgrad.skip_spikes(adam(), window=4)),
    "adan": Recipe(lambda: jgrad.adan(1e-2, weight_decay=0.1), roundings=16),
    "lion": Recipe(lambda: jgrad.lion(1e-3, weight_decay=0.1)),
    "lamb": Recipe(lambda: jgrad.lamb(1e-2, layer_axes=AXES), roundings=NORMS),
    "lars": Recipe(lambda: jgrad.lars(1e-2, layer_axes=AXES), roundings=NORMS),
    "adafactor": Recipe(adafactor, roundings=NORMS),
    "adafactor, rounded": Recipe(lambda: jgrad.stochastic_rounding(adafactor()), dtype=BF16, roundings=NORMS,
     few=1e-2),
    "muon": Recipe(muon, roundings=NORMS),
    "normuon": Recipe(lambda: muon(rule="normuon"), roundings=NORMS),
    "hyperball": Recipe(hyperball, roundings=NORMS),
    "watch": Recipe(lambda: watched(adam()), roundings=NORMS),
    "clip": Recipe(lambda: clipped(adam()), FIRST, roundings=NORMS),
    "clip by the previous norm": Recipe(lambda: optax.chain(jgrad.clip_by_global_norm(0.05, of="previous"), adam()),
     roundings=NORMS),
    "skip": Recipe(lambda: jgrad.skip_nonfinite(adam()), FIRST),
    "branch": Recipe(lambda: jgrad.skip_nonfinite(adam(), branch=True), FIRST, roundings=4),
    "a branch around optax": Recipe(lambda: jgrad.skip_nonfinite(optax.chain(adam(), optax.scale(0.5)), branch=True),
     FIRST | {"elementwise": True}, roundings=4),
    "partition": Recipe(partition, roundings=NORMS),
    "optax": Recipe(lambda: optax.sgd(1e-2, momentum=0.9), {"elementwise": True}, roundings=4),
    "all": Recipe(lambda: watched(jgrad.skip_nonfinite(clipped(jgrad.stochastic_rounding(eight_bits())))), FIRST,
     BF16, WIDE, roundings=NORMS, few=0.02),
}  # fmt: skip
