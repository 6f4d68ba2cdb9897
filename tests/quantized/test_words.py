"""8-bit codes as words of four, and back: which byte is which, in each memory, and in whole states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from jgrad._quantized import words
from tests.support import messages
from tests.support.eight_bits import is_blocks, unquantized
from tests.support.memory import kinds, offloaded, on_device, on_host
from tests.support.private import host_memory, inner_equations
from tests.support.states import as_file, assert_same_bits

pytestmark = pytest.mark.not_in_jax_0_8("host memory")

# By shape: the axis of which four become one.
SHAPES = {(1024, 256): 0, (4, 256, 256): 1, (2, 4, 128, 256): 2, (512, 32, 256): 0}
PLACES = {
    "NumPy": lambda tree: jax.tree.map(np.asarray, tree),
    "device": lambda tree: tree,
    "host": on_host,
}


def blocks(shape, dtype):
    rng = np.random.default_rng(0)
    codes = jnp.asarray(rng.integers(-128, 128, size=shape), jnp.int8)
    scale = 2.0 ** rng.integers(-9, 9, size=(*shape[:-1], shape[-1] // 256))
    return jgrad.Blocks(codes.view(dtype), jnp.asarray(scale, jnp.float32))


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", SHAPES)
def test_words_and_back(shape, place, jit):
    """The first of four rows has the lowest byte of a word; all stay where they lie."""
    for dtype in (jnp.int8, jnp.uint8):
        given = PLACES[place](blocks(shape, dtype))
        found = jit(words.to_words)(given)
        assert found.codes.dtype == (jnp.int32 if dtype == jnp.int8 else jnp.uint32)
        assert (found.shape, found.dtype) == (shape, dtype)
        rows = np.moveaxis(np.asarray(given.codes).view(np.uint8), SHAPES[shape], 0)
        expected = sum(rows[k::4].astype(np.uint32) << (8 * k) for k in range(4))
        bits = np.asarray(found.codes).view(np.uint32)
        np.testing.assert_array_equal(np.moveaxis(bits, SHAPES[shape], 0), expected)
        back = jit(words.to_codes)(found)
        np.testing.assert_array_equal(back.codes, given.codes)
        assert back.codes.dtype == dtype
        if place != "NumPy":
            assert kinds(found) == kinds(back) == kinds(given)


# Of which the codes stay bytes, on the device: see `host_memory` for what is small.
OTHERS = {
    "a short last axis": (4, 256, 128),
    "rows that four do not divide": (2, 258, 512),
    "few words": (512, 256),
    "vectors of layers": (32, 8192),
}


@pytest.mark.parametrize("name", OTHERS)
def test_codes_that_stay(name):
    tx = jgrad.offload(jgrad.adam(0.1, moment_dtype="8bit"))
    state = tx.init({"w": jnp.ones(OTHERS[name], jnp.bfloat16)})
    assert [x.codes.dtype for x in jax.tree.leaves(state, is_leaf=is_blocks) if is_blocks(x)] == [
        jnp.int8,
        jnp.uint8,
    ]
    assert set(kinds(state)) == {"device"}


def test_scales_of_matrices_stay():
    """Those of layers do not: a slice of a matrix would be one of lanes, which XLA for TPUs refuses."""
    shapes = {"matrix": (2**16, 512), "stack": (4, 2**14, 512)}
    w = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    init = jgrad.offload(jgrad.lion(0.1, moment_dtype="8bit")).init
    _, *moments = jax.make_jaxpr(init)(w).out_avals
    found = [(x.dtype, x.memory_space == jax.memory.Space.Host) for x in moments]
    word, scale = jnp.dtype(jnp.int32), jnp.dtype(jnp.float32)
    assert found == [(word, True), (scale, False), (word, True), (scale, True)]


# ---- states ------------------------------------------------------------------------------------

W = {"w": jnp.sin(jnp.arange(2.0**18)).reshape(4, 256, 256), "b": jnp.ones(256), "m": jnp.ones((1024, 256))}  # fmt: skip
TX = jgrad.average_params(jgrad.adam(0.1, moment_dtype="8bit"), 0.9)


def trained(place=lambda w: w):
    """A state on the device, and the same as `offload` has it."""
    w, step = place(W), jax.jit(TX.update)
    state = step(w, step(w, TX.init(w), w)[1], w)[1]
    return state, offloaded(state)


def of_state(state):
    return [x.codes.dtype.name for x in jax.tree.leaves(state, is_leaf=is_blocks) if is_blocks(x)]


def packed(w):
    return jgrad.pack(w, multiple_of=4)


@pytest.mark.slow(always=["tree"])
@pytest.mark.parametrize("place", [lambda w: w, packed], ids=["tree", "packed"])
def test_files_do_not_show_where_a_state_lay(place):
    """`unpack` has codes; `pack` and `carry_over` make of them what lies where `like` has it."""
    here, there = trained(place)
    assert set(of_state(there)) == {"int32", "uint32"}
    assert set(of_state(here)) == {"int8", "uint8"}
    assert_same_bits(jgrad.unpack(there), jgrad.unpack(here))
    assert_same_bits(on_device(jgrad.pack(jgrad.unpack(here), like=there)), on_device(there))
    assert_same_bits(jgrad.pack(jgrad.unpack(there), like=here), here)
    for old in (there, here, as_file(there), as_file(here), as_file(jgrad.unpack(there))):
        for like in (there, here):
            state, account = jgrad.carry_over(old, like=like, params=place(W), strict=True)
            assert_same_bits(state, like)
            assert kinds(state) == kinds(like)
            assert {*account.converted} <= {"mw/b", "vw/b"}  # in 8 bits in a buffer alone
        shapes = jax.eval_shape(jgrad.offload(TX).init, place(W))
        state, _ = jgrad.carry_over(old, like=shapes, params=place(W), strict=True)
        assert_same_bits(on_device(state), on_device(there))


def test_they_begin_in_slices(monkeypatch):
    """No stack of words is on the device."""
    monkeypatch.setattr(host_memory, "SLICE", 2**14)
    init = jgrad.offload(TX).init
    moved = [
        x.aval.shape
        for eqn in inner_equations(jax.make_jaxpr(init)(W).jaxpr.eqns)
        if eqn.primitive.name == "device_put"
        for x in eqn.invars
        if jnp.issubdtype(x.aval.dtype, jnp.integer)
    ]
    assert moved.count((1, 64, 256)) == 2
    assert (4, 64, 256) not in moved
    state, expected = init(W), offloaded(TX.init(W))
    assert_same_bits(state, expected)
    assert kinds(state) == kinds(expected)


def test_of_other_dtypes():
    """In float32, and in 8 bits again: rounded to the nearest, which changes no decoded number."""
    here, there = trained()
    in_float32 = unquantized(there)
    assert_same_bits(on_device(in_float32), unquantized(here))
    assert kinds(in_float32.inner.mw["w"]) == ["pinned_host"]
    state, account = jgrad.carry_over(in_float32, like=there, strict=True)
    assert_same_bits(state, there)
    assert kinds(state) == kinds(there)
    assert "float32 to 8 bits" in str(account)
    state, _ = jgrad.carry_over(there, like=there, reset={"w": True, "b": False, "m": False})
    assert not np.any(state.inner.mw["w"].codes)
    assert kinds(state) == kinds(there)


def test_conversions_on_the_host_need_no_device(monkeypatch):
    """A stack need not fit there."""
    _, there = trained()
    monkeypatch.delattr(host_memory, "to_device")
    codes = jgrad.unpack(there)
    assert_same_bits(jgrad.pack(codes, like=there), there)
    assert_same_bits(jgrad.carry_over(codes, like=there)[0], there)


test_words_without_an_offload = messages.test_of("words", globals())
