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
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jgrad
from benchmarks import collectives
from tests.cases import CASES, DECAYED, ONE_EACH, RATE
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


# The axes of the mesh, and the specs of the leaves of a layer.
PLACES = {
    "rows": ({"d": 8}, lambda i: {"w": P("d"), "up": P("d"), "b": P("d")}),
    "columns": ({"d": 8}, lambda i: {"w": P(None, "d"), "up": P(None, "d"), "b": P("d")}),
    "mixed": ({"a": 4, "b": 2}, mixed),
}
FORMS = (*PLACES, "packed")


def model(form, dtype=jnp.float32, axis_type=AxisType.Auto):
    """Shapes with shardings, as a tree or packed."""
    shapes = {"w": (64, 96), "up": (64, 128), "b": (64,)}
    layer = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    tree = {f"layer_{i}": layer for i in range(LAYERS)}
    if form == "packed":
        packed = jax.eval_shape(lambda tree: jgrad.pack(tree, multiple_of=8), tree)
        return placed(packed, NamedSharding(mesh_of(d=8), P("d")))
    axes, specs = PLACES[form]
    mesh = mesh_of(axis_type, **axes)
    own = {f"layer_{i}": specs(i) for i in range(LAYERS)}
    return placed(tree, jax.tree.map(lambda spec: NamedSharding(mesh, spec), own))


def placed(tree, shardings):
    if not isinstance(shardings, dict | tuple):
        shardings = jax.tree.map(lambda _: shardings, tree)
    put = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(put, tree, shardings)


def moved(tx, w, *, typed=True):
    """How many collectives of each kind there are in a donated step.

    With `typed=False` the types of what is traced say nothing of a mesh, and `in_shardings` shards
    the arrays.
    """
    state = jgrad.state_shardings(tx, w)
    own = jax.tree.map(lambda x: x.sharding, w)
    args = w, placed(jax.eval_shape(tx.init, w), state), w
    options = {"donate_argnums": (0, 1), "out_shardings": (own, state)}
    if not typed:
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        options["in_shardings"] = (own, state, own)
    text = jax.jit(step_of(tx), **options).lower(*args).compile().as_text()
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


@pytest.mark.slow(always=["lars_masked-mixed"])
@pytest.mark.parametrize(("tx", "form", "limit"), names_first(rows()))
def test_optimizers(tx, form, limit):
    """Nothing where elements do not know of each other, else what norms need."""
    assert_at_most(moved(tx, model(form)), limit)


# On CPUs, sums over the rows of a buffer are loops over them, for which rows are gathered where the
# type does not say that they may be sharded. For TPUs and GPUs they are no loops.
UNTYPED = {
    "lamb": (jgrad.lamb(RATE, weight_decay=0.1), {"all-gather": 8}),
    "lars": (jgrad.lars(RATE, weight_decay=0.1), {"all-gather": 4}),
    "clip": (optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.adam(RATE)), NORMS),
}


@pytest.mark.slow(always=["lars-mixed"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", UNTYPED)
def test_arrays_that_only_in_shardings_shards(name, form):
    """Where no type says that leaves may be sharded, they are not stacked either."""
    tx, packed = UNTYPED[name]
    limit = {"packed": packed, "mixed": NORMS_OF_TWO}.get(form, NORMS)
    assert_at_most(moved(tx, model(form), typed=False), limit)


def together(txs):
    """The sum of what transformations of the same gradients return."""

    def update(g, states, w):
        found = {name: tx.update(g, states[name], w) for name, tx in txs.items()}
        updates = [updates for updates, _ in found.values()]
        return jax.tree.map(lambda *xs: sum(xs), *updates), {k: s for k, (_, s) in found.items()}

    return optax.GradientTransformation(
        lambda w: {name: tx.init(w) for name, tx in txs.items()}, update
    )


def with_weights_in(dtype, tx):
    """For float32 weights."""
    cast = lambda tree, dtype=dtype: jax.tree.map(lambda x: x.astype(dtype), tree)

    def update(g, state, w):
        updates, state = tx.update(cast(g), state, cast(w))
        return cast(updates, jnp.float32), state

    return optax.GradientTransformation(lambda w: tx.init(cast(w)), update)


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_elementwise_in_one_program(form, axis_type):
    """Optimizers and wrappers whose elements do not know of each other need none."""
    names = {*ONE_EACH, *DECAYED}
    cases = [case.without_masks() for case in CASES if case.elementwise and case.name in names]
    txs = {str(case): case.tx() for case in cases}
    wrappers = [w for w in WRAPPERS if not w.shares]
    txs |= {w.name: with_weights_in(w.dtype, w.around(jgrad.adam(RATE))) for w in wrappers}
    assert len(txs) > 8
    assert moved(together(txs), model(form, axis_type=axis_type)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_norms_in_one_program(form):
    """All that have norms or flags: sums of squares, which XLA joins, and nothing else."""
    txs = {name: tx for name, (_, tx) in PEERS.items() if name not in ("adamw", "muon")}
    txs["accumulate"] = jgrad.accumulate(jgrad.adam(RATE), 2)
    each = NORMS_OF_TWO if form == "mixed" else NORMS
    assert_at_most(moved(together(txs), model(form)), {"all-reduce": 2 * each["all-reduce"]})


@pytest.mark.slow
@pytest.mark.parametrize("form", ["rows", "mixed"])
@pytest.mark.parametrize("name", UNTYPED)
def test_norms_on_explicit_axes(name, form):
    """As on automatic ones: types say how each leaf is sharded."""
    limit = NORMS_OF_TWO if form == "mixed" else NORMS
    assert_at_most(moved(UNTYPED[name][0], model(form, axis_type=AxisType.Explicit)), limit)


OF_WRAPPERS = {
    "clip_by_global_norm": NORMS,
    "accumulate": {"all-reduce": 1},
    "skip_nonfinite": {"all-reduce": 1},
    "hyperball": NORMS,
    "watch": {"all-reduce": 3 * NORMS["all-reduce"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["rows", "columns", "packed"])
@pytest.mark.parametrize("wrapper", WRAPPERS, ids=str)
def test_wrappers(wrapper, form):
    found = moved(wrapper.around(jgrad.adam(RATE)), model(form, wrapper.dtype))
    assert_at_most(found, OF_WRAPPERS.get(wrapper.name, NOTHING))


@pytest.mark.slow
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


@pytest.mark.slow(always=["lamb-layers"])
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
    "skip": (optax.apply_if_finite(optax.adam(RATE), 5), jgrad.skip_nonfinite(jgrad.adam(RATE))),
    "lars": (optax.lars(RATE), jgrad.lars(RATE)),
    "lamb": (optax.lamb(RATE), jgrad.lamb(RATE)),
    "muon": (
        optax.contrib.muon(RATE),
        jgrad.muon(RATE, matrices=jgrad.hidden_matrices(), adam_learning_rate=RATE),
    ),
}


@pytest.mark.slow(always=["lars-packed", "clip-packed"])
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("name", "form"),
    # Packed, optax's Muon finds no matrices.
    [(name, form) for name in PEERS for form in FORMS if (name, form) != ("muon", "packed")],
)
def test_at_most_as_many_as_optax(name, form):
    """Beside those of the rare step that rescales the norm of clipping."""
    theirs, ours = (sum(moved(tx, model(form)).values()) for tx in PEERS[name])
    assert ours <= theirs * (2 if name == "clip" else 1), (ours, theirs)
