"""What transformations and states print: the call, and kinds and shapes of codes."""

import jax.numpy as jnp
import optax
import pytest

import jgrad
from tests.cases import CASES

W = {"w": jnp.ones((16, 256)), "b": jnp.zeros(3)}


def test_a_transformation_prints_its_call():
    schedule = optax.cosine_decay_schedule(1e-3, 10)
    inner = optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.adam(schedule, weight_decay=0.1))
    tx = jgrad.skip_nonfinite(jgrad.accumulate(inner, every=4), loss_scale=4.0)
    assert repr(tx) == "skip_nonfinite(accumulate(chain(...), every=4), loss_scale=4.0)"
    of_all = jgrad.adam(schedule, weight_decay=0.1, weight_decay_mask={"w": True})
    assert repr(of_all).startswith(f"adam({schedule.__name__}, ")
    assert repr(of_all).endswith("weight_decay=0.1, weight_decay_mask={'w': True})")


def test_hidden_matrices_print_what_they_were_given():
    tx = jgrad.muon(0.1, matrices=jgrad.hidden_matrices(), adam_learning_rate=0.01)
    assert repr(tx) == "muon(0.1, matrices=hidden_matrices(), adam_learning_rate=0.01)"
    chosen = jgrad.hidden_matrices(exclude=["head"], layer_axes=0)
    assert repr(chosen) == "hidden_matrices(exclude=('head',), layer_axes=0)"


def test_arrays_are_kinds_and_shapes():
    rates = {"w": jnp.ones((4, 1, 1)), "b": 0.1}
    assert repr(jgrad.lion(rates)) == "lion({'b': 0.1, 'w': float32[4, 1, 1]})"
    mask = {f"layer_{i}": True for i in range(20)}
    text = repr(jgrad.adam(0.1, weight_decay=0.1, weight_decay_mask=mask))
    assert text.endswith("...)")
    assert len(text) < 150


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_optimizer_prints_its_name(case):
    assert repr(case.tx()).startswith(f"{case.make.__name__}(0.05")


def test_an_optimizer_of_ones_own_does_too():
    @jgrad.optimizer_of_leaf
    def signum(g, mw, *, beta=0.9):
        mw = beta.value * mw + g
        return jnp.sign(mw), mw

    assert repr(signum(1e-3, beta=0.8)) == "signum(0.001, beta=0.8)"


GIVEN = {"accumulate": {"every": 2}, "hyperball": {"learning_rate": 0.1, "leaves": True}}
OTHERS = ("accumulate", "hyperball", "master_weights", "offload", "pack_small", "schedule_free")
WRAPPERS = (*OTHERS, "skip_nonfinite", "skip_spikes", "stochastic_rounding", "watch")


@pytest.mark.parametrize("name", WRAPPERS)
def test_every_wrapper_prints_what_is_inside(name):
    tx = getattr(jgrad, name)(jgrad.lion(0.1), **GIVEN.get(name, {}))
    assert repr(tx).startswith(f"{name}(lion(0.1)")


def test_a_state_in_8_bits_prints_no_codes():
    state = jgrad.adam(1e-3, moment_dtype="8bit").init(W)
    assert repr(state.mw["w"]) == "Blocks(int8[16, 256], float32[16, 1])"
    assert len(repr(state).splitlines()) == 1
    assert repr(jgrad.Blocks(1, None)) == "Blocks(1, None)"
