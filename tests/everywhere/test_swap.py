"""jgrad in the place of optax, for the tests of others: `tests/clients/swap.py`, `studies/clients.py`."""

import textwrap

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from studies import clients
from tests.clients import swap

CALLS = {
    "adam": {"b1": 0.8, "b2": 0.99, "eps": 1e-3},
    "adamw": {"weight_decay": 0.1, "mask": {"a": True, "b": False}},
    "sgd": {"momentum": 0.9, "nesterov": True},
    "lamb": {"weight_decay": 0.1, "eps": 1e-3},
    "lars": {"weight_decay": 0.1, "eps": 1e-3, "momentum": 0.8, "nesterov": True},
}


def updates(tx, count=3):
    w = {"a": jnp.array([1.0, -2.0, 3.0]), "b": jnp.array([0.5, 0.25])}
    g, state = {"a": jnp.array([0.1, 0.5, -0.3]), "b": jnp.array([1.0, -1.0])}, tx.init(w)
    for _ in range(count):
        found, state = tx.update(g, state, w)
    return np.concatenate([found["a"], found["b"]])


@pytest.mark.slow
@pytest.mark.parametrize("defaults", [True, False], ids=["defaults", "options"])
@pytest.mark.parametrize("name", CALLS)
def test_options_of_the_same_meaning(name, defaults, standard_promotion):
    options = {} if defaults else CALLS[name]
    found = updates(swap.ours(name, 0.1, **options))
    np.testing.assert_allclose(found, updates(getattr(optax, name)(0.1, **options)), rtol=1e-5)
    np.testing.assert_allclose(
        updates(swap.wrapped(swap.ours(name, 0.1, **options))), found, rtol=1e-5
    )


def test_what_jgrad_does_not_have_is_left_to_optax():
    before = swap.calls.copy()
    tx = swap.ours("adam", 0.1, eps_root=1e-8)
    assert not isinstance(tx.init(jnp.ones(2)), jgrad.OptState)
    assert swap.calls - before == {"adam, left to optax": 1}
    assert isinstance(swap.ours("sgd", 0.1, nesterov=True).init(jnp.ones(2)), jgrad.OptState)


@pytest.mark.slow
def test_the_tests_of_others(tmp_path, capsys):
    """One that passes with both, one that needs optax's own state, and one that fails."""
    text = """
        import jax.numpy as jnp
        import optax

        def test_steps():
            tx = optax.adam(0.1)
            assert tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))[0][0] < 0

        def test_state():
            assert optax.adam(0.1).init(jnp.ones(2))[0].count == 0

        def test_wrong():
            assert False
    """
    (tmp_path / "test_others.py").write_text(textwrap.dedent(text))
    assert clients.main(["", str(tmp_path), "test_others.py"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[2] == f"| {tmp_path.name} `test_others.py` | 2 | 1 | 1 | adam 2 |"
    assert shown[3:] == [
        "jgrad fails: test_others.py::test_state",
        "wrappers fails: test_others.py::test_state",
    ]
    assert clients.main([""]) == clients.main(["", str(tmp_path / "none")]) == 2
