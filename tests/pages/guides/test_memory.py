"""The blocks about memory and many devices."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jgrad
from tests.pages.guides.entries import after, choices, in_both_forms, it_runs, nbytes, run, size
from tests.support.pages import page

DEVICES = "docs/devices.md"
FOUR_BYTES = "docs/four_bytes.md"
COMPILED = "benchmarks/notes/accelerators.md"
PAGES = (DEVICES, FOUR_BYTES, COMPILED)


def for_a_mesh():
    """A model and its loss."""
    loss = lambda w, x: jnp.mean(jnp.square(x @ w["w"]))
    return {"params": {"w": jnp.ones((16, 3))}, "loss": loss}


after(DEVICES, 0, names=for_a_mesh)(it_runs)


@after(DEVICES, 1, 0, names=for_a_mesh, slow=True)
@after(DEVICES, 3, 0, names=for_a_mesh, slow=True)
def sharded_state_trains(names, printed):
    """Ten steps, each with a smaller loss."""
    params, state, batch = names["params"], names["state"], jnp.ones((8, 16))
    losses = []
    for _ in range(11):
        losses.append(float(names["loss"](jgrad.unpack(params), batch)))
        params, state, *_ = names["step"](params, state, batch)
    assert all(b < a for a, b in itertools.pairwise(losses))


@after(DEVICES, 2, 0, names=for_a_mesh)
def gradients_in_shard_map(names, printed):
    """Those of the whole batch."""
    batch = jnp.arange(128.0).reshape(8, 16)
    found = names["gradients"](names["params"], batch)
    expected = jax.grad(names["loss"])(names["params"], batch)
    assert jnp.allclose(found["w"], expected["w"], rtol=1e-6)


def test_donation():
    """The results are in the order of the arguments, and nothing is copied; else every leaf is."""
    tx, params = jgrad.adam(0.1), {f"w{i}": jnp.ones((64, 64)) for i in range(4)}
    args = tx.init(params), params, params

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    swapped = jax.jit(lambda state, params, g: step(params, state, g), donate_argnums=(0, 1))
    orders = step.lower(params, *args[::2]), swapped.lower(*args)
    copies = [re.findall(r"= f32\[64,64\]\S* copy\(", x.compile().as_text()) for x in orders]
    assert not copies[0]
    assert len(copies[1]) >= 4


@after(COMPILED, 0, slow=True)
def whole_step(names, printed):
    """What a TPU would make of each leaf, as the comment has it."""
    answers = dict(line.split(" ", 1) for line in printed.splitlines())
    assert answers[".inner.mw['w']"] == answers[".inner.vw['w']"] == "one kernel"
    shown = re.search(r"# (\S+) (XLA: .*) \.\.\.$", page(COMPILED), re.MULTILINE)
    assert answers[shown[1]] == shown[2]


def assert_trains(names, state):
    """In both kinds of step."""
    params, args = names["params"], (names["x"], names["y"])
    before = float(names["loss"](params, *args))
    for _ in range(3):
        params, state, _ = in_both_forms(names["step"], params, state, *args)
    assert float(names["loss"](params, *args)) < 0.9 * before


@after(FOUR_BYTES, 0)
@after(FOUR_BYTES, 1, 0, slow=True)
def four_bytes(names, printed):
    """Weights and state have four bytes per parameter."""
    params, state = names["params"], names["tx"].init(names["params"])
    assert nbytes((params, state)) == pytest.approx(4.03 * size(params), rel=0.01)
    assert_trains(names, state)


@after(FOUR_BYTES, 2, 0)
def a_mean_over_devices(names, printed):
    """In a `pmap`, replicas stay alike: `tests/backward/test_gradients.py` has the numbers."""
    params, state = names["params"], names["tx"].init(names["params"])
    args = jax.tree.map(lambda x: jnp.stack([x] * 2), (params, state, names["x"], names["y"]))
    mapped = jax.pmap(names["step"], axis_name="data", devices=jax.devices()[:2])
    jax.eval_shape(mapped, *args)


@after(COMPILED, 1)
def counting_a_step(names, printed):
    """Without the compilers it says how to install them; with them, what a step costs."""
    assert 'pip install ".[accelerators]"' in printed or printed.startswith("28.0")


@pytest.mark.parametrize("block", choices(PAGES))
def test_block(block, standard_promotion):
    run(block)
