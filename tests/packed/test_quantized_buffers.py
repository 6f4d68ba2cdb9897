"""States in 8 bits of packed trees: unpacked and packed again, with the codes of the tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from tests.support import messages
from tests.support.choice import mostly_slow
from tests.support.eight_bits import quantized, unquantized
from tests.support.states import assert_same_bits

SHAPES = {
    "rows": (8, 512),
    "between": (4, 6, 256),
    "flat": (5000,),
    "small": (10,),
    "stacked": (3, 70, 50),
    "last": (512, 12),
    "scalar": (),
    "empty": (0, 3),
    "no layers": (0, 20),
}
SMALL = ("small", "scalar", "empty", "no layers")  # in 8 bits as their buffer is, unless apart
# Axes over which layers are stacked; of each kind: the first axis, another, all but the last.
STACKED = {
    **dict.fromkeys(SHAPES),
    "rows": 1,
    "between": 1,
    "stacked": (0, 1),
    "last": 1,
    "no layers": 0,
}
PACKINGS = {
    "plain": {},
    "stacked": {"layer_axes": STACKED},
    "first axis": {"layer_axes": {name: 0 if name == "stacked" else None for name in SHAPES}},
    "shards": {"multiple_of": 8},
    "large": {"max_size": 5000},
    "apart": {"small_apart": True},
}

tx = jgrad.adam(1e-2, moment_dtype="8bit")

# Compiled: eagerly, each shape and operation would be a program of its own.
update, unpack, unquantized = map(jax.jit, (tx.update, jgrad.unpack, unquantized))
as_like = jax.jit(lambda state, like: jgrad.pack(state, like=like))


def tree(seed):
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-3, 3, size=len(SHAPES))
    pairs = zip(SHAPES.items(), scale, strict=True)
    return {k: jnp.asarray(s * rng.normal(size=shape), jnp.float32) for (k, shape), s in pairs}


def trained(pack):
    """The state after two updates."""
    w = pack(tree(0))
    state = tx.init(w)
    for seed in (1, 2):
        _, state = update(pack(tree(seed)), state, w)
    return state


packings = pytest.mark.parametrize("name", mostly_slow(PACKINGS, "stacked"))


@packings
def test_numbers_of_an_unpacked_state(name):
    """They are packed again; small leaves as numbers, for which there may be several codes."""
    state = trained(lambda w: jgrad.pack(w, **PACKINGS[name]))
    unpacked = unpack(state)
    assert_same_bits(unquantized(as_like(unpacked, state)), unquantized(state))
    assert_same_bits(unquantized(unpacked), unpack(unquantized(state)))
    for name, shape in SHAPES.items():
        assert unpacked.mw[name].shape == shape
        assert isinstance(unpacked.mw[name], jax.Array if name in SMALL else jgrad.Blocks)
    like = jax.eval_shape(tx.init, tree(0))
    assert jax.eval_shape(unpack, state) == jax.eval_shape(lambda: unpacked)
    as_a_tree = jax.jit(lambda state: quantized(state, like=like))(unpacked)
    assert int(update(tree(1), as_a_tree, tree(0))[1].step) == 3


@pytest.mark.slow
@packings
def test_the_state_of_a_tree_is_packed_by_value(name):
    alone = trained(lambda w: w)
    like = jax.eval_shape(tx.init, jgrad.pack(tree(0), **PACKINGS[name]))
    packed = jax.jit(lambda state: jgrad.pack(state, like=like))(alone)
    found, numbers = jax.device_get((unpack(unquantized(packed)), unquantized(alone)))
    for key in SHAPES:
        expected = numbers.mw[key]
        # Other blocks have other scales: a number may be between two codes, or below the smallest.
        bound = np.abs(expected) / 16 + np.abs(expected).max(initial=0) / 2**13
        assert (np.abs(found.mw[key] - expected) <= bound).all()


test_message = messages.test_of("packed_8_bits", globals())
