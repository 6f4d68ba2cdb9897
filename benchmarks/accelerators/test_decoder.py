"""Train steps of decoders: the model, the table, and that a step of ours takes what optax's takes."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.accelerators import decoder, llama, targets
from benchmarks.accelerators.decoder import CELLS, DECODERS, RECIPES, TOPOLOGIES
from benchmarks.accelerators.llama import Decoder

SMALL = Decoder(layers=2, width=256, hidden=128, heads=2, groups=1, vocabulary=64)


def test_sizes():
    assert llama.size(DECODERS["8 B"]) == pytest.approx(8.05e9, rel=0.001)
    assert llama.size(DECODERS["70 B"]) == pytest.approx(70.6e9, rel=0.001)
    assert jax.tree.structure(decoder.specs(), is_leaf=lambda x: not isinstance(x, dict)) == (
        jax.tree.structure(llama.shapes(SMALL, jnp.float32))
    )


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
