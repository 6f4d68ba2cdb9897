"""What a moment holds: no state becomes silently that of a method whose moments are others."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.support.states import assert_same_bits, filled

W = {"w": jnp.ones((8, 6)), "b": jnp.ones(3)}
IS_MATRIX = {"w": True, "b": False}


def muon(**options):
    return jgrad.muon(0.1, matrices=IS_MATRIX, adam_learning_rate=0.1, **options)


GRADIENTS, SUM, STEPS = "average of gradients", "sum of gradients", "average of steps"
SQUARES, UNCORRECTED = "squares", "squares without a correction of the bias"
# What the moments of `w` hold, as the papers define them; None for none.
METHODS = {
    "adam": (jgrad.adam(0.1), GRADIENTS, SQUARES),
    "lamb": (jgrad.lamb(0.1), GRADIENTS, SQUARES),
    "adan": (jgrad.adan(0.1), GRADIENTS, "squares of gradients that look ahead"),
    "lion": (jgrad.lion(0.1), GRADIENTS, None),
    "momentum": (jgrad.gradient_descent(0.1, momentum=0.9), SUM, None),
    "lars": (jgrad.lars(0.1), "sum of steps", None),
    "adafactor": (jgrad.adafactor(0.1, momentum=0.9), STEPS, UNCORRECTED),
    "adafactor, factored": (jgrad.adafactor(0.1, momentum=0.9, min_side=2), STEPS, UNCORRECTED),
    "adafactor alone": (jgrad.adafactor(0.1, min_side=2), None, UNCORRECTED),
    "muon": (muon(), GRADIENTS, None),
    "dion2": (muon(fraction=0.5), SUM, None),
    "normuon": (muon(rule="normuon"), GRADIENTS, "squares of outputs"),
    "soap": (jgrad.soap(0.1, matrices=IS_MATRIX), GRADIENTS, "squares in bases"),
    "optax.adamw": (optax.adamw(0.1), GRADIENTS, SQUARES),
    "optax.amsgrad": (optax.amsgrad(0.1), GRADIENTS, SQUARES),
    "optax.rmsprop": (optax.rmsprop(0.1), None, "squares that nothing counts"),
    "optax.adabelief": (optax.adabelief(0.1), GRADIENTS, "squares of deviations"),
    "optax.novograd": (optax.novograd(0.1), "sum of directions", "squares of norms"),
    "optax.sgd": (optax.sgd(0.1, momentum=0.9), SUM, None),
    "optax.lars": (optax.lars(0.1), "sum of updates", None),
    "optax.lion": (optax.lion(0.1), GRADIENTS, None),
    "optax.muon": (optax.contrib.muon(0.1), GRADIENTS, None),
    "sophia": (optax.contrib.sophia(0.1), GRADIENTS, "a Hessian"),
}
# Adam's second moments are those of SOAP in the bases with which it begins.
SAME = {("squares", "squares in bases")}


def carried(old, like, **options):
    """In two forms of optax, dtypes mix."""
    with jax.numpy_dtype_promotion("standard"):
        return jgrad.carry_over(old, like=like, **options)


def state_of(name, seed=0):
    with jax.numpy_dtype_promotion("standard"):
        return filled(jax.eval_shape(METHODS[name][0].init, W), seed)


@pytest.mark.parametrize("old", METHODS)
def test_nothing_passes_as_another_thing(old):
    """In each of all pairs it is refused, or noted where both states are of one structure."""
    _, first, second = METHODS[old]
    before, went = state_of(old), 0
    for new in METHODS:
        _, new_first, new_second = METHODS[new]
        like = state_of(new, 1)
        try:
            _, account = carried(before, like)
        except ValueError as error:
            said = str(error)
            if old != new and ("`momentum" in said or "reset=" in said):
                continue
            raise
        went += 1
        carries = {*account.kept, *account.converted}
        if "mw/w" in carries and first != new_first:
            assert "right for the same method alone" in str(account)
        if "vw/w" in carries:
            assert second == new_second or (second, new_second) in SAME
    assert went


def test_what_is_certain_passes():
    """Without a word or a note."""
    names = ("adam", "lamb", "optax.adamw", "optax.amsgrad")
    for old, new in itertools.product(names, (*names, "soap")):
        before = state_of(old)
        state, account = carried(before, state_of(new, 1))
        assert not account.notes
        assert_same_bits(
            optax.tree.get(state, "mw", optax.tree.get(state, "mu")),
            optax.tree.get(before, "mw", optax.tree.get(before, "mu")),
        )
        assert {"mw/w", "vw/w"} <= {*account.kept}


WORDS = {
    "adam to lion": ("adam", "lion"),
    "adam to adafactor": ("adam", "adafactor"),
    "adafactor to adam": ("adafactor", "adam"),
    "lion to optax.lion": ("lion", "optax.lion"),
    "optax.sgd to lars": ("optax.sgd", "lars"),
    "optax.sgd to optax.lars": ("optax.sgd", "optax.lars"),
}


@pytest.mark.parametrize("name", WORDS)
def test_the_words(name):
    """Without one it is an error; "keep" takes the bits, "reset" begins with zeros."""
    old, new = WORDS[name]
    before, like = state_of(old), state_of(new, 1)
    with pytest.raises(ValueError, match=r'`momentum`: None, expected "keep" if .* or "reset"'):
        carried(before, like)
    state, account = carried(before, like, momentum="keep")
    assert {"mw/w", "mw/b"} <= {*account.kept}
    assert 'by `momentum="keep"`' in str(account)
    kept = [x for x in jax.tree.leaves(state) if x.shape == (8, 6)]
    assert any(np.array_equal(kept[0], x) for x in jax.tree.leaves(before) if x.shape == (8, 6))
    if "adafactor" in (old, new):
        return  # whose second moments are not
    state, account = carried(before, like, momentum="reset")
    assert {"mw/w", "mw/b"} <= {*account.reset}
    assert not account.dropped or account.dropped == ("vw/b", "vw/w")
    assert not jax.tree.leaves(optax.tree.get(state, "mw", state))[0].any() or new == "optax.lion"


def test_of_one_structure():
    """They are kept, and the account says what for; "reset" begins with zeros all the same."""
    before, like = state_of("lion"), state_of("momentum", 1)
    state, account = carried(before, like)
    assert_same_bits(state, before)
    assert str(account).endswith(
        "note       mw of 2 leaves: momentum of `gradient_descent`, `lars`, `lion` or `muon`, which "
        'look alike, so kept: right for the same method alone. `momentum="reset"` begins with zeros.'
    )
    assert not carried(before, like, momentum="keep")[1].notes
    state, account = carried(before, like, momentum="reset")
    assert account.reset == ("mw/b", "mw/w")
    assert not state.mw["w"].any()
    assert_same_bits(
        carried(state_of("adam"), like=state_of("lamb", 1), momentum="reset")[0], state_of("adam")
    )


def test_second_moments_are_not_made_up():
    """Neither beside a first moment that stays, nor beside one that begins anew."""
    like = state_of("adam", 1)
    for old in "lion", "momentum", "optax.sgd", "sophia", "soap", "normuon":
        for momentum in None, "keep", "reset":
            with pytest.raises(
                ValueError, match=r"`tx.init\(params\)`, .* `reset=`; `momentum=` concerns"
            ):
                carried(state_of(old), like, momentum=momentum)
        state, account = carried(state_of(old), like, reset=True)
        assert not any(x["w"].any() for x in (state.mw, state.vw))
        assert account.reset == ("mw/b", "mw/w", "vw/b", "vw/w")


@pytest.mark.slow
def test_what_like_gives_is_not_zeroed(standard_promotion):
    """The coefficients of optax's `muon`, and the key of Sophia."""
    like = METHODS["optax.muon"][0].init(W)
    state, account = carried(state_of("muon"), like, momentum="keep")
    for old in state, state_of("adam"):
        found, _ = carried(old, like, momentum="keep")
        pair = (x.inner_states["muon"].inner_state[0].ns_coeffs for x in (found, like))
        np.testing.assert_array_equal(*pair)
    assert any("ns_coeffs" in x for x in account.from_like)
    like = METHODS["sophia"][0].init(W)
    state, _ = carried(state_of("optax.lion"), like, reset=True)
    keys = (jax.random.key_data(x[0].hessian_fn_state.key) for x in (state, like))
    np.testing.assert_array_equal(*keys)


def test_numbers_that_like_gives_are_kept():
    """Moments and counters, too: of `old` there are none."""
    like = state_of("adam", 1)
    old = jgrad.gradient_descent(0.1).init(W)._replace(step=jnp.asarray(5))
    state, account = carried(old, like)
    assert_same_bits(state, like._replace(step=old.step))
    assert account.from_like == ("mw/b", "mw/w", "vw/b", "vw/w")


def test_second_moments_without_a_count(standard_promotion):
    """Adam corrects a bias by its step, and RMSprop has none: neither takes the other's squares."""
    rmsprop, adam = (METHODS[name][0].init(W) for name in ("optax.rmsprop", "adam"))
    for old, like in (rmsprop, adam), (adam, rmsprop):
        for momentum in None, "keep", "reset":
            with pytest.raises(ValueError, match=r"vw/b, a second moment that `old` lacks"):
                jgrad.carry_over(old, like=like, momentum=momentum)
    counted = optax.scale_by_rms(0.9, bias_correction=True).init(W)
    _, account = jgrad.carry_over(counted, like=jax.eval_shape(METHODS["adam"][0].init, W))
    assert (account.kept, account.notes) == (("step", "vw/b", "vw/w"), ())


def test_squares_of_adafactor():
    """They cross to Adam's by a word alone, and none begins at zero beside a step."""
    plain, adam = jgrad.adafactor(0.1).init(W), jgrad.adam(0.1).init(W)
    for old, like in (plain, adam), (adam, plain):
        with pytest.raises(
            ValueError, match=r'None, expected "keep" if .* or `reset=` for the leaf: '
        ):
            jgrad.carry_over(old, like=like)
        _, account = jgrad.carry_over(old, like=like, momentum="keep")
        assert {"vw/b", "vw/w"} <= {*account.kept}
        assert account.notes[-1].startswith("vw of 2 leaves: averages of squares, as in `ada")
        with pytest.raises(ValueError, match="a second moment that `old` lacks"):
            jgrad.carry_over(old, like=like, momentum="reset")


def test_a_state_of_adafactor_says_what_it_is():
    """Though no leaf is factored; that of 1.1, which did not, is taken by the optimizer itself."""
    tx = METHODS["adafactor"][0]
    state = tx.init(W)
    assert type(state) is jgrad.AdafactorState
    of_1_1 = jgrad.OptState(*state)
    updates, new = tx.update(W, of_1_1, W)
    assert type(new) is jgrad.OptState
    assert_same_bits((updates, tuple(new)), (lambda u, s: (u, tuple(s)))(*tx.update(W, state, W)))
    again, _ = jgrad.carry_over(of_1_1, like=state, momentum="keep")
    assert_same_bits(again, state)
