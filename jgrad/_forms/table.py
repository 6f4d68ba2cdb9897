"""The forms that there are: `jgrad` enters them when it is imported."""

from jgrad._forms.eight_bits import EightBits
from jgrad._forms.factors import RowsAndColumns
from jgrad._forms.random_keys import RandomKeys
from jgrad._trees import forms


def enter() -> None:
    """Puts them into the table in which the rest of the house finds them."""
    forms.register(EightBits())
    forms.register(RowsAndColumns())
    forms.rounds_by(RandomKeys)
