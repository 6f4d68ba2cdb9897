"""The blocks of a first training: README, getting started, wrappers, packed trees and Muon."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

from tests.pages.guides.entries import README, after, choices, it_runs, run

STARTED = "docs/getting_started.md"
WRAPPERS = "docs/wrappers.md"
PACKED = "docs/packed.md"
MUON = "docs/muon.md"
PAGES = (README, STARTED, WRAPPERS, PACKED, MUON)


@after(README, 0)
def readme(names, printed):
    loss = re.fullmatch(r"loss (\S+) after 300 steps\n", printed)[1]
    assert float(loss) < 1e-2  # from 0.55, the mean square of y


@after(STARTED, 1, 0)
def under_jit(names, printed):
    assert int(names["state"].step) == 201
    assert float(names["value"]) < 5e-3  # from 0.5
    shapes = {name: x.shape for name, x in names["params"].items()}
    assert jax.tree.map(jnp.shape, names["state"].mw) == shapes  # as the page says


@after(STARTED, 2, 0, 1)
def schedules(names, printed):
    """`adamw` goes on from the state, and `safe` counts a NaN."""
    params = names["params"]
    grads = jax.tree.map(lambda w: w * jnp.nan, params)
    assert int(names["adamw"].update(grads, names["state"], params)[1].step) == 202
    assert int(names["safe"].update(grads, names["safe"].init(params), params)[1].skipped) == 1


after(STARTED, 3, 0, 1)(it_runs)


@after(WRAPPERS, 0)
def order_of_wrappers(names, printed):
    """What the text reads in the state is there."""
    state = names["tx"].init({"w": jnp.ones((2, 3), jnp.float16)})
    assert (float(state.loss_scale), int(state.skipped)) == (2.0**15, 0)
    assert optax.tree.get(state, "average")["w"].dtype == jnp.float32


after(PACKED, 0, (README, 0))(it_runs)
after(MUON, 0, slow=True)(it_runs)


@after(MUON, 1, slow=True)
def muon_clip(names, printed):
    """The largest logit of the queries and keys that come out is tau where it was more."""
    keys = jax.random.split(jax.random.key(0), 3)
    w = {"query": keys[0], "key": keys[1]}
    w = {name: jax.random.normal(key, (8, 2, 4)) for name, key in w.items()}
    x = jax.random.normal(keys[2], (5, 8))

    def largest(w):
        query, key = (jnp.einsum("td,dhs->ths", x, w[n]) for n in ("query", "key"))
        return jnp.max(jnp.einsum("ths,uhs->htu", query, key), axis=(1, 2))

    tau = float(jnp.mean(largest(w)))  # one head above, one below
    clipped = largest(names["clipped"](w, largest(w), tau))
    assert float(clipped.max()) == pytest.approx(tau, rel=1e-5)
    assert float(clipped.min()) == pytest.approx(float(largest(w).min()), rel=1e-5)
    new, _ = names["step"](w, names["tx"].init(w), w, largest(w))
    assert new["query"].shape == (8, 2, 4)


@pytest.mark.parametrize("block", choices(PAGES))
def test_block(block, standard_promotion):
    run(block)
