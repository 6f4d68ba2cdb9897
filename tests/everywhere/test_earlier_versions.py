"""States of earlier versions fit this one, and lead to the same next step."""

import chex
import jax
import numpy as np
import optax
import orbax.checkpoint
import pytest

import jgrad
from tests import golden
from tests.cases import CASES
from tests.support.eight_bits import unquantized
from tests.support.loops import assert_equal
from tests.support.public import VERSION

FILES = sorted(golden.DATA.glob("states_*.npz"))


def written():
    """What each file has."""
    for file in FILES:
        names = {key.partition("/")[0] for key in np.load(file)}
        assert names <= golden.TRANSFORMATIONS.keys()
        for name in golden.TRANSFORMATIONS:
            if name in names:
                yield pytest.param(name, file, id=f"{name}-{file.stem}")


WRITTEN = list(written())


@pytest.mark.slow(always=["lamb-states_1.0.0"])
@pytest.mark.parametrize(("name", "file"), WRITTEN)
def test_golden_checkpoint(file, name):
    """Every array under the path where it was, in its dtype, and none beside; then one step."""
    arrays = dict(np.load(file))
    tx, w = golden.TRANSFORMATIONS[name](), golden.weights(name)
    today = tx.init(w)
    state = golden.as_in_11(name, today, arrays)
    w = golden.like(f"{name}/weights", w, arrays)
    found = golden.like(f"{name}/state", state, arrays)
    assert any(
        np.any(a != b) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True)
    )
    expected = golden.like(f"{name}/next_state", state, arrays)
    if state is not today:
        found, expected = (
            jgrad.carry_over(x, like=today, strict=True)[0] for x in (found, expected)
        )
    w, state = golden.step(tx, w, found, golden.gradient(2, name), name)
    gap = golden.gap(name)
    chex.assert_trees_all_close(w, golden.like(f"{name}/next_weights", w, arrays), rtol=gap)
    found, expected = unquantized((state, expected))
    chex.assert_trees_all_close(found, expected, rtol=gap, atol=1e-7)
    assert jax.tree.structure(state) == jax.tree.structure(today)


# The norm of the previous gradient is measured again.
KEPT = [x for x in WRITTEN if x.values[0] != "clip_of_previous"]


@pytest.mark.slow(one_in=40)
@pytest.mark.parametrize(("name", "file"), KEPT)
def test_golden_checkpoint_without_a_target(file, name):
    """`carry_over` finds the place of each array by what its path says, bit for bit."""
    arrays, tx = dict(np.load(file)), golden.TRANSFORMATIONS[name]()
    old = golden.without_target(name, arrays)
    like = jax.eval_shape(tx.init, golden.weights(name))
    state, account = jgrad.carry_over(old, like=like, strict=True, momentum="keep")
    assert not account.converted
    expected = [x for key, x in arrays.items() if key.startswith(f"{name}/state")]
    state = golden.as_in_11(name, state, arrays)
    for x, y in zip(jax.tree.leaves(state), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(x, y.dtype), y)


def through_orbax(folder, state, like):
    """What is restored of a state that was saved."""
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", like)


def test_this_version_has_a_file():
    assert any(f.stem == f"states_{VERSION}" for f in FILES)


@pytest.mark.slow(always=["lion", "lion_bfloat16", "lars", "lars_bfloat16", "lars_plain",
    "skip_spikes", "accumulate_weighted", "stochastic_rounding"])  # fmt: skip
@pytest.mark.parametrize("name", golden.TRANSFORMATIONS)
def test_states_are_read_by_name(name):
    """`optax.tree.get`, however deep a state is wrapped."""
    state = golden.TRANSFORMATIONS[name]().init(golden.weights(name))
    found = optax.tree.get(state, "mw")
    rows = {case.name: "mw" in case.state for case in CASES}
    method = name.removesuffix("_8bit").removesuffix("_bfloat16")
    assert (found is None) == (not rows.get(method, name != "schedule_free"))
    for field in ("vw", "master", "average", "total", "skipped", "loss_scale"):
        keys = {
            str(getattr(k, "name", ""))
            for p, _ in jax.tree_util.tree_leaves_with_path(state)
            for k in p
        }
        assert (optax.tree.get(state, field) is not None) == (field in keys)


# Some are packed already; Muon and SOAP refuse packed matrices, and these are small.
TREES = [name for name in golden.TRANSFORMATIONS if "pack" not in name]
PACKED = [name for name in TREES if not name.startswith(("muon", "normuon", "soap"))]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False], ids=["from packed", "from tree"])
@pytest.mark.parametrize("name", PACKED)
def test_files_do_not_depend_on_the_layout(name, packed, tmp_path):
    """What orbax saved of one form is restored into both, and the next steps agree."""
    tx, w = golden.TRANSFORMATIONS[name](), golden.weights(name)
    floating = w | {"count": None}  # integers are not packed
    start = jgrad.pack(floating) if packed else floating
    saved = jgrad.unpack((start, tx.init(start)))
    tree = through_orbax(tmp_path, saved, jax.eval_shape(lambda: saved))
    assert_equal(tree, saved)
    assert jax.tree.structure(tree) == jax.tree.structure(saved)
    form = jax.eval_shape(lambda w: (jgrad.pack(w), tx.init(jgrad.pack(w))), floating)
    again = jgrad.pack(tree, like=form)
    assert jax.tree.structure(again) == jax.tree.structure(form)
    assert_equal(jgrad.unpack(again), saved)


@pytest.mark.slow(always=["schedule_free-tree"])
@pytest.mark.parametrize(
    ("name", "pack"),
    [pytest.param(x, jgrad.pack_small, id=f"{x}-pack_small") for x in PACKED if x != "offload"]
    + [pytest.param(x, lambda tx: tx, id=f"{x}-tree") for x in TREES],
)
def test_orbax_saves_every_state_as_it_is(name, pack, tmp_path):
    """Integers beside moments, float32 beside copies: nothing that orbax refuses is in a state."""
    w = golden.weights(name)
    tx = pack(golden.TRANSFORMATIONS[name]())
    _, state = golden.step(tx, w, tx.init(w), golden.gradient(0, name), name)
    again = through_orbax(tmp_path, state, jax.eval_shape(tx.init, w))
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert_equal(again, state)
