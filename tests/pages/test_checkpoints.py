"""The example's checkpoints: any number of devices, packed or not, and nothing altered unseen."""

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import jgrad
from checkpoints import CheckpointError, Checkpoints, whole_steps
from tests.multi_device.meshes import mesh_of, place
from tests.pages.harm import data_file, flip_a_bit
from tests.support.errors import assert_error
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
    mesh = mesh_of(data=devices)
    tx = jgrad.zero(transformation() if tx is None else tx, "data")
    w = jgrad.pack(weights() if w is None else w, multiple_of=devices)
    w = place(w, mesh, P())
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
    assert_error(CheckpointError, message, lambda: checkpoints.restore(like, step))


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


# ---- what does not -------------------------------------------------------------------------------


def test_one_flipped_bit(opened, folder):
    for step in (1, 2):
        opened.save(step, packed(2))
    file = data_file(folder / "2")
    flip_a_bit(file)
    message = f"{file}: altered or missing since step 2 was saved; remove {folder / '2'} to go on after step 1."
    assert_refused(message, opened, packed(2))
    assert_equal(opened.restore(packed(2), 1), packed(2))


ALTERED = "altered or missing since step 1 was saved; there is no older step."
HARMED = {
    "gone": (lambda file: file.unlink(), ALTERED),
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:-1]), ALTERED),
}
HARMED |= {
    text: (lambda file, text=text: file.write_text(text), "altered since it was written.")
    for text in ("{", '{"files": {}}', '{"files": {}, "arrays": 3}')  # manifests
}


@pytest.mark.parametrize("harm", HARMED)
def test_a_file_that_is_not_whole(opened, folder, harm):
    opened.save(1, packed(2))
    manifest = folder / "1" / "default" / "manifest.json"
    file = manifest if harm.startswith("{") else data_file(folder / "1")
    do, message = HARMED[harm]
    do(file)
    assert_refused(f"{file}: {message}", opened, packed(2))


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


def of_shape(dtype, size):
    """The model with another bias."""
    w = weights()
    w["layer"]["b"] = jnp.zeros(size, dtype)
    return w


SGD, MOMENTUM = jgrad.gradient_descent(0.1), jgrad.gradient_descent(0.1, momentum=0.9)
OTHERS = {
    # orbax would cast
    "another dtype": (None, lambda: packed(2, of_shape(jnp.bfloat16, 64)),
     "[0]['layer']['b']: float32 of shape (64,) in the checkpoint, expected bfloat16 of shape "
     "(64,); [1].inner.master['layer']['b']: nothing in the checkpoint, expected float32 of shape (64,)."),
    "another shape": (SGD, lambda: packed(2, of_shape(jnp.float32, 65), SGD),
     "[0]['layer']['b']: float32 of shape (64,) in the checkpoint, expected float32 of shape (65,)."),
    "another method": (MOMENTUM, lambda: packed(2, tx=jgrad.adam(0.1)),
     "[1].vw['layer']['b']: nothing in the checkpoint, expected float32 of shape (64,); "
     "[1].vw['layer']['w']: nothing in the checkpoint, expected float32 of shape (24, 20); "
     "[1].vw['rest'][0]: nothing in the checkpoint, expected float32 of shape (3, 16, 10) (and 2 more)."),
}  # fmt: skip


@pytest.mark.parametrize(("tx", "like", "message"), OTHERS.values(), ids=OTHERS)
def test_what_does_not_fit(opened, folder, tx, like, message):
    opened.save(1, packed(2, tx=tx))
    assert_refused(f"{folder}: step 1 does not fit: {message}", opened, like())
