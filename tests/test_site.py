"""The site's own data: words of the search lead to what there is, and each to one thing."""

import runpy

import pytest

import jgrad
from tests.support.pages import ROOT

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


WHAT_USERS_TYPE = {
    "adam": ["adamw"],
    "lamb": ["layerwise"],
    "gradient_descent": ["sgd", "momentum"],
    "zero": ["fsdp"],
    "clip_by_global_norm": ["grad clipping"],
    "accumulate": ["gradient accumulation", "multisteps"],
    "master_weights": ["mixed precision"],
    "skip_nonfinite": ["fp16", "loss scale"],
    "by_path": ["param groups"],
    "hyperball": ["muonh", "adamh"],
    "ema": ["polyak"],
    "memory": ["int8", "8bit", "quantized"],
}


@pytest.mark.parametrize("target", WHAT_USERS_TYPE)
def test_what_users_type(target):
    assert {*WHAT_USERS_TYPE[target]} <= {*TARGETS[target]}
