"""Random bits from a hash: as uniform and as independent as those of a generator, on 2^18 elements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from jgrad._forms.random_keys import element_keys
from jgrad._layers import array_spec
from jgrad._quantized.random_bits import (
    ElementKeys,
    Part,
    element_numbers,
    leaf_keys,
    random_bits,
    step_keys,
)

COUNT = 2**18
NOISE = 5 / COUNT**0.5  # of a correlation: five standard deviations


@jax.jit
def _drawn(step, keys):
    numbers = element_numbers((COUNT,))
    return random_bits(step_keys(step), ElementKeys(keys, np.zeros((), np.uint32)), numbers)


def drawn(step, position=0, *, seed=0, purpose=1):
    return np.asarray(_drawn(jnp.int32(step), leaf_keys(seed, purpose, [position])[0]))


def correlation(a, b):
    return abs(np.corrcoef(a.astype(float), b.astype(float))[0, 1])


@pytest.mark.parametrize("step", [1, 2, 1000, 2**31 - 1])
@pytest.mark.parametrize("position", [0, 1, 777])
def test_uniform(step, position):
    """Chi^2 of the upper, middle and lower eight bits over 256 cells; the mean; each bit by itself."""
    bits = drawn(step, position)
    for shift in (24, 12, 0):
        counts = np.bincount((bits >> shift) & 255, minlength=256)
        chi2 = np.sum(np.square(counts - COUNT / 256)) / (COUNT / 256)
        assert abs(chi2 - 255) < 5 * np.sqrt(2 * 255)
    assert abs(np.mean(bits / 2**32) - 0.5) < 5 / np.sqrt(12 * COUNT)
    for bit in range(32):
        assert abs(np.mean((bits >> bit) & 1) - 0.5) < 5 / np.sqrt(4 * COUNT)


def test_steps_leaves_seeds_and_purposes_are_independent():
    """As numbers, and in the lower twelve bits, which decide nothing alone but carry."""
    first = drawn(1)
    others = [drawn(t) for t in (2, 3, 101, 257, 65537)]
    others += [drawn(1, i) for i in (1, 2, 256)]
    others += [drawn(1, seed=1), drawn(1, purpose=2), drawn(2, 1)]
    for other in others:
        for mask in (0xFFFFFFFF, 0xFFF):
            assert correlation(first & mask, other & mask) < NOISE


@pytest.mark.parametrize("distance", [1, 2, 3, 8, 32, 128, 255, 256, 257, 512, 4096, 65536])
def test_neighbours_are_independent(distance):
    """Also 256 apart: the same place in the next block."""
    for step in (1, 12345):
        bits = drawn(step)
        assert correlation(bits[distance:], bits[:-distance]) < NOISE
        following = drawn(step + 1)
        assert correlation(following[distance:], bits[:-distance]) < NOISE


@pytest.mark.slow
def test_no_stream_is_a_part_of_another():
    """Of two leaves, or two steps, no run of four numbers is common, wherever each of them starts."""
    streams = [drawn(t, i) for t, i in ((1, 0), (2, 0), (1, 1), (7, 3))]
    runs = [
        set(zip(*(s[j : COUNT - 3 + j].tolist() for j in range(4)), strict=True)) for s in streams
    ]
    assert len(set.union(*runs)) == sum(map(len, runs))


def test_streams_whose_first_keys_are_near():
    """The second key enters between the rounds: else one would be the other, five elements on."""
    of_step = step_keys(jnp.int32(1))
    numbers = element_numbers((4096,))
    draw = lambda *keys: np.asarray(
        random_bits(
            of_step, ElementKeys(np.array(keys, np.uint32), np.zeros((), np.uint32)), numbers
        )
    )
    a, b = draw(10, 3000000019), draw(15, 2000000011)
    assert not np.any(a[5:] == b[:-5])
    assert correlation(a[5:], b[:-5]) < 5 / 4096**0.5


@pytest.mark.slow
def test_e44_keys_of_leaves_and_steps():
    """1000 leaves and 1000 steps: a million pairs of keys, of which no two are equal.

    In a step the first key alone differs between leaves, and of a leaf between steps.
    """
    leaves = leaf_keys(0, 1, range(1000)).astype(np.uint32)
    steps = np.asarray(jax.jit(jax.vmap(step_keys))(jnp.arange(1, 1001, dtype=jnp.int32)))
    sums = steps[:, None] + leaves[None]
    assert len(np.unique(leaves[:, 0])) == len(np.unique(steps[:, 0])) == 1000
    pairs = sums[..., 0].astype(np.uint64) << np.uint64(32) | sums[..., 1]
    assert len(np.unique(pairs)) == 10**6


def test_e44_a_saturated_counter_repeats_them():
    """After 2^31 - 1 steps: the state stays the same from one such step to the next."""
    w = {"w": jnp.ones(4096)}
    g = {"w": jnp.asarray(np.random.default_rng(0).normal(size=4096), jnp.float32)}
    tx = jgrad.adam(0.1, beta1=0.0, beta2=0.0, moment_dtype="8bit")
    step = jax.jit(lambda s: tx.update(g, s, w)[1])
    last = tx.init(w)._replace(step=jnp.asarray(2**31 - 2, jnp.int32))
    early = step(step(tx.init(w)))
    a = step(last)
    b = step(a)
    assert int(a.step) == int(b.step) == 2**31 - 1
    np.testing.assert_array_equal(a.vw["w"].codes, b.vw["w"].codes)
    assert np.mean(np.asarray(a.vw["w"].codes) != np.asarray(early.vw["w"].codes)) > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("axis", [None, 0])
def test_the_same_element_packed_or_not(axis):
    """Keys and numbers of a buffer's rows are those of its leaves, padding aside; also of layers."""
    tree = {"a": jnp.zeros((3, 1000)), "b": jnp.zeros(4097), "c": jnp.zeros((2, 5))}
    packed = jgrad.pack(tree, layer_axes={"a": axis, "b": None, "c": None})
    (spec,) = array_spec.specs(packed)
    keys = element_keys(spec, 0, 1, *jax.tree.leaves(packed))
    rows = random_bits(step_keys(jnp.int32(3)), keys, keys.element_numbers(spec.shape))
    unpacked = jgrad.unpack(
        jax.tree.map(lambda _: jax.lax.bitcast_convert_type(rows, jnp.float32), packed)
    )
    for position, x in enumerate(jax.tree.leaves(unpacked)):
        own = ElementKeys(leaf_keys(0, 1, [position])[0], np.zeros((), np.uint32))
        expected = random_bits(step_keys(jnp.int32(3)), own, element_numbers(x.shape))
        np.testing.assert_array_equal(jax.lax.bitcast_convert_type(x, jnp.uint32), expected)


@pytest.mark.parametrize("first_axes", [(), (1,), (2, 0)], ids=str)
def test_the_same_element_in_a_part(first_axes):
    """Numbers of all parts of a leaf are those of the leaf, in every order of its axes."""
    shape, counts = (4, 1, 6), (2, 1, 3)
    whole = np.asarray(element_numbers(shape, first_axes))
    order = [*first_axes, *(i for i in range(3) if i not in first_axes)]
    expected = np.arange(24).reshape([shape[i] for i in order]).transpose(np.argsort(order))
    np.testing.assert_array_equal(whole, expected)
    for i in range(2):
        for j in range(3):
            part = Part(counts, (jnp.int32(i), None, jnp.int32(j)))
            found = element_numbers((2, 1, 2), first_axes, part)
            np.testing.assert_array_equal(found, whole[2 * i : 2 * i + 2, :, 2 * j : 2 * j + 2])
