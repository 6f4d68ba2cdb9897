"""What recipes and 8 bits cost, by the compiled program: bytes, temporaries, operations per leaf.

Counts and no times. `benchmarks/notes/what_wrappers_cost.md` says what they mean, and
`benchmarks/recipes.py` has the recipes.
"""

import jax
import jax.numpy as jnp
import pytest

import jgrad
from benchmarks.recipes import RATE, RECIPES, Recipe, clipped, program

pytestmark = pytest.mark.usefixtures("standard_promotion")  # schedules of optax promote

packed_or_not = pytest.mark.parametrize("packed", [False, True], ids=["tree", "packed"])


@pytest.fixture(params=[1, 8], ids=["one device", "eight devices"])
def devices(request, monkeypatch):
    """How many there are for all that the program knows: with several, leaves may be sharded."""
    jax.clear_caches()
    monkeypatch.setattr(jax, "device_count", lambda: request.param)
    yield request.param
    jax.clear_caches()


# Bytes moved and bytes of temporaries, at most, per parameter: on a tree, and packed.
LIMITS = {
    "momentum, decay": ((28, 0), (28, 0)),
    "Nesterov, decay": ((32, 0), (32, 0)),
    "AdamW": ((40, 0), (40, 0)),
    "clip + AdamW": ((48, 0), (48, 0.1)),
    "skip(AdamW)": ((44, 0), (44, 0)),
    "skip(clip + AdamW)": ((48, 0), (48, 0.1)),
    "skip(optax's AdamW)": ((64, 7), (64, 7)),
    "skip(optax's AdamW, branch=True)": ((58, 4), (58, 4)),
    "accumulate(clip + AdamW)": ((96, 4), (96, 4)),
    "accumulate, emit=False": ((24, 0), (24, 0)),
    "AdamW + ema": ((52, 0), (52, 0)),
    "LARS": ((44, 0), (30, 0.2)),
    "clip + LAMB": ((76, 4), (50, 0.2)),
    "bf16: AdamW": ((32, 0), (32, 0)),
    "bf16: AdamW, bf16 moments": ((30, 4), (30, 4)),
    "bf16: master(AdamW)": ((44, 0), (44, 0)),
    "bf16: skip(master(clip + AdamW))": ((60, 4), (60, 4)),
    "bf16: skip(accumulate(master(clip + LAMB + ema)))": ((148, 8), (130, 8)),
}
LEAVES, SIZE = 3, 512

# Operations of the compiled program for each leaf of 32 x 32, at most; those of optax 0.2.8 beside.
# A clip of what is added, two constants of which each is an operation, is what most of ours are more.
OPERATIONS = {
    "momentum": (lambda: jgrad.gradient_descent(0.1, momentum=0.9), 22),  # 17
    "Adam": (lambda: jgrad.adam(0.1), 54),  # 47
    "AdamW": (lambda: jgrad.adam(0.1, weight_decay=0.01), 63),  # 51
    "AdamW, schedule": (lambda: jgrad.adam(RATE, weight_decay=0.01), 64),  # 78
    "clip + AdamW, schedule": (lambda: clipped(jgrad.adam(RATE, weight_decay=0.01)), 112),  # 105
    "LARS": (lambda: jgrad.lars(0.1, weight_decay=1e-4), 110),  # 110
    "LAMB": (lambda: jgrad.lamb(0.1, weight_decay=1e-4), 124),  # 139
}
# Likewise where leaves may be sharded, so that norms are rescaled leaf by leaf.
LEAF_BY_LEAF = {"LARS": 127, "LAMB": 141}


def built(recipe, leaves, shape, *, packed=False):
    tree = {f"w{i}": jnp.ones(shape, recipe.dtype) for i in range(leaves)}
    return compiled(recipe.ours(), jgrad.pack(tree) if packed else tree, recipe.options)


def compiled(tx, params, options=None):
    """A step of update and apply with what it changes donated."""
    step = program(tx, params, params, options or {})
    step.build()
    return step


def test_every_recipe_has_a_limit():
    assert LIMITS.keys() == RECIPES.keys()


@pytest.mark.slow
@pytest.mark.not_in_jax_0_8("temporaries")
@packed_or_not
@pytest.mark.parametrize("name", RECIPES)
def test_bytes(name, packed):
    """The scalars, and the numbers of layers, are less than a hundredth."""
    limit, temporaries = LIMITS[name][packed]
    step, elements = built(RECIPES[name], LEAVES, (SIZE, SIZE), packed=packed), LEAVES * SIZE**2
    assert step.counted_bytes <= 1.01 * limit * elements
    assert step.temporary_bytes <= (temporaries + 0.05) * elements


@pytest.mark.slow(always=["one device-AdamW, schedule"])
@pytest.mark.not_in_jax_0_8("temporaries")
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_each_leaf(name, devices):
    """A scalar that many leaves read ends in a division; XLA repeats anything less for each leaf."""
    make, limit = OPERATIONS[name]
    limit = LEAF_BY_LEAF.get(name, limit) if devices > 1 else limit
    few, many = (built(Recipe(make), leaves, (32, 32)).operations for leaves in (16, 32))
    assert many - few <= 16.5 * limit
