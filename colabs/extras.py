"""Packages that an example needs beside the library: one that is missing is the first thing said.

Imported and called before all others, since JAX takes seconds to be imported.
"""

import importlib.util
import pathlib
import sys

# Of each extra of pyproject.toml, what is imported.
EXTRAS = {
    "demo": ("sklearn", "matplotlib", "rich"),
    "distributed": ("sklearn", "rich", "orbax"),
}


def need(*modules: str) -> None:
    """Ends this program where a module is not installed, and says how to install it."""
    missing = [x for x in modules if importlib.util.find_spec(x) is None]
    is_installed = importlib.util.find_spec("jgrad") is not None
    if not missing and is_installed:
        return
    # One extra that has all of them, else each that has one.
    whole = [name for name, own in EXTRAS.items() if {*(missing or modules)} <= {*own}]
    each = [name for name, own in EXTRAS.items() if {*missing} & {*own}]
    names = ",".join(whole[:1] or each)
    package = "jgrad" if is_installed else pathlib.Path(__file__).parents[1]
    said = ", ".join(missing if is_installed else ["jgrad", *missing])
    sys.exit(f"Not installed: {said}. Give: pip install '{package}[{names}]'")
