"""Compiles for machines that are not there, where that is asked for."""

import pathlib

import jax
import pytest

from benchmarks.accelerators import targets
from tests.support.choice import asked_for

FOLDER = pathlib.Path(__file__).parent

# Where libtpu is installed, JAX would look for a TPU. Nothing runs here, and nothing is there.
if jax.config.jax_platforms is None:
    jax.config.update("jax_platforms", "cpu")


def pytest_collection_modifyitems(config, items):
    """Without being asked for, only what reads saved text; pyproject names the folder each time."""
    if any(asked_for(config, file, "accelerators") for file in FOLDER.glob("test_*.py")):
        return
    dropped = [x for x in items if x.get_closest_marker("accelerators")]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [x for x in items if x not in dropped]


@pytest.fixture(autouse=True)
def _compiled_afresh(standard_promotion):
    """Schedules of optax promote; and a program from a cache would say nothing of its compiler."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", before)


@pytest.fixture
def target(request):
    """One of `targets.TARGETS` by its name; without its compiler the test is skipped by name."""
    found = targets.TARGETS[request.param]
    if reason := targets.missing(found):
        pytest.skip(reason)
    return found
