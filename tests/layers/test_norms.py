"""Norms of layers at every scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from jgrad._arithmetic import leafwise
from jgrad._layers import norms, trust
from jgrad._layers.layer_axes import LayerAxes
from jgrad._layers.trust import TrustLayers
from tests.support.compilations import compilations


def found_norms(*arrays):
    """The norms of arrays, by the function under test."""
    layers = [LayerAxes(x.shape) for x in arrays]
    (batches,) = norms.layer_norms(layers, [(leafwise.identity, (x,)) for x in arrays])
    return norms.split(layers, batches)


def true_norm(x):
    x = np.asarray(x).astype(np.longdouble)
    return np.sqrt(np.sum(np.square(np.abs(x))))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("scale", [0, 1e-30, 1e-23, 1e-19, 1e-10, 1, 1e10, 1e19, 1e30, 3e38])
def test_scales(scale, jit):
    """Neither overflow nor underflow, alone and beside layers of other scales."""
    rng = np.random.default_rng(0)
    odd = jnp.asarray(scale * rng.uniform(0.1, 0.3, size=(3, 4)), jnp.float32)
    plain = jnp.asarray(rng.normal(size=7), jnp.float32)
    for arrays in ([odd], [plain, odd, plain * 1e-3], [odd, plain * 1e25]):
        found = (jax.jit(found_norms) if jit else found_norms)(*arrays)
        for x, y in zip(found, arrays, strict=True):
            np.testing.assert_allclose(np.asarray(x), float(true_norm(y)), rtol=1e-6)


@pytest.mark.parametrize("norm", ["layers", "global"])
@pytest.mark.parametrize("scale", [0, 1e-30, 1e30])
def test_constants(scale, norm):
    """What a jitted function closes over: small and large arrays, of equal elements and of others."""
    rng = np.random.default_rng(0)
    numbers = [np.ones((3, 4)), rng.normal(size=7), rng.normal(size=(130, 128))]
    arrays = [jnp.asarray(scale * x, jnp.float32) for x in numbers]
    if norm == "global":
        found = jax.jit(lambda: jgrad.global_norm(arrays))()
        arrays = [np.concatenate([np.ravel(x) for x in arrays])]
    else:
        found = jax.jit(lambda: jnp.stack(found_norms(*arrays)))()
    np.testing.assert_allclose(np.ravel(found), [float(true_norm(x)) for x in arrays], rtol=1e-6)


@pytest.mark.bits
@pytest.mark.slow(one_in=8)
@pytest.mark.parametrize("scale", [1e-25, 1e25])
@pytest.mark.parametrize("shape", [(123,), (40, 30), (7, 5, 11), (33, 31)])
def test_layers_of_another_scale_change_no_bit(shape, scale):
    """A layer beside one that is rescaled keeps its plain sum: replicas on devices stay equal."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(16)]
    usual = jax.jit(found_norms)(*arrays)
    rescaled = jax.jit(found_norms)(*(scale * x if i == 4 else x for i, x in enumerate(arrays)))
    assert [a == b for a, b in zip(usual, rescaled, strict=True)] == [i != 4 for i in range(16)]


def test_a_layer_that_needs_no_unit_keeps_its_plain_sum():
    """Both sums are of one order on most CPUs, so nothing else can tell which was taken."""
    total, rescaled, unit = jnp.array([4.0, 4.0]), jnp.array([9.0, 9.0]), jnp.array([1.0, 2.0])
    norm = norms._mixed(total, rescaled, unit)
    np.testing.assert_array_equal(norm.mantissa, [2.0, 3.0])


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_dtypes(dtype, x64):
    """In float32 or wider: 100 elements of 100 overflow float16's own sum of squares."""
    x = jnp.full((10, 10), 100, dtype)
    (found,) = found_norms(x)
    np.testing.assert_allclose(found, 1000.0, rtol=1e-6)
    assert found.dtype == (jnp.float64 if dtype == "float64" else jnp.float32)


def test_mixed_precision(x64):
    """Each layer is scaled within its own dtype's range, beside one of another."""
    single, double = jnp.full(3, 1e30, jnp.float32), jnp.full(3, 1e200, jnp.float64)
    found = found_norms(single, double)
    np.testing.assert_allclose(found, [np.sqrt(3) * 1e30, np.sqrt(3) * 1e200], rtol=1e-6)


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize("count", [1, 15, 16, 17, 50])
@pytest.mark.parametrize("small", [True, False])
def test_batches(count, small):
    """Any number of layers, alike or not, in the usual and in the rescaled way."""
    rng = np.random.default_rng(count)
    shapes = [(4, 3) if i % 2 else (5,) for i in range(count)]
    scale = 1e-25 if small else 1.0
    arrays = [jnp.asarray(scale * rng.normal(size=s), jnp.float32) for s in sorted(shapes)]
    expected = [float(true_norm(x)) for x in arrays]
    np.testing.assert_allclose(found_norms(*arrays), expected, rtol=1e-6)


def test_large_layers_are_rescaled_one_by_one():
    arrays = [jnp.full((200, 100), 1e-25 * (i + 1), jnp.float32) for i in range(3)]
    np.testing.assert_allclose(
        found_norms(*arrays), [float(true_norm(x)) for x in arrays], rtol=1e-5
    )


def test_functions_of_shared_scalars():
    """A layer may be a function of arrays, some of which all layers share."""
    f = lambda x, y, a: x + a * y
    a = jnp.float32(3.0)
    rng = np.random.default_rng(0)
    pairs = [jnp.asarray(1e-25 * rng.normal(size=(2, 6)), jnp.float32) for _ in range(5)]
    layers = [LayerAxes((6,))] * 5
    first, second = norms.layer_norms(
        layers, [(f, (x, y, a)) for x, y in pairs], [(leafwise.identity, (x,)) for x, _ in pairs]
    )
    for found, (x, y) in zip(norms.split(layers, first), pairs, strict=True):
        np.testing.assert_allclose(
            found, float(true_norm(np.asarray(x, float) + 3 * np.asarray(y, float))), rtol=1e-5
        )
    for found, (x, _) in zip(norms.split(layers, second), pairs, strict=True):
        np.testing.assert_allclose(found, float(true_norm(x)), rtol=1e-5)


@pytest.fixture(params=["cpu", "default"])
def platform(request, monkeypatch):
    """What is taken for this platform."""
    chosen = lambda *args, **branches: branches[request.param](*args)
    monkeypatch.setattr(jax.lax, "platform_dependent", chosen)
    trust._written_or_not.cache_clear()
    yield request.param
    trust._written_or_not.cache_clear()


def test_where_the_norm_of_a_direction_is_computed(platform):
    """From the written direction on a CPU, on others from the arrays that it is computed from."""
    x, y = jnp.asarray([1.0, 2.0]), jnp.asarray([10.0, 20.0])
    calls = [(jnp.add, (x, y))]
    directions, measured = trust.computed_once(calls, TrustLayers([LayerAxes((2,))]))
    (f, (written,)), (measure, (same, *arrays)) = directions[0], measured[0]
    np.testing.assert_array_equal(f(written), [11, 22])
    assert same is written
    np.testing.assert_array_equal(
        measure(jnp.zeros(2), *arrays), [0, 0] if platform == "cpu" else [11, 22]
    )


def test_non_finite():
    """NaN and infinity are not hidden, and do not spread to other layers."""
    found = found_norms(jnp.array([1.0, jnp.nan]), jnp.array([jnp.inf, 1.0]), jnp.array([3.0, 4.0]))
    np.testing.assert_array_equal(found, [np.nan, np.inf, 5.0])


def test_empty():
    np.testing.assert_array_equal(found_norms(jnp.zeros((0, 3)), jnp.array([3.0, 4.0])), [0.0, 5.0])
    assert norms.layer_norms([], [], []) == [[], []]


@pytest.mark.slow(one_in=40)
@pytest.mark.parametrize("exponent", range(-120, 121, 4))
def test_slopes_at_every_scale(exponent):
    """The slope of a norm is the direction of the layer, forward and reverse; zero at zero."""
    x = jnp.ldexp(jnp.asarray([3.0, -4.0]), exponent)
    norm = lambda x: found_norms(x)[0]
    np.testing.assert_array_equal(jax.grad(norm)(jnp.zeros(2)), [0, 0])
    for slope in (jax.jacrev(norm), jax.jacfwd(norm)):
        np.testing.assert_allclose(slope(x), [0.6, -0.8], rtol=1e-5)


def test_one_conditional_for_the_model():
    """However many layers there are, one `lax.cond` chooses the rare way."""
    arrays = [jnp.ones((i + 1,)) for i in range(18)]
    jaxpr = str(jax.make_jaxpr(found_norms)(*arrays))
    assert jaxpr.count("cond[") == 1


def test_vmap():
    x = jnp.asarray([[3.0, 4.0], [3e-25, 4e-25], [3e25, 4e25]], jnp.float32)
    found = jax.vmap(lambda x: found_norms(x)[0])(x)
    np.testing.assert_allclose(found, [5.0, 5e-25, 5e25], rtol=1e-6)


@pytest.mark.slow(one_in=12)
@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
@pytest.mark.parametrize("stacked", [(0,), (1,), (0, 2)])
def test_stacked_layers(stacked, scale, count):
    """A norm for each index along the stacked axes, in the usual and in the rescaled way."""
    rng = np.random.default_rng(0)
    spread = 10.0 ** rng.uniform(-2, 2, size=(count, 4, 3, 2))
    arrays = [jnp.asarray(scale * x * rng.normal(size=x.shape), jnp.float32) for x in spread]
    layers = [LayerAxes((4, 3, 2), stacked)] * count
    (batches,) = norms.layer_norms(layers, [(leafwise.identity, (x,)) for x in arrays])
    within = layers[0].within
    for found, x in zip(norms.split(layers, batches), arrays, strict=True):
        expected = np.sqrt(np.sum(np.asarray(x, np.longdouble) ** 2, axis=within, keepdims=True))
        np.testing.assert_allclose(found, np.asarray(expected, float), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_norms_beyond_the_largest_number(dtype, x64):
    """The largest number stands for them; infinity stays what it is, and the slope is finite."""
    largest = jnp.finfo(dtype).max
    x = jnp.full(4, largest, dtype)
    found, infinite = found_norms(x, x.at[0].set(jnp.inf))
    assert found == largest
    assert infinite == jnp.inf
    assert jnp.all(jnp.isfinite(jax.grad(lambda x: found_norms(x)[0])(x)))


def test_global_norm_of_nothing():
    assert norms.global_norm([], []) == norms.ScaledNorm(0, 1)


def eager_norms(norm, arrays):
    """The norm of each array, or of all, with what they should be."""
    exact = np.array([true_norm(x) for x in arrays], float)
    if norm == "of each":
        return found_norms(*arrays), exact
    return [jgrad.global_norm(arrays)], [np.linalg.norm(exact)]


@pytest.mark.parametrize("norm", ["of each", "of all"])
def test_an_eager_call_of_many_arrays(norm, monkeypatch):
    """More than share a program, with squares that overflow. Here no program is compiled."""
    monkeypatch.setattr(norms, "_EAGER", 8)
    rng = np.random.default_rng(0)
    arrays = list(jnp.asarray(1e25 * rng.normal(size=(20, 2)), jnp.float32))
    with jax.disable_jit():
        found, expected = eager_norms(norm, arrays)
    np.testing.assert_allclose(np.array(found), expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["of each", "of all"])
def test_programs_of_an_eager_call(norm):
    """Of 256 arrays each: twice as many need no other program."""
    rng = np.random.default_rng(0)
    arrays = list(jnp.asarray(rng.normal(size=(256, 2)), jnp.float32))
    eager_norms(norm, [*arrays, *arrays[:8]])
    found = []
    call = lambda arrays: found.extend(eager_norms(norm, arrays))
    assert compilations(call, [*arrays, *arrays]) == 0
    np.testing.assert_allclose(np.array(found[0]), found[1], rtol=1e-6)
