"""What 1.0 froze: public names, their arguments and defaults, and the fields of states.

    python -m tests.frozen

writes `tests/data/frozen_<version>.json`, once, before a major version is released; it is never
written again. `tests/test_stability.py` compares each later version with it.
"""

import inspect
import json
import pathlib
from typing import Any

import jgrad
from tests.support.public import EXPORTED, VERSION

DATA = pathlib.Path(__file__).parent / "data"


def of(name: str) -> dict[str, Any]:
    """The arguments of a function as (name, kind, default); the fields of a state."""
    thing = getattr(jgrad, name)
    if inspect.isfunction(thing):
        parameters = inspect.signature(thing).parameters.values()
        return {"arguments": [[p.name, p.kind.name, default(p)] for p in parameters]}
    return {"fields": list(getattr(thing, "_fields", ()))}


def default(parameter: inspect.Parameter) -> str | None:
    """As Python writes it; None where an argument is required."""
    return None if parameter.default is parameter.empty else repr(parameter.default)


def main() -> None:
    """Writes the file of this version."""
    path = DATA / f"frozen_{VERSION}.json"
    assert not path.exists(), f"{path} is there already"
    path.write_text(json.dumps({name: of(name) for name in EXPORTED}, indent=1) + "\n")


if __name__ == "__main__":
    main()
