"""What 2.0 changes: each row of "from 1.1 to 2.0" in CHANGELOG.md, tried as the old call."""

import functools
import pathlib
import re
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jgrad
from tests.backward import models
from tests.support.private import host_memory

W = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
MASK = {"w": True, "b": False}
SGD, ADAM = jgrad.gradient_descent(0.1), jgrad.adam(0.1)
MOMENTUM = jgrad.gradient_descent(0.1, momentum=0.9)
MATRICES = {"matrices": MASK, "adam_learning_rate": 0.1}
SCALED = functools.partial(jgrad.skip_nonfinite, loss_scale=4.0)
AVERAGED = jgrad.average_params(ADAM, 0.9)
TREE = {"w": 0.1, "b": 0.1}


def update(tx, updates=W, **keywords):
    """Traced alone."""
    state = tx.init(W)
    return jax.eval_shape(lambda w: tx.update(updates, state, w, **keywords), W)


def step(tx, params=None, **keywords):
    """A step in the backward pass, traced alone."""
    options = {x: keywords.pop(x) for x in ("elementwise", "mesh_axes") if x in keywords}
    params = models.params() if params is None else params
    run = jgrad.step_in_backward(tx, models.loss, **options)
    given = params, tx.init(params), models.batch()
    return jax.eval_shape(lambda *given: run(*given, **keywords), *given)


def in_pmap():
    params, state = models.params(), SGD.init(models.params())
    run = jax.pmap(jgrad.step_in_backward(SGD, models.loss), axis_name="d", in_axes=(None, None, 0))
    jax.eval_shape(run, params, state, jnp.stack([models.batch()] * 2))


def in_zero():
    tx = jgrad.zero(jgrad.muon(0.1, **MATRICES), "d")
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=P())
    jax.eval_shape(init, jgrad.pack(W, multiple_of=2))


def without_host_memory():
    """As on a backend whose devices have one kind of memory."""
    one_kind = SimpleNamespace(platform="cpu", addressable_memories=list)
    with mock.patch.object(jax, "local_devices", return_value=[one_kind]):
        host_memory.check.__wrapped__("offload")


def carried(old, new, **options):
    """Of a state of W to that of another optimizer."""
    return jgrad.carry_over(old.init(W), like=jax.eval_shape(new.init, W), **options)


def refused(error, *words):
    """The old call is an error that says what to write."""

    def check(call):
        with pytest.raises(error) as caught:
            call()
        for word in words:
            assert word in str(caught.value), caught.value

    return check


# By what the old column of its row says: what comes of it, and old calls.
ERRORS = {
    "old_momentum=": (refused(TypeError, "carry_over: `", "an unknown argument, expected `momentum`"),
     lambda: carried(ADAM, ADAM, old_momentum="average"), lambda: carried(ADAM, ADAM, momentum_decay=0.9)),
    "kept first moments": (refused(ValueError, "carry_over: `momentum`: None", '"keep"', '"reset"'),
     lambda: carried(ADAM, jgrad.lion(0.1)), lambda: carried(jgrad.adafactor(0.1, momentum=0.9), MOMENTUM)),
    "made up second moments": (refused(ValueError, "a second moment that `old` lacks", "`reset=`", "`tx.init(params)`"),
     lambda: carried(MOMENTUM, ADAM)),
    "Account.estimated": (refused(AttributeError, "estimated"), lambda: carried(ADAM, ADAM)[1].estimated),
    "in `pmap`, or in `shard_map": (refused(ValueError, "step_in_backward: `gradients`: None", "jax.lax.pmean"),
     in_pmap),
    "scale=2.0": (refused(TypeError, "step_in_backward: `scale`", "by position"), lambda: step(SGD, scale=2.0)),
    "one stacked array as the `params`": (refused(ValueError, "step_in_backward: `params`", "`{'layers': params}`"),
     lambda: step(SGD, jnp.ones((3, 4)))),
    "elementwise=True": (refused(ValueError, "step_in_backward: `tx`"),
     lambda: step(optax.scale_by_trust_ratio(), elementwise=True)),
    "trained nothing after an overflow": (refused(ValueError, "`skip_nonfinite(accumulate(tx, every), loss_scale=...)`"),
     lambda: jgrad.accumulate(SCALED(SGD), 2).init(W)),
    "two loss scales": (refused(ValueError, "one `loss_scale`"), lambda: SCALED(SCALED(SGD)).init(W)),
    "`accumulate` inside `accumulate`": (refused(ValueError, "one `accumulate`"),
     lambda: jgrad.accumulate(jgrad.accumulate(SGD, 2), 2).init(W)),
    "`master_weights` and `stochastic_rounding` inside": (refused(ValueError, "inside, expected"),
     lambda: jgrad.master_weights(jgrad.stochastic_rounding(SGD)).init(W),
     lambda: jgrad.schedule_free(jgrad.master_weights(SGD)).init(W)),
    "`schedule_free(accumulate(tx))`": (refused(ValueError, "schedule_free: `tx`", "inside, expected"),
     lambda: jgrad.schedule_free(jgrad.accumulate(SGD, 2)).init(W), lambda: jgrad.schedule_free(AVERAGED).init(W)),
    "clipped gradients with their scale": (refused(ValueError, "expected the clip inside"),
     lambda: update(optax.chain(jgrad.clip_by_global_norm(1.0), SCALED(SGD)))),
    "without `weight_decay`: ignored": (refused(ValueError, "without `weight_decay`"),
     lambda: jgrad.adam(0.1, weight_decay_mask=MASK), lambda: jgrad.adam(0.1, weight_decay_rule="cautious")),
    "without `momentum`, `normuon_beta`": (refused(ValueError, "expected "),
     lambda: jgrad.gradient_descent(0.1, moment_dtype="8bit"),
     lambda: jgrad.lars(0.1, momentum=None, rate_in_momentum=False),
     lambda: jgrad.muon(0.1, **MATRICES, normuon_beta=0.5), lambda: jgrad.muon(0.1, **MATRICES, error_decay=0.5),
     lambda: jgrad.muon(0.1, **MATRICES, nesterov=False, fraction=0.5),
     lambda: jgrad.skip_nonfinite(SGD, growth_interval=3), lambda: jgrad.pack(W, max_size=300, small_apart=True)),
    "`update` took options": (refused(TypeError, "`moment_dtype`: given to `update`, expected in `adam(...)`"),
     lambda: update(jgrad.skip_nonfinite(ADAM), moment_dtype="8bit")),
    "update(weights=...)": (refused(TypeError, "the keyword `weights`, expected `weight`"),
     lambda: update(ADAM, weights=2.0)),
    "does not return zeros for zeros": (refused(ValueError, "expected zeros there"),
     lambda: jgrad.optimizer_of_leaf(lambda g: g + 1.0)(0.1)),
    "a mask that is a jax array": (refused(TypeError, "weight_decay_mask"),
     lambda: jgrad.adam(0.1, weight_decay=0.1, weight_decay_mask=jnp.asarray(True)).init(W)),
    "took an array of 0 or less": (refused(ValueError, "accumulate: `every`: 0"),
     lambda: jgrad.accumulate(SGD, lambda done: jnp.int32(0)).init(W)),
    "left `learning_rate` and `clip_factor` out": (refused(ZeroDivisionError, "division"),
     lambda: jgrad.watch(optax.stateless(lambda updates, params: 1 / 0)).init(W)),
    "names of 0.6 that warned": (refused(AttributeError, "runs"), lambda: jgrad.pack(W).layout.runs),
    "`quantized(state": (refused(AttributeError, "gone in 2.0, expected `jgrad.carry_over(state, like=...)`"),
     lambda: jgrad.quantized, lambda: jgrad.unquantized),
    "`norm_axes=` of ten": (refused(TypeError, "`norm_axes`", "expected `mesh_axes`"),
     lambda: jgrad.lamb(0.1, norm_axes="data")),
    "cut_over=": (refused(TypeError, "expected `shard_over`"),
     lambda: jgrad.state_shardings(SGD, W, cut_over="data"),
     lambda: jgrad.muon(0.1, **MATRICES, share_over="data")),
    "`muon(beta1=, beta2=)`": (refused(TypeError, "`adam_beta"), lambda: jgrad.muon(0.1, **MATRICES, beta1=0.9),
     lambda: jgrad.muon(0.1, **MATRICES, beta2=0.9)),
    "`StochasticState.step`": (refused(AttributeError, "gone in 2.0, expected `done`"),
     lambda: jgrad.stochastic_rounding(SGD).init(W).step),
    "misspelt options": (refused((TypeError, AttributeError), "acumulate"), lambda: jgrad.acumulate),
    "`pack(params, matrices=": (refused(TypeError, "pack: `matrices`: gone in 2.0", "`max_size`", "`shard_over`"),
     lambda: jgrad.pack(W, matrices=MASK)),
    "`muon` of matrices in a packed buffer": (refused(ValueError,
     "muon: `matrices` at ['w']: True for a leaf that is packed with others"), lambda: jgrad.muon(0.1,
     **MATRICES).init(jgrad.pack(W))),
    "`zero(muon(...)": (refused(ValueError, "in the place of `zero`, `shard_over` under `jit`"), in_zero),
    "Adam's squares for those of an `adafactor`": (refused(ValueError, "carry_over: `momentum`: None, expected",
     "`reset=`"), lambda: carried(ADAM, jgrad.adafactor(0.1)), lambda: carried(jgrad.adafactor(0.1), ADAM)),
    "squares of `optax.rmsprop`": (refused(ValueError, "a second moment that `old` lacks", "`reset=`"),
     lambda: carried(optax.rmsprop(0.1), ADAM), lambda: carried(ADAM, optax.rmsprop(0.1))),
    "made elements of rows and columns": (refused(ValueError,
     "rows and columns, of which others can only be guessed", "`reset=`"),
     lambda: carried(jgrad.adafactor(0.1, min_side=2), ADAM, momentum="keep")),
    "`offload(tx)` on a CPU": (refused(RuntimeError, "offload: the backend 'cpu'", "expected 'pinned_host' among them"),
     without_host_memory),
    "`optax.chain(tx, jgrad.ema(decay))`": (refused(AttributeError, "`average_params(tx, decay)`",
     "`optax.ema` averages updates"), lambda: optax.chain(ADAM, jgrad.ema(0.9))),
    "`ema` behind `accumulate`": (refused(ValueError, "`accumulate(average_params(tx, decay), every)`"),
     lambda: jgrad.average_params(jgrad.accumulate(ADAM, 2), 0.9).init(W)),
    "`pack_small(small_apart=)`": (refused(TypeError, "pack_small: `small_apart`", "always apart"),
     lambda: jgrad.pack_small(ADAM, max_size=4096, small_apart=True)),
    "`soap(weight_decay_mask=mask)`": (refused(ValueError, "soap: `weight_decay_mask`", "without `weight_decay`"),
     lambda: jgrad.soap(0.1, matrices=MASK, weight_decay_mask=MASK)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("check", "call"),
    [
        pytest.param(check, call, id=f"{row}-{i}")
        for row, (check, *calls) in ERRORS.items()
        for i, call in enumerate(calls)
    ],
)
def test_an_old_call_that_is_an_error(check, call):
    check(call)


# ---- what is another number, or another type ----------------------------------------------------

CHANGED = {}


def row(old):
    """A test of the row whose old column says this."""

    def added(test):
        CHANGED[old] = test
        return test

    return added


@row("averages of `optax.contrib.schedule_free`")
def averages_of_optax():
    old = optax.contrib.schedule_free(optax.adam(0.1), 0.1).init(W)
    like = jax.eval_shape(jgrad.schedule_free(ADAM).init, W)
    moved = jax.tree.map(lambda x: x + 1, W)
    state, _ = jgrad.carry_over(old, like=like, params=moved)
    np.testing.assert_array_equal(state.average["w"], moved["w"])


@row("`type(state) is OptState`")
def the_type_of_adafactor():
    state = jgrad.adafactor(0.1).init(W)
    assert isinstance(state, jgrad.OptState)
    assert type(state) is jgrad.AdafactorState


@row("`update(commit=, notes=")
def keywords_are_free():
    for name in ("commit", "notes", "then", "undecayed"):
        update(jgrad.skip_nonfinite(ADAM), **{name: "mine"})


@row("got keywords that the caller had not given")
def keywords_of_the_call():
    def strict(updates, state, params=None, *, value):
        return updates, state

    tx = optax.GradientTransformationExtraArgs(optax.init_empty_state, strict)
    for around in (jgrad.skip_nonfinite, jgrad.watch):
        update(around(tx), value=1.0)


@row("named `gain`")
def gains_are_no_matrices():
    assert jgrad.hidden_matrices()({"gain": jnp.ones((4, 4)), "w": jnp.ones((4, 4))}) == {
        "gain": False,
        "w": True,
    }


@row("rounded by the random bits of the first one")
def random_bits_of_one_device():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    w, g = jnp.ones((2, 8), jnp.bfloat16), jnp.full((2, 8), 1e-3, jnp.bfloat16)

    def trained(tx, w, g):
        return tx.update(g, tx.init(w), w)[0]

    tx = jgrad.stochastic_rounding(SGD, mesh_axes=P("d"))
    sharded = jax.shard_map(
        functools.partial(trained, tx), mesh=mesh, in_specs=P("d"), out_specs=P("d")
    )
    expected = trained(jgrad.stochastic_rounding(SGD), w, g)
    np.testing.assert_array_equal(jax.jit(sharded)(w, g), expected)


@row("names of mesh axes as `mesh_axes=`")
def names_of_mesh_axes():
    jgrad.apply_gradients(SGD, W, SGD.init(W), W, mesh_axes="data")
    step(SGD, mesh_axes="data")


@row('gave `P("x")` for a matrix')
def specs_of_explicit_axes():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    w = jax.device_put(jnp.ones((4, 3)), NamedSharding(mesh, P("x", None)))
    assert jgrad.state_shardings(ADAM, w).mw.spec == P("x", None)


def names_of_report(tx):
    return {*jgrad.report(jax.eval_shape(jgrad.watch(tx).init, W))}


@row("`report`: `trust_ratio/<path>`")
def norms_say_how_far_a_leaf_moves():
    names = names_of_report(jgrad.lars(0.1)) | names_of_report(jgrad.muon(0.1, **MATRICES))
    assert {"update_ratio/w", "learning_rate"} <= names
    assert not any("trust" in x or "residual" in x for x in names)


@row("`report`: `learning_rate/<path>`")
def a_tree_of_rates_is_what_you_gave():
    assert not any("learning_rate" in x for x in names_of_report(jgrad.adam(TREE)))


@row("`report`: a second rate")
def the_last_rate_counts():
    tx = jgrad.watch(optax.chain(jgrad.adam(0.1), jgrad.adam(0.2)))
    numbers = jgrad.report(tx.update(W, tx.init(W), W)[1])
    assert "learning_rate#1" not in numbers
    assert float(numbers["learning_rate"]) == pytest.approx(0.2)


@row("JAX 0.7, optax 0.2.5")
def the_oldest_versions_are_of_a_year_ago():
    project = (pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"jax>=0.8.1"' in project
    assert '"optax>=0.2.6"' in project


@row("without `layer_axes` in `step_in_backward`")
def stacks_are_known():
    params = {"layers": {"w": jnp.arange(24.0).reshape(3, 2, 4)}, "head": jnp.ones(4)}

    def loss(params, x):
        x = jgrad.scan_layers(lambda w, x: x + jnp.tanh(x @ w["w"]) @ w["w"].T, params["layers"], x)
        return jnp.mean(jnp.square(x))

    axes = {"layers": 0, "head": None}
    step = lambda tx: jgrad.step_in_backward(tx, loss)(params, tx.init(params), jnp.ones((5, 2)))
    known, said = step(jgrad.lamb(0.1)), step(jgrad.lamb(0.1, layer_axes=axes))
    jax.tree.map(np.testing.assert_array_equal, known, said)


@row("states of 0.2 to 0.6")
def states_of_0_x_are_read_no_more():
    """They had empty arrays where nothing is kept."""
    old = MOMENTUM.init(W)._replace(vw=jax.tree.map(lambda x: jnp.zeros((0,)), W))
    with pytest.raises((TypeError, ValueError), match="vw"):
        MOMENTUM.update(W, old, W)


@row("`Blocks(codes, scale, form)`")
def the_dtype_of_codes_says_how_they_are_decoded():
    assert jgrad.Blocks._fields == ("codes", "scale")
    assert not hasattr(jgrad.Blocks(1, 2), "form")


@row("`soap(...)` had a decay of 0.01")
def soap_has_no_decay():
    updates = jax.jit(lambda tx, w: tx.update(0 * w, tx.init(w), w)[0], static_argnums=0)
    w, of_leaves = jnp.ones(2), functools.partial(jgrad.soap, 0.1, matrices=False)
    np.testing.assert_array_equal(updates(of_leaves(), w), 0)
    np.testing.assert_allclose(updates(of_leaves(weight_decay=0.01), w), -0.001, rtol=1e-6)


@row("`EmaState(done, average)` in the state of a chain")
def an_average_of_1_1():
    """As a pickle brings it back, and from a file that was read without a target."""
    inner = ADAM.init(W)._replace(step=jnp.int32(3))
    average = jax.tree.map(lambda x: x + 2, W)
    old = inner, jgrad.EmaState(jnp.int32(3), average)
    like = jax.eval_shape(AVERAGED.init, W)
    of_file = [x._asdict() for x in old]
    del of_file[1]["inner"]
    for state in (old, of_file):
        new, account = jgrad.carry_over(state, like=like, strict=True)
        assert isinstance(new, jgrad.EmaState)
        assert (int(new.done), int(new.inner.step)) == (3, 3)
        jax.tree.map(np.testing.assert_array_equal, new.average, average)
        assert "average_params.average" in str(account)


@pytest.mark.parametrize("old", CHANGED)
def test_an_old_call_that_does_another_thing(old):
    CHANGED[old]()


# ---- the table ----------------------------------------------------------------------------------

CHANGELOG = (pathlib.Path(__file__).parents[2] / "CHANGELOG.md").read_text()
TABLE = CHANGELOG.partition("from 1.1 to 2.0:\n\n")[2].partition("\n\n")[0]


def test_each_row_of_the_table_is_tried():
    """By a part of its old column, which is that of no other."""
    rows = re.findall(r"^\| (.+?) \| .+ \|$", TABLE, re.MULTILINE)[2:]
    known = ERRORS | CHANGED
    assert len(rows) > 30
    for old in rows:
        assert len([x for x in known if x in old]) == 1, old
