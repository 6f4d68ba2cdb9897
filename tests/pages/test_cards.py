"""The figures of methods side by side are counted, and those of programs for accelerators are their limits."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jgrad
from benchmarks.accelerators.limits import COLLECTIVES, LIMITS, NOT_REACHED, limit
from benchmarks.accelerators.recipes import RECIPES
from tests.multi_device.test_collectives import model, moved
from tests.support.pages import rows, section

RATE = optax.cosine_decay_schedule(1e-3, 1000)
SIDE = 1024  # of the matrix whose state is counted
EXTRA = 0.005  # counters, and digits that the table leaves out
pytestmark = [
    pytest.mark.ci,
    pytest.mark.usefixtures("standard_promotion"),  # schedules of optax promote
]

adam = functools.partial(jgrad.adam, RATE)
adamw = functools.partial(adam, weight_decay=0.1)
muon = functools.partial(jgrad.muon, RATE, matrices=True, adam_learning_rate=RATE)
normuon = functools.partial(muon, rule="normuon")


def turned(make):
    return lambda **options: jgrad.hyperball(make(**options), RATE, leaves=True)


# Each row of the table: what makes it of more options, and its name among compiled recipes.
ROWS = {
    "`gradient_descent`, momentum": (functools.partial(jgrad.gradient_descent, RATE, momentum=0.9), "momentum"),
    "`lion`": (functools.partial(jgrad.lion, RATE, weight_decay=0.1), "Lion"),
    "`adam`": (adamw, "AdamW"),
    "`adam`, cautious decay": (functools.partial(adamw, weight_decay_rule="cautious"), "AdamW, cautious"),
    "`adam`, 8 bits": (functools.partial(adamw, moment_dtype="8bit"), "AdamW, 8 bits"),
    "`adam`, bfloat16, `stochastic_rounding`": (lambda **options: jgrad.stochastic_rounding(adamw(**options)),
     "bf16: stochastic(AdamW)"),
    "`adafactor`": (functools.partial(jgrad.adafactor, RATE), "Adafactor"),
    "`lars`": (functools.partial(jgrad.lars, RATE, weight_decay=1e-4), "LARS"),
    "`lamb`": (functools.partial(jgrad.lamb, RATE, weight_decay=0.1), "LAMB"),
    "`muon`": (muon, "Muon"),
    '`muon`, "normuon"': (normuon, "NorMuon"),
    "`soap`": (functools.partial(jgrad.soap, RATE, matrices=True), "SOAP"),
    "`hyperball`, `adam`": (turned(adam), "hyperball(Adam)"),
    "`hyperball`, `muon`": (turned(muon), "hyperball(Muon)"),
    "`schedule_free`, `adam`": (lambda **options: jgrad.schedule_free(jgrad.adam(1e-3, beta1=0.0, **options)),
     "schedule_free(Adam)"),
}  # fmt: skip
TABLE = {row[0]: row[1:] for row in rows(section("benchmarks/notes/side_by_side.md", "The table"))}
every_row = pytest.mark.parametrize("name", TABLE | ROWS)


def cells(name, column):
    """The figures of a cell: of a tree, and packed; or in float32, and in 8 bits."""
    return [float(x) for x in re.findall(r"\d+(?:\.\d+)?", TABLE[name][column])]


def shown(name, column):
    """A figure for each form of the recipe: of a tree and packed, where that differs."""
    figures, forms = cells(name, column), RECIPES[ROWS[name][1]].forms
    return zip(forms, figures * (len(forms) // len(figures)), strict=True)


def dtype_of(name):
    return jnp.bfloat16 if "bfloat16" in name else jnp.float32


@every_row
def test_state(name):
    """Bytes per parameter of a matrix, from the shapes of its state."""
    w = {"w": jax.ShapeDtypeStruct((SIDE, SIDE), dtype_of(name))}
    make, figures = ROWS[name][0], cells(name, 0)
    forms = [{}, {"moment_dtype": "8bit"}]
    for figure, form in zip(figures, forms[-len(figures) :], strict=True):
        if name == "`adafactor`":
            form = {}  # without momentum there is no form to choose
        state = jax.eval_shape(make(**form).init, w)
        found = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / SIDE**2
        assert found == pytest.approx(figure, abs=EXTRA)


def most(recipe, target, form):
    """The largest limits of all models that a recipe is compiled on: bytes and temporaries."""
    usual = limit(recipe, target, packed=form == "packed")
    models = RECIPES[recipe].models
    bounds = [NOT_REACHED.get((recipe, target, model, form), usual) for model in models]
    return tuple(map(max, zip(*bounds, strict=True)))


@pytest.mark.parametrize(("column", "target"), [(2, "h100"), (3, "v5e")])
@every_row
def test_bytes_on_accelerators(name, column, target):
    """Within what the tests of compiled programs allow, and near it."""
    if target not in LIMITS[ROWS[name][1]]:
        assert not cells(name, column)
        return
    for form, figure in shown(name, column):
        bound, _ = most(ROWS[name][1], target, form)
        assert 0.7 * bound <= figure <= bound + 0.5  # the table has whole bytes above a hundred


@every_row
def test_collectives(name):
    """As many as the tests of programs for 16 chips allow; none are told of what has no such program."""
    allowed = COLLECTIVES.get(ROWS[name][1])
    none = "0" if allowed is not None else ""
    assert TABLE[name][1] == (
        ", ".join(f"{n} {kind}" for kind, n in (allowed or {}).items()) or none
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["`adam`, cautious decay", "`schedule_free`, `adam`"])
def test_no_collective(name):
    """What is elementwise, compiled here for eight devices."""
    assert TABLE[name][1] == "0"
    assert not moved(ROWS[name][0](), model("rows"))


def test_figures_of_accelerators():
    """As the tests of programs for TPU and GPU allow: the largest of all models and both forms."""
    table = rows(section("benchmarks/notes/accelerators.md", "What each recipe costs"))
    assert len(table) == 14
    for name, *shown in table:
        recipe = name.replace("`", "").removesuffix(", a mini-step")
        for cell, target in zip(shown, ("h100", "v5e"), strict=True):
            bounds = [most(recipe, target, form) for form in RECIPES[recipe].forms]
            bound, temporaries = map(max, zip(*bounds, strict=True))
            for found, kept in re.findall(r"([\d.]+) / ([\d.]+)", cell):
                assert float(found) <= bound
                assert float(kept) <= temporaries + 0.05
