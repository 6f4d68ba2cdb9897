"""The site: its contents and its looks, and that words of the search lead to one thing each."""

import ast
import json
import re
import runpy

import pytest

import jgrad
from tests.support import pages
from tests.support.pages import ROOT, page

CONTENTS = runpy.run_path(str(ROOT / "docs/_extensions/contents.py"))
NOTEBOOKS = sorted(file.name for file in ROOT.glob("colabs/*.ipynb"))
HELPERS = {file.stem for file in ROOT.glob("colabs/*.py")}

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
    "average_params": ["ema", "polyak"],
    "memory": ["int8", "8bit", "quantized"],
}


@pytest.mark.parametrize("target", WHAT_USERS_TYPE)
def test_what_users_type(target):
    assert {*WHAT_USERS_TYPE[target]} <= {*TARGETS[target]}


# ---- contents ----------------------------------------------------------------------------------


ENTRIES = [entry for group in CONTENTS["CONTENTS"].values() for entry in group]
LISTED = CONTENTS["MEASUREMENTS"] | CONTENTS["PROJECT"]


def test_every_page_is_in_the_site_once():
    names = [*ENTRIES, *LISTED]
    assert len(names) == len(set(names))
    files = {f"{name.removeprefix('repository/')}.md" for name in names}
    assert files >= {name.removeprefix("docs/") for name in (*pages.GUIDES, *pages.NOTES)}


def test_the_sidebar_can_be_read_at_a_glance():
    """It has at most 25 entries with the home page, and what stands under one is not shown."""
    assert '"home_page_in_toc": True' in page("docs/conf.py")
    assert '"max_navbar_depth": 1' in page("docs/conf.py")
    assert 1 + len(ENTRIES) <= 25


def test_what_stands_under_an_entry_has_a_sentence():
    assert {"contents/measurements", "contents/project", "gallery/index", "reference"} < {*ENTRIES}
    for sentence in LISTED.values():
        assert re.fullmatch(r"[A-Z].{10,99}\.", sentence)


def test_pages_have_descriptions():
    """The extension is in use: in a build, it warns of a page of which it finds no sentence."""
    assert re.search(r"^extensions = \[[^]]*\"descriptions\",", page("docs/conf.py"), re.MULTILINE)


# ---- looks -------------------------------------------------------------------------------------

CSS = {
    selector.strip(): rules
    for selector, rules in re.findall(
        r"([^{}]+)\{([^{}]*)\}",
        re.sub(r"/\*.*?\*/", "", page("docs/_static/site.css"), flags=re.DOTALL),
    )
}


@pytest.mark.parametrize(
    ("selector", "rule"),
    [
        (
            ".highlight-diff.highlight-diff .highlight .gd",
            "color: color-mix(in srgb, var(--pst-color-danger)",
        ),
        (
            ".highlight-diff.highlight-diff .highlight .gi",
            "color: color-mix(in srgb, var(--pst-color-success)",
        ),
        (".thumbnail", "object-fit: contain"),
        (".pst-scrollable-table-container::after", "animation-timeline: scroll(nearest inline)"),
        (".pre", "white-space: nowrap"),
    ],
)
def test_looks(selector, rule):
    assert rule in CSS[selector]


# ---- notebooks ---------------------------------------------------------------------------------


def imported(source):
    """The files of colabs/ that some code imports, and those that these import."""
    found = {}
    nodes = list(ast.walk(ast.parse(source)))
    names = [x.name for node in nodes if isinstance(node, ast.Import) for x in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    for name in sorted(HELPERS.intersection(names)):
        found |= {name: None} | imported(page(f"colabs/{name}.py"))
    return found


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_says_how_to_get_what_it_imports(name):
    """By links in its first cell, for readers who have no clone."""
    first, *cells = json.loads(page(f"colabs/{name}"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    code = "\n".join(re.sub(r"(?m)^[%!].*", "", x) for x in code)
    links = re.findall(r"\]\((\w+)\.py\)", "".join(first["source"]).partition("Without")[2])
    assert sorted(links) == sorted(imported(code))


def test_a_notebook_imports_a_helper_and_what_that_imports():
    assert [*imported("import bigram")] == ["bigram", "text"]
