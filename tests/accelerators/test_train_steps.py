"""The peak of a whole train step, each layer updated in the backward pass, compiled for one device."""

import re

import jax
import jax.numpy as jnp
import pytest

import jgrad
from benchmarks.accelerators import backward
from benchmarks.accelerators.backward import Peak, Row
from benchmarks.accelerators.targets import TARGETS
from benchmarks.accelerators.train_steps import (
    FORMS,
    HIDDEN,
    MODELS,
    ON_HOST,
    RECIPES,
    TOKENS,
    WIDTH,
    block,
    compiled,
)
from tests.support.pages import rows, section

BACKWARD = FORMS[1]

# Bytes per parameter at most, of both models.
LIMITS = {
    "AdamW": {"v5e": 14.1, "h100": 13.0},
    "skip(clip + AdamW)": {"v5e": 14.1, "h100": 13.0},
    "AdamW, 8 bits": {"v5e": 8.1, "h100": 6.9},
    "bf16: AdamW, 8 bits": {"v5e": 4.1, "h100": 4.5},
    "bf16: stochastic(AdamW, 8 bits)": {"v5e": 4.1, "h100": 4.5},
    "bf16: skip(clip + stochastic(AdamW, 8 bits))": {"v5e": 4.1, "h100": 4.5},
    "bf16: stochastic(momentum in bfloat16)": {"v5e": 4.1, "h100": 4.5},
    # Weights, and of one layer of 16 both weights and gradients: a rare branch reads them.
    "bf16: stochastic(Adafactor)": {"v5e": 2.3, "h100": 2.7},
    "Muon": {"v5e": 10.2, "h100": 11.0},
    # Both matrices of a layer are joined for their products, in float32.
    "bf16: stochastic(Muon)": {"v5e": 7.3, "h100": 9.6},
}

# For its loops that change no weights, XLA for a TPU keeps the matrices of queries, keys and values
# in another layout: a copy of 100 MB.
NOT_REACHED = {("bf16: skip(clip + stochastic(AdamW, 8 bits))", "v5e", "attention"): 4.6}

QUICK = {
    ("AdamW", "layers"),
    ("bf16: stochastic(Adafactor)", "layers"),
    ("bf16: skip(clip + stochastic(AdamW, 8 bits))", "layers"),
}


def choices():
    for name in LIMITS:
        for target in ("v5e", "h100"):
            for model in MODELS:
                marks = [] if (name, model) in QUICK else [pytest.mark.slow]
                identity = f"{name}-{target}-{model}"
                yield pytest.param(name, target, model, id=identity, marks=marks)


def test_every_recipe_has_a_limit():
    assert LIMITS.keys() == {name for name, recipe in RECIPES.items() if not recipe.of_optax}


@pytest.mark.accelerators
@pytest.mark.parametrize(("name", "target", "model"), list(choices()), indirect=["target"])
def test_peak(name, target, model):
    key = next(x for x, y in TARGETS.items() if y == target)
    found = round(backward.peak(key, model, name, BACKWARD).total, 1)
    now = NOT_REACHED.get((name, key, model))
    assert found <= (now or LIMITS[name][key])
    assert now is None or found > LIMITS[name][key]  # else remove the entry


@pytest.mark.accelerators
@pytest.mark.parametrize("target", ["v5e"], indirect=True)
@pytest.mark.parametrize(("layers", "limit"), [(16, 2.8), (32, 2.4)])
def test_moments_of_a_layer_on_the_device(target, layers, limit):
    """Float32 moments stay on the host: no stack of them is on the device, nor copied."""
    shapes = {"up": (layers, WIDTH, HIDDEN), "down": (layers, HIDDEN, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(x, jnp.bfloat16) for name, x in shapes.items()}
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16)

    def loss(params, x):
        return jnp.mean(jgrad.scan_layers(block, params, x).astype(jnp.float32) ** 2)

    program = compiled(target, ON_HOST, BACKWARD, loss, params, x)
    counts, size = program.counts, sum(x.size for x in params.values())
    assert (counts.arguments + counts.temporaries) / size <= limit
    stacks = re.findall(rf"f32\[{layers},\d+,\d+\]{{[^}}]*}} ?[\w-]*", program.text)
    assert stacks
    assert all("S(5)" in x and not x.endswith(" copy") for x in stacks)


@pytest.mark.accelerators
@pytest.mark.parametrize("target", ["v5e"], indirect=True)
def test_adafactor_holds_weights_and_gradients(target):
    """Before the update in the usual form, and no array beside them."""
    found = backward.peak("v5e", "layers", "bf16: stochastic(Adafactor)", FORMS[0])
    assert found.total <= 4.02


@pytest.mark.accelerators
@pytest.mark.parametrize("target", ["v5e"], indirect=True)
def test_kernels_in_the_loop(target):
    """Both stacks of matrices have one, and both matrices beside them."""
    program = backward.program("v5e", "layers", "bf16: stochastic(AdamW, 8 bits)", BACKWARD)
    assert program.text.count("tpu_custom_call") == 4


FOUND = {
    Row("v5e", "layers", "AdamW"): [Peak(12, 6), Peak(12, 2.004)],
    Row("v5e", "layers", "AdamW of optax"): [Peak(12, 5.5)],
    Row("h100", "attention", "AdamW"): [Peak(12, 4.25), Peak(12, 1)],
}
TABLE = """\
| recipe | TPU v5e, layers | H100, attention |
| --- | --- | --- |
| AdamW | 18.00 → 14.00 | 16.25 → 13.00 |
| AdamW of optax | 17.50 |  |"""


def test_a_table():
    """A row for each recipe, a cell for each program: both forms, where there are both."""
    assert backward.table(FOUND) == TABLE


def test_a_page():
    """The table takes the place of another, however often."""
    new = backward.page("a\n<!-- peaks: start -->\nold\n<!-- peaks: end -->\nb\n", FOUND)
    assert new == f"a\n<!-- peaks: start -->\n\n{TABLE}\n\n<!-- peaks: end -->\nb\n"
    assert backward.page(new, FOUND) == new


def test_the_table_of_the_page():
    """Each recipe, within the limits of the compiled programs."""
    table = rows(section("benchmarks/notes/accelerators.md", "Peaks by recipe"))
    assert [name for name, *_ in table] == list(RECIPES)
    for name, *cells in table:
        columns = [(key, model) for key in ("v5e", "h100") for model in MODELS]
        for (key, model), cell in zip(columns, cells, strict=True):
            peaks = [float(x) for x in cell.split(" → ")]
            assert len(peaks) == (1 if RECIPES[name].of_optax else 2)
            if len(peaks) == 2:
                assert round(peaks[1], 1) <= NOT_REACHED.get((name, key, model), LIMITS[name][key])
