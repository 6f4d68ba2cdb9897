"""Each recipe, compiled for an H100 and a TPU v5e, costs at most what `limits.py` says."""

import pytest

from benchmarks.accelerators import program
from benchmarks.accelerators.limits import KERNELS, LIMITS, NOT_REACHED, PRODUCTS, limit
from benchmarks.accelerators.recipes import MODELS, RECIPES, Known
from benchmarks.accelerators.targets import TARGETS

accelerators = pytest.mark.accelerators

COMPILED = [
    (name, target, model, form)
    for name, recipe in RECIPES.items()
    for target in ("v5e", "h100")
    if recipe.on_tpu or target == "h100"
    for model in recipe.models
    for form in recipe.forms
]


def counts(name, target, model, form):
    """Of a step of ours."""
    recipe, work, packed = RECIPES[name], MODELS[model], form == "packed"
    # A packed tree knows where its layers are.
    tx = recipe.ours(Known(None if packed else work.layer_axes))
    params = work.params(recipe.dtype, packed=packed)
    return program.step_counts(target, tx, params, **recipe.options)


def test_every_recipe_has_limits():
    assert LIMITS.keys() == RECIPES.keys()
    both, gpu = {"v5e", "h100"}, {"h100"}
    assert all(LIMITS[x].keys() == (both if r.on_tpu else gpu) for x, r in RECIPES.items())
    assert {(name, target) for name, target, *_ in COMPILED} == KERNELS.keys()
    assert all(KERNELS[name, t].keys() == set(RECIPES[name].models) for name, t in KERNELS)


def test_what_is_not_reached_is_compiled():
    assert NOT_REACHED.keys() <= set(COMPILED)


def choices():
    """By default large leaves, which compile in seconds; others take up to a minute each."""
    for name, target, model, form in COMPILED:
        is_quick = model == "large" or (model == "two shapes" and form == "tree")
        marks = [] if is_quick else [pytest.mark.slow]
        identity = f"{name}-{target}-{model}-{form}"
        yield pytest.param(name, target, model, form, id=identity, marks=marks)


@accelerators
@pytest.mark.parametrize(("name", "target", "model", "form"), list(choices()), indirect=["target"])
def test_bytes_temporaries_and_kernels(name, target, model, form):
    found, size = counts(name, target, model, form), MODELS[model].size
    key = next(x for x, y in TARGETS.items() if y == target)
    moved, temporaries = round(found.bytes / size, 1), round(found.temporaries / size, 2)
    most, now = limit(name, key, packed=form == "packed"), NOT_REACHED.get((name, key, model, form))
    bound = now or most
    assert moved <= bound.bytes
    assert temporaries <= bound.temporaries
    if now:
        assert moved > most.bytes or temporaries > most.temporaries, "reached: remove the entry"
    kernels = KERNELS[name, key][model][RECIPES[name].forms.index(form)]
    assert found.kernels <= 1.1 * kernels
    assert found.products == PRODUCTS.get((name, key), 0)
