"""Collects these tests where they are asked for, and lets clients keep habits of their own."""

import importlib
import pathlib
import warnings

import jax
import pytest

from tests.support.choice import asked_for

FOLDER = pathlib.Path(__file__).parent


def missing(client):
    """Why a client cannot be imported; None where it can."""
    with warnings.catch_warnings():
        # When they are imported, some of them use what JAX and Python will remove.
        warnings.simplefilter("ignore")
        try:
            importlib.import_module(client)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None


def pytest_ignore_collect(collection_path, config):
    """Files of a client that is missing; `test_every_client_is_installed` fails and names it."""
    client = collection_path.stem.removeprefix("test_")
    if not asked_for(config, FOLDER, "clients"):
        return True
    known = collection_path.name.startswith("test_") and client != "installed"
    return True if known and missing(client) else None


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
