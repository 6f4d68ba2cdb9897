"""Every block of README, docs/ and the notes runs as a reader runs it, and does what its text says.

Each of the other files of this folder runs those of some pages.
"""

from tests.pages.guides import (
    test_choose,
    test_first_training,
    test_larger_than_device,
    test_memory,
    test_methods,
    test_runs,
    test_scanned_layers,
    test_trainers,
)
from tests.pages.guides.entries import ENTRIES, README
from tests.support.pages import GUIDES, NOTES, blocks

FILES = (
    *(test_choose, test_first_training, test_memory, test_methods, test_runs),
    *(test_larger_than_device, test_scanned_layers, test_trainers),
)


def test_each_page_is_in_one_file():
    """A page that has blocks, that is: its name belongs in `PAGES` of one file."""
    found = [name for file in FILES for name in file.PAGES]
    assert sorted(found) == sorted(x for x in (README, *GUIDES, *NOTES) if blocks(x))


def test_entries_are_of_blocks():
    assert all(index in range(len(blocks(name))) for name, index in ENTRIES)


def test_blocks_of_contributing():
    """`test_moments.py` and `test_hand_over.py` run them."""
    assert len(blocks("CONTRIBUTING.md")) == 2
