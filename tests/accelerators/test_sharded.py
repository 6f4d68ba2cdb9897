"""Collectives of steps whose leaves are sharded over many chips, under `jit`: those of optax at most."""

import pytest

from benchmarks.accelerators import sharded, targets
from benchmarks.accelerators.recipes import RECIPES
from benchmarks.accelerators.sharded import ARRANGEMENTS, TOPOLOGIES
from tests.accelerators.limits import COLLECTIVES, COLLECTIVES_NOW

accelerators = pytest.mark.accelerators

LONG = {  # each is in a shorter one, or made of two
    "AdamW, 8 bits, optax.apply_updates",
    "bf16: stochastic(AdamW, 8 bits), optax.apply_updates",
    "NorMuon",
    "hyperball(Muon)",
    "clip + LAMB",
}


def choices():
    """By default 16 chips and one axis; LAMB on two. What is in `LONG` takes up to a minute each."""
    for name in RECIPES:
        for topology in TOPOLOGIES:
            for arrangement in ARRANGEMENTS:
                few = arrangement == "fsdp" or (name, arrangement) == ("LAMB", "tensor")
                quick = topology == "v5e:4x4" and few and name not in LONG
                marks = [] if quick else [pytest.mark.slow]
                yield pytest.param(name, topology, arrangement, marks=marks)


def test_every_recipe_has_a_limit():
    assert COLLECTIVES.keys() == RECIPES.keys() >= LONG
    assert all(own.keys() <= {"all-reduce", "all-to-all"} for own in COLLECTIVES.values())
    known = {(name, key) for name in RECIPES for key in ARRANGEMENTS}
    assert COLLECTIVES_NOW.keys() <= known


@accelerators
@pytest.mark.parametrize(("name", "topology", "arrangement"), list(choices()))
def test_collectives(name, topology, arrangement):
    target = targets.TARGETS[topology.partition(":")[0]]
    if reason := targets.missing(target, topology):
        pytest.skip(reason)
    found = sharded.counts(RECIPES[name], ARRANGEMENTS[arrangement], topology, form="tree")
    most, now = COLLECTIVES[name], COLLECTIVES_NOW.get((name, arrangement))
    bound = most if now is None else now
    beyond = {x: n for x, n in found.counts.collectives.items() if n > bound.get(x, 0)}
    assert not beyond
    if now is not None:
        reached = all(n <= most.get(x, 0) for x, n in found.counts.collectives.items())
        assert not reached, "reached: remove the entry"


@accelerators
@pytest.mark.parametrize("name", ["clip + AdamW", "LAMB", "LARS"])
def test_what_optax_takes(name):
    """The limits are those of optax, with as many again in the branch that repeats norms rescaled."""
    if reason := targets.missing(targets.TARGETS["v5e"]):
        pytest.skip(reason)
    theirs = sharded.counts(RECIPES[name], ARRANGEMENTS["fsdp"], "v5e:4x4", form="optax")
    assert theirs.counts.collectives.keys() == {"all-reduce"}
    assert COLLECTIVES[name]["all-reduce"] <= 2 * theirs.counts.collectives["all-reduce"]
