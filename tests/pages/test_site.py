"""The site: its contents and its looks, and that words of the search lead to one thing each."""

import ast
import datetime
import html
import io
import json
import re
import runpy
import xml.etree.ElementTree

import numpy as np
import pytest

import jgrad
from tests.support import pages
from tests.support.pages import ROOT, page
from tests.support.public import EXPORTED, VERSION

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
    assert set(NAMES) <= set(EXPORTED)


@pytest.mark.parametrize("word", sorted({word for words in TARGETS.values() for word in words}))
def test_a_word_leads_to_one_thing(word):
    """Or to a pair of related names; and it is not a name, which the search finds by itself."""
    found = targets(word)
    assert len(found) == 1 or found in RELATED
    assert word == word.lower().strip()
    assert word not in EXPORTED or word == "quantized"  # an old name
    assert ";" not in word  # which would be two entries for Sphinx


# ---- contents ----------------------------------------------------------------------------------


ENTRIES = [entry for group in CONTENTS["CONTENTS"].values() for entry in group]
LISTED = CONTENTS["MEASUREMENTS"] | CONTENTS["PROJECT"]


def test_every_page_is_in_the_site_once():
    names = [*ENTRIES, *LISTED]
    assert len(names) == len(set(names))
    files = {f"{name.removeprefix('repository/')}.md" for name in names}
    assert files >= {name.removeprefix("docs/") for name in (*pages.GUIDES, *pages.NOTES)}


# ---- the release -------------------------------------------------------------------------------


def extension(name, monkeypatch):
    """One that imports Sphinx: CI's stage `site` has it."""
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(ROOT / "docs/_extensions")
    return runpy.run_path(str(ROOT / f"docs/_extensions/{name}.py"))


@pytest.fixture
def release(monkeypatch):
    return extension("release", monkeypatch)


SOURCES = {
    "contents/upgrade": "CHANGELOG.md",
    "gallery/finetune_lora": "colabs/finetune_lora.py",
    "gallery/quickstart": "colabs/quickstart.ipynb",
    "index": "README.md",
    "memory": "docs/memory.md",
    "reference/optimizers": "docs/reference.md",
    "repository/benchmarks/notes/soap": "benchmarks/notes/soap.md",
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_page_is_edited_where_it_is_written(release, name):
    found = release["links"](name, "https://host/jgrad")
    assert found["edit"] == f"https://host/jgrad/edit/main/{SOURCES[name]}"
    assert found["report"].startswith("https://host/jgrad/issues/new?title=Documentation%2C%20")
    assert (ROOT / SOURCES[name]).is_file()


def test_nothing_leads_to_an_address_that_is_not_known(release):
    assert release["links"]("memory", "") == {}
    assert "](http" not in release["cite"]("")
    assert release["cite"]("https://host/jgrad").count("https://host/jgrad") == 3
    assert bool(release["address"]()) == ('/OWNER/jgrad"' not in page("pyproject.toml"))


@pytest.fixture(scope="module")
def site():
    """The folder of the site as it was built last."""
    built = ROOT / "docs/_build/html"
    parts = [*ROOT.glob("docs/*.*"), *ROOT.glob("docs/_extensions/*.*"), ROOT / "CHANGELOG.md"]
    newest = max(x.stat().st_mtime for x in parts if x.name != "index.md")
    if not built.exists() or (built / "searchindex.js").stat().st_mtime < newest:
        pytest.skip("builds of the site are older than its parts")
    return built


def test_a_page_says_its_version_and_date(site):
    day = datetime.date.fromisoformat(re.search(r"date-released: (\S+)", page("CITATION.cff"))[1])
    text = (site / "memory.html").read_text()
    assert f"<title>Memory &#8212; jgrad {VERSION}</title>" in text
    assert f"jgrad {VERSION}, {day:%-d %B %Y} · <a" in text


def test_what_to_change_is_a_page(site):
    """With each row of the table in the changelog."""
    tables = re.findall(r", from (\S+) to (\S+):\n\n((?:\|.*\n)+)", page("CHANGELOG.md"))
    (old, new, table), *_ = tables
    assert VERSION.startswith(f"{new}.")
    text = (site / "contents/upgrade.html").read_text()
    assert text.count("<tr") == len(pages.rows(table)) + 1
    entry = f'<a class="reference internal" href="contents/upgrade.html">From {old} to {new}</a>'
    assert entry in (site / "index.html").read_text()


# By what is typed, the page that comes first, by its title, a word of its title or of words.py.
SEARCHED = {
    "adamw": "reference/optimizers",
    "multisteps": "reference/wrappers",
    "muonclip": "muon",
    "scan": "scanned_layers",
    "lora": "gallery/finetune_lora",
}


@pytest.mark.parametrize("word", SEARCHED)
def test_the_search_finds(site, word):
    index = (site / "searchindex.js").read_text()
    index = json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))
    found = index["titleterms"].get(word, [])
    found = [found] if isinstance(found, int) else found
    found = [*found, *(x[0] for x in index["indexentries"].get(word, []))]
    assert SEARCHED[word] in [index["docnames"][i] for i in found]


# ---- equations ---------------------------------------------------------------------------------

# As they are written, and as they are set: a fraction in braces, a root and an exponent as calls.
EQUATIONS = {
    "w' = w - the_rate |w| / |u| u": "w' = w - {the_rate |w| / |u|} u",
    "d = m' / (1 - beta1^t) / (sqrt(v) + epsilon)": "d = {{m' / 1 - β1^t} / root(v) + ε}",
    "m' = a |w| / (|g| + b |w|) (g + b w)": "m' = {a |w| / |g| + b |w|} (g + b w)",
    "w' = R u / |w + R u / |u||": "w' = {R u / |w + {R u / |u|}|}",
    "b = min(1 - t^-b_decay, (n + 1)^c d)": "b = min(1 - t^ - b_decay, (n + 1)^c d)",
    "u = g / sqrt(v),  v = r' c' / (mean of r')": "u = {g / root(v)},   v = {r' c' / mean of r'}",
    "r = the rest with share (a - b) / (c - d), or b": "r = the rest with share {a - b / c - d}, or b",
    "g_i = epsilon[0] P^H Adam's g": "gi = ε0 P^H Adam's g",
}


def in_line(node):
    """MathML as a line of text."""
    parts = [in_line(x) for x in node]
    if node.tag == "mspace":
        return " " if float(node.get("width")[:-2]) < 1 else "   "
    if node.tag == "mfrac":
        return f"{{{parts[0]} / {parts[1]}}}"
    if node.tag in ("msup", "msubsup"):
        return f"{''.join(parts[:-1])}^{parts[-1]}"
    text = "".join([node.text or "", *parts]).translate({0x2212: "-", 0x2032: "'"})
    text = f"root({text})" if node.tag == "msqrt" else text
    is_spaced = node.tag == "mo" and text in "=+-,"
    return (f"{text} " if text == "," else f" {text} ") if is_spaced else text


@pytest.mark.parametrize("written", EQUATIONS)
def test_an_equation_is_set_as_it_is_written(written, monkeypatch):
    shown = extension("equations", monkeypatch)["mathml"](written)
    tree = xml.etree.ElementTree.fromstring(html.unescape(shown))
    found = in_line(tree)
    assert re.sub(r" +", " ", found) == re.sub(r" +", " ", EQUATIONS[written])


@pytest.mark.parametrize(
    "written",
    ["x = f(*args)", "x = tx.update(g)", "x = a / ", "x = (a", "x = a)", "x = |a", "f(x)"],
)
def test_what_is_no_equation_stays_as_it_is(written, monkeypatch):
    with pytest.raises(ValueError, match=r"^no |a mark|is not closed|an end"):
        extension("equations", monkeypatch)["mathml"](written)


def test_equations_of_the_site_are_set(site):
    """Each card of methods, and each optimizer of the reference but one that has no equation."""
    cards = re.findall(r"`\w+' = ", page("docs/methods.md"))
    text = (site / "methods.html").read_text()
    assert text.count('<math display="block"') == len(cards) > 5
    optimizers = (site / "reference/optimizers.html").read_text()
    assert optimizers.count('<math display="block"') == optimizers.count('<dt class="sig') - 1
    assert not re.search(
        r"sqrt\(|\^T|g²", re.sub(r"<math .*?>|<pre>.*?</pre>", "", text, flags=re.S)
    )


# Prose, with what is set in brackets.
PROSE = {
    "where |.| is the 2-norm, and X = 0 where d =\n0, without": "where [|.|] is the 2-norm, and [X = 0] where [d =\n0], without",
    "(w is a weight of Adam's, m' / sqrt(v') a step)": "([w] is a weight of Adam's, [m' / sqrt(v')] a step)",
    "averages of g g^T, 10^4 times": "averages of [g g^T], [10^4] times",
    "w' = w - learning_rate direction - weight_decay w, with": "[w' = w - learning_rate direction - weight_decay w], with",
    "A list of 3 (E18, T5), the n-th in [0, 1) is f(x) by weight_decay": "A list of 3 (E18, T5), the n-th in [0, 1) is f(x) by weight_decay",
}


@pytest.mark.parametrize("prose", PROSE)
def test_terms_in_prose_are_set(prose, monkeypatch):
    parts = extension("inline_equations", monkeypatch)["marked"](prose)
    assert "".join(f"[{x}]" if shown else x for x, shown in parts) == PROSE[prose]


def test_the_reference_has_a_line_for_each_name(site):
    """In a table of its group, with the first line of its docstring."""
    text = html.unescape(re.sub(r"<[^>]+>", "", (site / "reference.html").read_text()))
    for name in EXPORTED:
        first = re.sub("`", "", (getattr(jgrad, name).__doc__ or "").strip().partition("\n")[0])
        words = first.removesuffix(" Field names are part of the checkpoint format.")
        plain = lambda x: re.sub(r"\W+", " ", x)
        assert plain(f"\n{name}\n\n{words}") in plain(text), name


def test_no_role_is_left(site):
    """A span of code across two lines is one link, also where a result is described."""
    for file in sorted((site / "reference").glob("*.html")):
        assert "py:obj" not in file.read_text(), file.name


# ---- cards -------------------------------------------------------------------------------------


def test_a_card_has_one_panel(monkeypatch):
    """The first of two, with a frame or with two axes, and an image without them as it is."""
    image, first = pytest.importorskip("PIL.Image"), extension("panels", monkeypatch)["first"]

    def card_of(pixels):
        file = io.BytesIO()
        image.fromarray(pixels).save(file, "PNG")
        return np.asarray(image.open(io.BytesIO(first(file.getvalue()))).convert("L"))

    pixels = np.full((200, 400), 255, np.uint8)
    assert card_of(pixels).shape == (200, 400)
    framed, bare = pixels.copy(), pixels.copy()
    for left in (40, 240):
        framed[30:150, left : left + 100] = 0
        framed[31:149, left + 1 : left + 99] = 255
        bare[30:150, left] = bare[149, left - 3 : left + 100] = 0  # with a mark at its end
    assert card_of(framed).shape == card_of(bare).shape == (120, 100)

    # A legend has a grey edge, and covers lines; it goes with all that is in it.
    legend = framed.copy()
    legend[40:70, 60:120] = 214
    legend[41:69, 61:119] = 255
    legend[50, 65:100] = 0
    assert (card_of(legend)[10:40, 10:90] == 255).all()
    assert (card_of(legend)[0] == 0).all()


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
