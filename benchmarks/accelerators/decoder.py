"""Train steps of decoders on many chips, compiled: `python -m benchmarks.accelerators.decoder`.

What fits: bytes on each chip at the peak of a step, and its collectives. Nothing runs. Weights are
sharded over all chips (FSDP), layers are stacked under `lax.scan` and computed once more in the
backward pass, and each chip has one sequence of 4096 tokens.

A program takes two to five minutes to compile, so `--only` picks some by "model topology recipe".
`--write` keeps what was found in `decoder.json`, draws it, and writes the table of
`benchmarks/notes/on_paper.md`.
"""

import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from absl import app, flags, logging
from jax.sharding import NamedSharding, PartitionSpec as P

import jgrad
from benchmarks import markdown
from benchmarks.accelerators import llama, targets
from benchmarks.accelerators.program import Program, mesh
from benchmarks.accelerators.sharded import placed
from benchmarks.accelerators.targets import TARGETS

_ONLY = flags.DEFINE_string("only", "", "Cells whose name holds this.")
_WRITE = flags.DEFINE_bool("write", False, "Keep the results, draw them, and write the table.")

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = pathlib.Path(__file__).with_name("decoder.json")
PICTURE = pathlib.Path(__file__).with_name("decoder.png")
PAGE = ROOT / "benchmarks" / "notes" / "on_paper.md"

TOKENS = 4096  # of a sequence
GIB = 2**30

DECODERS = {name: llama.MODELS[name] for name in ("8 B", "70 B")}


# Chips, all in one mesh axis.
TOPOLOGIES = {"v5e:4x4": 16, "v5e:16x16": 256, "v5p:8x8x8": 512}
CELLS = [
    ("8 B", "v5e:4x4"),
    ("8 B", "v5e:16x16"),
    ("8 B", "v5p:8x8x8"),
    ("70 B", "v5e:16x16"),
    ("70 B", "v5p:8x8x8"),
]
_AXIS = "fsdp"

# XLA moves products of matrices to where a collective is under way, as far as memory allows: then
# the logits live longer, or not, as it happens. Without that, peaks are those of recipes.
_IN_ORDER: dict[str, Any] = {"xla_tpu_enable_async_collective_fusion": False}


class Recipe(NamedTuple):
    """An optimizer.

    Attributes:
      make: makes it.
      dtype: of weights and gradients.
      optaxs: whether it is optax's, whose state is placed by paths.
      in_backward: whether the step is taken in the backward pass.
      options: of the compiler.
    """

    make: Callable[[], optax.GradientTransformation]
    dtype: Any = jnp.float32
    optaxs: bool = False
    in_backward: bool = False
    options: dict[str, Any] = _IN_ORDER


def _adamw(**options: Any) -> optax.GradientTransformation:
    return jgrad.adam(1e-4, weight_decay=0.1, **options)


def _eight_bits() -> optax.GradientTransformation:
    return _adamw(moment_dtype="8bit")


def _muon() -> optax.GradientTransformation:
    return jgrad.muon(
        0.02,
        matrices=jgrad.hidden_matrices(layer_axes=llama.LAYER_AXES),
        layer_axes=llama.LAYER_AXES,
        weight_decay=0.1,
        adam_learning_rate=1e-4,
        shard_over=_AXIS,
    )


def _adafactor() -> optax.GradientTransformation:
    return jgrad.stochastic_rounding(jgrad.adafactor(1e-2, layer_axes=llama.LAYER_AXES))


_BF16: Any = jnp.bfloat16

RECIPES = {
    "AdamW of optax": Recipe(lambda: optax.adamw(1e-4, weight_decay=0.1), optaxs=True),
    "AdamW": Recipe(lambda: _adamw()),
    "AdamW, 8 bits": Recipe(_eight_bits),
    "bf16: stochastic(AdamW)": Recipe(lambda: jgrad.stochastic_rounding(_adamw()), _BF16),
    "bf16: stochastic(AdamW, 8 bits)": Recipe(
        lambda: jgrad.stochastic_rounding(_eight_bits()), _BF16
    ),
    "bf16: stochastic(Adafactor)": Recipe(_adafactor, _BF16),
    "AdamW, XLA's order": Recipe(lambda: _adamw(), options={}),
    "AdamW, 8 bits, XLA's order": Recipe(_eight_bits, options={}),
    "LAMB of optax": Recipe(lambda: optax.lamb(1e-4, weight_decay=0.1), optaxs=True),
    "LAMB": Recipe(lambda: jgrad.lamb(1e-4, weight_decay=0.1, layer_axes=llama.LAYER_AXES)),
    "Muon": Recipe(_muon),
}
# Each layer updated as soon as its gradient is known.
RECIPES |= {
    f"{name}, in backward": RECIPES[name]._replace(in_backward=True)
    for name in (
        *("AdamW", "AdamW, 8 bits", "bf16: stochastic(AdamW, 8 bits)"),
        *("bf16: stochastic(Adafactor)", "Muon"),
    )
}


class Result(NamedTuple):
    """Of a compiled step, or of one that the compiler says is too large.

    Attributes:
      model: one of `DECODERS`.
      topology: one of `TOPOLOGIES`.
      recipe: one of `RECIPES`.
      arguments: bytes on a chip: weights, state and tokens; None where it was too large.
      temporaries: bytes on a chip; None where it was too large.
      peak: bytes on a chip of all that lives at once; what the compiler asks for where it is too
        large, None where it does not say.
      compiled: whether it was.
      collectives: how many of each kind; those in the loop over layers count once.
      seconds: of tracing and compiling.
    """

    model: str
    topology: str
    recipe: str
    arguments: int | None
    temporaries: int | None
    peak: int | None
    compiled: bool
    collectives: dict[str, int]
    seconds: float

    @property
    def name(self) -> str:
        """What `--only` is looked for in."""
        return f"{self.model} {self.topology} {self.recipe}"

    @property
    def fits(self) -> bool:
        """Into the memory of a chip."""
        return self.compiled and (self.peak or 0) <= _target(self.topology).memory


def _target(topology: str) -> targets.Target:
    return TARGETS[topology.partition(":")[0]]


def specs() -> dict[str, Any]:
    """How each leaf is sharded: matrices along their inputs, the head along the vocabulary."""
    matrix = P(None, _AXIS, None)
    names = ("queries", "keys_values", "out", "gate", "up", "down")
    layers = dict.fromkeys(names, matrix) | {"norm_1": P(), "norm_2": P()}
    return {
        "embedding": P(_AXIS, None),
        "head": P(None, _AXIS),
        "norm": P(),
        "layers": layers,
    }


def compiled(name: str, topology: str, recipe: str) -> Result:
    """A train step, compiled."""
    model, made, target = DECODERS[name], RECIPES[recipe], _target(topology)
    chips = mesh(target, topology, **{_AXIS: TOPOLOGIES[topology]})
    how = specs()
    params = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(chips, spec)),
        llama.shapes(model, made.dtype),
        how,
    )
    tokens = jax.ShapeDtypeStruct(
        (TOPOLOGIES[topology], TOKENS), jnp.int32, sharding=NamedSharding(chips, P(_AXIS))
    )
    tx, over = made.make(), NamedSharding(chips, P(_AXIS))

    def of_params(params: Any, tokens: jax.Array) -> jax.Array:
        return llama.loss(model, params, tokens, over)

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(of_params)(params, tokens)
        params, state = jgrad.apply_gradients(tx, grads, state, params, mesh_axes=how)
        return params, state, value

    if made.in_backward:
        step = jgrad.step_in_backward(tx, of_params, mesh_axes=how)

    with jax.sharding.set_mesh(chips):
        where = placed(tx, params, by_paths=made.optaxs)
        state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            jax.eval_shape(tx.init, params),
            where,
        )
        outputs = (
            jax.tree.map(lambda x: x.sharding, params),
            where,
            NamedSharding(chips, P()),
        )
        try:
            counts = Program(
                target,
                step,
                (params, state, tokens),
                donate=(0, 1),
                out_shardings=outputs,
                options=made.options,
            ).counts
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            asked = _asked_for(str(error))
            return Result(name, topology, recipe, None, None, asked, False, {}, 0.0)
    return Result(
        name,
        topology,
        recipe,
        counts.arguments,
        counts.temporaries,
        counts.peak,
        True,
        counts.collectives,
        round(counts.seconds, 1),
    )


def _asked_for(message: str) -> int | None:
    """Bytes that the compiler wanted: "Used 17.36G of 15.75G hbm"."""
    found = re.search(r"Used ([\d.]+)([GM]) of", message)
    return int(float(found[1]) * 2 ** {"G": 30, "M": 20}[found[2]]) if found else None


def table(results: Sequence[Result]) -> str:
    """In Markdown, a row for each recipe."""
    columns = [
        "model",
        "chips",
        "recipe",
        "arguments",
        "temporaries",
        "peak",
        "fits",
        "collectives",
    ]
    rows = []
    for x in results:
        chips = f"{TOPOLOGIES[x.topology]}: {x.topology}"
        sizes = (_gib(y) for y in (x.arguments, x.temporaries, x.peak))
        kinds = ", ".join(f"{count} {kind}" for kind, count in x.collectives.items())
        fits = "yes" if x.fits else "**no**"
        rows.append([x.model, chips, x.recipe, *sizes, fits, kinds or "-"])
    return markdown.table(columns, rows)


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f}"


def known() -> list[Result]:
    """What was found before, in the order of cells."""
    found = [Result(**x) for x in json.loads(RESULTS.read_text())] if RESULTS.exists() else []
    order = [(*cell, recipe) for cell in CELLS for recipe in RECIPES]
    return sorted(found, key=lambda x: order.index((x.model, x.topology, x.recipe)))


def keep(result: Result) -> None:
    """In the place of what was found before."""
    others = [x for x in known() if x.name != result.name]
    text = json.dumps([x._asdict() for x in (*others, result)], indent=1)
    RESULTS.write_text(text + "\n")


def draw(results: Sequence[Result], path: pathlib.Path) -> None:
    """Bars for the peak of each recipe, a panel for each model and topology."""
    from matplotlib.figure import Figure

    cells = [cell for cell in CELLS if any((x.model, x.topology) == cell for x in results)]
    figure = Figure((2.6 + 2.3 * len(cells), 3.4), layout="constrained")
    panels = figure.subplots(1, len(cells), sharey=True, squeeze=False)[0]
    names = list(RECIPES)
    for panel, (model, topology) in zip(panels, cells, strict=True):
        own = [x for x in results if (x.model, x.topology) == (model, topology) and x.peak]
        memory = _target(topology).memory / GIB
        for x in own:
            color = "#3b78e7" if x.fits else "#c9c9c9"
            height = names.index(x.recipe)
            panel.barh(height, x.peak / GIB, height=0.72, color=color)
            panel.text(x.peak / GIB, height, f" {x.peak / GIB:.1f}", va="center", fontsize=8)
        highest = max((x.peak / GIB for x in own), default=memory)
        if highest > 0.5 * memory:
            panel.axvline(memory, color="#e8892b", linewidth=1.2)
        panel.set(xlim=(0, 1.2 * highest), ylim=(len(names) - 0.4, -0.6), xlabel="GiB on a chip")
        panel.set_title(f"{model}, {topology}", fontsize=10)
        panel.tick_params(left=False)
        panel.spines[["top", "right", "left"]].set_visible(False)
    panels[0].set(yticks=range(len(names)), yticklabels=names)
    figure.savefig(path, dpi=130)


def page(text: str, results: Sequence[Result]) -> str:
    """The page, with the table and the picture of these results."""
    shown = table(results)
    if results:
        shown += f"\n\n![Bytes at the peak](../{PICTURE.relative_to(PAGE.parents[1])})"
    return markdown.replaced(text, "decoder", shown)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    jax.config.update("jax_platforms", "cpu")  # compilers are asked, no device
    logging.set_verbosity(logging.WARNING)
    todo = [(*cell, recipe) for cell in CELLS for recipe in RECIPES]
    todo = [x for x in todo if _ONLY.value in " ".join(x)]
    if not todo:
        raise app.UsageError(f"--only={_ONLY.value}: no such cell")
    found = []
    for model, topology, recipe in todo:
        if reason := targets.missing(_target(topology), topology):
            print(reason)
            continue
        print(f"{model} {topology} {recipe}: compiling", flush=True)
        jax.clear_caches()
        found.append(compiled(model, topology, recipe))
        print(f"  {_gib(found[-1].peak)} GiB at the peak, {found[-1].seconds:.0f} s", flush=True)
        if _WRITE.value:
            keep(found[-1])
    print(f"\nCompiled, not run; GiB on each chip.\n\n{table(found)}")
    if _WRITE.value:
        draw(known(), PICTURE)
        PAGE.write_text(page(PAGE.read_text(), known()))


if __name__ == "__main__":
    app.run(main)
