"""Old names of options and of attributes: they work, and say what they are called now."""

import functools
import inspect
import pickle
import pydoc
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

import jgrad
from jgrad._trees.renamed import renamed, renamed_attribute
from tests.support.errors import assert_error
from tests.support.loops import assert_equal


@renamed(beta1="adam_beta1", rate="learning_rate")
def make(learning_rate, every=1, *, adam_beta1=0.9, mask=None):
    """Makes what it is given."""
    return optax.scale(learning_rate * adam_beta1), (learning_rate, every, adam_beta1, mask)


@renamed(beta1="adam_beta1")
def scale(learning_rate, *, adam_beta1=0.5):
    return optax.scale(learning_rate * adam_beta1)


class State(NamedTuple):
    done: int
    inner: int
    step = renamed_attribute("step", "done")


OLD = "make: `beta1`: an old name, expected `adam_beta1`; the next release does not know it."


def warned(call):
    """What the call returns; and texts, files and lines of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    assert {w.category for w in caught} <= {FutureWarning}
    return result, [str(w.message) for w in caught], {(w.filename, w.lineno) for w in caught}


def line_of(function):
    return __file__, function.__code__.co_firstlineno


def test_new_names_do_not_warn():
    assert warned(lambda: make(0.1, 2, adam_beta1=0.5)[1]) == ((0.1, 2, 0.5, None), [], set())


def test_old_names_work():
    call = lambda: make(rate=0.1, beta1=0.5, mask=3)[1]
    result, texts, places = warned(call)
    assert result == (0.1, 1, 0.5, 3)
    rate = OLD.replace("adam_beta1", "learning_rate").replace("beta1", "rate")
    assert texts == [rate, OLD]
    assert places == {line_of(call)}


@pytest.mark.parametrize("call", [lambda **k: make(0.1, **k), lambda **k: make(rate=0.1, **k)])
def test_both_names(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_error(
            TypeError,
            "make: `beta1`: beside `adam_beta1`, expected `adam_beta1` alone, which is its new name.",
            lambda: call(beta1=0.5, adam_beta1=0.5),
        )
    assert_error(
        TypeError,
        "make: `rate`: beside `learning_rate`, expected `learning_rate` alone, which is its new name.",
        lambda: make(0.1, rate=0.1),
    )


def test_help_knows_the_new_names_alone():
    names = ["learning_rate", "every", "adam_beta1", "mask"]
    assert list(inspect.signature(make).parameters) == names
    text = pydoc.plain(pydoc.render_doc(make))
    assert "make(learning_rate, every=1, *, adam_beta1=0.9, mask=None)" in text
    assert "Makes what it is given." in text
    assert (make.__name__, make.__module__) == ("make", __name__)


def test_an_unknown_name_is_pythons_error():
    with pytest.raises(TypeError, match=r"make\(\) got an unexpected keyword argument 'b'"):
        make(0.1, b=2)


@pytest.mark.parametrize("name", ["beta1", "adam_beta1"])
def test_inject_hyperparams(name):
    """By the old name too; its state has the new one, and its updates do not warn."""
    call = lambda: optax.inject_hyperparams(scale)(0.5, **{name: 0.25})
    tx, texts, places = warned(call)
    assert (len(texts), places) == ((1, {line_of(call)}) if name == "beta1" else (0, set()))
    w = jnp.ones(3)
    state = tx.init(w)
    assert set(state.hyperparams) == {"learning_rate", "adam_beta1"}
    updates, _ = tx.update(w, state, w)
    assert jnp.array_equal(updates, 0.125 * w)


def test_partial():
    assert functools.partial(make, adam_beta1=0.5)(0.1)[1] == (0.1, 1, 0.5, None)
    call = lambda: functools.partial(make, beta1=0.5)(0.1)[1]
    result, texts, places = warned(call)
    assert (result, texts, places) == ((0.1, 1, 0.5, None), [OLD], {line_of(call)})
    with pytest.warns(FutureWarning, match="`beta1`: an old name"):
        signature = inspect.signature(functools.partial(make, beta1=0.5))
    assert signature.parameters["adam_beta1"].default == 0.5


def test_pickle():
    assert pickle.loads(pickle.dumps(make)) is make


def test_an_attribute():
    call = lambda: State(3, 4).step
    text = "State: `step`: an old name, expected `done`; the next release does not know it."
    assert warned(call) == (3, [text], {line_of(call)})
    assert State._fields == ("done", "inner")


def test_an_option_that_served_two_methods():
    """`beta2` of Muon was that of Adam and that of NorMuon."""

    @renamed(both=("first", "second"))
    def f(*, first=0, second=0):
        return first, second

    with pytest.warns(FutureWarning, match="f: `both`: an old name, expected `first` and `second`"):
        assert f(both=3) == (3, 3)
    assert_error(
        TypeError,
        "f: `both`: beside `second`, expected `second` alone, which is its new name.",
        lambda: f(both=3, second=1),
    )


def test_muon_by_its_old_names():
    w = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    options = {"matrices": {"w": True, "b": False}, "adam_learning_rate": 0.1, "rule": "normuon"}
    new = jgrad.muon(0.1, adam_beta1=0.5, adam_beta2=0.6, normuon_beta=0.6, **options)
    with pytest.warns(FutureWarning) as caught:
        old = jgrad.muon(0.1, beta1=0.5, beta2=0.6, norm_axes=None, share_over=None, **options)
    assert len(caught) == 4
    results = [jax.jit(tx.update)(w, tx.init(w), w) for tx in (new, old)]
    assert_equal(*results)


def test_a_name_that_is_gone():
    assert_error(
        AttributeError,
        "jgrad.muon_update: a name of 0.6, expected `jgrad.muon`, its method.",
        lambda: jgrad.muon_update,
    )
    assert not hasattr(jgrad, "another")
