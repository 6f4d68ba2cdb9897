"""The blocks about runs, and about states of others."""

import re
import types

import jax
import jax.numpy as jnp
import optax
import pytest

import jgrad
from tests.pages.guides.entries import after, choices, it_runs, run
from tests.support.loops import assert_equal
from tests.support.pages import blocks, page

RUNS = "docs/runs.md"
OPTAX = "docs/from_optax.md"
PYTORCH = "docs/from_elsewhere.md"
PAGES = (RUNS, OPTAX, PYTORCH)


def of_a_run():
    """What docs/runs.md leaves to the reader."""
    params = {"embed": {"table": jnp.ones((5, 4))}, "head": jnp.ones((4, 2))}
    grads = jax.tree.map(jnp.ones_like, params)
    return {"params": params, "grads": grads}


@after(RUNS, 0, names=of_a_run, slow=True)
def diverging(names, printed):
    """What the table says is in the report."""
    for name in re.findall(r"^\| `([a-z_/.]+)`", page(RUNS), re.MULTILINE):
        assert any(key.startswith(name.removesuffix("...")) for key in names["metrics"]), name


@after(RUNS, 1, slow=True)
def change_in_the_middle(names, printed):
    assert printed == blocks(RUNS, "text")[0]
    _, state = names["tx"].update(names["params"], names["state"], names["params"])
    assert int(state.step) == 1


@after(OPTAX, 0, names=lambda: {"opt_state": optax.adam(0.1).init(jnp.ones(3))})
def state_of_optax(names, printed):
    assert_equal(names["state"], jgrad.adam(0.1).init(jnp.ones(3)))


# `test_from_pytorch.py` has a model and an optimizer of PyTorch's numbers.
NOTHING = types.SimpleNamespace(named_parameters={}.items)
after(PYTORCH, 1, names=lambda: {"model": NOTHING, "adam": None, "steps": 3})(it_runs)


@pytest.mark.parametrize("block", choices(PAGES))
def test_block(block, standard_promotion):
    run(block)
