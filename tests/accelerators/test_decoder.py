"""Train steps of decoders: the model, the table, and that a step of ours takes what optax's takes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from benchmarks.accelerators import decoder, targets
from benchmarks.accelerators.decoder import CELLS, DECODERS, RECIPES, TOPOLOGIES, Decoder, Result

SMALL = Decoder(layers=2, width=256, hidden=128, heads=2, groups=1, vocabulary=64)
GIB = 2**30


def result(peak=10 * GIB, *, compiled=True):
    kinds = {"all-gather": 3, "all-reduce": 2}
    return Result("8 B", "v5e:4x4", "AdamW", GIB, 2 * GIB, peak, compiled, kinds, 60.0)


def test_sizes():
    assert decoder.size(DECODERS["8 B"]) == pytest.approx(8.05e9, rel=0.001)
    assert decoder.size(DECODERS["70 B"]) == pytest.approx(70.6e9, rel=0.001)
    assert jax.tree.structure(decoder.specs(), is_leaf=lambda x: not isinstance(x, dict)) == (
        jax.tree.structure(decoder.shapes(SMALL), is_leaf=lambda x: not isinstance(x, dict))
    )


@pytest.mark.slow
def test_the_loss():
    """Of no weights that of a guess; of random ones a finite gradient for each leaf."""
    chips = Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    zeros = jax.tree.map(jnp.zeros, decoder.shapes(SMALL), is_leaf=lambda x: isinstance(x, tuple))
    tokens = jnp.arange(40, dtype=jnp.int32).reshape(2, 20)
    loss = jax.jit(jax.value_and_grad(lambda w: decoder.loss(SMALL, chips, w, tokens)))
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype), zeros)
    with jax.numpy_rank_promotion("allow"):
        assert loss(zeros)[0] == pytest.approx(math.log(64))
        _, grads = loss(weights)
    sizes = [float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(grads)]
    assert all(0 < x < math.inf for x in sizes)


def test_what_fits():
    """Into 16 GB of a v5e, of 10^9 bytes, if it could be compiled at all."""
    assert result(int(15.9e9)).fits
    assert not result(int(16.1e9)).fits
    assert not result(compiled=False).fits


def test_what_the_compiler_asks_for():
    message = "Ran out of memory in memory space hbm. Used 17.50G of 15.75G hbm. Exceeded"
    assert decoder._asked_for(message) == 17.5 * GIB
    assert decoder._asked_for("Ran out of something else") is None


def test_a_table():
    too_large = result(20 * GIB, compiled=False)._replace(
        arguments=None, temporaries=None, collectives={}
    )
    assert decoder.table([result(), too_large]).splitlines()[2:] == [
        "| 8 B | 16: v5e:4x4 | AdamW | 1.00 | 2.00 | 10.00 | yes | 3 all-gather, 2 all-reduce |",
        "| 8 B | 16: v5e:4x4 | AdamW | - | - | 20.00 | **no** | - |",
    ]


def test_what_is_kept(tmp_path, monkeypatch):
    """In the order of cells and recipes, and each once."""
    monkeypatch.setattr(decoder, "RESULTS", tmp_path / "results.json")
    first, second = result(), result()._replace(recipe="AdamW of optax")
    decoder.keep(first)
    decoder.keep(second)
    decoder.keep(newer := first._replace(peak=9 * GIB))
    assert decoder.known() == [second, newer]
    page = decoder.page("a\n<!-- decoder: start -->\nold\n<!-- decoder: end -->\nb\n", [newer])
    assert page.startswith("a\n<!-- decoder: start -->\n\n| model")
    assert page.endswith("accelerators/decoder.png)\n\n<!-- decoder: end -->\nb\n")
    assert decoder.page(page, [newer]) == page


def test_the_table_of_the_page():
    known = decoder.known()
    assert {(x.model, x.topology) for x in known} <= set(CELLS)
    assert {x.recipe for x in known} <= RECIPES.keys()
    assert decoder.table(known) in decoder.PAGE.read_text()


@pytest.mark.accelerators
def test_adamw_is_as_optaxs(monkeypatch):
    """A short step of a small model, on 16 chips: the same memory and collectives."""
    if reason := targets.missing(targets.TARGETS["v5e"]):
        pytest.skip(reason)
    monkeypatch.setattr(decoder, "TOKENS", 256)
    monkeypatch.setitem(DECODERS, "8 B", SMALL._replace(width=1024, hidden=2048, vocabulary=4096))
    with jax.numpy_rank_promotion("allow"):
        ours, theirs = (
            decoder.compiled("8 B", "v5e:4x4", recipe) for recipe in ("AdamW", "AdamW of optax")
        )
    assert ours.fits
    assert ours.collectives == theirs.collectives
    assert ours.collectives
    assert ours.peak <= 1.01 * theirs.peak
    assert ours.arguments == pytest.approx(theirs.arguments, rel=0.01)
    assert TOPOLOGIES[ours.topology] == 16
