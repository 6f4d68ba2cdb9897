"""Decoders in flax whose peaks are measured: the head in slices, and the table of the page."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.accelerators import decoder_peaks, flax_decoders, largest
from benchmarks.accelerators.decoder_peaks import CASES
from tests.support.pages import section


def test_a_head_in_slices_is_the_whole_head(x64):
    """Value and gradients of the cross-entropy; a slice may have none of the targets."""
    rng = np.random.default_rng(0)
    head, x = rng.normal(size=(4, 8, 5)), jnp.asarray(rng.normal(size=(2, 3, 8)))
    targets = jnp.asarray([[0, 19, 7], [4, 4, 11]])

    def whole(head, x):
        logits = x @ jnp.concatenate([*head], axis=-1)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
        return -jnp.mean(chosen)

    def in_slices(head, x):
        return flax_decoders.in_slices(head, x, targets)

    given = 50 * jnp.asarray(head), x
    found, expected = (jax.jit(jax.value_and_grad(f, (0, 1)))(*given) for f in (in_slices, whole))
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_models_are_the_same():
    """In linen and in nnx: as many parameters, and a loss that is a number."""
    models = [flax_decoders.linen(jnp.bfloat16), flax_decoders.in_nnx(jnp.bfloat16)]
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    with jax.numpy_rank_promotion("allow"):
        losses = [jax.eval_shape(model.loss, model.params, tokens) for model in models]
    sizes = [sum(x.size for x in jax.tree.leaves(model.params)) for model in models]
    assert sizes == [268_469_248] * 2
    assert [(x.shape, x.dtype) for x in losses] == [((), jnp.float32)] * 2


def test_the_tables_of_the_page():
    table = decoder_peaks.table(decoder_peaks.known())
    assert table in section("benchmarks/notes/peaks.md", "The peak")
    assert largest.table(largest.known()) in section(
        "benchmarks/notes/peaks.md", "The largest model"
    )


def test_the_picture_of_four_bytes():
    """It is drawn from the table, and says in words what it shows."""
    found = decoder_peaks.PICTURE.read_text()
    assert found == decoder_peaks.picture(decoder_peaks.known())
    assert re.search(r'aria-label="Peak of .*; optax, bfloat16: [\d.]+, [\d.]+; jgrad, ', found)


# Bytes per parameter at most, in the backward pass.
LIMITS = {
    "AdamW in 8 bits": {"v5e": 4.5, "h100": 4.5},
    "AdamW in 8 bits, head in slices": {"v5e": 4.4, "h100": 4.4},
}


@pytest.mark.accelerators
@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("target", ["v5e", "h100"], indirect=True)
def test_peak(name, target):
    key = next(x for x, y in decoder_peaks.TARGETS.items() if y == target)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        found = decoder_peaks.peak(key, CASES[name], decoder_peaks.FORMS[1])
    assert round(found, 2) <= LIMITS[name][key]
