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
pytestmark = pytest.mark.ci


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


# ---- contents ----------------------------------------------------------------------------------


ENTRIES = [entry for group in CONTENTS["CONTENTS"].values() for entry in group]
LISTED = CONTENTS["MEASUREMENTS"] | CONTENTS["PROJECT"]


def test_every_page_is_in_the_site_once():
    names = [*ENTRIES, *LISTED]
    assert len(names) == len(set(names))
    files = {f"{name.removeprefix('repository/')}.md" for name in names}
    assert files >= {name.removeprefix("docs/") for name in (*pages.GUIDES, *pages.NOTES)}


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
