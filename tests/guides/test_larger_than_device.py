"""The page on weights and moments in host memory, and the program that it names."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from jgrad._backward.step_in_backward import forced
from tests.guides.entries import after, choices, run
from tests.support.memory import kinds, on_device

PAGE = "docs/larger_than_device.md"
PAGES = (PAGE,)

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(
        jax.__version_info__ < (0, 10),
        reason="The CPU of JAX 0.8 moves nothing to its host's memory.",
    ),
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
