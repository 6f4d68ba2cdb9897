"""The page on weights and moments in host memory, and the program that it names."""

import importlib
import io
import pathlib
import pickle
import shutil
import tempfile

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization

import jgrad
from tests.pages.guides.entries import IMPORTED, after, choices, run
from tests.support.memory import kinds, largest_on_device, on_device
from tests.support.pages import blocks, run_example
from tests.support.private import forced, host_memory

PAGE = "docs/larger_than_device.md"
NOTE = "benchmarks/notes/host_memory.md"
PAGES = (PAGE, NOTE)

pytestmark = [
    pytest.mark.ci,
    pytest.mark.not_in_jax_0_8("host memory"),
]


@after(PAGE, 0)
def weights_and_moments_on_the_host(names, printed):
    """They stay there. `tests/backward/test_host_memory.py` compares bits."""
    params, state = names["params"], names["state"]
    assert set(kinds((params["layers"], state.inner.mw))) == {"pinned_host"}
    assert set(kinds((params["embedding"], names["value"]))) == {"device"}
    step = jgrad.step_in_backward(names["tx"], names["loss"])
    given = params, state, names["tokens"]
    with forced():
        found = jax.jit(step)(*given)
        expected = jax.jit(step)(*on_device(given))
    for x, y in zip(*map(jax.tree.leaves, on_device((found, expected))), strict=True):
        x, y = (np.asarray(a, np.float32) for a in (x, y))
        np.testing.assert_allclose(x, y, rtol=2**-7)  # a rounding to bfloat16, of few elements


@after(PAGE, 1, 0)
def recipes(names, printed):
    """Each trains; the last one is left in the names."""
    tx, params = names["tx"], names["given"]
    step = jgrad.step_in_backward(tx, names["loss"])
    jax.eval_shape(step, params, tx.init(params), names["tokens"])
    assert set(kinds(tx.init(params).master["layers"])) == {"pinned_host"}


@after(PAGE, 2, 0)
def adapters_beside_a_base(names, printed):
    """The base is fetched from the host."""
    layers = names["params"]["layers"]
    adapters = {"a": jnp.ones((4, 256, 2), jnp.bfloat16), "b": jnp.zeros((4, 2, 256), jnp.bfloat16)}
    tx, x = jgrad.adam(1e-3), jnp.ones((3, 256), jnp.bfloat16)
    step = jax.jit(jgrad.step_in_backward(tx, names["lora_loss"]))
    new, _, _ = step(adapters, tx.init(adapters), layers, x)
    assert jnp.any(new["b"] != 0)


@after(PAGE, 3, 0)
def chunks_of_tokens(names, printed):
    """The cross-entropy of optax, and its gradients."""
    key = jax.random.key(0)
    x, head = jax.random.normal(key, (16, 8)), jax.random.normal(key, (8, 32))
    targets = jnp.arange(16)

    def plain(x, head):
        return optax.softmax_cross_entropy_with_integer_labels(x @ head, targets).mean()

    chunked = lambda x, head: names["cross_entropy"](x, head, targets)
    found, expected = (jax.value_and_grad(f, argnums=(0, 1))(x, head) for f in (chunked, plain))
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@after(PAGE, 4, 0)
def an_embedding_in_slices(names, printed):
    """The same rows."""
    table = jax.random.normal(jax.random.key(0), (4, 8, 16))
    tokens = jnp.arange(14).reshape(2, 7) * 2
    np.testing.assert_array_equal(names["looked_up"](table, tokens), table.reshape(-1, 16)[tokens])


def by_block(library):
    """What the page passes as `init` of a layer."""
    init = {
        "linen": lambda key: LinenBlock().init(key, jnp.ones((1, 256)))["params"],
        "nnx": lambda key: nnx.state(NnxBlock(nnx.Rngs(key))),
        "equinox": lambda key: eqx.filter(eqx.nn.MLP(256, 256, 256, 1, key=key), eqx.is_array),
    }
    return init[library]


class LinenBlock(nn.Module):
    """Two matrices."""

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(256)(nn.relu(nn.Dense(256)(x)))


class NnxBlock(nnx.Module):
    """Two matrices."""

    def __init__(self, rngs):
        self.up = nnx.Linear(256, 256, rngs=rngs)
        self.down = nnx.Linear(256, 256, rngs=rngs)


@after(NOTE, 0, (PAGE, 0))
def layers_one_by_one(names, printed):
    """Those of `jax.vmap`, with matrices on the host; the loop has one of them on the device."""
    key = jax.random.key(0)
    for library in ("linen", "nnx", "equinox"):
        init = by_block(library)
        found = names["make_layers"](init, key, 3)
        expected = jax.vmap(init)(jax.random.split(key, 3))
        for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            assert x.sharding.memory_kind == ("pinned_host" if x.ndim > 2 else "device")
            np.testing.assert_array_equal(on_device(x), y)
        program = jax.make_jaxpr(lambda key, f=init: names["make_layers"](f, key, 3))(key)
        assert largest_on_device(program.jaxpr) == 256 * 256


def for_a_checkpoint():
    """A model of the shapes of the first block, and where it is saved."""

    def init(key):
        up = jax.random.normal(key, (4, 256, 1024), jnp.bfloat16)
        layers = {"up": up, "down": jnp.zeros((4, 1024, 256), jnp.bfloat16)}
        return {"embedding": jnp.ones((512, 256), jnp.bfloat16), "layers": layers}

    return {"init": init, "path": pathlib.Path(tempfile.mkdtemp()) / "saved"}


@after(NOTE, 1, (PAGE, 0), names=for_a_checkpoint)
@after(NOTE, 2, (PAGE, 0), 1, names=for_a_checkpoint)
def saved_and_restored(names, printed):
    """The same numbers in the same places; `shardings` puts back what others read to the device."""
    params, state = names["params"], names["state"]
    tx, made = names["tx"], names["init"](jax.random.key(0))
    shutil.rmtree(names["path"].parent)
    assert kinds(params) == ["device", "pinned_host", "pinned_host"]
    assert set(kinds(state.inner.mw)) == {"pinned_host"}
    assert all(map(host_memory.is_on_host, jax.tree.leaves((params["layers"], state.inner.mw))))
    expected = made, tx.init(made)
    for x, y in zip(*map(jax.tree.leaves, on_device(((params, state), expected))), strict=True):
        np.testing.assert_array_equal(x, y)
    if "shardings" not in names:
        return
    assert jax.tree.map(lambda x: x.sharding, (params, state)) == (
        jax.tree.map(lambda x: x.sharding, names["shapes"]),
        names["shardings"],
    )
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, state)
    file.seek(0)
    for read in (
        pickle.loads(pickle.dumps(state)),
        eqx.tree_deserialise_leaves(file, state),
        serialization.from_bytes(state, serialization.to_bytes(state)),
    ):
        assert not any(map(host_memory.is_on_host, jax.tree.leaves(read)))
        assert kinds(jax.device_put(read, names["shardings"])) == kinds(state)


def test_a_checkpoint_in_8_bits(standard_promotion):
    """By the same block: codes are bytes in the file and words on the host, and the step goes on."""
    names = IMPORTED | for_a_checkpoint()
    in_8_bits = blocks(PAGE)[0].replace("moment_dtype=jnp.bfloat16", 'moment_dtype="8bit"')
    assert in_8_bits != blocks(PAGE)[0]
    exec(in_8_bits, names)
    run_example(NOTE, 1, names)
    params, state, _ = names["step"](names["params"], names["state"], names["tokens"])
    expected = on_device((params, state))
    names |= {"params": params, "state": state}
    run_example(NOTE, 2, names)
    shutil.rmtree(names["path"].parent)
    found = names["params"], names["state"]
    assert kinds(found) == kinds((params, state))
    assert jnp.int32 in [x.dtype for x in jax.tree.leaves(found[1].inner.mw)]
    assert any(map(host_memory.is_on_host, jax.tree.leaves(found[1].inner.mw)))
    for x, y in zip(*map(jax.tree.leaves, (on_device(found), expected)), strict=True):
        np.testing.assert_array_equal(x, y)
    names["step"](*found, names["tokens"])


@after(PAGE, 5, 0)
def bytes_of_a_step(names, printed):
    """A CPU counts both as its memory."""
    assert printed.splitlines()[0].endswith("on the device")


@pytest.mark.parametrize("block", choices(PAGES))
def test_block(block, standard_promotion):
    run(block)


@pytest.mark.usefixtures("as_users_run_it")
def test_the_program(capsys):
    """It learns, says what lies on the host, and continues a sequence."""
    importlib.import_module("larger_than_device")
    lines = capsys.readouterr().out.splitlines()
    first, *_, last = (float(x.split()[-1]) for x in lines if x.startswith("step"))
    assert last < first / 5
    assert "[0]['layers']['up']: 4.00 MB on the host" in lines
    assert "[1]['layers']['up']: 4.00 MB on the host" in lines
    assert lines[-1].endswith("is continued by 59")
