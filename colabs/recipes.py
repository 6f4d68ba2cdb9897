"""The optimizers and recipes by which the language model is trained, from their names.

An optimizer is a rule; a recipe is in what parameters and moments are stored. Around both stand the
wrappers, in the order of docs/wrappers.md.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

import jgrad
from language_model import LAYER_AXES

Transformation = optax.GradientTransformationExtraArgs
Rate = float | Callable[[Any], Any]

# By names and shapes: `hidden` are the matrices of layers, `layers` has the embedding, too.
hidden = jgrad.hidden_matrices(layer_axes=LAYER_AXES)
layers = jgrad.hidden_matrices(exclude=("norm",), layer_axes=LAYER_AXES)


class Optimizer(NamedTuple):
    """A rule: what makes it of a rate, and the rate that suits the default model."""

    make: Callable[..., Transformation]
    rate: float


class Recipe(NamedTuple):
    """What is stored: the dtype of parameters, that of moments, and what keeps small steps."""

    dtype: Any = jnp.float32
    moment_dtype: Any = None
    around: Callable[[Transformation], Transformation] = lambda tx: tx


_TRUST = {"trust_ratio_mask": layers, "layer_axes": LAYER_AXES}
_MUON = {"matrices": hidden, "layer_axes": LAYER_AXES, "scale": "match_rms_adamw"}

OPTIMIZERS = {
    "adamw": Optimizer(jgrad.adam, 0.01),
    "lamb": Optimizer(functools.partial(jgrad.lamb, **_TRUST), 0.03),
    "lars": Optimizer(functools.partial(jgrad.lars, trust_coefficient=0.02, **_TRUST), 1.0),
    "momentum": Optimizer(functools.partial(jgrad.gradient_descent, momentum=0.9), 1.0),
    "muon": Optimizer(functools.partial(jgrad.muon, **_MUON), 0.03),
}
RECIPES = {
    "float32": Recipe(),
    "bf16_master": Recipe(jnp.bfloat16, around=jgrad.master_weights),
    "bf16_stochastic": Recipe(jnp.bfloat16, around=jgrad.stochastic_rounding),
    "8bit": Recipe(moment_dtype="8bit"),
    "8bit_bf16_stochastic": Recipe(jnp.bfloat16, "8bit", jgrad.stochastic_rounding),
}


def transformation(
    optimizer: str,
    recipe: str,
    rate: Rate,
    *,
    weight_decay: float = 0.1,
    clip: float = 0.0,
    accumulate: int = 1,
    skip: bool = False,
    ema: float = 0.0,
    shard_over: str | None = None,
) -> Transformation:
    """The optimizer in its wrappers.

        skip_nonfinite(accumulate(master_weights(chain(clip, optimizer, ema))))

    Args:
      optimizer: a name in `OPTIMIZERS`.
      recipe: a name in `RECIPES`.
      rate: a number, or a schedule of the number of updates.
      weight_decay: of matrices of layers; norms and the embedding do not decay.
      clip: the largest global norm of a gradient; 0 for no clipping.
      accumulate: mini-batches for each update.
      skip: whether steps that are not finite are left out.
      ema: decay of the average of parameters; 0 for none.
      shard_over: under `jit`, the mesh axis over which the iterations of Muon are sharded.
    """
    own = RECIPES[recipe]
    options = {"shard_over": shard_over} if optimizer == "muon" else {}
    tx = OPTIMIZERS[optimizer].make(
        rate,
        weight_decay=weight_decay,
        weight_decay_mask=hidden,
        moment_dtype=own.moment_dtype,
        **options,
    )
    if clip or ema:
        first = [jgrad.clip_by_global_norm(clip)] if clip else []
        tx = optax.chain(*first, tx, *([jgrad.ema(ema)] if ema else []))
    tx = own.around(tx)
    if accumulate > 1:
        tx = jgrad.accumulate(tx, accumulate)
    return jgrad.skip_nonfinite(tx) if skip else tx
