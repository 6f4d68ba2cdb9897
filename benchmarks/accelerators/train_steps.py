"""A train step in both forms: gradient and then update, or `jgrad.step_in_backward`.

`python -m benchmarks.accelerators.backward` compiles it for machines that are not there,
`python -m benchmarks.device` times it on one that is. The model has 16 layers of two matrices of
1024 x 4096, with or without attention, and a batch that is small beside the weights.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jgrad
from benchmarks.accelerators.program import Program, on_one_device
from benchmarks.accelerators.targets import Target

LAYERS, WIDTH, HIDDEN, TOKENS, HEAD = 16, 1024, 4096, 64, 64
LAYER_AXES = {"embed": None, "layers": 0, "head": None}
MODELS = ("layers", "attention")
FORMS = ("gradient, then update", "in the backward pass")


class Recipe(NamedTuple):
    """An optimizer.

    Attributes:
      make: makes it.
      dtype: of the weights.
      first_pass: whether it needs a number of all gradients.
      of_optax: whether it is optax's, for the usual form alone.
      on_host: what of it is in host memory: nothing, its state, or also weights, those of layers
        or all.
    """

    make: Callable[[], optax.GradientTransformation]
    dtype: Any = jnp.float32
    first_pass: bool = False
    of_optax: bool = False
    on_host: str = ""


def _adamw(**options: Any) -> optax.GradientTransformation:
    return jgrad.adam(1e-3, weight_decay=0.1, **options)


def _clipped(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    return jgrad.skip_nonfinite(optax.chain(jgrad.clip_by_global_norm(1.0), tx))


def _muon() -> optax.GradientTransformation:
    matrices = jgrad.hidden_matrices(layer_axes=LAYER_AXES)
    return jgrad.muon(
        0.02, matrices=matrices, layer_axes=LAYER_AXES, weight_decay=0.1, adam_learning_rate=1e-3
    )


_BF16: Any = jnp.bfloat16
RECIPES = {
    "AdamW of optax": Recipe(lambda: optax.adamw(1e-3, weight_decay=0.1), of_optax=True),
    "AdamW": Recipe(_adamw),
    "skip(clip + AdamW)": Recipe(lambda: _clipped(_adamw()), first_pass=True),
    "AdamW, 8 bits": Recipe(lambda: _adamw(moment_dtype="8bit")),
    "bf16: AdamW, 8 bits": Recipe(lambda: _adamw(moment_dtype="8bit"), _BF16),
    "bf16: stochastic(AdamW, 8 bits)": Recipe(
        lambda: jgrad.stochastic_rounding(_adamw(moment_dtype="8bit")), _BF16
    ),
    "bf16: skip(clip + stochastic(AdamW, 8 bits))": Recipe(
        lambda: _clipped(jgrad.stochastic_rounding(_adamw(moment_dtype="8bit"))),
        _BF16,
        first_pass=True,
    ),
    "bf16: stochastic(momentum in bfloat16)": Recipe(
        lambda: jgrad.stochastic_rounding(
            jgrad.gradient_descent(1e-3, momentum=0.9, moment_dtype=jnp.bfloat16)
        ),
        _BF16,
    ),
    "bf16: stochastic(Adafactor)": Recipe(
        lambda: jgrad.stochastic_rounding(jgrad.adafactor(1e-2, layer_axes=LAYER_AXES)), _BF16
    ),
    "Muon": Recipe(_muon),
    "bf16: stochastic(Muon)": Recipe(lambda: jgrad.stochastic_rounding(_muon()), _BF16),
}
STATE, LAYERS_TOO, ALL = "state", "layers and state", "weights and state"


def on_host(moment_dtype: Any, what: str) -> Recipe:
    """AdamW with weights in bfloat16, and with moments of some dtype."""

    def make() -> optax.GradientTransformation:
        return jgrad.stochastic_rounding(_adamw(moment_dtype=moment_dtype))

    return Recipe(make, _BF16, on_host=what)


ON_HOST = on_host(None, STATE)
ON_HOSTS = {
    f"bf16: stochastic(AdamW in bfloat16){what and f', {what} on the host'}": on_host(_BF16, what)
    for what in ("", STATE, ALL)
}


def shapes(model: str, dtype: Any) -> dict[str, Any]:
    """Of all leaves."""
    layers = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    if model == "attention":
        layers |= {"qkv": (LAYERS, WIDTH, 3 * WIDTH), "out": (LAYERS, WIDTH, WIDTH)}
    leaves = {"embed": (WIDTH, WIDTH), "layers": layers, "head": (WIDTH, WIDTH)}
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype),
        leaves,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def _attention(layer: Any, x: jax.Array) -> jax.Array:
    parts = jnp.split((x @ layer["qkv"]).reshape(TOKENS, -1, HEAD), 3, axis=1)
    return jax.nn.dot_product_attention(*parts, is_causal=True).reshape(x.shape) @ layer["out"]


def block(layer: Any, x: jax.Array) -> jax.Array:
    """A layer of the model."""
    if "qkv" in layer:
        x = x + _attention(layer, x)
    return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """As a user writes it."""
    x = jgrad.scan_layers(block, params["layers"], jnp.tanh(x @ params["embed"]))
    return jnp.mean(((x @ params["head"]) - y).astype(jnp.float32) ** 2)


def transformation(recipe: Recipe) -> optax.GradientTransformation:
    """The optimizer, with its state where the recipe has it."""
    return jgrad.offload(recipe.make()) if recipe.on_host else recipe.make()


def step_of(recipe: Recipe, form: str, loss: Callable[..., Any] = loss) -> Callable[..., Any]:
    """(params, state, *args of the loss) -> (params, state, value)."""
    tx = transformation(recipe)
    if form == FORMS[1]:
        return jgrad.step_in_backward(tx, loss, first_pass=recipe.first_pass)

    def step(params: Any, state: Any, *args: Any) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, *args)
        return *jgrad.apply_gradients(tx, grads, state, params), value

    return step


def _placed(target: Target, tree: Any, on_host: Sequence[bool]) -> Any:
    """Shapes of arrays on the first device of the target, some of them in host memory."""
    kinds = ["pinned_host" if there else None for there in on_host]
    pairs = zip(jax.tree.leaves(tree), kinds, strict=True)
    leaves = [on_one_device(target, x, kind) for x, kind in pairs]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _is_on_host(recipe: Recipe, path: Any, x: Any) -> bool:
    """Whether a parameter is: a matrix, or a stack of these, of a million elements at least."""
    chosen = recipe.on_host == ALL or (recipe.on_host == LAYERS_TOO and "layers" in str(path))
    return chosen and x.size >= 2**20 and x.ndim > 1


def compiled(
    target: Target, recipe: Recipe, form: str, loss: Callable[..., Any], params: Any, *args: Any
) -> Program:
    """The step of a model of these shapes, on one device, which may write over what it is given."""
    tx = transformation(recipe)
    jax.clear_caches()
    program, state = jax.make_jaxpr(tx.init, return_shape=True)(params)
    is_there = [x.memory_space == jax.memory.Space.Host for x in program.out_avals]
    state = _placed(target, state, is_there)
    pairs = jax.tree_util.tree_leaves_with_path(params)
    params = _placed(target, params, [_is_on_host(recipe, *pair) for pair in pairs])
    args = on_one_device(target, args)
    kept = jax.tree.map(lambda x: x.sharding, (params, state)) if recipe.on_host else None
    out_shardings = kept and (*kept, None)
    step = step_of(recipe, form, loss)
    return Program(target, step, (params, state, *args), donate=(0, 1), out_shardings=out_shardings)
