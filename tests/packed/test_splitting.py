"""Cuts in two turns give the pieces of one, under every transformation, and compile to few kernels."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from jgrad._packed import buffers
from tests.support.choice import mostly_slow
from tests.support.compilations import compilations
from tests.support.loops import assert_equal

SIZES = {
    "few": (3, 3, 5),
    "many": (4,) * 100,
    "mixed": (2, *(4,) * 70, 7, *(4,) * 9, 0),
    "one": (9,),
    "nothing": (0, 0),
}
every_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def vector(sizes, first=1.0):
    x = jnp.arange(sum(sizes), dtype=jnp.float32)
    return x.at[0].set(first) if x.size else x


@pytest.mark.slow(one_in=7)
@pytest.mark.parametrize("first", [1.0, -1.0, 0.0, -0.0, np.inf, np.nan])
@every_size
def test_pieces(sizes, first):
    """Whatever the first number is, by which XLA is kept from looking through."""
    x = vector(sizes, first)
    ends = np.cumsum(sizes)[:-1]
    found = jax.jit(lambda x: buffers.split(x, sizes))(x)
    for a, b in zip(found, np.split(np.asarray(x), ends), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", mostly_slow(SIZES.values(), SIZES["many"]), ids=SIZES)
def test_derivatives(sizes):
    """In both modes, one over the other, and over a batch."""
    x = vector(sizes)
    weights = [float(i + 1) for i in range(len(sizes))]
    f = lambda x: sum(
        w * jnp.sum(jnp.sin(y)) for w, y in zip(weights, buffers.split(x, sizes), strict=True)
    )
    factor = jnp.asarray(np.repeat(weights, sizes), jnp.float32)
    np.testing.assert_allclose(jax.grad(f)(x), factor * jnp.cos(x), rtol=1e-6)
    along = jax.jvp(jax.grad(f), (x,), (jnp.ones_like(x),))[1]
    np.testing.assert_allclose(along, -factor * jnp.sin(x), rtol=1e-6)
    both = jax.vmap(jax.grad(f))(jnp.stack([x, -x]))
    np.testing.assert_allclose(both[1], factor * jnp.cos(x), rtol=1e-6)


def test_few_kernels():
    """Hundreds of pieces in the kernels of some dozens."""
    sizes = (8,) * 300
    x = vector(sizes)
    text = jax.jit(lambda x: [2 * y for y in buffers.split(x, sizes)]).lower(x).compile().as_text()
    cuts = set(re.findall(r"slice=\{\[(\d+:\d+)\]\}", text))
    assert 0 < len(cuts) < 60


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
def test_dtypes(dtype):
    x = vector(SIZES["many"]).astype(dtype)
    for i, piece in enumerate(jax.jit(lambda x: buffers.split(x, SIZES["many"]))(x)):
        np.testing.assert_array_equal(piece, x[4 * i : 4 * i + 4])


@pytest.mark.slow
def test_thousands_of_pieces_of_few_sizes():
    """An eager call takes them one by one, and compiles a program for each size."""
    tree = {f"w{i}": jnp.full((16, 16) if i % 3 else (5,), float(i)) for i in range(600)}
    packed = []
    assert compilations(lambda tree: packed.append(jgrad.pack(tree)), tree) <= 12
    found = []
    assert compilations(lambda packed: found.append(jgrad.unpack(packed)), packed[0]) <= 6
    assert_equal(found[0], tree)
    assert_equal(jax.jit(jgrad.unpack)(packed[0]), tree)
    assert_equal(jgrad.unpack(jax.device_get(packed[0])), tree)
    state = []
    tx = jgrad.pack_small(jgrad.adam(0.1))
    assert compilations(lambda tree: state.append(tx.init(tree)), tree) <= 12
    assert_equal(state[0].mw.buffers["float32"], 0 * packed[0].buffers["float32"])
