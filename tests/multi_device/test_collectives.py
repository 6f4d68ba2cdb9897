"""What a step under `jit` moves between eight devices that have a part of each leaf.

The program does not say how leaves are sharded, so nothing in it may join or cut arrays along an
axis that could be: then XLA moves their parts. There are more leaves of a shape than are measured
together.
"""

import collections

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jgrad
from benchmarks import collectives
from tests.cases import CASES, RATE
from tests.multi_device.meshes import mesh_of
from tests.support.loops import step_of
from tests.wrappers.test_every_wrapper import WRAPPERS

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="The XLA of older versions joins no sums on CPUs."
)

LAYERS = 9
NOTHING = {}
# Sums of squares, which XLA joins; in the rare step that repeats them rescaled, once more.
NORMS = {"all-reduce": 2}
# In four different ways on a mesh of two axes.
NORMS_OF_TWO = {"all-reduce": 8}


def mixed(i):
    """Leaves of one shape, each third of them sharded in another way."""
    return (
        {"w": P("a", "b"), "up": P("a"), "b": P("a")},
        {"w": P("b", "a"), "up": P(None, "b"), "b": P("b")},
        {"w": P("b"), "up": P(("a", "b")), "b": P()},
    )[i % 3]


# The mesh and the specs of the leaves of a layer.
PLACES = {
    "rows": (mesh_of(d=8), lambda i: {"w": P("d"), "up": P("d"), "b": P("d")}),
    "columns": (mesh_of(d=8), lambda i: {"w": P(None, "d"), "up": P(None, "d"), "b": P("d")}),
    "mixed": (mesh_of(a=4, b=2), mixed),
}
FORMS = (*PLACES, "packed")


def model(form, dtype=jnp.float32):
    """Shapes with shardings, as a tree or packed."""
    shapes = {"w": (64, 96), "up": (64, 128), "b": (64,)}
    layer = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    tree = {f"layer_{i}": layer for i in range(LAYERS)}
    if form == "packed":
        packed = jax.eval_shape(lambda tree: jgrad.pack(tree, multiple_of=8), tree)
        return placed(packed, NamedSharding(mesh_of(d=8), P("d")))
    mesh, specs = PLACES[form]
    own = {f"layer_{i}": specs(i) for i in range(LAYERS)}
    return placed(tree, jax.tree.map(lambda spec: NamedSharding(mesh, spec), own))


def placed(tree, shardings):
    if not isinstance(shardings, dict | tuple):
        shardings = jax.tree.map(lambda _: shardings, tree)
    put = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(put, tree, shardings)


def moved(tx, w):
    """How many collectives of each kind there are in a donated step."""
    state = jgrad.state_shardings(tx, w)
    shardings = jax.tree.map(lambda x: x.sharding, w), state
    args = w, placed(jax.eval_shape(tx.init, w), state), w
    step = jax.jit(step_of(tx), donate_argnums=(0, 1), out_shardings=shardings)
    text = step.lower(*args).compile().as_text()
    return dict(collections.Counter(x.kind for x in collectives.of(text, 8)))


def assert_at_most(found, limit):
    assert found.keys() <= limit.keys(), found
    assert all(found[kind] <= limit[kind] for kind in found), found


def rows():
    """Each optimizer, in each form; in 8 bits where each shard of a leaf has whole blocks."""
    for case in (case.without_masks() for case in CASES):
        limit = NOTHING if case.elementwise else NORMS
        if case.make is jgrad.muon:
            continue  # see `test_at_most_as_many_as_optax`
        for form in FORMS:
            yield f"{case}-{form}", case.tx(), form, NORMS_OF_TWO if form == "mixed" else limit
            if case.state and form in ("rows", "packed"):
                tx = case.tx(moment_dtype="8bit")
                yield f"{case}-8bit-{form}", tx, form, limit


def names_first(rows):
    return [pytest.param(*row, id=name) for name, *row in rows]


@pytest.mark.parametrize(("tx", "form", "limit"), names_first(rows()))
def test_optimizers(tx, form, limit):
    """Nothing where elements do not know of each other, else what norms need."""
    assert_at_most(moved(tx, model(form)), limit)


OF_WRAPPERS = {
    "clip_by_global_norm": NORMS,
    "accumulate": {"all-reduce": 1},
    "skip_nonfinite": {"all-reduce": 1},
}


@pytest.mark.parametrize("form", ["rows", "columns", "packed"])
@pytest.mark.parametrize("wrapper", WRAPPERS, ids=str)
def test_wrappers(wrapper, form):
    found = moved(wrapper.around(jgrad.adam(RATE)), model(form, wrapper.dtype))
    assert_at_most(found, OF_WRAPPERS.get(wrapper.name, NOTHING))


@pytest.mark.parametrize("form", ["rows", "columns", "packed"])
def test_all_together(form):
    """The flag of the gradients, and two norms, each once more where it is rescaled."""
    inner = optax.chain(
        jgrad.clip_by_global_norm(1.0), jgrad.lamb(RATE, weight_decay=0.1), jgrad.ema(0.9)
    )
    tx = jgrad.skip_nonfinite(jgrad.accumulate(jgrad.master_weights(inner), 4))
    assert_at_most(moved(tx, model(form, jnp.bfloat16)), {"all-reduce": 5})


# Axes over which a stack of layers is sharded: experts, or a part of each layer.
STACKS = {"layers": P("d"), "within": P(None, "d")}


@pytest.mark.parametrize("where", STACKS)
@pytest.mark.parametrize("make", [jgrad.lars, jgrad.lamb], ids=["lars", "lamb"])
def test_stacked_layers(make, where):
    shapes = {f"w{i}": (16, 64, 32) for i in range(LAYERS)}
    shapes |= {f"b{i}": (16, 64) for i in range(LAYERS)}
    sharding = NamedSharding(mesh_of(d=8), STACKS[where])
    w = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        for name, shape in shapes.items()
    }
    assert_at_most(moved(make(RATE, weight_decay=0.1, layer_axes=0), w), NORMS)


PEERS = {
    "adamw": (optax.adamw(RATE), jgrad.adam(RATE, weight_decay=1e-4)),
    "clip": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE)),
        optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.adam(RATE)),
    ),
    "lars": (optax.lars(RATE), jgrad.lars(RATE)),
    "lamb": (optax.lamb(RATE), jgrad.lamb(RATE)),
    "muon": (
        optax.contrib.muon(RATE),
        jgrad.muon(RATE, matrices=jgrad.hidden_matrices(), adam_learning_rate=RATE),
    ),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("form", PLACES)
@pytest.mark.parametrize("name", PEERS)
def test_at_most_as_many_as_optax(name, form):
    """Beside those of the rare step that rescales the norm of clipping."""
    theirs, ours = (sum(moved(tx, model(form)).values()) for tx in PEERS[name])
    assert ours <= theirs * (2 if name == "clip" else 1)
