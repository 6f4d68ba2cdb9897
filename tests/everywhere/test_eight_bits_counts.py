"""8-bit moments in the compiled program: bytes, temporaries, and what must not be in it."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import jgrad
from benchmarks.recipes import program
from tests.cases import CASES, ONE_EACH
from tests.support.choice import mostly_slow

# Bytes of temporaries per parameter, more than float32's, on a tree and packed. Updates and codes
# cannot both be written in place. LARS and packed LAMB take more: float32 moments are written where
# norms and updates read them, and those before rounding are nowhere, so XLA writes them, or what
# LARS adds to them, for the time of the step.
USUAL = (2.3, 2.3)
BEYOND = {"lamb": (2.3, 8.1), "lars": (4.7, 5.1)}
SHAPES = ((256, 512), (512, 256), (100, 300), (8192,))
MAKES = {
    case.name: functools.partial(case.make, 1e-3, **case.without_masks().options)
    for case in CASES
    # The directions of Muon are products of matrices, which are written out.
    if case.state and case.make is not jgrad.muon and case.name in ONE_EACH
}
every_method = pytest.mark.parametrize("name", mostly_slow(MAKES, "adam"))
packed_or_not = pytest.mark.parametrize("packed", [False, True], ids=["tree", "packed"])


def tree(leaves=20):
    return {f"w{i}": jnp.ones(SHAPES[i % len(SHAPES)]) for i in range(leaves)}


def built(tx, params):
    """A step of update and apply with what it changes donated."""
    step = program(tx, params, params, {})
    step.build()
    return step


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="The XLA of older versions writes more out."
)
@packed_or_not
@every_method
def test_twenty_leaves(name, packed):
    """Temporaries by XLA's own count; no generator of random numbers, and no table."""
    params = jgrad.pack(tree()) if packed else tree()
    count = sum(x.size for x in jax.tree.leaves(params))
    plain, eight = (built(MAKES[name](**o), params) for o in ({}, {"moment_dtype": "8bit"}))
    assert eight.temporary_bytes <= plain.temporary_bytes + BEYOND.get(name, USUAL)[packed] * count
    held = sum(x.nbytes for x in jax.tree.leaves(eight.carry[1]))
    assert held <= (1.02 if eight.carry[1].vw is None else 2.04) * count
    # Packed LARS and LAMB add up rows and take the factors of layers so in float32, too.
    expensive = re.compile(r" (rng|gather|dynamic-gather|sort|scatter)\S*\(")
    assert set(expensive.findall(eight.text)) <= set(expensive.findall(plain.text))
    assert "threefry" not in eight.text


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="The XLA of older versions writes more out."
)
@packed_or_not
def test_bfloat16_moments(packed):
    """4 bytes between steps; those of temporaries are an update's; no generator of random numbers."""
    params = jgrad.pack(tree()) if packed else tree()
    count = sum(x.size for x in jax.tree.leaves(params))
    step = built(MAKES["adam"](moment_dtype=jnp.bfloat16), params)
    assert sum(x.nbytes for x in jax.tree.leaves(step.carry[1])) <= 4 * count + 4
    assert step.temporary_bytes <= 4.01 * count
    assert not re.search(r" (rng\S*|gather|dynamic-gather|sort|scatter)\(", step.text)


def test_small_leaves_apart_cost_no_bytes():
    """In 8 bits and in float32: a step moves as much, with a few kernels more."""
    params = tree(8) | {f"b{i}": jnp.ones(700) for i in range(8)}
    for options in ({"moment_dtype": "8bit"}, {}):
        forms = (jgrad.pack(params), jgrad.pack(params, small_apart=True))
        whole, apart = (built(MAKES["adam"](**options), form) for form in forms)
        assert abs(apart.bytes_accessed / whole.bytes_accessed - 1) < 0.01
        assert apart.temporary_bytes <= 1.01 * whole.temporary_bytes
        count = [program.text.count(" fusion(") for program in (whole, apart)]
        assert count[1] <= count[0] + 3
