"""What jgrad exports, its version and its folder."""

import inspect
import pathlib

import jgrad
from jgrad import __all__ as EXPORTED, __version__ as VERSION

__all__ = ["EXPORTED", "PACKAGE", "VERSION"]
PACKAGE = pathlib.Path(inspect.getfile(jgrad)).parent
