"""States of earlier versions fit this one, and lead to the same next step."""

import chex
import jax
import numpy as np
import optax
import orbax.checkpoint
import pytest

import jgrad
from tests import golden
from tests.choice import mostly_slow
from tests.loops import assert_equal

FILES = sorted(golden.DATA.glob("states_*.npz"))


@pytest.mark.parametrize("file", mostly_slow(FILES, FILES[0]), ids=lambda f: f.stem)
@pytest.mark.parametrize("name", golden.TRANSFORMATIONS)
def test_golden_checkpoint(file, name):
    """Every array under the path where it was, in its dtype, and none beside; then one step."""
    arrays = dict(np.load(file))
    if not any(key.startswith(f"{name}/") for key in arrays):
        pytest.skip(f"jgrad had no {name} when {file.name} was written")
    tx, w = golden.TRANSFORMATIONS[name](), golden.weights()
    state = tx.init(w)
    w = golden.like(f"{name}/weights", w, arrays)
    found = golden.like(f"{name}/state", state, arrays)
    assert any(
        np.any(a != b) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True)
    )
    w, state = golden.step(tx, w, found, golden.gradient(2))
    chex.assert_trees_all_close(w, golden.like(f"{name}/next_weights", w, arrays), rtol=1e-5)
    chex.assert_trees_all_close(
        state, golden.like(f"{name}/next_state", state, arrays), rtol=1e-5, atol=1e-7
    )


def test_this_version_has_a_file():
    assert any(f.stem == f"states_{jgrad.__version__}" for f in FILES)


def test_field_names():
    """They are in every checkpoint: a new name would make the old ones unreadable."""
    assert {
        "OptState": jgrad.OptState._fields,
        "AccumulateState": jgrad.AccumulateState._fields,
        "EmaState": jgrad.EmaState._fields,
        "MasterState": jgrad.MasterState._fields,
        "SkipState": jgrad.SkipState._fields,
    } == {
        "OptState": ("step", "mw", "vw"),
        "AccumulateState": ("mini_step", "count", "skipped", "total", "inner"),
        "EmaState": ("done", "average"),
        "MasterState": ("master", "inner"),
        "SkipState": ("skipped", "inner", "streak", "loss_scale"),
    }


@pytest.mark.parametrize("name", golden.TRANSFORMATIONS)
def test_states_are_read_by_name(name):
    """`optax.tree.get`, however deep a state is wrapped."""
    state = golden.TRANSFORMATIONS[name]().init(golden.weights())
    found = optax.tree.get(state, "mw")
    assert (found is None) == (name == "gradient_descent")
    for field in ("vw", "master", "average", "total", "skipped", "loss_scale"):
        keys = {
            str(getattr(k, "name", ""))
            for p, _ in jax.tree_util.tree_leaves_with_path(state)
            for k in p
        }
        assert (optax.tree.get(state, field) is not None) == (field in keys)


@pytest.mark.parametrize("packed", [True, False], ids=["from packed", "from tree"])
@pytest.mark.parametrize("name", mostly_slow(golden.TRANSFORMATIONS, "accumulate"))
def test_files_do_not_depend_on_the_layout(name, packed, tmp_path):
    """What orbax saved of one form is restored into both, and the next steps agree."""
    tx, w = golden.TRANSFORMATIONS[name](), golden.weights()
    # orbax refuses arrays without elements, which stand where a parameter needs no master copy.
    wanted = "bfloat16" if name == "master_weights" else ("float32", "bfloat16")
    floating = jax.tree.map(lambda x: x if x.dtype.name in wanted else None, w)
    start = jgrad.pack(floating) if packed else floating
    saved = jgrad.unpack((start, tx.init(start)))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        tree = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: saved))
    assert_equal(tree, saved)
    form = jax.eval_shape(lambda w: (jgrad.pack(w), tx.init(jgrad.pack(w))), floating)
    again = jgrad.pack(tree, like=form)
    assert jax.tree.structure(again) == jax.tree.structure(form)
    assert_equal(jgrad.unpack(again), saved)
