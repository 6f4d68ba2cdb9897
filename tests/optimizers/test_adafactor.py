"""Adafactor: what is factored, layers of stacks, every scale, and what others have.

Most of the numbers come from its rows in `cases.py`; those of matrices by layers and outputs are here.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.pages import upstream_methods
from tests.pages.test_upstream_methods import theirs
from tests.reference import optimizers as reference
from tests.support import messages
from tests.support.errors import assert_error
from tests.support.loops import run

RATE = 0.05
SHAPES = {"w": (6, 4), "conv": (2, 2, 3, 5), "layers": (3, 5, 4), "b": (7,), "x": ()}


def draw(seed, dtype=float, shapes=SHAPES, scale=1.0):
    rng = np.random.default_rng(seed)

    def normal(shape):
        x = rng.normal(size=shape)
        return x * np.exp(1j * rng.normal(size=shape)) if dtype == "complex128" else x

    return {name: jnp.asarray(scale * normal(shape), dtype) for name, shape in shapes.items()}


def leaf_axes(**axes):
    return dict.fromkeys(SHAPES) | axes


OPTIONS = {
    "paper": {},
    "outputs": {"output_axes": dict.fromkeys(SHAPES, 0) | {"conv": (1, 3), "layers": 1}},
    "momentum": {"momentum": 0.9, "weight_decay": 0.1, "weight_decay_rule": "cautious"},
    "independent": {"weight_decay": 0.1, "weight_decay_rule": "independent"},
    "bare": {"clip_threshold": None, "scale_by_parameter": False, "beta2_cap": 0.5},
    "torch": {"rule": "torch", "epsilon": (None, 1e-3), "weight_decay": 0.1, "momentum": 0.5},
    "torch, bounded": {"rule": "torch", "epsilon": (2.0, 1e-3)},
    "large": {"min_side": 5},
    "epsilon": {"epsilon": (0.1, 3.0), "clip_threshold": 0.1, "beta2_decay": 0.5},
}


@pytest.mark.slow(
    always=["paper-float64", "bare-float64", "torch, bounded-float64", "epsilon-float64"]
)
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("name", OPTIONS)
def test_reference(name, dtype, x64):
    """Of convolutions and of stacks, whose layers have averages, clipping and scale of their own."""
    options = {"min_side": 2} | OPTIONS[name]
    w = draw(0, dtype)
    grads = [draw(t, dtype, scale=10.0 ** (t % 3 - 1)) for t in range(1, 9)]
    tx = jgrad.adafactor(RATE, layer_axes=leaf_axes(layers=0), **options)
    found, _ = run(tx, w, grads)
    for key in SHAPES:
        own = {k: x[key] if isinstance(x, dict) else x for k, x in options.items()}
        own["layer_axes"] = 0 if key == "layers" else None
        expected = reference.trajectory(
            reference.adafactor([w[key]], RATE, **own), [[g[key]] for g in grads]
        )
        for a, (b,) in zip(found, expected, strict=True):
            np.testing.assert_allclose(a[key], b, rtol=1e-12, atol=1e-13)


def test_what_is_factored():
    """Both sides of a matrix are long enough; state in float32 whatever the weights have."""
    shapes = {"w": (8, 6), "small": (8, 5), "conv": (2, 3, 6), "layers": (6, 8), "b": (40,)}
    axes = dict.fromkeys(shapes) | {"layers": 0}
    tx = jgrad.adafactor(RATE, min_side=6, layer_axes=axes)
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        state = tx.init(draw(0, dtype, shapes))
        expected = {name: shape for name, shape in shapes.items() if name not in ("w", "conv")}
        expected["w"] = jgrad.Factors((1, 6), (8, 1))
        expected["conv"] = jgrad.Factors((1, 1, 6), (2, 3, 1))
        assert jax.tree.map(jnp.shape, state.vw) == expected
        assert {x.dtype for x in jax.tree.leaves(state.vw)} == {np.dtype(np.float32)}
        assert state.mw is None
    assert state.vw["conv"].shape == (2, 3, 6)
    assert (state.vw["w"].ndim, state.vw["w"].size, state.vw["w"].dtype) == (2, 48, jnp.float32)


# ---- others' steps ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", "adafactor, decay"])
@pytest.mark.parametrize("leaf", [*upstream_methods.MATRICES, "bias"])
def test_torch(name, leaf, x64):
    """Its own steps, after each of some updates."""
    own = {"rule": "torch", "min_side": 1, "epsilon": (None, 1e-3), "output_axes": (0,)}
    if name == "adafactor, decay":
        own |= {"beta2_decay": 0.5, "epsilon": (1 / 64, 1.0), "clip_threshold": 1.25}
        own["weight_decay"] = upstream_methods.DECAY
    rate = upstream_methods.RATE if name == "adafactor, decay" else 1 / 4
    first, grads = jax.tree.map(jnp.asarray, upstream_methods.problem([leaf]))
    found, _ = run(jgrad.adafactor(rate, **own), first, grads)
    for t, expected in zip(upstream_methods.SHOWN, theirs(name, leaf), strict=True):
        np.testing.assert_allclose(found[t - 1][leaf], expected, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [None, 0.75])
def test_optax(momentum, x64):
    """One matrix and a bias in float64; it takes its decay's exponent in float32."""
    shapes = {"w": (5, 8), "b": (6,)}
    options = {"momentum": momentum, "weight_decay_rate": 0.01}
    theirs = optax.adafactor(RATE, min_dim_size_to_factor=3, **options)
    tx = jgrad.adafactor(
        RATE, min_side=3, momentum=momentum, weight_decay=0.01, weight_decay_rule="independent"
    )
    w, grads = draw(0, shapes=shapes), [draw(t, shapes=shapes) for t in range(1, 6)]
    with jax.numpy_dtype_promotion("standard"):
        expected = run(theirs, w, grads)[0]
    for a, b in zip(run(tx, w, grads)[0], expected, strict=True):
        chex.assert_trees_all_close(a, b, rtol=1e-6)


# ---- every scale --------------------------------------------------------------------------------


@pytest.mark.slow(always=["1e-22-True", "1e+17-True", "1e+30-True", "1e+30-False", "1e-08-False"])
@pytest.mark.parametrize("factored", [True, False])
@pytest.mark.parametrize("scale", [1e-22, 1e-18, 1e-15, 1e-8, 1e8, 1e17, 1e18, 1e19, 1e30])
def test_every_scale(scale, factored):
    """As in float64, where float32 has the averages; above them steps stay clipped, and finite."""
    shapes = {"w": (70, 90)} if factored else {"w": (700,)}
    w = draw(0, jnp.float32, shapes)
    grads = [draw(t, jnp.float32, shapes, scale) for t in (1, 2)]
    tx = jgrad.adafactor(RATE, min_side=16)
    state, before = tx.init(w), np.asarray(w["w"], float)
    expected = reference.trajectory(
        reference.adafactor([w["w"]], RATE, min_side=16), [[g["w"]] for g in grads]
    )
    rms = lambda x: np.sqrt(np.mean(x**2))
    for g, (after,) in zip(grads, expected, strict=True):
        updates, state = tx.update(g, state, w)
        chex.assert_tree_all_finite((updates, state))
        found, exact = np.asarray(updates["w"], float), after - before
        w, before = optax.apply_updates(w, updates), after
        # Squares above 2^126 count as that, or above 2^126 / 90 in a matrix, and so do gradients.
        if scale > (1e17 if factored else 1e18):
            assert rms(found) <= 1.1 * RATE
            assert np.all(np.sign(found) == np.sign(exact))
        else:
            assert rms(found - exact) < 1e-6 * rms(exact)


@pytest.mark.parametrize("rule", ["paper", "torch"])
def test_no_gradient_counts_as_more_than_its_square(rule):
    """Equal gradients of any size make steps of the learning rate, whether they are clipped or not."""
    w = {"matrix": jnp.ones((32, 64)), "vector": jnp.ones(32)}
    options = {"rule": rule, "min_side": 1, "scale_by_parameter": False, "clip_threshold": None}
    tx = jgrad.adafactor(RATE, **options)
    update = jax.jit(tx.update)
    for scale in (1e3, 1e19, 1e25, 3e38):
        updates, _ = update(jax.tree.map(lambda x, s=scale: s * x, w), tx.init(w), w)
        for x in jax.tree.leaves(updates):
            np.testing.assert_allclose(x, -RATE, rtol=2e-6)


@pytest.mark.slow
def test_rows_of_any_scale():
    """An outer product of numbers from 1e-9 to 1e9 is its own estimate: steps are signs."""
    numbers = 10.0 ** jnp.linspace(-9, 9, 16)
    g = {"w": jnp.outer(numbers, numbers[::-1])}
    w = {"w": jnp.ones((16, 16))}
    tx = jgrad.adafactor(1.0, min_side=2, epsilon=(0.0, 0.0))
    updates, _ = tx.update(g, tx.init(w), w)
    np.testing.assert_allclose(updates["w"], -np.ones((16, 16)), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1e-30, 0.0])
@pytest.mark.parametrize("rule", ["paper", "torch"])
def test_slopes_at_zero_gradients(rule, epsilon):
    """Zero gradients move nothing, and slopes of every order are finite, in float32."""
    w = {"w": jnp.ones((3, 2)), "zero": jnp.zeros((2, 2)), "b": jnp.zeros(2)}
    zeros = jax.tree.map(jnp.zeros_like, w)
    tx = jgrad.adafactor(RATE, min_side=2, momentum=0.9, rule=rule, epsilon=(epsilon, 1e-3))

    def total(rate, w, g):
        state = tx.init(w)
        for _ in range(3):
            updates, state = tx.update(g, state, w, learning_rate=rate)
            w = optax.apply_updates(w, updates)
        return sum(jnp.vdot(x, x + 1) for x in jax.tree.leaves(w))

    updates, _ = tx.update(zeros, tx.init(w), w)
    assert not any(np.any(x) for x in jax.tree.leaves(updates))
    first = jax.grad(total, argnums=(0, 1))
    # The slope by gradients is up to 2^76, and its square no number.
    along = (
        jnp.float32(1.0),
        jax.tree.map(jnp.ones_like, w),
        jax.tree.map(lambda x: x + 1e-15, zeros),
    )
    second = lambda *args: jax.jvp(first, args, along)
    by_gradients = jax.grad(total, argnums=2)
    args = jnp.float32(RATE), w, zeros
    chex.assert_tree_all_finite((jax.jit(second)(*args), jax.jit(by_gradients)(*args)))


def test_averages_forget_less_and_less(x64):
    """v after t updates: with 1 - 1 / t it is the mean of all squares."""
    w, tx = {"b": jnp.ones(2)}, jgrad.adafactor(RATE, beta2_decay=1.0, epsilon=(0.0, 0.0))
    grads = [{"b": jnp.full(2, float(t))} for t in range(1, 101)]
    _, state = run(tx, w, grads)
    np.testing.assert_allclose(state.vw["b"], np.mean(np.arange(1, 101.0) ** 2), rtol=1e-12)


# ---- forms of the state -------------------------------------------------------------------------


def train(tx, w, count, seed=1):
    grads = [draw(seed + t, jnp.float32, {k: x.shape for k, x in w.items()}) for t in range(count)]
    found, state = run(tx, w, grads)
    return found[-1], state


def test_carry_over():
    """Elements become means of rows and columns; the elements of these are only guessed."""
    w = draw(0, jnp.float32, {"w": (2, 8, 6), "b": (3,)})
    tx, whole = jgrad.adafactor(RATE, min_side=2), jgrad.adafactor(RATE)
    _, before = train(whole, w, 3)
    like = jax.eval_shape(tx.init, w)
    state, account = jgrad.carry_over(before, like=like)
    v = np.asarray(before.vw["w"])
    np.testing.assert_allclose(state.vw["w"].rows, v.mean((0, 1), keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(state.vw["w"].columns, v.mean(2, keepdims=True), rtol=1e-6)
    assert "converted  vw/w: float32 to rows and columns in float32" in str(account)
    assert account.kept == ("step", "vw/b")
    same, account = jgrad.carry_over(state, like=like, strict=True)
    assert same.vw["w"].rows is state.vw["w"].rows
    assert account.kept == ("step", "vw/b", "vw/w")
    of_layers = jgrad.adafactor(RATE, min_side=2, layer_axes={"w": 0, "b": None})
    for other in whole, of_layers:
        like = jax.eval_shape(other.init, w)
        message = "carry_over: `old` at .vw['w']: rows and columns, of which others can only be guessed, expected `reset=` for this leaf."
        assert_error(ValueError, message, lambda like=like: jgrad.carry_over(state, like=like))
        again, _ = jgrad.carry_over(state, like=like, reset={"w": True, "b": False})
        np.testing.assert_array_equal(again.vw["b"], state.vw["b"])


@pytest.mark.slow
def test_a_file_without_a_target():
    """As orbax restores it: dictionaries for nodes."""
    w = draw(0, jnp.float32, {"w": (8, 6), "b": (3,)})
    tx = jgrad.adafactor(RATE, min_side=2, momentum=0.9)
    _, state = train(tx, w, 2)
    read = {
        "step": state.step,
        "mw": state.mw,
        "vw": {"w": state.vw["w"]._asdict(), "b": state.vw["b"]},
    }
    found, account = jgrad.carry_over(read, like=jax.eval_shape(tx.init, w))
    chex.assert_trees_all_equal(found, state)
    assert not account.dropped


def test_momentum_is_not_adams():
    """Steps, and no gradients, whether a leaf is factored or none is: Adam begins with none."""
    w = draw(0, jnp.float32, {"w": (8, 6)})
    for min_side in 2, 128:
        tx = jgrad.adafactor(RATE, min_side=min_side, momentum=0.9)
        _, state = train(tx, w, 2)
        like = jax.eval_shape(jgrad.adam(RATE).init, w)
        with pytest.raises(ValueError, match=r"`momentum`: None, .* averages of steps"):
            jgrad.carry_over(state, like=like)
        with pytest.raises(ValueError, match=r"`momentum`: None, .* averages of gradients"):
            jgrad.carry_over(jgrad.adam(RATE).init(w), like=state)


# ---- packed trees -------------------------------------------------------------------------------


@pytest.mark.slow
def test_packed_matrices():
    w = draw(0, jnp.float32, {"w": (50, 60), "b": (3,)})
    tx = jgrad.adafactor(RATE, min_side=16)
    expected = (
        "adafactor: `params` at ['w']: a packed matrix of shape (50, 60), which is factored, expected "
        "it unpacked: `pack_small`, or `max_size` of `pack`."
    )
    assert_error(ValueError, expected, lambda: tx.init(jgrad.pack(w)))
    packed = jgrad.pack(w, max_size=100)
    state = tx.init(packed)
    updates, state = jax.jit(tx.update)(packed, state, packed)
    expected, whole = jax.jit(tx.update)(w, tx.init(w), w)
    chex.assert_trees_all_close(jgrad.unpack(updates), expected, rtol=1e-6)
    chex.assert_trees_all_close(jgrad.unpack(state).vw, whole.vw, rtol=1e-6)


def test_a_number_of_python_is_trained():
    """As other methods do: the first step is the learning rate times the size of the weight."""
    w, g = {"b": 1.5}, {"b": 2.0}
    tx = jgrad.adafactor(RATE)
    updates, state = tx.update(g, tx.init(w), w)
    np.testing.assert_allclose(updates["b"], -1.5 * RATE, rtol=1e-6)
    assert state.vw["b"].shape == ()


W = {"w": jnp.ones((4, 3))}


def of_other(**options):
    """The update with a state of other options."""
    tx, other = jgrad.adafactor(RATE, min_side=2), jgrad.adafactor(RATE, **options)
    return lambda: tx.update(W, other.init(W), W)


test_messages = messages.test_of("adafactor", globals())
