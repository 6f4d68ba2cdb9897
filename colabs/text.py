"""The sources of Python's own library, byte by byte, split by file.

Every Python ships the text, and another version of Python has another text: losses of two versions
are not comparable, and differences between optimizers are.
"""

import pathlib
import sys
import sysconfig
import zlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

VOCABULARY = 256

# Of the tables of `encodings` many are almost alike, and would be in training and test; the largest
# part of `pydoc_data` is prose.
_LEFT_OUT = {"encodings", "pydoc_data"}
_TESTS = {"test", "tests", "idle_test"}


class Text:
    """Bytes, and the windows of one length to cut from them."""

    def __init__(self, content: bytes) -> None:
        self.codes = np.frombuffer(content, np.uint8)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Integers of shape `(*starts.shape, length)`."""
        return self.codes[starts[..., None] + np.arange(length)].astype(np.int32)

    def batch(
        self, number: int, *, seed: int = 0, windows: int = 16, length: int = 33
    ) -> np.ndarray:
        """Windows from anywhere, of shape (windows, length), known by the number of the batch."""
        rng = np.random.default_rng((seed, number))
        return self.windows(rng.integers(len(self.codes) - length + 1, size=windows), length)

    def batches(self, number: int, **options: int) -> np.ndarray:
        """The first batches, of shape (number, windows, length); options as in `batch`."""
        return np.stack([self.batch(i, **options) for i in range(number)])

    def spread(self, number: int, length: int = 33) -> np.ndarray:
        """Windows at equal distances over the whole text, of shape (number, length)."""
        return self.windows(np.linspace(0, len(self.codes) - length, number).astype(int), length)


class Split(NamedTuple):
    """Texts of different files."""

    training: Text
    validation: Text
    test: Text


def load() -> Split:
    """The library of this Python, about eight bytes in ten for training, and one for each other."""
    found = files()
    return Split(*(Text(_joined(found[part])) for part in Split._fields))


def files() -> dict[str, list[pathlib.Path]]:
    """The files of each part. A file stays in its part in every version of Python."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    found: dict[str, list[pathlib.Path]] = {part: [] for part in Split._fields}
    for name in sorted(sys.stdlib_module_names - _LEFT_OUT):
        for path in [root / f"{name}.py", *sorted((root / name).rglob("*.py"))]:
            relative = path.relative_to(root)
            if path.is_file() and not _TESTS & set(relative.parts):
                found[part_of(relative.as_posix())].append(path)
    if not all(found.values()):
        raise FileNotFoundError(f"{root}: no sources of Python's library, expected its .py files.")
    return found


def part_of(name: str) -> str:
    """Of a file by its path in the library, of ten files one to validate and one to test."""
    return {0: "validation", 1: "test"}.get(zlib.crc32(name.encode()) % 10, "training")


def _joined(paths: Iterable[pathlib.Path]) -> bytes:
    return b"\n".join(path.read_bytes() for path in paths)
