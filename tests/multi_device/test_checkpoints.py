"""The example's checkpoints: any number of devices, packed or not, and nothing altered unseen."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jgrad
from checkpoints import CheckpointError, Checkpoints, whole_steps
from tests.support.errors import assert_error
from tests.support.harm import data_file, flip_a_bit
from tests.support.loops import assert_equal
from tests.support.packed_model import normal

pytestmark = pytest.mark.slow


def weights():
    w = normal(0)
    w["rest"] = [x.astype(jnp.bfloat16) for x in w["rest"]]
    return w


def transformation():
    """Has all kinds of state, and None where a parameter is float32 already."""
    return jgrad.accumulate(jgrad.master_weights(jgrad.lamb(0.1)), 2)


def packed(devices, w=None, tx=None):
    """Parameters on each of some devices, and the state cut over them."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    tx = jgrad.zero(transformation() if tx is None else tx, "data")
    w = jgrad.pack(weights() if w is None else w, multiple_of=devices)
    w = jax.device_put(w, NamedSharding(mesh, P()))
    shardings = jgrad.state_shardings(tx, w, shard_over="data")
    return w, jax.jit(tx.init, out_shardings=shardings)(w)


def unlike_the_first(tree):
    """Another number in every place, and zeros as padding."""
    leaves, structure = jax.tree.flatten(jgrad.unpack(tree))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [
        x + 1 if x.ndim == 0 else jax.random.normal(key, x.shape, x.dtype)
        for key, x in zip(keys, leaves, strict=True)
    ]
    found = jgrad.pack(structure.unflatten(drawn), like=tree)
    return jax.device_put(found, jax.tree.map(lambda x: x.sharding, tree))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "saved"


@pytest.fixture
def opened(folder):
    checkpoints = Checkpoints(folder)
    yield checkpoints
    checkpoints.close()


def assert_refused(message, checkpoints, like, step=None):
    with pytest.raises(CheckpointError) as caught:
        checkpoints.restore(like, step)
    assert str(caught.value) == message


# ---- what comes back -----------------------------------------------------------------------------


def test_other_numbers_of_devices(opened):
    """From eight to four to one, each restored from what the one before saved."""
    saved = unlike_the_first(packed(8))
    first = jgrad.unpack(saved)
    for step, devices in enumerate((8, 4, 1)):
        opened.save(step, saved)
        like = packed(devices)
        saved = opened.restore(like)
        assert jax.tree.structure(saved) == jax.tree.structure(like)
        for x, y in zip(jax.tree.leaves(saved), jax.tree.leaves(like), strict=True):
            assert x.sharding == y.sharding
        assert_equal(jax.device_get(jgrad.unpack(saved)), jax.device_get(first))


def test_both_forms(opened):
    """What was packed is restored as a tree, and what was a tree packed."""
    tx, w = transformation(), weights()
    tree = w, tx.init(w)
    start = packed(8)
    opened.save(0, unlike_the_first(start))
    found = opened.restore(tree)
    assert_equal(jax.device_get(found), jax.device_get(jgrad.unpack(unlike_the_first(start))))
    opened.save(1, found)
    assert_equal(jax.device_get(opened.restore(start)), jax.device_get(unlike_the_first(start)))


def test_shapes_are_enough(opened):
    """No second state has to be there while one is restored."""
    saved = unlike_the_first(packed(8))
    opened.save(0, saved)
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    assert_equal(opened.restore(jax.tree.map(shape, saved)), saved)


def test_the_last_steps_stay(opened, folder):
    for step in range(5):
        opened.save(step, packed(2))
    assert opened.latest() == whole_steps(folder)[-1] == 4
    assert {x.name for x in folder.iterdir()} == {"2", "3", "4"}


# ---- what does not -------------------------------------------------------------------------------


def test_one_flipped_bit(opened, folder):
    for step in (1, 2):
        opened.save(step, packed(2))
    file = data_file(folder / "2")
    flip_a_bit(file)
    message = (
        f"{file}: altered or missing since step 2 was saved; remove {folder / '2'} to go on "
        "after step 1."
    )
    assert_refused(message, opened, packed(2))
    assert_equal(opened.restore(packed(2), 1), packed(2))


@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_a_file_that_is_not_whole(opened, folder, harm):
    opened.save(1, packed(2))
    file = data_file(folder / "1")
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    message = f"{file}: altered or missing since step 1 was saved; there is no older step."
    assert_refused(message, opened, packed(2))


@pytest.mark.parametrize("text", ["{", '{"files": {}}', '{"files": {}, "arrays": 3}'])
def test_a_manifest_that_was_altered(opened, folder, text):
    opened.save(1, packed(2))
    file = folder / "1" / "default" / "manifest.json"
    file.write_text(text)
    message = f"{file}: altered since it was written."
    assert_refused(message, opened, packed(2))


def test_no_step(opened, folder):
    assert opened.latest() is None
    assert_refused(f"{folder}: no whole checkpoint.", opened, packed(2))
    assert_refused(f"{folder}: no whole checkpoint of step 3.", opened, packed(2), 3)


def test_a_step_that_was_not_finished_does_not_count(opened, folder):
    """orbax gives it its name last, and removes what has another one."""
    for step in (1, 2):
        opened.save(step, packed(2))
    opened.close()
    (folder / "2").rename(folder / "2.orbax-checkpoint-tmp")
    assert whole_steps(folder) == [1]
    again = Checkpoints(folder)
    assert again.latest() == 1
    again.save(2, packed(2))
    assert again.latest() == 2
    again.close()
    assert {x.name for x in folder.iterdir()} == {"1", "2"}


def test_what_others_put_there(opened, folder):
    """Files stay; beside steps of others nothing is saved, and none of them is removed."""
    (folder / "notes.json").write_text("{}")
    for step in (1, 2):
        opened.save(step, packed(2))
    assert (folder / "notes.json").exists()
    opened.close()
    with ocp.CheckpointManager(folder) as others:
        others.save(7, args=ocp.args.StandardSave({"w": jnp.zeros(3)}))
    there = {x.name for x in folder.iterdir()}
    assert there >= {"1", "2", "7", "notes.json"}
    message = f"{folder}: step 7 has no manifest, and was not saved here; give another folder."
    assert_error(CheckpointError, message, lambda: Checkpoints(folder, keep=1))
    assert {x.name for x in folder.iterdir()} == there


def test_steps_go_up(opened, folder):
    """After going back, what came later has to be removed first."""
    for step in (1, 2):
        opened.save(step, packed(2))
    message = (
        f"{folder}: step 2 is not after step 2; remove {folder / '2'}, or save in another folder."
    )
    assert_error(CheckpointError, message, lambda: opened.save(2, packed(2)))


def test_how_many_stay(folder):
    assert_error(ValueError, "keep: 0, expected at least 1.", lambda: Checkpoints(folder, keep=0))
    one = Checkpoints(folder, keep=1)
    for step in (1, 2):
        one.save(step, packed(2), about={"rate": step / 10})
    assert one.about(2) == {"rate": 0.2}
    one.close()
    assert {x.name for x in folder.iterdir()} == {"2"}


def test_another_dtype(opened):
    """orbax would cast."""
    opened.save(1, packed(2))
    w = weights()
    w["layer"]["b"] = w["layer"]["b"].astype(jnp.bfloat16)
    message = (
        f"{opened._folder}: step 1 does not fit: [0]['layer']['b']: float32 of shape (64,) in the "
        "checkpoint, expected bfloat16 of shape (64,); [1].inner.master['layer']['b']: nothing in "
        "the checkpoint, expected float32 of shape (64,)."
    )
    assert_refused(message, opened, packed(2, w))


def test_another_shape(opened):
    opened.save(1, packed(2, tx=jgrad.gradient_descent(0.1)))
    w = weights()
    w["layer"]["b"] = jnp.zeros(65)
    message = (
        f"{opened._folder}: step 1 does not fit: [0]['layer']['b']: float32 of shape (64,) in the "
        "checkpoint, expected float32 of shape (65,)."
    )
    assert_refused(message, opened, packed(2, w, jgrad.gradient_descent(0.1)))


def test_another_method(opened):
    opened.save(1, packed(2, tx=jgrad.gradient_descent(0.1, momentum=0.9)))
    message = (
        f"{opened._folder}: step 1 does not fit: [1].vw['layer']['b']: nothing in the checkpoint, "
        "expected float32 of shape (64,); [1].vw['layer']['w']: nothing in the checkpoint, expected "
        "float32 of shape (24, 20); [1].vw['rest'][0]: nothing in the checkpoint, expected float32 "
        "of shape (3, 16, 10) (and 2 more)."
    )
    assert_refused(message, opened, packed(2, tx=jgrad.adam(0.1)))


def test_arrays_that_are_nowhere(opened):
    opened.save(1, packed(2))
    like = jax.device_get(packed(2))
    message = (
        "[0].buffers['bfloat16']: ndarray, expected an array of JAX, or a `jax.ShapeDtypeStruct` "
        "with a sharding."
    )
    assert_error(TypeError, message, lambda: opened.restore(like))


def test_what_is_in_a_manifest(opened, folder):
    opened.save(1, packed(2, tx=jgrad.gradient_descent(0.1)))
    inside = folder / "1" / "default"
    manifest = json.loads((inside / "manifest.json").read_text())
    assert manifest["arrays"]["[0]['rest'][1]"] == "bfloat16 of shape (32,)"
    files = {str(x.relative_to(inside)) for x in inside.rglob("*") if x.is_file()}
    later = {"manifest.json", "commit_success.txt"}
    assert set(manifest["files"]) == files - later
