"""Adan: what it shares with others, and what its further moments are in a state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.cases import gradients, moments_of, params
from tests.reference import optimizers as reference
from tests.support.eight_bits import value
from tests.support.errors import assert_error
from tests.support.loops import assert_equal, run
from tests.support.states import filled

W = {"large": jnp.ones((32, 256)), "small": jnp.ones(3)}
LOST = (
    "carry_over: `like` at .vw['large']: vw/large, a second moment that `old` lacks; start afresh by "
    "`tx.init(params)`, or keep only the step by `reset=`; `momentum=` concerns first moments alone."
)


def test_the_papers_decay(x64):
    """It divides the weights, and is the decoupled one at a smaller learning rate."""
    w, grads, (rate, decay) = params("float64"), gradients(20, "float64"), (0.05, 0.1)
    found, _ = run(jgrad.adan(rate / (1 + rate * decay), weight_decay=decay), w, grads)

    leaves = jax.tree.leaves(w)
    plain = reference.adan(leaves, rate)
    next(plain)
    steps, before = [], [np.asarray(x) for x in leaves]
    for g in grads:  # the steps of Adan depend on gradients alone
        after = plain.send(jax.tree.leaves(g))
        steps.append([a - b for a, b in zip(after, before, strict=True)])
        before = after
    expected = [np.asarray(x) for x in leaves]
    for step in steps:
        expected = [(x + u) / (1 + rate * decay) for x, u in zip(expected, step, strict=True)]
    for x, y in zip(jax.tree.leaves(found[-1]), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12)


def test_optax_at_one_half(standard_promotion):
    """Where b2 is 1 - b2; decay and its mask, too."""
    w, grads = params(), gradients(20)
    numbers = {"weight_decay": 0.1, "mask": lambda p: jax.tree.map(lambda x: x.ndim > 1, p)}
    theirs, _ = run(optax.adan(0.05, b2=0.5, eps_root=0.0, **numbers), w, grads)
    mask = {"weight_decay": 0.1, "weight_decay_mask": numbers["mask"]}
    ours, _ = run(jgrad.adan(0.05, beta2=0.5, **mask), w, grads)
    for x, y in zip(*map(jax.tree.leaves, (ours[-1], theirs[-1])), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["8bit", jnp.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["tree", "packed"])
def test_every_moment_has_the_form(form, packed):
    """Of a large leaf all four, and no more: four bytes and four scales of 256 elements."""
    tx = jgrad.adan(0.1, moment_dtype=form)
    state = jax.eval_shape(tx.init, jgrad.pack(W) if packed else {"large": W["large"]})
    held = [
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(m))
        for m in moments_of(state).values()
    ]
    elements = 33 * 256 if packed else 32 * 256
    assert held == 4 * [elements * 2 if form != "8bit" else elements + elements // 256 * 4]


def test_the_old_gradient_in_8_bits():
    """Equal gradients have differences of a rounding at most; without an old one, of 0.34 here."""
    g = jax.tree.map(lambda x: jnp.linspace(0.5, 1.0, x.size).reshape(x.shape), W)
    tx, w = jgrad.adan(0.1, moment_dtype="8bit"), W
    state = tx.init(w)
    for _ in range(5):
        updates, state = jax.jit(tx.update)(g, state, w)
    np.testing.assert_allclose(updates["large"], -0.1, rtol=0.5)
    assert np.abs(value(state.dw["large"])).max() < 0.05
    assert state.gw["large"].codes.dtype == jnp.int8
    assert state.vw["large"].codes.dtype == jnp.uint8


def state_of(tx, seed):
    return filled(jax.eval_shape(tx.init, W), seed)


def test_from_adam_and_back():
    """Averages of gradients are certain; squares measure another thing, so nothing is made up."""
    adam, adan = state_of(jgrad.adam(0.1), 0), state_of(jgrad.adan(0.1), 1)
    for old, like in ((adam, adan), (adan, adam)):
        for momentum in (None, "keep"):
            call = lambda: jgrad.carry_over(old, like=like, momentum=momentum)  # noqa: B023
            assert_error(ValueError, LOST, call)
        state, account = jgrad.carry_over(old, like=like, reset=True)
        assert not any(jnp.any(x) for x in jax.tree.leaves(moments_of(state)))
        assert_equal(state.step, old.step)
        assert {x.partition("/")[0] for x in account.reset} == {*moments_of(state)}


def test_to_another_form_and_back():
    """All four are converted; in the same form they stay; named and unnamed."""
    old = state_of(jgrad.adan(0.1), 0)
    like = jax.eval_shape(jgrad.adan(0.1, moment_dtype="8bit").init, W)
    state, account = jgrad.carry_over(old, like=like, strict=True)
    assert account.converted == tuple(f"{name}/large" for name in moments_of(old))
    for name, moment in moments_of(state).items():
        assert isinstance(moment["large"], jgrad.Blocks), name
        assert_equal(moment["small"], getattr(old, name)["small"])
    from_file = old._asdict()  # as orbax restores it without a target
    assert_equal(jgrad.carry_over(from_file, like=old, strict=True)[0], old)


def test_a_state_of_adam_is_an_error():
    """In an update; one of an earlier wrapper or of optax, too."""
    tx = jgrad.adan(0.1)
    with pytest.raises(
        TypeError, match=r"adan: `state`: OptState, expected the AdanState that this `adan`"
    ):
        tx.update(W, jgrad.adam(0.1).init(W), W)
