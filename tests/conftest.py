"""Strictness for every test: nothing is promoted implicitly; pyproject makes warnings errors."""

import os

import chex
import jax
import pytest

# These want eight devices; `test_multi_device.py` gives them a process of their own.
collect_ignore = [] if "JGRAD_MULTI_DEVICE" in os.environ else ["multi_device"]

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption("--every", type=int, default=1, help="Run each n-th test alone.")


def pytest_collection_modifyitems(config, items):
    """Most tests are one of many alike, with other options: each n-th has some of every kind."""
    every = config.getoption("--every")
    config.hook.pytest_deselected(items=[x for i, x in enumerate(items) if i % every])
    items[:] = items[::every]


@pytest.fixture
def x64():
    """64-bit types, for tests that compare with float64."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def standard_promotion():
    """For peers that rely on implicit promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(autouse=True)
def _fresh_trace_counts():
    """`chex.assert_max_traces` counts by the function's name, across tests."""
    chex.clear_trace_counter()
