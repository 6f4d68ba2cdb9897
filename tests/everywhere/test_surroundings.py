"""Every optimizer and wrapper where training steps are: under x64, in loops, on meshes, in `shard_map`.

There types say more than shapes and dtypes, and Python's numbers are other ones. The truth is what
the same transformation does alone, on one device, one compiled step after the other. Variables of
flax are in `test_nnx.py`.
"""

import functools
import inspect
import itertools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jgrad
from tests.cases import CASES, RATE
from tests.multi_device.meshes import mesh_of
from tests.optimizers.test_further_moments import ademamix
from tests.optimizers.test_of_leaf import adamax
from tests.support import oldest
from tests.support.compilations import compilations
from tests.support.loops import assert_equal, stack, step_of
from tests.support.other_platforms import as_on
from tests.support.precision import in_64_bits
from tests.wrappers.test_every_wrapper import WRAPPERS

# Whole rows of blocks, blocks of several rows, less than 8 bits are for, and one row of blocks.
SHAPES = {"w": (16, 512), "up": (64, 96), "b": (64,), "v": (8192,)}
STEPS = 2


class Subject(NamedTuple):
    """A transformation.

    Attributes:
      name: shown by pytest.
      make: makes it, of a learning rate and more options.
      dtype: of the parameters.
      injectable: a factory for `optax.inject_hyperparams`, and its options.
      axes: options inside `shard_map`, of sharded leaves; None where there is no such form.
    """

    name: str
    make: Any
    dtype: Any = jnp.float32
    injectable: tuple[Any, dict[str, Any]] | None = None
    axes: dict[str, Any] | None = None


def axes_of(case):
    """How sharded leaves are named."""
    if case.has_specs:
        return {"mesh_axes": {name: P("d") for name in SHAPES}}
    return {} if case.elementwise else {"mesh_axes": "d"}


def subjects():
    for case in (case.without_masks() for case in CASES):
        moments = {"": {}}
        if case.rounded:
            moments |= {"-bf16": {"moment_dtype": jnp.bfloat16}, "-8bit": {"moment_dtype": "8bit"}}
        for suffix, own in moments.items():
            make = functools.partial(case.tx, **own)
            options = {"learning_rate": RATE} | case.options | own
            yield Subject(f"{case}{suffix}", make, jnp.float32, (case.make, options), axes_of(case))
    for method, own in itertools.product((adamax, ademamix), ({}, {"moment_dtype": "8bit"})):
        make = lambda rate=RATE, method=method, own=own: method(rate, **own)
        name = method.__name__ + "-8bit" * bool(own)
        yield Subject(name, make, jnp.float32, (method, {"learning_rate": RATE} | own), {})
    for i, wrapper in enumerate(WRAPPERS):
        name = wrapper.name + "-scaled" * (i == 3)
        make = lambda rate=RATE, own=wrapper, **axes: own.around(jgrad.adam(rate), **axes)
        axes = {"mesh_axes": "d"} if wrapper.shares else {}
        if wrapper.name in ("offload", "stochastic_rounding"):  # in a shard, other bits round
            axes = None
        yield Subject(name, make, wrapper.dtype, axes=axes)
    yield Subject("recipe", recipe, axes={"mesh_axes": "d"})
    eight = functools.partial(jgrad.adam, moment_dtype="8bit")
    skip = lambda rate=RATE, **axes: jgrad.skip_nonfinite(eight(rate), **axes)
    yield Subject("skip-8bit", skip, axes={"mesh_axes": "d"})
    rounded = lambda rate=RATE: jgrad.stochastic_rounding(eight(rate))
    yield Subject("rounded-8bit", rounded, jnp.bfloat16)
    small = lambda rate=RATE: jgrad.pack_small(jgrad.adam(rate), max_size=6144)
    yield Subject("pack_small", small)


def recipe(rate=RATE, **axes):
    clip = jgrad.clip_by_global_norm(0.01, **axes)
    inner = optax.chain(clip, jgrad.adam(rate, weight_decay=0.1))
    return jgrad.skip_nonfinite(jgrad.accumulate(inner, 2, **axes), **axes)


def model(seed, subject, form):
    """Parameters or gradients, of a scale of its own in each leaf."""
    rng = np.random.default_rng(seed)
    scales = (10.0 ** (i - 2) for i in range(len(SHAPES)))
    numbers = {
        name: scale * rng.normal(size=shape)
        for (name, shape), scale in zip(SHAPES.items(), scales, strict=True)
    }
    tree = {name: jnp.asarray(x, subject.dtype) for name, x in numbers.items()}
    return jgrad.pack(tree, multiple_of=8) if form == "packed" else tree


def inputs(subject, form):
    """Parameters and gradients, of which the first has none for a leaf."""
    gradients = [model(1 + t, subject, form) for t in range(STEPS)]
    first = jgrad.unpack(gradients[0]) if form == "packed" else gradients[0]
    first = first | {"b": jnp.zeros_like(first["b"])}
    gradients[0] = jgrad.pack(first, multiple_of=8) if form == "packed" else first
    return model(0, subject, form), gradients


# ---- the surroundings --------------------------------------------------------------------------


def trained(tx, w, gradients, state=None, step=None):
    step = jax.jit(step_of(tx)) if step is None else step
    state = jax.jit(tx.init)(w) if state is None else state
    for g in gradients:
        w, state = step(w, state, g)
    return jax.device_get((w, state))


def alone(subject, form):
    return trained(subject.make(), *inputs(subject, form))


def under_x64(subject, form):
    """Parameters stay in their dtype; Python's numbers are int64 and float64."""
    with in_64_bits():
        return trained(subject.make(), *inputs(subject, form))


def with_other_promotion(subject, form):
    """The suite's own settings are the strict ones."""
    assert jax.config.jax_numpy_dtype_promotion == "strict"
    assert jax.config.jax_numpy_rank_promotion == "raise"
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return alone(subject, form)


def eager(subject, form):
    tx = subject.make()
    w, gradients = inputs(subject, form)
    return trained(tx, w, gradients, tx.init(w), step_of(tx))


def donated(subject, form):
    """Weights and state, in one trace; both moments of a new state have buffers of their own."""
    tx = subject.make()
    w, gradients = inputs(subject, form)
    before = w, tx.init(w)
    step = jax.jit(chex.assert_max_traces(step_of(tx), n=1), donate_argnums=(0, 1))
    after = trained(tx, w, gradients, before[1], step)
    assert all(x.is_deleted() for x in jax.tree.leaves(before))
    return after


def exported(subject, form):
    """The step is lowered for machines that are not at hand, too."""
    tx = subject.make()
    w, gradients = inputs(subject, form)
    state, platforms = jax.jit(tx.init)(w), ("cpu", "cuda", "tpu")
    step = export.export(jax.jit(step_of(tx)), platforms=platforms)(w, state, gradients[0])
    assert step.platforms == platforms
    return trained(tx, w, gradients, state, step.call)


def on_another(platform, subject, form):
    """What depends on the platform is that of a GPU, or of a TPU."""
    tx = subject.make()
    w, gradients = inputs(subject, form)
    return trained(tx, w, gradients, step=as_on(platform, step_of(tx)))


def in_a_scan(subject, form):
    """Dtypes of the state are stable."""
    w, gradients = inputs(subject, form)
    return jax.device_get(jax.jit(functools.partial(by_scan, subject.make()))(w, stack(gradients)))


def beside_another_model(subject, form):
    """Under `vmap`, with a model whose numbers are others."""
    models = inputs(subject, form)
    others = jax.tree.map(lambda x: (100 * x + 1).astype(x.dtype), models)
    w, gradients = stack([models, others])
    run = jax.jit(jax.vmap(functools.partial(by_scan, subject.make()), in_axes=(0, 1)))
    found = jax.device_get(run(w, stack(gradients)))
    return jax.tree.map(lambda x: x[0], found)


def on_a_mesh(axis_type, spec):
    def run(subject, form):
        mesh = mesh_of(axis_type, d=8)
        place = lambda x: NamedSharding(mesh, P("d") if form == "packed" else spec(x))
        put = lambda tree: jax.tree.map(lambda x: jax.device_put(x, place(x)), tree)
        w, gradients = inputs(subject, form)
        w, gradients, tx = put(w), [put(g) for g in gradients], subject.make()
        # The state that `init` makes, eagerly, and the one that `state_shardings` places.
        state = tx.init(w)
        shardings = jgrad.state_shardings(tx, w)
        jax.tree.map(lambda x, s: s.shard_shape(x.shape), state, shardings)
        if axis_type == AxisType.Explicit:
            # Results lie where arguments do: a carry of another type is an error of JAX.
            body = lambda carry, _: (step_of(tx)(*carry, gradients[0]), None)
            jax.eval_shape(lambda carry: jax.lax.scan(body, carry, length=2), (w, state))
        return trained(tx, w, gradients, state)

    return run


def rows(x):
    return P("d")


def columns(x):
    return P(*[None] * (x.ndim - 1), "d")


def in_shard_map(subject, form, sharded=False):
    """With types that say what varies over devices: replicated, or each device with its rows."""
    mesh, spec = mesh_of(d=8), P("d") if sharded else P()
    w, gradients = jax.device_put(inputs(subject, form), NamedSharding(mesh, spec))
    # Outside there is no axis for norms, nor is it needed.
    state, tx = subject.make().init(w), subject.make(**subject.axes if sharded else {})
    states = jax.tree.map(lambda x: x.sharding.spec, state)
    step = jax.shard_map(
        step_of(tx), mesh=mesh, in_specs=(spec, states, spec), out_specs=(spec, states)
    )
    return trained(tx, w, gradients, state, jax.jit(step))


# Leaves that are on all devices have a part of no norm, though one name is given for all leaves.
MIXED = {"w": P(None, "d"), "up": P("d"), "b": P(), "v": P("d")}
MODELS = 2


def by_scan(tx, w, gradients):
    """Whole training, `init`, too."""

    def step(carry, g):
        return step_of(tx)(*carry, g), None

    return jax.lax.scan(step, (w, tx.init(w)), gradients)[0]


def mapped(subject, form, where):
    """Several models in `shard_map`, trained by a scan there; `vmap` is inside or around."""
    w, gradients = inputs(subject, form)
    models = jax.tree.map(lambda x: jnp.stack([x] * MODELS), (w, stack(gradients)))
    mesh = mesh_of(d=2)
    make = functools.partial(jax.shard_map, mesh=mesh)
    if where == "models":  # each device has some of its own
        axes = {"mesh_axes": P()} if has_specs(subject) else {}
        train = functools.partial(by_scan, subject.make(**axes))
        run = make(jax.vmap(train), in_specs=P("d"), out_specs=P("d"))
    else:
        own = {"mesh_axes": MIXED} if has_specs(subject) else {}
        train = functools.partial(by_scan, subject.make(**(subject.axes | own)))
        shardings = jax.tree.map(lambda x: NamedSharding(mesh, x), MIXED)
        of_state = jgrad.state_shardings(subject.make(), w, shardings)
        own = MIXED, jax.tree.map(lambda x: x.spec, of_state)
        of_gradients = jax.tree.map(lambda x: P(None, *x), MIXED)
        if where == "around":
            run = jax.vmap(make(train, in_specs=(MIXED, of_gradients), out_specs=own))
        else:
            specs = jax.tree.map(lambda x: P(None, *x), ((MIXED, of_gradients), own))
            run = make(jax.vmap(train), in_specs=specs[0], out_specs=specs[1])
    return run, models


def under_vmap(subject, form, where):
    run, models = mapped(subject, form, where)
    found = jax.device_get(jax.jit(run)(*models))
    # Random bits of what varies along a mesh axis are its device's, and each has one model.
    is_rounded = subject.name.endswith(("-8bit", "-bf16"))
    alike = 1 if where == "models" and is_rounded else MODELS
    first, *others = (jax.tree.map(lambda x, i=i: x[i], found) for i in range(alike))
    for other in others:
        assert_equal(other, first)
    return first


def injected(subject, form):
    """Every number is an array, and traced; what is no number is named, and so are counts."""
    make, options = subject.injectable
    defaults = {name: x.default for name, x in inspect.signature(make).parameters.items()}
    counts = ("fraction",)  # of rows
    static = [name for name, x in options.items() if not isinstance(x, float) or name in counts]
    static += [name for name, x in defaults.items() if type(x) is int and name not in static]
    tx = optax.inject_hyperparams(make, static_args=static)(**options)
    w, gradients = inputs(subject, form)
    step = jax.jit(chex.assert_max_traces(step_of(tx), n=1))
    found = trained(tx, w, gradients, step=step)
    found[1].hyperparams["learning_rate"] = np.float32(2 * RATE)
    step(w, found[1], gradients[0])  # another number, and no other trace
    return found[0], found[1].inner_state


def closed_over(subject, form):
    """Weights, state and gradients are constants of the program, whose one argument is the rate."""
    w, gradients = inputs(subject, form)
    state = jax.jit(lambda: subject.make().init(w))()
    step = lambda rate, *given: step_of(subject.make(rate))(*given)
    for g in gradients:
        w, state = jax.jit(lambda rate, given=(w, state, g): step(rate, *given))(RATE)
    return jax.device_get((w, state))


SURROUNDINGS = {
    "x64": under_x64,
    "other promotion": with_other_promotion,
    "eager": eager,
    "donated": donated,
    "exported": exported,
    "cuda": functools.partial(on_another, "cuda"),
    "tpu": functools.partial(on_another, "tpu"),
    "scan": in_a_scan,
    "vmap": beside_another_model,
    "auto": on_a_mesh(AxisType.Auto, rows),
    "explicit": on_a_mesh(AxisType.Explicit, rows),
    "explicit columns": on_a_mesh(AxisType.Explicit, columns),
    "shard_map": in_shard_map,
    "shard_map, sharded": functools.partial(in_shard_map, sharded=True),
    "vmap in shard_map": functools.partial(under_vmap, where="inside"),
    "vmap of shard_map": functools.partial(under_vmap, where="around"),
    "models in shard_map": functools.partial(under_vmap, where="models"),
    "injected": injected,
    "closed over": closed_over,
}


UNPACKED = {case.name for case in CASES if not case.packs}
NOT_ON_A_CPU = {"cuda": ("soap", "offload"), "tpu": ("soap", "offload", "8bit")}
SHARDED = ("shard_map, sharded", "vmap in shard_map", "vmap of shard_map")


def has_specs(subject):
    """Whether leaves have each a name for their sharded axes."""
    return subject.axes is not None and isinstance(subject.axes.get("mesh_axes"), dict)


def is_there(subject, form, where):
    if any(word in subject.name for word in NOT_ON_A_CPU.get(where, ())):  # operations of theirs
        return False
    if form == "packed" and subject.name.partition("-")[0] in UNPACKED:
        return False
    if form == "packed" and (subject.name == "pack_small" or where == "explicit columns"):
        return False
    if where in SHARDED:  # packed, it is `zero`'s
        # Blocks, and the packed leaves of a part of the model, are others in a shard.
        local = where != "shard_map, sharded" and (
            "8bit" in subject.name or subject.name == "pack_small"
        )
        return form == "tree" and subject.axes is not None and not local
    if where == "models in shard_map":
        return subject.name != "offload"
    return where != "injected" or subject.injectable is not None


def choices():
    for choice in itertools.product(subjects(), ("tree", "packed"), SURROUNDINGS):
        if is_there(*choice):
            subject, form, where = choice
            yield pytest.param(*choice, id=f"{subject.name}-{form}-{where}")


def subject_of(name):
    return next(subject for subject in subjects() if subject.name == name)


@functools.lru_cache(maxsize=4)
def expected_of(name, form):
    return alone(subject_of(name), form)


def tolerance_of(subject, where):
    """Of the largest step: a few roundings, or what becomes of them."""
    if where == "injected" and "soap" not in subject.name:
        return 1e-4  # 1 - beta2 of a traced float32 beta2 is right to 5e-5 only
    if where in SHARDED and is_rounded(subject):
        return 0.3  # elements are counted in each shard, so that other bits round them
    if "soap" in subject.name:
        return 1e-3  # eigenvectors turn by roundings, divided by the distance of eigenvalues
    return 1e-4 if "muon" in subject.name else 1e-5  # fifteen products, one after the other


def is_rounded(subject):
    """Whether moments or weights are rounded stochastically."""
    return subject.dtype != jnp.float32 or "bit" in subject.name or "bf16" in subject.name


def neighbours_of(subject, where):
    """The largest fraction of weights that may differ by more, where another bit was rounded."""
    if not is_rounded(subject):
        return 0
    if "soap" in subject.name:
        return 0.05  # by up to 1e-3: a fiftieth of a spacing in 8 bits
    # The second moments differ by 5e-5 there: 1/80 of a spacing of bfloat16, hence of 1.3% the code.
    # The neighbour of a code near 0 turns Lion's sign, and with it a whole step; or a cautious decay.
    turns = "lion" in subject.name or "dion3" in subject.name
    return 0.013 if where == "injected" or turns else 0.002


@pytest.mark.slow(always=["gradient_descent-tree-x64", "adam-8bit-packed-other promotion",
    "adam-8bit-packed-donated", "adam-8bit-tree-injected", "momentum-tree-auto",
    "lamb-packed-cuda", "muon-tree-tpu", "pack_small-tree-cuda"])  # fmt: skip
@pytest.mark.parametrize(("subject", "form", "where"), list(choices()))
def test_e19_e42_as_alone(subject, form, where):
    """The dtypes, the numbers to a few roundings of weights and steps.

    A rounding may turn a code, or the last bit of a weight in bfloat16, into its neighbour: of a few
    elements.
    """
    if where in SHARDED and "vmap" in where:
        oldest.skip("sums that vary")
    found = SURROUNDINGS[where](subject, form)
    expected = expected_of(subject.name, form)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    assert all((a.dtype, a.shape) == (b.dtype, b.shape) for a, b in pairs)
    start, tolerance = jax.device_get(inputs(subject, form)[0]), tolerance_of(subject, where)
    for a, b, w in zip(*map(jax.tree.leaves, (found[0], expected[0], start)), strict=True):
        a, b, w = (x.astype(np.float64) for x in (a, b, w))
        far = np.abs(a - b) > tolerance * np.max(np.abs(b - w)) + 2.5e-7 * np.abs(b)
        assert np.mean(far) <= neighbours_of(subject, where), np.max(np.abs(a - b))


@pytest.mark.not_in_jax_0_8("sums that vary")
@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("name", ["lamb_masked", "hyperball", "soap", "adafactor_factored"])
def test_types_under_vmap(name, where):
    """What varies over devices is in the types, so that a trace is enough to see an error."""
    run, models = mapped(subject_of(name), "tree", where)
    jax.eval_shape(run, *models)


@pytest.mark.slow(always=["soap"])
@pytest.mark.parametrize("subject", list(subjects()), ids=lambda x: x.name)
def test_eager_updates_compile_nothing_after_the_second(subject):
    """A conditional of functions that each call makes anew is compiled in each, and kept."""
    tx = subject.make()
    w, g = ({k: model(i, subject, "tree")[k] for k in ("up", "b")} for i in (0, 1))
    states = [tx.init(w)]

    def update(_):
        states.append(tx.update(g, states.pop(), w)[1])

    compilations(update, 1, 2)
    assert compilations(update, 3, 4) == 0
