"""What a step under `jit` moves between eight devices that have a part of each leaf.

The program does not say how leaves are sharded, so nothing in it may join or cut arrays along an
axis that could be: then XLA moves their parts. There are more leaves of a shape than are measured
together.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jgrad
from benchmarks import collectives
from tests.cases import CASES, RATE
from tests.multi_device.meshes import mesh_of
from tests.support.loops import step_of
from tests.wrappers.test_every_wrapper import WRAPPERS

pytestmark = pytest.mark.not_in_jax_0_8("joined sums")

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


# On CPUs, sums over the rows of a buffer are loops over them, for which rows are gathered where the
# type does not say that they may be sharded. For TPUs and GPUs they are no loops.
WITH_NORMS = {
    "lamb": (jgrad.lamb(RATE, weight_decay=0.1), {"all-gather": 8}),
    "lars": (jgrad.lars(RATE, weight_decay=0.1), {"all-gather": 4}),
    "clip": (optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.adam(RATE)), NORMS),
}
OF_WRAPPERS = {
    "clip_by_global_norm": NORMS,
    "accumulate": {"all-reduce": 1},
    "skip_nonfinite": {"all-reduce": 1},
    "hyperball": NORMS,
    "watch": {"all-reduce": 3 * NORMS["all-reduce"]},
}
# Axes over which a stack of layers is sharded: experts, or a part of each layer.
STACKS = {"layers": P("d"), "within": P(None, "d")}


def recipe():
    inner = jgrad.average_params(
        optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.lamb(RATE, weight_decay=0.1)), 0.9
    )
    return jgrad.skip_nonfinite(jgrad.accumulate(jgrad.master_weights(inner), 4))


def stacked(spec):
    """Shapes of stacks of 16 layers."""
    sharding = NamedSharding(mesh_of(d=8), spec)
    shapes = {f"w{i}": (16, 64, 32) for i in range(LAYERS)}
    shapes |= {f"b{i}": (16, 64) for i in range(LAYERS)}
    shape = lambda s: jax.ShapeDtypeStruct(s, jnp.float32, sharding=sharding)
    return {name: shape(s) for name, s in shapes.items()}


def rows():
    """What is alone in a program: a name, the transformation, its model, a limit, and whether types
    say how leaves are sharded. Where none does, leaves are not stacked either."""
    of = functools.partial(functools.partial, model)  # made when the test runs
    for name, (tx, packed) in WITH_NORMS.items():
        for form in FORMS:
            limit = NORMS_OF_TWO if form == "mixed" else NORMS
            yield f"{name}-{form}", tx, of(form), limit, True
            limit = packed if form == "packed" else limit
            yield f"{name}-{form}-untyped", tx, of(form), limit, False
        for form, limit in (("rows", NORMS), ("mixed", NORMS_OF_TWO)):
            w = of(form, axis_type=AxisType.Explicit)
            yield f"{name}-{form}-explicit", tx, w, limit, True
    for form in ("rows", "columns", "packed"):
        for i, wrapper in enumerate(WRAPPERS):
            tx, limit = wrapper.around(jgrad.adam(RATE)), OF_WRAPPERS.get(wrapper.name, NOTHING)
            yield f"{wrapper}-{i}-{form}", tx, of(form, wrapper.dtype), limit, True
        # The flag of the gradients, and two norms, each once more where it is rescaled.
        yield f"recipe-{form}", recipe(), of(form, jnp.bfloat16), {"all-reduce": 5}, True
    for where, spec in STACKS.items():
        for make in (jgrad.lars, jgrad.lamb):
            tx = make(RATE, weight_decay=0.1, layer_axes=0)
            yield f"{make.__name__}-{where}", tx, functools.partial(stacked, spec), NORMS, True


@pytest.mark.slow(always=["lars-mixed", "lars-mixed-untyped", "lamb-layers"])
@pytest.mark.parametrize(
    ("tx", "w", "limit", "typed"), [pytest.param(*row, id=name) for name, *row in rows()]
)
def test_at_most(tx, w, limit, typed):
    """Nothing where elements do not know of each other, else what norms and flags need."""
    assert_at_most(moved(tx, w(), typed=typed), limit)


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


def optimizers(form, *, elementwise):
    """In 8 bits, too, where each shard of a leaf has whole blocks.

    Without Adafactor, whose means of rows and columns are sums of their own.
    """
    for case in (case.without_masks() for case in CASES):
        if case.has_specs:
            continue
        if case.elementwise == elementwise:
            yield str(case), case.tx()
            if case.rounded and form in ("rows", "packed"):
                yield f"{case}-8bit", case.tx(moment_dtype="8bit")


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_elementwise_in_one_program(form, axis_type):
    """Optimizers and wrappers whose elements do not know of each other need none."""
    txs = dict(optimizers(form, elementwise=True))
    wrappers = [w for w in WRAPPERS if not w.shares]
    txs |= {w.name: with_weights_in(w.dtype, w.around(jgrad.adam(RATE))) for w in wrappers}
    assert len(txs) > 15
    assert moved(together(txs), model(form, axis_type=axis_type)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_norms_in_one_program(form):
    """All that have norms or flags: sums of squares, which XLA joins, and nothing else."""
    of_one = (NORMS_OF_TWO if form == "mixed" else NORMS)["all-reduce"]
    txs = {"clip": WITH_NORMS["clip"][0], "accumulate": jgrad.accumulate(jgrad.adam(RATE), 2)}
    txs["skip"] = jgrad.skip_nonfinite(jgrad.adam(RATE))
    assert_at_most(moved(together(txs), model(form)), {"all-reduce": 2 * of_one})
    txs = dict(optimizers(form, elementwise=False))
    assert_at_most(moved(together(txs), model(form)), {"all-reduce": len(txs) * of_one})
