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

# The matrices of layers; and which leaves have a trust ratio.
hidden = jgrad.by_path({"layers/norm_*": False, "layers/*": True}, rest=False)
scaled = jgrad.by_path({"layers/norm_*": False, "norm": False}, rest=True)


class Optimizer(NamedTuple):
    """A rule: what makes it of a rate, the rate that suits the default model, and who decays."""

    make: Callable[..., Transformation]
    rate: float
    decays: bool = True  # the matrices of layers


class Recipe(NamedTuple):
    """What is stored: the dtype of parameters, that of moments, and what keeps small steps."""

    dtype: Any = jnp.float32
    moment_dtype: Any = None
    around: Callable[[Transformation], Transformation] = lambda tx: tx


_TRUST = {"trust_ratio_mask": scaled, "layer_axes": LAYER_AXES}
_MUON = {"matrices": hidden, "layer_axes": LAYER_AXES, "scale": "match_rms_adamw"}


def adamh(rate: Rate, **options: Any) -> Transformation:
    """Adam, with matrices of layers that keep their norm and turn by the rate."""
    tx = jgrad.adam(rate, **options)
    return jgrad.hyperball(tx, rate, leaves=hidden, layer_axes=LAYER_AXES)


OPTIMIZERS = {
    "adamh": Optimizer(adamh, 0.01, decays=False),
    "adamw": Optimizer(jgrad.adam, 0.01),
    "adamw_cautious": Optimizer(functools.partial(jgrad.adam, weight_decay_rule="cautious"), 0.01),
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
    spikes: bool = False,
    watch: int = 0,
    shard_over: str | None = None,
    mesh_axis: str | None = None,
) -> Transformation:
    """The optimizer in its wrappers.

        watch(skip_spikes(skip_nonfinite(accumulate(master_weights(average_params(clip, tx))))))

    Args:
      optimizer: a name in `OPTIMIZERS`.
      recipe: a name in `RECIPES`.
      rate: a number, or a schedule of the number of updates.
      weight_decay: of matrices of layers, unless they keep their norm; norms and the embedding do
        not decay.
      clip: the largest global norm of a gradient; 0 for no clipping.
      accumulate: mini-batches for each update.
      skip: whether steps that are not finite are left out.
      ema: decay of the average of parameters; 0 for none.
      spikes: whether steps with a loss far above those before are left out; `update` then needs
        `loss=`.
      watch: calls of `update` from one that is measured to the next; 0 to measure none.
      shard_over: under `jit`, the mesh axis over which the iterations of Muon are sharded.
      mesh_axis: inside `shard_map`, the mesh axis of the batch.
    """
    own, rule = RECIPES[recipe], OPTIMIZERS[optimizer]
    decay = weight_decay if rule.decays else 0.0
    options = {"shard_over": shard_over} if optimizer == "muon" else {}
    tx = rule.make(
        rate,
        weight_decay=jgrad.by_path({"layers/norm_*": 0.0, "layers/*": decay}, rest=0.0),
        moment_dtype=own.moment_dtype,
        **options,
    )
    if clip:
        tx = optax.chain(jgrad.clip_by_global_norm(clip), tx)
    if ema:
        tx = jgrad.average_params(tx, ema)
    tx = own.around(tx)
    if accumulate > 1:
        tx = jgrad.accumulate(tx, accumulate)
    if skip:
        tx = jgrad.skip_nonfinite(tx)
    if spikes:
        tx = jgrad.skip_spikes(tx, mesh_axes=mesh_axis)
    return jgrad.watch(tx, every=watch, layer_axes=LAYER_AXES) if watch else tx
