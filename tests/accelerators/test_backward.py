"""The table of `docs/four_bytes.md`: how it is written, and what it has."""

from benchmarks.accelerators import backward
from benchmarks.accelerators.backward import Peak, Row
from benchmarks.accelerators.train_steps import RECIPES
from tests.support.pages import rows, section

FOUND = {
    Row("v5e", "layers", "AdamW"): [Peak(12.0, 6.0), Peak(12.0, 2.004)],
    Row("v5e", "layers", "AdamW of optax"): [Peak(12.0, 5.5)],
    Row("h100", "layers", "AdamW"): [Peak(12.0, 4.41), Peak(12.0, 0.78)],
}
TABLE = """\
| recipe | TPU v5e, layers | H100, layers |
| --- | --- | --- |
| AdamW | 18.00 → 14.00 | 16.41 → 12.78 |
| AdamW of optax | 17.50 |  |"""


def test_a_table():
    """A row for each recipe, a cell for each program: of both forms, if both were compiled."""
    assert backward.table(FOUND) == TABLE


def test_a_page():
    """The table takes the place of another, however often."""
    text = "a\n<!-- peaks: start -->\nold\n<!-- peaks: end -->\nb\n"
    new = backward.page(text, FOUND)
    assert new == f"a\n<!-- peaks: start -->\n\n{TABLE}\n\n<!-- peaks: end -->\nb\n"
    assert backward.page(new, FOUND) == new


def test_the_table_of_the_page():
    """It has each recipe, and no peak that is higher in the backward pass."""
    table = rows(section("docs/four_bytes.md", "The peak"))
    assert [name for name, *_ in table] == list(RECIPES)
    for name, *cells in table:
        peaks = [[float(x) for x in cell.split(" → ")] for cell in cells]
        assert {len(x) for x in peaks} == {1 if RECIPES[name].of_optax else 2}
        assert all(x[-1] < x[0] for x in peaks if len(x) == 2)
