"""Models and optimizers for the tests of moments in 8 bits."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from tests.cases import CASES, METHODS, ONE_EACH, RATE, moments_of
from tests.support.private import decoded, geometry

_ELEMENTWISE = [case.name for case in CASES if case.elementwise]


def _parts():
    """Directions alone, for `optax.chain`, of the methods that have them."""
    for method in METHODS:
        name = f"scale_by_{method.__name__}"
        if hasattr(jgrad, name):
            part = getattr(jgrad, name)
            case = next(case for case in CASES if case.make is method and case.rounded)
            names = inspect.signature(part).parameters
            options = {k: x for k, x in case.without_masks().options.items() if k in names}
            yield name, functools.partial(part, **options)


MAKES = {
    case.name: functools.partial(case.make, RATE, **case.without_masks().options)
    for case in CASES
    if case.rounded
} | dict(_parts())
# One of each method.
EACH = [name for name in MAKES if name in ONE_EACH or name.startswith("scale_by_")]
# Of methods whose elements do not know of each other.
ELEMENTWISE = [name for name in EACH if name.removeprefix("scale_by_") in _ELEMENTWISE]


CONSTANT_FREE = functools.partial(jgrad.adam, RATE, epsilon=0.0, moment_dtype="8bit")


def optimizers(names=EACH):
    """The transformations in 8 bits; other options follow."""
    makes = [functools.partial(MAKES[name], moment_dtype="8bit") for name in names]
    return pytest.mark.parametrize("make", makes, ids=names)


def in_float32(make):
    """The same factory without `moment_dtype`."""
    options = {name: x for name, x in make.keywords.items() if name != "moment_dtype"}
    return functools.partial(make.func, *make.args, **options)


def packs(name):
    """Whether its matrices may be packed."""
    return name not in {case.name for case in CASES if not case.packs}


FORMS = {"tree": False, "packed": True}
packed_or_not = pytest.mark.parametrize("packed", FORMS.values(), ids=FORMS)


def normal(shape, seed=0, *, spread=1.0):
    """Numbers whose sizes differ by a factor of about `e**spread`."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(
        rng.normal(size=shape) * np.exp(spread * rng.normal(size=shape)), jnp.float32
    )


def model(seed=0):
    """A leaf of whole blocks, and one whose last block is shorter."""
    shapes = {"a": (16, 512), "c": (70, 90)}
    return {name: normal(shape, seed + i) for i, (name, shape) in enumerate(shapes.items())}


def gradients(count, seed=10):
    return [model(seed + 5 * t) for t in range(count)]


def moments(state):
    """Every array in 8 bits of a state."""
    return [x for x in jax.tree.leaves(state, is_leaf=is_blocks) if is_blocks(x)]


def value(x):
    """The numbers of a moment, in whichever form."""
    return np.asarray(jax.jit(decoded)(x) if is_blocks(x) else x)


def per_element(x, part):
    """Codes or scales of a moment for each element, as float32."""
    if part == "codes":
        return x.codes.astype(jnp.float32)
    shape = x.codes.shape
    return jnp.broadcast_to(geometry(x).per_element(x.scale), shape)


def unpacked(moment, part):
    """The same of a moment that may be packed, on the tree."""
    return jgrad.unpack(jax.tree.map(lambda x: per_element(x, part), moment, is_leaf=is_blocks))


def assert_same_moments(a, b):
    """Codes and scales of two states bit for bit, packed or not."""
    for x, y in zip(moments_of(a).values(), moments_of(b).values(), strict=True):
        for part in ("codes", "scale"):
            chex.assert_trees_all_equal(unpacked(x, part), unpacked(y, part))


def quantized(state, *, like):
    """The state in the form of another, where nothing is dropped and nothing new."""
    return jgrad.carry_over(state, like=like, strict=True)[0]


def unquantized(state):
    """The state with arrays of float32 for `Blocks`."""

    def shape(x):
        return jax.ShapeDtypeStruct(x.shape, jnp.float32) if is_blocks(x) else x

    return quantized(state, like=jax.tree.map(shape, state, is_leaf=is_blocks))


def is_blocks(x):
    return isinstance(x, jgrad.Blocks)
