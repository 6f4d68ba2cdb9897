"""The whole programs of colabs/: each is short, learns, goes on from its checkpoint, and is a page."""

import importlib
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import finetune_lora
import jgrad
from tests.support.pages import ROOT

pytestmark = pytest.mark.usefixtures("as_users_run_it")
PAGES = runpy.run_path(str(ROOT / "docs/_extensions/trainings.py"))
NAMES = PAGES["NAMES"]
STEPS = 200  # of a run: fewer than the programs' own
BOUND = 0.9  # of test digits named rightly; a tenth by chance
MARKS = {
    "train_linen": [pytest.mark.slow],
    "train_sharded_nnx": [pytest.mark.slow],
    "finetune_lora": [pytest.mark.slow],
}


@pytest.fixture
def run(tmp_path, capsys):
    """Calls `train` of a program, and returns its state, its accuracy, and what it printed."""

    def call(name, steps=STEPS, folder="run", **options):
        train = importlib.import_module(name).train
        *state, accuracy = train(str(tmp_path / folder), steps, **options)
        return state, accuracy, capsys.readouterr().out

    return call


def arrays(tree):
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def assert_same(tree, other):
    """Bit for bit."""
    for x, y in zip(arrays(tree), arrays(other), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", [pytest.param(x, marks=MARKS.get(x, ())) for x in NAMES])
def test_it_learns_and_goes_on(name, run):
    """Ended between two checkpoints, the run that goes on is the one that was never ended."""
    whole, accuracy, text = run(name)
    assert accuracy > BOUND
    run(name, 101, "ended")
    again, same, rest = run(name, folder="ended")
    assert same == accuracy
    assert_same(whole, again)
    lines = lambda text: [x for x in text.splitlines() if x.startswith(("step", "call"))]
    assert len(lines(text)) == 2
    assert lines(rest) == lines(text)[1:]
    assert "going on" not in text
    assert re.search(r"^going on after (step|call) 100$", rest, re.MULTILINE)


# ---- what the pages say of a program -----------------------------------------------------------


def in_8_bits(state):
    """The shapes of the leaves whose first moment is in 8 bits."""
    return [x.shape for x in arrays(optax.tree.get(state, "mw")) if x.dtype == jnp.int8]


def test_nnx(run):
    (model, optimizer), *_ = run("train_nnx", 100)
    assert in_8_bits(optimizer.opt_state) == [model.a.kernel.shape, model.b.kernel.shape]
    report = {k: float(x[...]) for k, x in jgrad.report(optimizer.opt_state).items()}
    assert report["measured"] == 100  # the last step of which there are norms
    assert 0 < report["update_ratio"] < 0.01
    assert report["grad_norm/a/kernel"] > 0


def test_linen(run):
    (state,), _, text = run("train_linen", 100)
    kernels = [x.shape for x in jax.tree.leaves(state.params) if x.size >= 4096]
    assert in_8_bits(state.opt_state) == kernels == [(3, 3, 16, 32), (128, 128)]
    assert (state.step, optax.tree.get(state.opt_state, "step")) == (100, 50)
    assert text.startswith("call 100, update 50: loss ")
    # A call that is skipped is counted all the same.
    grads = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.params)
    after = state.apply_gradients(grads=grads)
    assert (after.step, after.opt_state.skipped) == (101, 1)
    assert optax.tree.get(after.opt_state, "step") == 50


def test_equinox(run, tmp_path):
    (model, state), *_ = run("train_equinox", 100)
    assert in_8_bits(state) == [x.weight.shape for x in model.layers[:2]] == [(256, 64), (256, 256)]
    assert [x.name for x in (tmp_path / "run").iterdir()] == ["digits.eqx"]


def test_shardings(run):
    """Codes lie where weights do, by the same names, and a checkpoint goes on anywhere."""
    (model, optimizer), *_ = run("train_sharded_nnx", 100)
    assert dict(model.layers[0].kernel[...].sharding.mesh.shape) == {"data": 2, "model": 2}
    for layer, names in (0, (None, "model")), (2, ("model", None)):
        kernel = model.layers[layer].kernel[...]
        own = NamedSharding(kernel.sharding.mesh, PartitionSpec(*names))
        assert kernel.sharding.is_equivalent_to(own, 2)
        for moment in optimizer.opt_state.mw, optimizer.opt_state.vw:
            codes, _ = moment["layers"][layer]["kernel"]
            assert codes[...].dtype.itemsize == 1
            assert codes[...].shape == kernel.shape
            assert codes[...].sharding.is_equivalent_to(own, 2)
            assert codes.get_metadata()["out_sharding"] == names
        named = nnx.get_named_sharding(nnx.state(model), kernel.sharding.mesh)
        assert jax.tree.leaves(named["layers"][layer]["kernel"]) == [own]
    _, accuracy, text = run("train_sharded_nnx", 200, shape=(4, 1))
    assert [x.partition(":")[0] for x in text.splitlines() if "step" in x] == [
        "going on after step 100",
        "step 200",
    ]
    assert accuracy > BOUND


def test_on_one_device(run):
    """The same numbers after ten steps, to a few roundings of weights below 1/2."""
    (sharded, _), *_ = run("train_sharded_nnx", 10)
    (alone, _), *_ = run("train_sharded_nnx", 10, "alone", shape=(1, 1))
    assert len(sharded.layers[0].kernel[...].sharding.device_set) == 4
    assert len(alone.layers[0].kernel[...].sharding.device_set) == 1
    for x, y in zip(arrays(sharded), arrays(alone), strict=True):
        np.testing.assert_allclose(x, y, atol=5e-7)


def test_lora(run):
    (model, optimizer), _, text = run("finetune_lora", 100)
    own = nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    digits = finetune_lora.load_digits(return_X_y=True)
    x, _, y, _ = finetune_lora.train_test_split(*digits, random_state=0)
    assert_same(own, finetune_lora.pretrained(x, y))
    adapters = [x.shape for x in jax.tree.leaves(nnx.state(model, nnx.LoRAParam))]
    assert adapters == [(64, 4), (4, 256), (256, 4), (4, 10)]
    _, adam = optimizer.opt_state
    for moment in adam.mw, adam.vw:
        assert [x.shape for x in jax.tree.leaves(moment)] == adapters
    assert "without adapters" in text
