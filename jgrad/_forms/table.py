"""What is behind the doors of the core: `jgrad` enters it when it is imported."""

from jgrad._forms.eight_bits import EightBits
from jgrad._forms.factors import RowsAndColumns
from jgrad._forms.random_keys import RandomKeys
from jgrad._inputs import aligned, functional
from jgrad._trees import explained, forms, known_names, variables


def enter() -> None:
    """Puts forms, random bits and functional updates where the rest of the house finds them."""
    forms.register(EightBits())
    forms.register(RowsAndColumns())
    forms.rounds_by(RandomKeys)
    forms.boxed_by(variables)
    functional.runs_by(aligned.run)
    explained.explains_by(known_names)
