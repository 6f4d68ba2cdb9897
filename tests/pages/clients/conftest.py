"""Collects these tests where they are asked for, and lets clients keep habits of their own."""

import contextlib
import importlib
import pathlib
import warnings

import jax
import pytest

from tests.support.choice import asked_for

FOLDER = pathlib.Path(__file__).parent


def pytest_ignore_collect(collection_path, config):
    return None if asked_for(config, FOLDER, "clients") else True


def pytest_collectstart(collector):
    """When they are imported, some clients use what JAX and Python will remove."""
    if FOLDER in collector.path.parents:
        with warnings.catch_warnings(), contextlib.suppress(ImportError):
            warnings.simplefilter("ignore")
            importlib.import_module("flax.linen")
            importlib.import_module("equinox")


def pytest_collection_modifyitems(items):
    """Warnings of clients are theirs; those of jgrad stay errors."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore", "error:::jgrad"))


@pytest.fixture(autouse=True)
def _promotion_of_clients():
    """optax's schedules, and most of the clients, promote dtypes and ranks implicitly."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
