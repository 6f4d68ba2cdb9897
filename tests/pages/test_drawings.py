"""The drawings of the guides are what `python -m benchmarks.drawings` makes, and say what pages say."""

import re
import xml.etree.ElementTree

import pytest

from benchmarks.drawings import alive, cards, nesting, setups
from benchmarks.drawings.__main__ import DRAWINGS, FOLDER, OF_CARDS
from tests.support.pages import GUIDES, page, rows, section

pytestmark = pytest.mark.ci


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_that_of_its_command(name):
    """And says in words what it shows; a page has it."""
    found = (FOLDER / f"{name}.svg").read_text()
    assert found == DRAWINGS[name]()
    assert len(xml.etree.ElementTree.fromstring(found).get("aria-label")) > 100
    texts = [page(guide) for guide in ("README.md", *GUIDES)]
    assert any(re.search(rf"!\[.{{20,}}\]\((docs/)?pictures/{name}\.svg\)", x) for x in texts)


def test_every_drawing_has_a_command():
    """Or is that of `decoder_peaks`, which `test_flax_decoders.py` looks at."""
    assert {file.stem for file in FOLDER.iterdir()} == {*DRAWINGS, "decoder_peaks"}


def test_every_program_has_a_card_that_is_drawn():
    """As `python -m benchmarks.drawings` draws it now, without letters: a card is small."""
    named = {file.stem for file in FOLDER.parents[1].glob("colabs/train_*.py")}
    assert cards.CARDS.keys() == {file.stem for file in OF_CARDS.iterdir()}
    assert cards.CARDS.keys() == named | {"finetune_lora"}
    for name, draw in cards.CARDS.items():
        found = (OF_CARDS / f"{name}.svg").read_text()
        assert found == draw()
        assert "<text" not in found


def test_what_is_alive():
    """By hand: gradients are whole, of one layer, or of one layer beside what is fetched with it."""
    share = 1 / alive.LAYERS
    ordinary, in_backward, on_the_host = map(alive.peak, alive.STEPS)
    kept = 2 + 2 + 2 / 256  # two moments of a byte, and a scale for 256 of each
    inputs = 512 * 1024 * 2 / (12 * 1024**2)
    assert ordinary == pytest.approx(kept + 2)
    assert in_backward == pytest.approx(kept + 2 * share + inputs)
    assert on_the_host == pytest.approx((kept + 2) * share + inputs)


def test_the_nesting_is_that_of_the_page():
    """From the outermost; the page has the optimizer by what goes around it."""
    table = [row[0] for row in rows(section("docs/wrappers.md", "Why this order"))]
    named = [x for row in table for x in re.findall(r"`(\w+)`", row)]
    drawn = [*nesting.WRAPPERS, *nesting.CHAIN[:1]]
    assert [x for x in named if x in drawn] == drawn


def test_figures_of_setups():
    """They stand on the pages about memory."""
    figures = [re.match(r"[\d.]+(?=:)", first) for first, _ in setups.SETUPS]
    figures = [x[0] for x in figures if x]
    assert len(figures) == 5
    assert figures == sorted(figures, key=float, reverse=True)
    table = [row[3] for row in rows(page("docs/memory.md"))]
    assert {"16", "12", "6.03"} <= set(table) & set(figures)
    peaks = {row[0]: row[1] for row in rows(page("benchmarks/notes/peaks.md"))}
    assert figures[3] == peaks["AdamW in 8 bits"].split()[-1]
    assert figures[4] == peaks["AdamW, moments in host memory"].split()[-1]
