"""One word for each thing that one does here.

    python -m tests near jgrad/_optimizers/adam.py -x

runs what the word stands for; what follows goes to the last of its commands.
"""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
WORDS = {
    "near": ("the tests nearest to what git says you changed, or to FILES", ["tests.near"]),
    "all": ("the default tests", ["pytest"]),
    "slow": ("every test, of many alike some", ["pytest --all"]),
    "lint": ("ruff and mypy", ["ruff check .", "ruff format --check .", "mypy"]),
    "site": ("docs/_build/html", ["sphinx -q -W -n docs docs/_build/html"]),
    "benchmarks": ("benchmarks/results.md", ["benchmarks --results=benchmarks/results.md"]),
    "mutate": ("breaks the library on purpose: do its tests notice?", ["tests.mutations --near"]),
    "cost": ("CPU seconds of the default tests, with their budget", ["tests.cost"]),
    "rooms": ("what lives in each file", ["tests.rooms"]),
    "digests": ("of every program, before and after a change of structure", ["tests.digests"]),
}


def main(word: str = "", *rest: str) -> int:
    """The first status that is not 0."""
    if word not in WORDS:
        print(__doc__, *(f"    {name:12}{text}" for name, (text, _) in WORDS.items()), sep="\n")
        return 2
    _, commands = WORDS[word]
    for command in commands:
        given = rest if command == commands[-1] else ()
        done = subprocess.run([sys.executable, "-m", *command.split(), *given], cwd=ROOT)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
