"""A state in the form of another recipe."""

import functools
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.support import messages
from tests.support.eight_bits import unquantized
from tests.support.errors import assert_error
from tests.support.states import assert_same_bits

rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


W = {
    "embed": {"table": normal(9, 5)},
    "layers": [{"w": normal(64, 128), "b": normal(7)}, {"w": normal(64, 128), "b": normal(7)}],
}
GRADIENTS = [
    jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), W) for _ in range(8)
]
IS_MATRIX = {"embed": False, "layers": [{"w": True, "b": False}] * 2}


def trained(tx, steps=3, w=W, first=0):
    state = tx.init(w)
    return steps_of(tx, state, w, range(first, first + steps))


def steps_of(tx, state, w, numbers):
    update = jax.jit(tx.update)
    for i in numbers:
        updates, state = update(GRADIENTS[i], state, w)
        w = optax.apply_updates(w, updates)
    return w, state


def carried(old, tx, w=W, **options):
    """The new state; of the right form, and with no array twice."""
    like = jax.eval_shape(tx.init, w)
    state, account = jgrad.carry_over(old, like=like, **options)
    assert jax.tree.structure(state) == jax.tree.structure(like)
    found, expected = map(jax.tree.leaves, (state, like))
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
    pointers = [x.unsafe_buffer_pointer() for x in found if x.size]
    assert len(set(pointers)) == len(pointers)
    str(account)
    return state, account


def assert_close(found, expected, rtol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol, 1e-6), found, expected)


# ---- states of optax ---------------------------------------------------------------------------

OPTAX = {
    "sgd": (optax.sgd(0.1, momentum=0.9), jgrad.gradient_descent(0.1, momentum=0.9)),
    "lion": (optax.lion(0.1, weight_decay=0.0), jgrad.lion(0.1, weight_decay=0.0)),
    "clipped": (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
     optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.adam(1e-2))),
    "injected": (optax.inject_hyperparams(optax.adam)(1e-2), jgrad.adam(1e-2)),
    "apply_if_finite": (optax.apply_if_finite(optax.adam(1e-2), 3), jgrad.skip_nonfinite(jgrad.adam(1e-2))),
    "in 16 steps of 4": (optax.MultiSteps(optax.adam(1e-2), 4), jgrad.accumulate(jgrad.adam(1e-2), 4)),
    "multi_transform": (optax.partition({"a": optax.adam(1e-2), "b": optax.adam(1e-2)}, lambda w: _labels("a", "b")),
     jgrad.adam(1e-2)),
}  # fmt: skip


def _labels(of_matrices, of_others):
    return jax.tree.map(lambda x: of_matrices if x.shape == (64, 128) else of_others, W)


@pytest.mark.slow(one_in=10)
@pytest.mark.parametrize("name", OPTAX)
def test_training_goes_on_as_optax_would(name, standard_promotion):
    theirs, ours = OPTAX[name]
    w, old = trained(theirs)  # of a window of four mini-batches, three
    state, _ = carried(old, ours, momentum="keep" if name in ("sgd", "lion") else None)
    expected = steps_of(theirs, old, w, range(3, 8))[0]
    assert_close(steps_of(ours, state, w, range(3, 8))[0], expected)


def test_frozen_leaves_of_a_partition(standard_promotion):
    labels = _labels("train", "freeze")
    theirs = optax.partition({"train": optax.adam(1e-2), "freeze": optax.set_to_zero()}, labels)
    w, old = trained(theirs)
    state, account = carried(old, jgrad.adam(1e-2))
    assert account.kept == (
        "step",
        *("mw/layers/0/w", "mw/layers/1/w", "vw/layers/0/w", "vw/layers/1/w"),
    )
    assert len(account.zero) == 6
    assert "vw of 3 leaves: zero beside a step that is kept" in str(account)
    assert int(state.step) == 3
    masked = optax.masked(jgrad.adam(1e-2), IS_MATRIX)
    frozen, account = carried(state, masked)
    assert len(account.dropped) == 6
    expected = steps_of(theirs, old, w, range(3, 6))[0]["layers"][0]["w"]
    found = steps_of(masked, frozen, w, range(3, 6))[0]["layers"][0]["w"]
    assert_close(found, expected)


# ---- recipes of jgrad --------------------------------------------------------------------------


@functools.cache
def make(**options):
    """One for the same options, so that it is compiled once."""
    return jgrad.adam(1e-2, **options)


def all_of_it(tx):
    return jgrad.skip_nonfinite(jgrad.accumulate(jgrad.stochastic_rounding(tx), 2))


@pytest.mark.slow
@pytest.mark.parametrize("pack", [lambda x: x, jgrad.pack], ids=["tree", "packed"])
def test_8_bits_and_layouts(pack):
    """From and to every form, with the same codes as by one way alone."""
    eight, half = make(moment_dtype="8bit"), make(moment_dtype=jnp.bfloat16)
    state = trained(make(), 3)[1]
    codes, account = carried(state, eight, pack(W))
    assert "mw/layers/0/w" in account.converted
    direct = jgrad.carry_over(state, like=jax.eval_shape(eight.init, W))[0]
    for i in range(2):  # leaves of the buffer that are stored in 8 bits on the tree, too
        found = jgrad.unpack(codes).mw["layers"][i]["w"]
        assert_same_bits(found, direct.mw["layers"][i]["w"])
    arrays, _ = carried(codes, make())
    assert_same_bits(unquantized(carried(arrays, eight, pack(W))[0]), unquantized(codes))
    rounded, _ = carried(state, half, pack(W))
    assert_same_bits(
        carried(rounded, half)[0].mw, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.mw)
    )
    assert_same_bits(carried(carried(state, make(), pack(W))[0], make())[0], state)


MUON = jgrad.muon(1e-2, matrices=IS_MATRIX, adam_learning_rate=1e-3)
NORMUON = jgrad.muon(1e-2, matrices=IS_MATRIX, adam_learning_rate=1e-3, rule="normuon")


@pytest.mark.parametrize("max_size", [None, 1000], ids=["tree", "packed"])
def test_adam_to_muon_and_back(max_size):
    """Second moments of matrices are dropped, and never made up: these begin anew as a whole."""
    w = W if max_size is None else jgrad.pack(W, max_size=max_size)
    old = trained(make())[1]
    state, account = carried(old, MUON, w, momentum="keep")
    matrices = ("vw/layers/0/w", "vw/layers/1/w")
    assert account.dropped == matrices
    assert_same_bits(jgrad.unpack(state).mw, old.mw)
    for before, tx in (state, make()), (old, NORMUON), (state, NORMUON):
        with pytest.raises(ValueError, match=r"vw/layers/0/w, .* `tx.init\(params\)`, .* `reset=`"):
            carried(before, tx, momentum="keep")
        again, account = carried(before, tx, reset=IS_MATRIX, params=W)
        assert account.reset == (*(x.replace("vw", "mw") for x in matrices), *matrices)
        is_adams = "vw of 2 leaves: zero beside a step that is kept" in str(account)
        assert is_adams == (tx is not NORMUON)
        assert not again.mw["layers"][0]["w"].any()
        assert_same_bits((again.mw["embed"], again.vw["embed"]), (old.mw["embed"], old.vw["embed"]))
    per_output = trained(NORMUON)[1]
    assert not carried(per_output, NORMUON)[1].dropped
    assert carried(per_output, MUON, momentum="keep")[1].dropped == matrices


def test_bfloat16_weights():
    """Copies of weights are made of the parameters; averages of the float32 copies."""
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), W)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    old = make().init(W)
    master = jgrad.master_weights(make())
    state, account = carried(old, master, half, params=half)
    assert_same_bits(state.master, wide)
    assert len(account.of_weights) == 5
    moved = state._replace(master=W)
    with_ema = jgrad.master_weights(jgrad.average_params(make(), 0.9))
    averaged, account = carried(moved, with_ema, half)
    assert_same_bits((averaged.master, averaged.inner.average), (W, W))
    assert "average_params.average, 5 leaves: the float32 copies" in str(account)
    removed, account = carried(moved, make())
    assert_same_bits(removed, state.inner)
    assert len(account.dropped) == 5


def test_wrappers_of_users():
    """A part that is not known is found by its fields; what is new of it starts as in `like`."""
    from tests.wrappers.test_hand_over import slowly

    tx = slowly(make(), 0.5)
    old = trained(tx)[1]
    state, account = carried(old, jgrad.skip_nonfinite(tx))
    assert_same_bits(state.inner, old)
    assert "slow/embed/table" in account.kept
    like = tx.init(W)
    state, account = jgrad.carry_over(make().init(W), like=like)
    assert_same_bits(state.slow, like.slow)
    assert len(account.from_like) == 5
    assert_error(
        ValueError,
        "carry_over: `like` at .slow['embed']['table']: the shape of a part that `old` does not have, "
        "and that starts at unknown numbers, expected arrays: `like=tx.init(params)`.",
        lambda: carried(make().init(W), tx),
    )


class Spikes(NamedTuple):
    skipped: Any
    losses: Any
    inner: Any


class Watch(NamedTuple):
    report: Any
    inner: Any


def test_other_fields():
    """Numbers of wrappers that are not known: kept where they fit, else as in `like`."""
    core = make().init(W)
    report = {"grad_norm": {"embed/table": jnp.ones(()), "layers": jnp.ones(2)}}
    old = Watch(report, Spikes(jnp.asarray(3), jnp.ones(8), core))
    like = Spikes(jnp.asarray(0), jnp.full(8, jnp.nan), Watch(report, core))
    state, account = jgrad.carry_over(old, like=like, strict=True)
    assert_same_bits(state, Spikes(old.inner.skipped, old.inner.losses, Watch(report, core)))
    assert account.kept[:3] == ("skipped", "losses", "step")  # reports are measured again
    other = like._replace(losses=jnp.full(4, jnp.nan))  # another window
    state, account = jgrad.carry_over(old, like=other)
    assert_same_bits((state.skipped, state.losses), (other.skipped, other.losses))
    assert account.from_like == account.dropped == ("skipped", "losses")
    shapes = jax.eval_shape(lambda: Watch(report, core))
    state, account = jgrad.carry_over(core, like=shapes)
    assert not jax.tree.leaves(state.report)[0]
    assert not account.zero


# ---- paths -------------------------------------------------------------------------------------


def test_renamed_leaves():
    old = trained(make())[1]
    new = {"tokens": W["embed"], "blocks": {"0": W["layers"][0], "last": W["layers"][1]}}
    rename = {"embed": "tokens", "layers": "blocks", "layers/1": "blocks/last"}
    state, account = carried(old, make(), new, rename=rename, strict=True)
    assert_same_bits(state.mw["blocks"]["last"], old.mw["layers"][1])
    assert_same_bits(state.vw["tokens"], old.vw["embed"])
    assert account.kept[:2] == ("step", "mw/blocks/0/b")
    without = {"blocks": new["blocks"]}
    _, account = carried(old, make(), without, rename={"layers/1": "blocks/last"})
    assert account.dropped == tuple(
        f"{x}/{y}" for x in ("mw", "vw") for y in ("embed/table", "layers/0/b", "layers/0/w")
    )


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize(
    "tx", [make(), jgrad.pack_small(make()), all_of_it(make(moment_dtype="8bit"))]
)
def test_reset(tx):
    mask = {"embed": True, "layers": [False, {"w": True, "b": False}]}
    chosen = ("embed/table", "layers/1/w")

    def by_shape(shapes):
        assert shapes["embed"]["table"].shape == (9, 5)
        return mask

    old = trained(tx, 4)[1]
    rules = jgrad.by_path({"embed/*": True, "layers/1/w": True}, rest=False)
    for reset in mask, by_shape, rules:
        for params in None, W, jax.eval_shape(lambda: W):
            state, account = carried(old, tx, reset=reset, params=params, strict=True)
            assert account.reset == tuple(f"{x}/{y}" for x in ("mw", "vw") for y in chosen)
            for name in "mw", "vw":
                found = unquantized(jgrad.unpack(optax.tree.get(state, name)))
                before = unquantized(jgrad.unpack(optax.tree.get(old, name)))
                assert not found["embed"]["table"].any()
                assert not found["layers"][1]["w"].any()
                assert_same_bits(found["layers"][0], before["layers"][0])


def test_reset_by_a_function_of_numpy():
    """It sees shapes and dtypes as JAX has them, also of numbers."""
    params = {"w": np.ones((3, 2)), "n": np.arange(2), "x": 1.5}
    seen = []
    tx = jgrad.adam(0.1)
    old = tx.init(params)

    def reset(shapes):
        seen.append({name: (x.shape, x.dtype.name) for name, x in shapes.items()})
        return jax.eval_shape(lambda tree: tree, shapes) and {"w": True, "n": False, "x": False}

    _, account = carried(old, tx, params, reset=reset, params=params)
    assert account.reset == ("mw/w", "vw/w")
    assert seen == [{"w": ((3, 2), "float32"), "n": ((2,), "int32"), "x": ((), "float32")}]


# ---- where it runs -----------------------------------------------------------------------------


def test_under_jit():
    """The account is static."""
    tx = all_of_it(MUON)
    old = trained(make())[1]
    like = jax.eval_shape(tx.init, W)
    call = functools.partial(jgrad.carry_over, like=like, momentum="keep")
    state, account = jax.jit(call)(old)
    expected, same = call(old)
    assert account == same
    assert hash(account) == hash(same)
    assert_same_bits(state, expected)
    assert jax.eval_shape(call, old)[1] == same


@pytest.mark.slow
def test_sharded_leaves():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    w = {"w": jax.device_put(normal(64, 256), place)}
    tx = jgrad.lamb(1e-2)
    old = tx.init(w)
    new = jgrad.accumulate(make(moment_dtype="8bit"), 2)
    state, _ = jgrad.carry_over(old, like=jax.eval_shape(new.init, w))
    for x in (state.total["w"], state.inner.mw["w"].codes, state.inner.vw["w"].codes):
        assert x.sharding.spec == place.spec
    assert int(new.update(w, state, w)[1].mini_step) == 1


def test_inside_shard_map():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    w = normal(64, 256)

    def call(w):
        old = make().init(w)
        like = jax.eval_shape(jgrad.skip_nonfinite(make()).init, w)
        return jgrad.carry_over(old._replace(mw=w), like=like)[0].inner.mw

    assert_same_bits(jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec))(w), w)


def test_models_under_vmap():
    models = jax.tree.map(lambda x: jnp.stack([x, x + 1]), W)
    old = jax.vmap(make().init)(models)
    tx = jgrad.skip_nonfinite(make())
    like = jax.eval_shape(jax.vmap(tx.init), models)
    found = jax.vmap(lambda x: jgrad.carry_over(x, like=jax.eval_shape(tx.init, W))[0])(old)
    assert_same_bits(
        found, jgrad.carry_over(old, like=like)[0]._replace(loss_scale=found.loss_scale)
    )


def test_x64(x64):
    w = jax.tree.map(lambda x: x.astype(jnp.float64), W)
    old = make().init(w)
    assert old.mw["embed"]["table"].dtype == jnp.float64
    state, account = carried(
        old, jgrad.schedule_free(make(moment_dtype="8bit", full_precision=True)), w, params=w
    )
    assert_same_bits(state.inner, old)
    back, account = carried(old, make(), W)
    assert "float64 to float32" in str(account)
    assert_same_bits(back.vw, jax.tree.map(lambda x: x.astype(jnp.float32), old.vw))


def test_donation(standard_promotion):
    """What is made of one array twice is two arrays."""
    old = trained(make())[1]
    theirs = optax.adamw(optax.linear_schedule(1e-2, 0, 9))
    state, _ = carried(old, theirs)
    step = jax.jit(lambda s: theirs.update(GRADIENTS[0], s, W)[1], donate_argnums=0)
    assert int(step(state)[0].count) == 4


def test_offloaded():
    tx = jgrad.offload(make())
    old = tx.init(W)
    kind = jax.tree.leaves(old)[0].sharding.memory_kind
    state, _ = jgrad.carry_over(make().init(W), like=old)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state)} == {kind}
    like = jgrad.skip_nonfinite(MUON).init(W)
    state, _ = jgrad.carry_over(old, like=like, momentum="keep")
    usual = jax.tree.leaves(make().init(W))[0].sharding.memory_kind
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state)} == {usual}


# ---- the account, and errors -------------------------------------------------------------------


def test_the_account_is_short():
    """A line for the leaves of a part that went one way: one of them and a count, or the part."""
    w = {f"layer_{i}": {"w": jnp.ones((4, 3)), "b": jnp.ones(3)} for i in range(150)}
    masks = {name: {"w": True, "b": False} for name in w}
    muon = jgrad.muon(1e-2, matrices=masks, adam_learning_rate=1e-3)
    _, account = carried(make().init(w), muon, w, momentum="keep")
    assert len(account.kept) == 451
    assert str(account).splitlines() == [
        "kept       step",
        "kept       mw, 300 leaves",
        "kept       vw/layer_0/b and 149 more",
        "dropped    vw/layer_0/w and 149 more",
        "note       mw of 150 leaves: averages of gradients, as in `adam`, kept as momentum of "
        '`gradient_descent`, `lars`, `lion` or `muon` by `momentum="keep"`.',
    ]
    assert str(carried(make().init(w), make(), w)[1]) == (
        "kept       step\nkept       mw, 300 leaves\nkept       vw, 300 leaves"
    )


def test_strict():
    tx = jgrad.skip_nonfinite(MUON)
    assert_error(
        ValueError,
        "carry_over: `strict`: True, expected nothing dropped or new:\n"
        "from like  skip_nonfinite.loss_scale: 1; `like=tx.init(params)` has others\n"
        "zero       skip_nonfinite.skipped\n"
        "zero       skip_nonfinite.streak\n"
        "dropped    vw/layers/0/w and 1 more",
        lambda: carried(make().init(W), tx, strict=True, momentum="keep"),
    )
    scaled = jgrad.skip_nonfinite(make(), loss_scale=2.0**15)
    state, account = jgrad.carry_over(make().init(W), like=scaled.init(W))
    assert account.from_like[-1] == "skip_nonfinite.loss_scale"
    assert not account.zero
    assert float(state.loss_scale) == 2.0**15


OLD = make().init(W)
OTHER = {**W, "embed": {"table": jnp.ones((10, 5))}}
AVERAGED = jgrad.average_params(make(), 0.9)


# ---- windows, numbers of a user, reports -------------------------------------------------------

P = {"a": jnp.ones(3)}


def after(tx, calls, **extra):
    """The state after calls with gradients of ones."""
    state = tx.init(P)
    for x in calls:
        state = tx.update(P, state, P, **dict.fromkeys(extra, x))[1]
    return state


def test_numbers_of_inject_hyperparams_are_those_of_like():
    tx = optax.inject_hyperparams(jgrad.adam)(learning_rate=1e-3)
    state, _ = jgrad.carry_over(after(jgrad.adam(0.1), (1,)), like=tx.init(P))
    assert float(state.hyperparams["learning_rate"]) == pytest.approx(1e-3)
    assert float(state.hyperparams["beta1"]) == pytest.approx(0.9)


def test_reports_are_measured_again():
    """They are not new, nor lost."""
    old = after(jgrad.watch(jgrad.adam(0.1)), (1,))
    new = {"b": P["a"]}
    like = jax.eval_shape(jgrad.watch(jgrad.adam(0.1)).init, new)
    _, account = jgrad.carry_over(old, like=like, rename={"a": "b"}, strict=True)
    assert account.kept == ("step", "mw/b", "vw/b")


# ---- no moment is kept -------------------------------------------------------------------------

NONE_IS_KEPT = {
    "other parameters": (make().init(W), make().init({"x": P["a"], "y": P["a"]}),
     "mw/embed/table, mw/layers/0/b, mw/layers/0/w, none of which `like` would keep, expected mw/x, mw/y, vw/x"),
    "another moment": (optax.chain(optax.scale_by_rms(), optax.scale_by_schedule(lambda step: 0.1)).init(P),
     jgrad.gradient_descent(0.1, momentum=0.9).init(P), "vw/a, none of which `like` would keep, expected mw/a"),
}  # fmt: skip


@pytest.mark.parametrize("name", NONE_IS_KEPT)
def test_the_step_alone_is_not_a_state(name):
    """Moments that begin anew beside it are asked for."""
    old, like, problem = NONE_IS_KEPT[name]
    remedy = "name other paths by `rename`, or begin with zeros by `reset=True`"
    assert_error(
        ValueError,
        f"carry_over: `old`: {problem}: {remedy}.",
        lambda: jgrad.carry_over(old, like=like),
    )
    state, account = jgrad.carry_over(old, like=like, reset=True)
    assert_same_bits(state, like)
    assert account.kept == ("step",)
    assert not account.zero
    some = jax.tree.map(lambda x: False, like.mw)
    with pytest.raises(ValueError, match="none of which `like` would keep"):
        jgrad.carry_over(old, like=like, reset=some)


AROUND = {
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "inject_hyperparams, a schedule": lambda: optax.inject_hyperparams(jgrad.adam)(lambda t: 0.1),
    "watch": lambda: jgrad.watch(make()),
}


@pytest.mark.parametrize("name", AROUND)
def test_hyperparameters_and_reports_are_no_moments(name, standard_promotion):
    """They have keys, too, and say nothing of whose state it is."""
    tx = AROUND[name]()
    old, like = tx.init(P), tx.init({"b": P["a"]})
    assert_error(
        ValueError,
        "carry_over: `old`: mw/a, vw/a, none of which `like` would keep, expected mw/b, vw/b: name "
        "other paths by `rename`, or begin with zeros by `reset=True`.",
        lambda: jgrad.carry_over(old, like=like),
    )
    for options in {"rename": {"a": "b"}}, {"reset": True}:
        assert_same_bits(jgrad.carry_over(old, like=like, **options)[0], like)


def test_reset_of_all_labels():
    """Without parameters, too: those of each label are in a tree of its own."""
    tx = optax.partition({"a": make(), "b": make()}, _labels("a", "b"))
    like = jax.eval_shape(tx.init, W)
    state, account = jgrad.carry_over(make().init(P), like=like, reset=True)
    assert len(account.reset) == 10
    assert_same_bits(state, tx.init(W))


def test_states_without_moments():
    """On the way to a method that has none they are dropped; from one, they begin at zero."""
    without, old = jgrad.gradient_descent(0.1), trained(make())[1]
    state, account = carried(old, without)
    assert (account.kept, len(account.dropped)) == (("step",), 10)
    again, account = carried(state, make())
    assert (int(again.step), account.kept, len(account.zero)) == (3, ("step",), 10)


# ---- many leaves -------------------------------------------------------------------------------

MANY = {
    "a wrapper more": (make(), jgrad.skip_nonfinite(make()), None),
    "a word for each": (optax.sgd(0.1, 0.9), jgrad.gradient_descent(0.1, momentum=0.9), "keep"),
    "averages": (make(), jgrad.average_params(make(), 0.9), None),
}


@pytest.mark.parametrize("name", MANY)
def test_work_is_linear_in_leaves(name, standard_promotion):
    """Counted in calls of functions of jgrad: no leaf looks at all others."""
    before, after, momentum = MANY[name]

    def calls(n):
        w = {f"l{i}": P["a"] for i in range(n)}
        old, like = before.init(w), after.init(w)
        count = 0

        def profile(frame, event, arg):
            nonlocal count
            count += event == "call" and frame.f_globals.get("__name__", "").startswith("jgrad.")

        was = sys.getprofile()
        sys.setprofile(profile)
        try:
            jgrad.carry_over(old, like=like, params=w, momentum=momentum)
        finally:
            sys.setprofile(was)
        return count

    assert calls(100) < 4.5 * calls(25)


test_message = messages.test_of("carry_over", globals())
