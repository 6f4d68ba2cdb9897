"""Executes a copy of every second notebook, some with fewer steps, so that this takes minutes.

    python .ci/notebooks.py 20785

With the next number the others have their turn. Nothing is kept: the outputs in the repository are
of the numbers that the notebooks have.
"""

import concurrent.futures
import pathlib
import sys
import time

import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).parents[1] / "colabs"

# What is in the notebook, once, and what stands in its place here; from the longest on.
FEWER = {
    "language_model": {
        "STEPS, WINDOWS, LENGTH = 200,": "STEPS, WINDOWS, LENGTH = 10,",
        "(0.25, 0.5, 1.0, 2.0)": "(0.5, 1.0)",
        "SEEDS = (1, 2, 3)": "SEEDS = (1, 2)",
        "ROUNDS = 30": "ROUNDS = 2",
    },
    "packed_training": {
        "batches(300)": "batches(30)",
        "rounds=11, calls=8": "rounds=2, calls=2",
    },
    "memory": {
        "steps=330, rate=0.001, seeds=10": "steps=24, rate=0.001, seeds=1",
        "steps=200,": "steps=12,",
    },
    "large_batches": {
        "EPOCHS = 32": "EPOCHS = 4",
        "SEEDS = np.arange(5)": "SEEDS = np.arange(2)",
        "COUNT = 8 ": "COUNT = 2 ",
    },
    "scaling_out": {
        "(epochs), 150": "(epochs), 30",
        "data[:100], data[100:]": "data[:20], data[20:]",
        "np.array([1, 2, 4, 8])": "np.array([1, 8])",
    },
    "learning_the_learning_rate": {
        "starts = trainings(seed=0, number=4)": "starts = trainings(seed=0, number=2)",
        "jnp.logspace(-4.5, 1, 67)": "jnp.logspace(-4.5, 1, 12)",
        "hypers, steps=40)": "hypers, steps=10)",
        "seed=1, number=20": "seed=1, number=4",
    },
    "soap_for_equations": {
        "(1, 32, 32, 32, 1), 4000": "(1, 32, 32, 32, 1), 80",
        "(2, 32, 32, 32, 1), 2000,": "(2, 32, 32, 32, 1), 80,",
        "(0.002, 0.008, 0.032, 0.128)": "(0.008, 0.032)",
    },
}


def shortened(path: pathlib.Path) -> nbformat.NotebookNode:
    """The notebook with the numbers that `FEWER` has for it."""
    notebook = nbformat.read(path, as_version=4)
    for old, new in FEWER.get(path.stem, {}).items():
        found = sum(cell.source.count(old) for cell in notebook.cells)
        if found != 1:
            raise ValueError(f"FEWER: {path.name}: expected {old!r} once, found it {found} times")
        for cell in notebook.cells:
            cell.source = cell.source.replace(old, new)
    return notebook


def execute(notebook: nbformat.NotebookNode) -> float:
    """The seconds that it took; raises what a cell raises."""
    start = time.monotonic()
    resources = {"metadata": {"path": str(FOLDER)}}
    nbclient.NotebookClient(notebook, timeout=None, resources=resources).execute()
    return time.monotonic() - start


def main(turn: int) -> None:
    """Two at a time, those with the most to do first."""
    rank = {name: i for i, name in enumerate(FEWER)}
    paths = sorted(FOLDER.glob("*.ipynb"), key=lambda x: (rank.get(x.stem, len(rank)), x.name))
    paths = paths[turn % 2 :: 2]
    notebooks = [shortened(path) for path in paths]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for path, seconds in zip(paths, pool.map(execute, notebooks), strict=True):
            print(f"{path.name}: {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
