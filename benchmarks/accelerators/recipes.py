"""What is compiled: optimizers with their wrappers, beside the nearest in optax, on several models.

`benchmarks/accelerators/limits.py` says what each may cost.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jgrad

RATE = optax.cosine_decay_schedule(1e-3, 1000)


class Known(NamedTuple):
    """What a recipe is told of the model.

    Attributes:
      layer_axes: those of leaves that are stacks of layers; None without any.
      shard_over: the mesh axis over which leaves are sharded under `jit`; None on one device.
      mesh_axes: the PartitionSpec of each leaf; None on one device.
    """

    layer_axes: Any = None
    shard_over: str | None = None
    mesh_axes: Any = None


class Recipe(NamedTuple):
    """A transformation of jgrad, and what comes nearest to it in optax.

    Attributes:
      ours: makes jgrad's.
      optaxs: makes optax's; None where it has none.
      dtype: of parameters and gradients.
      options: of `program.step`, and through it of each `update` of ours.
      models: names of `MODELS` to compile it on.
      forms: in which it is compiled; matrices are not packed.
      on_tpu: whether it is compiled for TPUs, too; sharded, only there.
    """

    ours: Callable[[Known], optax.GradientTransformation]
    optaxs: Callable[[], optax.GradientTransformation] | None = None
    dtype: Any = jnp.float32
    options: Mapping[str, Any] = MappingProxyType({})
    models: tuple[str, ...] = ("medium", "large", "stacked")
    forms: tuple[str, ...] = ("tree", "packed")
    on_tpu: bool = True


def _decayed(params: Any) -> Any:
    """Scales of norms neither decay nor have a trust ratio; stacked ones have two axes."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "norm" not in jax.tree_util.keystr(path), params
    )


_adamw = functools.partial(jgrad.adam, RATE, weight_decay=0.1, weight_decay_mask=_decayed)
_optax_adamw = functools.partial(optax.adamw, RATE, weight_decay=0.1, mask=_decayed)
_RATIOS: dict[str, Any] = {"weight_decay_mask": _decayed, "trust_ratio_mask": _decayed}


def _lars(known: Known) -> optax.GradientTransformation:
    return jgrad.lars(RATE, weight_decay=1e-4, layer_axes=known.layer_axes, **_RATIOS)


def _lamb(known: Known) -> optax.GradientTransformation:
    return jgrad.lamb(RATE, weight_decay=0.1, layer_axes=known.layer_axes, **_RATIOS)


def _optax_lamb() -> optax.GradientTransformation:
    return optax.lamb(RATE, weight_decay=0.1, mask=_decayed)


def _clipped(*txs: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(jgrad.clip_by_global_norm(1.0), *txs)


def _optax_clipped(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def _eight_bits() -> optax.GradientTransformation:
    return _adamw(moment_dtype="8bit")


def _stack(known: Known) -> optax.GradientTransformation:
    tx = jgrad.average_params(_clipped(_lamb(known)), 0.999)
    return jgrad.skip_nonfinite(jgrad.accumulate(jgrad.master_weights(tx), 4))


def _of_matrices(
    make: Callable[..., optax.GradientTransformation],
    known: Known,
    weight_decay: float = 0.1,
    **options: Any,
) -> optax.GradientTransformation:
    return make(
        RATE,
        matrices=jgrad.hidden_matrices(layer_axes=known.layer_axes),
        layer_axes=known.layer_axes,
        weight_decay=weight_decay,
        adam_learning_rate=RATE,
        shard_over=known.shard_over,
        mesh_axes=known.mesh_axes,
        **options,
    )


_muon = functools.partial(_of_matrices, jgrad.muon)
_soap = functools.partial(_of_matrices, jgrad.soap)


def _adafactor(known: Known) -> optax.GradientTransformation:
    return jgrad.adafactor(RATE, layer_axes=known.layer_axes)


def _hyperball(known: Known) -> optax.GradientTransformation:
    return jgrad.hyperball(jgrad.adam(RATE), RATE, leaves=_decayed, layer_axes=known.layer_axes)


def _muonh(known: Known) -> optax.GradientTransformation:
    matrices = jgrad.hidden_matrices(layer_axes=known.layer_axes)
    tx = _muon(known, weight_decay=0.0)
    return jgrad.hyperball(tx, RATE, leaves=matrices, layer_axes=known.layer_axes)


def _schedule_free() -> optax.GradientTransformation:
    return jgrad.schedule_free(jgrad.adam(RATE, beta1=0.0))


def _watched(known: Known, every: int) -> optax.GradientTransformation:
    return jgrad.watch(_adamw(), every=every, layer_axes=known.layer_axes)


_BF16: Any = jnp.bfloat16

RECIPES = {
    "watch(AdamW)": Recipe(lambda known: _watched(known, every=1)),
    "watch(AdamW, every=100)": Recipe(lambda known: _watched(known, every=100)),
    "momentum": Recipe(
        lambda _: jgrad.gradient_descent(RATE, momentum=0.9), lambda: optax.sgd(RATE, 0.9)
    ),
    "Lion": Recipe(
        lambda _: jgrad.lion(RATE, weight_decay=0.1), lambda: optax.lion(RATE, weight_decay=0.1)
    ),
    "AdamW": Recipe(lambda _: _adamw(), _optax_adamw),
    "AdamW, cautious": Recipe(lambda _: _adamw(weight_decay_rule="cautious")),
    "schedule_free(Adam)": Recipe(lambda _: _schedule_free()),
    "clip + AdamW": Recipe(lambda _: _clipped(_adamw()), lambda: _optax_clipped(_optax_adamw())),
    "skip(clip + AdamW)": Recipe(
        lambda _: jgrad.skip_nonfinite(_clipped(_adamw())),
        lambda: optax.apply_if_finite(_optax_clipped(_optax_adamw()), 5),
    ),
    "skip(LAMB)": Recipe(
        lambda known: jgrad.skip_nonfinite(_lamb(known)), models=("large",), forms=("tree",)
    ),
    "skip(optax's AdamW)": Recipe(
        lambda _: jgrad.skip_nonfinite(_optax_adamw()),
        lambda: optax.apply_if_finite(_optax_adamw(), 5),
        models=("large",),
        forms=("tree",),
    ),
    "skip_spikes(skip(clip + AdamW))": Recipe(
        lambda _: jgrad.skip_spikes(jgrad.skip_nonfinite(_clipped(_adamw()))),
        options={"loss": 1.0},
    ),
    "hyperball(Adam)": Recipe(_hyperball),
    "AdamW + ema": Recipe(lambda _: jgrad.average_params(_adamw(), 0.999)),
    "accumulate(clip + AdamW)": Recipe(
        lambda _: jgrad.accumulate(_clipped(_adamw()), 4),
        lambda: optax.MultiSteps(_optax_clipped(_optax_adamw()), 4).gradient_transformation(),
    ),
    "accumulate, emit=False": Recipe(
        lambda _: jgrad.accumulate(_clipped(_adamw()), 4), options={"emit": False}
    ),
    "LARS": Recipe(
        _lars,
        lambda: optax.lars(RATE, 1e-4, weight_decay_mask=_decayed, trust_ratio_mask=_decayed),
    ),
    "LAMB": Recipe(_lamb, _optax_lamb),
    "clip + LAMB": Recipe(
        lambda known: _clipped(_lamb(known)), lambda: _optax_clipped(_optax_lamb())
    ),
    "Adafactor": Recipe(_adafactor, lambda: optax.adafactor(RATE), forms=("tree",)),
    "AdamW, 8 bits": Recipe(lambda _: _eight_bits()),
    "AdamW, 8 bits, optax.apply_updates": Recipe(
        lambda _: _eight_bits(), options={"by_optax": True}
    ),
    "bf16: AdamW": Recipe(lambda _: _adamw(), _optax_adamw, _BF16),
    "bf16: master(AdamW)": Recipe(lambda _: jgrad.master_weights(_adamw()), dtype=_BF16),
    "bf16: stochastic(AdamW)": Recipe(lambda _: jgrad.stochastic_rounding(_adamw()), dtype=_BF16),
    "bf16: stochastic(AdamW, 8 bits)": Recipe(
        lambda _: jgrad.stochastic_rounding(_eight_bits()), dtype=_BF16
    ),
    "bf16: stochastic(AdamW, 8 bits), optax.apply_updates": Recipe(
        lambda _: jgrad.stochastic_rounding(_eight_bits()),
        dtype=_BF16,
        options={"by_optax": True},
    ),
    "bf16: skip(stochastic(clip + AdamW, 8 bits))": Recipe(
        lambda _: jgrad.skip_nonfinite(jgrad.stochastic_rounding(_clipped(_eight_bits()))),
        dtype=_BF16,
    ),
    "bf16: skip(accumulate(master(clip + LAMB + ema)))": Recipe(_stack, dtype=_BF16),
    "Muon": Recipe(
        _muon,
        lambda: optax.contrib.muon(RATE, weight_decay=0.1),
        models=("two shapes",),
        forms=("tree",),
    ),
    "hyperball(Muon)": Recipe(_muonh, models=("two shapes",), forms=("tree",)),
    "NorMuon": Recipe(
        lambda known: _muon(known, rule="normuon"), models=("two shapes",), forms=("tree",)
    ),
    # For a TPU, XLA compiles eigenvectors of a side of 1024 for a minute, of 4096 for over ten.
    "SOAP": Recipe(_soap, models=("squares",), forms=("tree",), on_tpu=False),
}


class Model(NamedTuple):
    """Shapes of leaves.

    Attributes:
      title: what a table calls it.
      shapes: by name.
      layer_axes: of leaves that are stacks of layers; None without any.
    """

    title: str
    shapes: dict[str, tuple[int, ...]]
    layer_axes: dict[str, int | None] | None = None

    def params(self, dtype: Any, *, packed: bool) -> Any:
        """The shapes, as a tree or as packed buffers."""
        tree = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in self.shapes.items()}
        pack = functools.partial(jgrad.pack, layer_axes=self.layer_axes)
        return jax.eval_shape(pack, tree) if packed else tree

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(x.size for x in self.params(jnp.float32, packed=False).values())


def _equal(count: int, *shape: int, name: str = "w") -> dict[str, tuple[int, ...]]:
    return {f"{name}{i:03}": shape for i in range(count)}


MODELS = {
    "medium": Model("24 leaves of 2048 x 1024", _equal(24, 2048, 1024)),
    # What large models have: no leaf fits into the VMEM of a TPU.
    "large": Model("6 leaves of 8192 x 4096", _equal(6, 8192, 4096)),
    "stacked": Model(
        "an embedding and 12 stacked layers of width 1024, and scales of norms",
        {
            "embedding": (16384, 1024),
            "layers_up": (12, 1024, 4096),
            "layers_down": (12, 4096, 1024),
            "layers_norm": (12, 1024),
            **_equal(12, 1024, name="norm"),
        },
        {
            "embedding": None,
            "layers_up": 0,
            "layers_down": 0,
            "layers_norm": 0,
            **dict.fromkeys(_equal(12, name="norm")),
        },
    ),
    "many": Model("300 leaves of 32 x 32", _equal(300, 32, 32)),
    "squares": Model("24 matrices of 1024 x 1024", _equal(24, 1024, 1024)),
    "two shapes": Model(
        "12 matrices of 1024 x 1024 and 12 of 1024 x 4096",
        _equal(12, 1024, 1024, name="square") | _equal(12, 1024, 4096, name="wide"),
    ),
}
