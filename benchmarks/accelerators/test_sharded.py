"""Collectives of steps whose leaves are sharded over many chips, under `jit`: those of optax at most."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jgrad
from benchmarks import collectives
from benchmarks.accelerators import hlo, sharded, targets
from benchmarks.accelerators.limits import COLLECTIVES, COLLECTIVES_NOW
from benchmarks.accelerators.program import Program, mesh, step
from benchmarks.accelerators.recipes import RECIPES
from benchmarks.accelerators.sharded import ARRANGEMENTS, TOPOLOGIES

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
    for name in COLLECTIVES:
        for topology in TOPOLOGIES:
            for arrangement in ARRANGEMENTS:
                few = arrangement == "fsdp" or (name, arrangement) == ("LAMB", "tensor")
                quick = topology == "v5e:4x4" and few and name not in LONG
                marks = [] if quick else [pytest.mark.slow]
                yield pytest.param(name, topology, arrangement, marks=marks)


def test_every_recipe_has_a_limit():
    assert COLLECTIVES.keys() == {name for name, recipe in RECIPES.items() if recipe.on_tpu} >= LONG
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


SQUARES_AND_WIDE = {"0": (64, 64), "1": (64, 64), "2": (64, 192), "3": (64, 192)}


@accelerators
@pytest.mark.parametrize(
    ("shard_over", "state_over", "ordinary", "refreshed"),
    [
        # Gradient, moment and direction of each matrix, its left average, and two right ones that
        # share a group with left ones. A refresh gathers the averages or the new bases of a size.
        (None, None, {"all-gather": 18, "all-reduce": 1}, {"all-gather": 1}),
        ("data", None, {"all-gather": 18, "all-reduce": 1}, {"all-gather": 1, "all-to-all": 1}),
        # Averages and bases are sharded: so a basis is gathered, and an average is not.
        ("data", "data", {"all-gather": 12, "all-reduce": 1}, {"all-to-all": 2}),
    ],
    ids=["whole", "dealt out", "sharded"],
)
def test_soap(shard_over, state_over, ordinary, refreshed):
    """On small sides, since XLA compiles eigenvectors of large ones for minutes.

    There are two sizes of bases, so two conditionals, and two branches in each make new bases. One
    or two collectives in a branch are those around a decomposition, so its loops have none.
    """
    if reason := targets.missing(targets.TARGETS["v5e"], "v5e:4x4"):
        pytest.skip(reason)
    soap, arrangement = RECIPES["SOAP"], ARRANGEMENTS["fsdp"]
    options = {"shard_over": shard_over, "state_over": state_over}
    made = sharded.program(soap, arrangement, "v5e:4x4", SQUARES_AND_WIDE, **options)
    found = hlo.collectives_by_place(made.text)
    assert _fit(found.outside, ordinary)
    assert found.branches
    assert len(found.branches) <= 4
    assert all(_fit(own, refreshed) for own in found.branches)


def _fit(found, most):
    return all(count <= most.get(kind, 0) for kind, count in found.items())


@accelerators
@pytest.mark.parametrize("name", ["clip + AdamW", "LAMB", "LARS"])
def test_what_optax_takes(name):
    """The limits are those of optax, with as many again in the branch that repeats norms rescaled."""
    if reason := targets.missing(targets.TARGETS["v5e"]):
        pytest.skip(reason)
    theirs = sharded.counts(RECIPES[name], ARRANGEMENTS["fsdp"], "v5e:4x4", form="optax")
    assert theirs.counts.collectives.keys() == {"all-reduce"}
    assert COLLECTIVES[name]["all-reduce"] <= 2 * theirs.counts.collectives["all-reduce"]


@pytest.mark.slow
@accelerators
def test_a_quarter_of_the_rows():
    """What the note on Muon says of `fraction`: bytes of all-to-alls and of HBM, and operations."""
    target, spec = targets.TARGETS["v5e"], P(None, "data")
    if reason := targets.missing(target, "v5e:4x4"):
        pytest.skip(reason)
    chips = mesh(target, "v5e:4x4", data=16)
    on_chips = NamedSharding(chips, spec)
    w = {
        f"{i}": jax.ShapeDtypeStruct((2048, 8192), jnp.float32, sharding=on_chips)
        for i in range(16)
    }
    share = 16 * 2048 * 8192 / 16

    def counts(fraction):
        options = {"shard_over": "data", "mesh_axes": spec, "fraction": fraction}
        tx = jgrad.muon(1e-3, matrices=True, adam_learning_rate=1e-3, **options)
        with jax.sharding.set_mesh(chips):
            where = jgrad.state_shardings(tx, w)
            place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
            state = jax.tree.map(place, jax.eval_shape(tx.init, w), where)
            outputs = jax.tree.map(lambda x: x.sharding, w), where
            program = Program(target, step(tx), (w, state, w), donate=(0, 1), out_shardings=outputs)
        moved = collectives.total(collectives.of(program.text, 16))
        return program.counts.bytes / share, {kind: n / share for kind, n in moved.items()}

    whole, of_all = counts(1.0)
    part, of_some = counts(0.25)
    assert of_all == {"all-to-all": 8}
    assert of_some == {"all-to-all": 2, "all-reduce": 4 * 2 / 512}
    assert whole == pytest.approx(103, rel=0.02)
    assert part == pytest.approx(28, rel=0.02)
