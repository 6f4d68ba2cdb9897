"""The site's own data: words of the search lead to what there is, and each to one thing."""

import pathlib
import runpy

import pytest

import jgrad

ROOT = pathlib.Path(__file__).parents[1]
WORDS = runpy.run_path(str(ROOT / "docs/_extensions/words.py"))
NAMES, GUIDES, RELATED = WORDS["NAMES"], WORDS["GUIDES"], WORDS["RELATED"]
TARGETS = {**NAMES, **GUIDES}


def targets(word):
    return {target for target, words in TARGETS.items() if word in words}


def test_words_are_for_public_names():
    assert set(NAMES) <= set(jgrad.__all__)


@pytest.mark.parametrize("word", sorted({word for words in TARGETS.values() for word in words}))
def test_a_word_leads_to_one_thing(word):
    """Or to a pair of related names; and it is not a name, which the search finds by itself."""
    found = targets(word)
    assert len(found) == 1 or found in RELATED
    assert word == word.lower().strip()
    assert word not in jgrad.__all__ or word == "quantized"  # an old name
    assert ";" not in word  # which would be two entries for Sphinx


def test_related_names_share_words():
    shared = [targets(word) for words in TARGETS.values() for word in words]
    assert all(pair in shared for pair in RELATED)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("adamw", "adam"),
        ("layerwise", "lamb"),
        ("sgd", "gradient_descent"),
        ("momentum", "gradient_descent"),
        ("fsdp", "zero"),
        ("grad clipping", "clip_by_global_norm"),
        ("gradient accumulation", "accumulate"),
        ("multisteps", "accumulate"),
        ("mixed precision", "master_weights"),
        ("fp16", "skip_nonfinite"),
        ("loss scale", "skip_nonfinite"),
        ("param groups", "by_path"),
        ("muonh", "hyperball"),
        ("adamh", "hyperball"),
        ("polyak", "ema"),
        ("int8", "memory"),
        ("8bit", "memory"),
        ("quantized", "memory"),
    ],
)
def test_what_users_type(word, expected):
    assert expected in targets(word)
