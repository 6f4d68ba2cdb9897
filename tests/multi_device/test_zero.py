"""`zero`: each device has a shard of the state, and the numbers are those of the whole."""

from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jgrad
from benchmarks import collectives
from tests.cases import CASES, MASK, ONE_EACH
from tests.multi_device.meshes import mesh_of, place, specs_of
from tests.support import messages
from tests.support.loops import assert_equal, stack
from tests.support.packed_model import DECAYS, PER_ELEMENT, RATES, assert_close, normal
from tests.wrappers.test_every_wrapper import WRAPPERS

pytestmark = pytest.mark.slow

DEVICES = 8
apply_updates = jax.jit(optax.apply_updates)


def packed_model(dtype=jnp.float32, **layout):
    return jgrad.pack(normal(0, dtype), multiple_of=DEVICES, **layout)


def gradients(packed, steps=3):
    """For each step a tree with an axis for devices; those of one leaf vanish at first."""
    found = []
    for step in range(steps):
        each = []
        for device in range(DEVICES):
            g = normal(1 + step * DEVICES + device)
            if step == 0:
                g["layer"]["b"] = jnp.zeros_like(g["layer"]["b"])
            dtypes = jax.tree.map(lambda g, p: g.astype(p.dtype), g, jgrad.unpack(packed))
            each.append(jgrad.pack(dtypes, like=packed))
        found.append(stack(each))
    return found


def averaged(tx, axes):
    """What `zero` stands for: on each device the mean, and all of the state."""
    update = lambda g, state, w: tx.update(jax.lax.pmean(g, axes), state, w)
    return optax.GradientTransformation(tx.init, update)


class Sharded:
    """`zero(tx)` in `shard_map`: the state of each device is a shard; or `averaged(tx)`, whole."""

    def __init__(self, tx, packed, axes="data", mesh=None, check=False, *, whole=False):
        self.mesh = mesh_of(data=DEVICES) if mesh is None else mesh
        self.tx = averaged(tx, axes) if whole else jgrad.zero(tx, axes)
        packed = place(packed, self.mesh, P())
        over = None if whole else axes
        shardings = jgrad.state_shardings(self.tx, packed, shard_over=over)
        self.specs = specs_of(shardings)
        self.state = jax.jit(self.tx.init, out_shardings=shardings)(packed)
        self.traces = 0

        def update(w, state, g):
            self.traces += 1
            return self.tx.update(jax.tree.map(lambda x: x[0], g), state, w)

        self.update = jax.jit(
            jax.shard_map(
                update,
                mesh=self.mesh,
                in_specs=(P(), self.specs, P(axes)),
                out_specs=(P(), self.specs),
                check_vma=check,
            )
        )


def train(run, w, grads):
    """Parameters and state after each step.

    Parameters are updated in a program of its own: in one with the update, XLA rounds the product
    of rate and direction and its sum with the weight at once, unless there is a gather between.
    """
    w, state = place(w, run.mesh, P()), run.state
    for g in grads:
        updates, state = run.update(w, state, g)
        w = jax.block_until_ready(apply_updates(w, updates))
    return w, state


def assert_same(tx, *, exact, packed=None, grads=None, **options):
    packed = packed_model() if packed is None else packed
    grads = gradients(packed) if grads is None else grads
    sharded = Sharded(tx, packed, **options)
    found = train(sharded, packed, grads)
    options.pop("check", None)
    expected = train(Sharded(tx, packed, **options, whole=True), packed, grads)
    (assert_equal if exact else assert_close)(found, expected)
    assert sharded.traces == 1
    return found


# ---- the numbers of the whole --------------------------------------------------------------------


@pytest.mark.slow(always=["adamw"])
@pytest.mark.bits
@pytest.mark.parametrize("case", [x for x in CASES if x.packs], ids=str)
def test_every_optimizer(case):
    """Bit for bit where each element is on its own; layers of which a device has a part, or none."""
    assert_same(case.tx(), exact=case.elementwise)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [x for x in WRAPPERS if x.dtype == jnp.float32], ids=str)
def test_every_wrapper(wrapper):
    """Inside of it, but for `offload`, which belongs outside."""
    if wrapper.name != "offload":
        assert_same(wrapper.around(jgrad.adam(0.1)), exact=False)


OPTIONS = {
    "a rate for each leaf": jgrad.adam(RATES),
    "a rate for each element": jgrad.adam(PER_ELEMENT),
    "a decay for each leaf": jgrad.adam(0.1, weight_decay=DECAYS),
    "a schedule": jgrad.adam(optax.linear_schedule(0.1, 0.0, 3)),
    "sqrt": optax.adam(0.1),
    "clipped": optax.chain(jgrad.clip_by_global_norm(0.1), jgrad.adam(0.1)),
    "averaged": jgrad.average_params(jgrad.adam(0.1), 0.9),
    "layers": jgrad.lamb(RATES, weight_decay=DECAYS, trust_ratio_mask=MASK),
    "a ratio": optax.chain(
        jgrad.scale_by_adam(), jgrad.scale_by_trust_ratio(), optax.scale(-0.1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    norms = name in ("clipped", "layers", "a ratio")
    with jax.numpy_dtype_promotion("standard"):  # for optax
        assert_same(OPTIONS[name], exact=not norms)


def mixed():
    """A buffer for each dtype."""
    w = normal(0)
    w["rest"] = [x.astype(jnp.bfloat16) for x in w["rest"]]
    return jgrad.pack(w, multiple_of=DEVICES)


@pytest.mark.parametrize("scale", [1e-25, 1e20])
def test_norms_at_every_scale(scale):
    """The way of rescaled sums, on devices that have a part of a layer, or none of it."""
    packed = jax.tree.map(lambda x: scale * x, packed_model())
    assert_same(jgrad.lamb(0.1), exact=False, packed=packed, grads=gradients(packed, 2))


SURROUNDINGS = {
    # float32 copies in the state
    "mixed dtypes": lambda: assert_same(jgrad.master_weights(jgrad.adam(0.1)), exact=True, packed=mixed()),
    # `shard_map` checks what is the same on all devices, unless it is told not to.
    "known types": lambda: assert_same(jgrad.lamb(0.1), exact=False, check=True),
    # Rows are divided over both, in their order.
    "two axes": lambda: assert_same(jgrad.lamb(0.1), exact=False, mesh=mesh_of(a=2, b=4), axes=("a", "b")),
}  # fmt: skip


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings(name):
    SURROUNDINGS[name]()


# ---- around and inside ---------------------------------------------------------------------------


@pytest.mark.slow(always=True)
def test_a_step_that_is_not_finite_on_one_device_is_skipped_on_all():
    packed = packed_model()
    grads = gradients(packed, 2)
    grads[1].buffers["float32"] = grads[1].buffers["float32"].at[3, 5, 7].set(jnp.inf)
    tx = jgrad.skip_nonfinite(jgrad.adam(0.1), loss_scale=2.0**15)
    _, state = assert_same(tx, exact=True, packed=packed, grads=grads)
    assert state.skipped == 1
    assert {int(x.data) for x in state.skipped.addressable_shards} == {1}


def test_layers_shard_over_a_model_axis():
    """Parameters cut over one axis, their state over the other as well."""
    mesh = mesh_of(data=4, model=2)
    w = {"w": normal(0)["layer"]["w"], "h": normal(1)["rest"][2].reshape(20, 15)}
    grads = [jax.tree.map(lambda x, i=i: jnp.cos(x + i), w) for i in range(4)]
    tx = jgrad.lamb(0.1, weight_decay=0.1, mesh_axes="model")

    def update(w, g):
        packed = jgrad.pack(w, multiple_of=4)
        of_zero = jgrad.zero(tx, "data")
        g = jgrad.pack(jax.tree.map(lambda x: x[0], g), like=packed)
        updates, state = of_zero.update(g, of_zero.init(packed), packed)
        assert state.mw.buffers["float32"].shape[0] * 4 == packed.buffers["float32"].shape[0]
        return optax.apply_updates(w, jgrad.unpack(updates))

    found = jax.jit(
        jax.shard_map(
            update,
            mesh=mesh,
            in_specs=(P("model"), P("data", "model")),
            out_specs=P("model"),
            check_vma=False,
        )
    )(w, stack(grads))
    whole = jgrad.lamb(0.1, weight_decay=0.1)
    mean = jax.tree.map(lambda *x: sum(x) / 4, *grads)
    updates, _ = whole.update(mean, whole.init(w), w)
    assert_close(found, optax.apply_updates(w, updates), 1e-5)


@pytest.mark.parametrize("check", [True, False])
def test_devices_that_disagree(check):
    """On whether gradients are finite: the norms inside of the window wait for all devices."""
    packed = packed_model()
    run = Sharded(jgrad.accumulate(jgrad.lamb(0.1), 1), packed)

    def update(w, state, g):
        finite = jax.lax.axis_index("data") != 3
        return run.tx.update(jax.tree.map(lambda x: x[0], g), state, w, finite=finite)

    mapped = jax.shard_map(
        update,
        mesh=run.mesh,
        in_specs=(P(), run.specs, P("data")),
        out_specs=(P(), run.specs),
        check_vma=check,
    )
    updates, state = jax.jit(mapped)(packed, run.state, gradients(packed, 1)[0])
    assert state.skipped == 1
    assert not any(jnp.any(x) for x in jax.tree.leaves(updates))


def test_around_it():
    """Wrappers outside have to be told that devices see different gradients: then all skip alike."""
    packed = packed_model()
    outside = jgrad.accumulate(jgrad.zero(jgrad.adam(0.1), "i"), 2, mesh_axes="i")
    many = jax.tree.map(lambda x: jnp.stack([x] * DEVICES), packed)
    state = jax.pmap(outside.init, axis_name="i")(many)
    update = jax.pmap(outside.update, axis_name="i")
    grads = gradients(packed)
    grads[0].buffers["float32"] = grads[0].buffers["float32"].at[3].set(jnp.nan)
    for g in grads:
        updates, state = jax.block_until_ready(update(g, state, many))
        if g is grads[1]:  # the end of a window, of which one mini-batch is left
            tx = jgrad.adam(0.1)
            mean = jax.tree.map(lambda x: jnp.mean(x, 0), g)
            expected, _ = tx.update(mean, tx.init(packed), packed)
            assert_close(jax.tree.map(lambda x: x[5], updates), expected)
    assert state.skipped.tolist() == [1] * DEVICES
    assert state.count.tolist() == [1] * DEVICES


# ---- what it costs -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [1, 2])
@pytest.mark.parametrize(
    "case", [x for x in CASES if x.name in ONE_EACH and x.state and not x.has_matrices], ids=str
)
def test_one_reduce_scatter_and_one_all_gather_per_dtype(case, dtypes):
    """Norms are all-reduced, which are a few numbers for each layer."""
    packed = packed_model() if dtypes == 1 else mixed()
    run = Sharded(jgrad.master_weights(case.tx()), packed)
    compiled = run.update.lower(packed, run.state, gradients(packed, 1)[0]).compile()
    found = collectives.of(compiled.as_text(), DEVICES)
    kinds = Counter(x.kind for x in found)
    assert (kinds.pop("reduce-scatter"), kinds.pop("all-gather")) == (dtypes, dtypes)
    assert set(kinds) == (set() if case.elementwise else {"all-reduce"})
    both_norms = 2 * len(jax.tree.leaves(normal(0))) * 4
    assert max([x.whole for x in found if x.kind == "all-reduce"], default=0) <= both_norms


# ---- what is wrong -------------------------------------------------------------------------------


def inside(f, params=packed_model, *, check=False, cut=False):
    """A call in `shard_map` of the parameters that `params` makes, traced only."""
    mesh, specs = mesh_of(data=DEVICES), P("data") if cut else P()
    mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check)
    return lambda: jax.eval_shape(mapped, params())


def step(tx):
    return lambda w: tx.update(w, tx.init(w), w)[0]


def named(*names):
    """By equal shapes at the same rows."""
    return jgrad.pack(dict.fromkeys(names, jnp.ones(3)), multiple_of=DEVICES)


ZERO = jgrad.zero(jgrad.adam(0.1), "data")


@pytest.mark.slow(always=True)
def test_an_axis_of_several_that_is_not_there():
    """`init` does not take the inside of `shard_map` for the outside."""
    tx = jgrad.zero(jgrad.adam(0.1), ("data", "date"))
    with pytest.raises(NameError, match="date"):
        inside(tx.init, check=True)()


test_message = pytest.mark.slow(always=True)(messages.test_of("zero", globals()))
