"""The table of `benchmarks/notes/differentiate.md`, by `studies/zero_gradients.py`: rows made again."""

import re

import jax
import optax
import pytest

from studies import zero_gradients
from tests.support.choice import mostly_slow
from tests.support.pages import page, rows

NOTE, GUIDE = "benchmarks/notes/differentiate.md", "docs/differentiate.md"
OPTAX = tuple(map(int, optax.__version__.split(".")[:3]))
TABLE = {row[0].strip("`"): tuple(row) for row in rows(page(NOTE))}


def test_the_rows():
    """Each method has one."""
    assert tuple(TABLE) == zero_gradients.METHODS


def test_the_counts():
    """Those of the text, and of the guide."""
    text = re.search(r"(\d+) of (\d+) optimizers return NaN if some .*?, (\d+) if", page(NOTE))
    own = [row for name, row in TABLE.items() if name.startswith("optax.")]
    nans = [sum(row[i] == "NaN" for row in own) for i in (1, 2)]
    assert [*map(int, text.groups())] == [nans[0], len(own), nans[1]]
    assert f"{nans[0]} of {len(own)} optimizers" in page(GUIDE)
    ours = {row[1:] for name, row in TABLE.items() if name.startswith("jgrad.")}
    assert ours == {("finite", "finite")}
    assert f"none of {len(TABLE) - len(own)}." in page(NOTE)


@pytest.mark.filterwarnings("ignore")  # of optax, about keys and names
@pytest.mark.parametrize("name", mostly_slow([*TABLE], "optax.adam", "jgrad.adam", "jgrad.lars"))
def test_a_row(name, standard_promotion):
    if name.startswith("optax.") and OPTAX < (0, 2, 8):
        pytest.skip("older versions of optax have not all of these, or others")
    with jax.numpy_rank_promotion("allow"):
        assert zero_gradients.row(name) == TABLE[name]
