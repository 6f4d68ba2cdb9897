"""The peak of a whole train step, each layer updated in the backward pass, compiled for one device."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jgrad
from benchmarks.accelerators import backward
from benchmarks.accelerators.backward import Peak, Row
from benchmarks.accelerators.llama import INPUTS_ON_HOST
from benchmarks.accelerators.targets import TARGETS
from benchmarks.accelerators.train_steps import (
    ALL,
    FORMS,
    HIDDEN,
    MODELS,
    RECIPES,
    STATE,
    TOKENS,
    WIDTH,
    block,
    compiled,
    on_host,
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


BF16: Any = jnp.bfloat16
# By what is on the host, the dtype of moments, and the layers: bytes per parameter on the device at
# most, and on the host. Half of it is what one layer needs, so twice the layers take half as much.
ON_HOSTS = {
    (STATE, None, 16): (2.8, 8),
    (STATE, None, 32): (2.4, 8),
    (STATE, BF16, 16): (2.5, 4),
    (ALL, None, 32): (0.6, 10),
    (ALL, BF16, 16): (0.55, 6),
    (ALL, BF16, 32): (0.28, 6),
    (STATE, "8bit", 16): (2.5, 2),
    (ALL, "8bit", 32): (0.28, 4),
}
# The dtypes of moments, and how many of their rows are one on the host.
STORED = {None: ("f32", 1), BF16: ("bf16", 1), "8bit": ("[su]32", 4)}


@pytest.mark.accelerators
@pytest.mark.parametrize("target", ["v5e"], indirect=True)
@pytest.mark.parametrize(("what", "dtype", "layers"), ON_HOSTS)
def test_one_layer_is_on_the_device(target, what, dtype, layers):
    """No stack in host memory is on the device, nor copied; a norm in each layer stays there."""
    shapes = {"up": (layers, WIDTH, HIDDEN), "down": (layers, HIDDEN, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(x, BF16) for name, x in shapes.items()}
    params["norm"] = jax.ShapeDtypeStruct((layers, WIDTH), BF16)
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), BF16)

    def normed(layer, x):
        return block(layer, (x * layer["norm"][None]).astype(x.dtype))

    def loss(params, x):
        return jnp.mean(jgrad.scan_layers(normed, params, x).astype(jnp.float32) ** 2)

    program = compiled(target, on_host(dtype, what), BACKWARD, loss, params, x)
    counts, size = program.counts, sum(x.size for x in params.values())
    on_device, on_the_host = ON_HOSTS[what, dtype, layers]
    assert (counts.arguments + counts.temporaries) / size <= on_device
    assert round(counts.host / size, 1) == on_the_host
    of_moments, rows = STORED[dtype]
    matrices = rf"{of_moments}\[{layers},(?:{WIDTH // rows}|{HIDDEN // rows}),\d+\]"
    stacks = re.findall(matrices + r"{[^}]*} ?[\w-]*", program.text)
    assert any("S(5)" in x for x in stacks)
    assert all("S(5)" in x or (what == STATE and dtype is BF16) for x in stacks)
    assert not any("S(5)" in x and x.endswith(" copy") for x in stacks)
    assert program.text.count("tpu_custom_call") == (3 if dtype == "8bit" else 0)


@pytest.mark.accelerators
@pytest.mark.parametrize("target", ["v5e"], indirect=True)
def test_slices_of_words(target):
    """Of an embedding that is updated in slices of rows, each by a kernel; its scales stay."""
    rows, size = 2**15, 2**25 + 2**21
    shapes = {"table": (rows, WIDTH), "layers": (2, WIDTH, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(x, BF16) for name, x in shapes.items()}

    def loss(params, x):
        x = params["table"][x]
        x = jgrad.scan_layers(lambda w, x: x + jnp.tanh(x @ w), params["layers"], x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
    program = compiled(target, on_host("8bit", STATE), BACKWARD, loss, params, x)
    assert round(program.counts.host / size, 1) == 2
    assert (program.counts.arguments + program.counts.temporaries) / size <= 5
    moved = re.findall(rf"[su]32\[{rows // 4},{WIDTH}\]{{[^}}]*}} copy", program.text)
    assert not moved
    assert program.text.count("tpu_custom_call") == 2


@pytest.mark.accelerators
@pytest.mark.parametrize("target", ["v5e"], indirect=True)
@pytest.mark.parametrize(("form", "what"), [(FORMS[0], STATE), (BACKWARD, ALL)])
def test_inputs_of_layers_are_on_the_host(target, form, what):
    """By a policy of JAX: they are more than what is on the device, and nowhere copied."""
    layers, tokens = 8, 2**15
    params = {"up": jax.ShapeDtypeStruct((layers, WIDTH, WIDTH), BF16)}
    params["down"] = params["up"]

    def loss(params, x):
        def named(layer, x):
            return block(layer, checkpoint_name(x, "input"))

        x = jgrad.scan_layers(named, params, x, remat=INPUTS_ON_HOST)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((tokens, WIDTH), BF16)
    program = compiled(target, on_host(BF16, what), form, loss, params, x)
    counts, stored = program.counts, 2 * layers * x.size
    assert counts.arguments + counts.temporaries < 0.9 * stored
    stacks = re.findall(rf"bf16\[{layers},{tokens},{WIDTH}\]{{[^}}]*}} ?[\w-]*", program.text)
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
