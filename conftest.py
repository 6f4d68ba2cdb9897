"""Strictness for every test, eight virtual devices, the choice of tests, and a bound on memory.

Nothing is promoted implicitly, and pyproject makes warnings errors. `pytest` runs the tests that
break where jgrad does; `tests/support/choice.py` says which, and what `--all` and `-m ci` add.
"""

import ctypes
import gc
import os
import pathlib
import resource
import sys

from tests.support import compiler

DEVICES = 8
# XLA reads both once, when JAX starts. It needs more threads than devices: on two cores, the
# collectives of eight virtual devices can otherwise wait for each other for ever.
_FLAG = "--xla_force_host_platform_device_count"
compiler.set_flags()
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}={DEVICES}".strip()
os.environ.setdefault("PJRT_NPROC", str(max(2 * DEVICES, os.cpu_count() or 1)))

import chex
import jax
import pytest
from hypothesis import settings

from tests.support import choice, oldest
from tests.support.precision import in_64_bits

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Two thirds of the time of a first run are XLA's. What it compiled for an earlier test is taken
# from a folder that git ignores. An entry that another process is writing is compiled instead,
# with a warning that pyproject lets pass. Processes that tests start do not share it: some of them
# are killed.
if jax.config.jax_compilation_cache_dir is None:
    _cache = pathlib.Path(__file__).parent / ".pytest_cache" / "xla"
    jax.config.update("jax_compilation_cache_dir", str(_cache))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# No deadline, since the first call of a shape compiles. The same examples in every run, so that a
# failure in CI is a failure anywhere.
settings.register_profile("default", deadline=None, derandomize=True, max_examples=5)
settings.register_profile("all", deadline=None, derandomize=True, max_examples=25)

# GB, above which a process frees its compiled programs, after which all is traced again: half
# of the machine's memory for all of its processes, within reason. One test takes up to 0.2.
_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
LIMIT = min(max(_MEMORY / 2 / int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)), 1.15), 3.5)
GIGABYTE = 2**30 if sys.platform == "darwin" else 2**20  # in the unit of `ru_maxrss`


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="Run the tests marked slow, too.")
    parser.addoption("--exhaustive", action="store_true", help="With --all: every choice.")
    parser.addoption("--every", type=int, default=1, help="Run only one share of n.")
    parser.addoption("--turn", type=int, default=0, help="With --every or --all: which share.")


def pytest_configure(config):
    # JAX makes many small objects that stay: by default the collector takes a tenth of the time.
    gc.set_threshold(100_000, 50, 100)
    settings.load_profile("all" if config.getoption("--all") else "default")
    if not hasattr(config, "workerinput"):  # in the process that collects reports
        config.pluginmanager.register(PeakMemory())


def pytest_report_header(config):
    turn, every = config.getoption("--turn"), config.getoption("--every")
    return f"share: 1 of {every}, --turn={turn}" if every > 1 or turn else None


def pytest_ignore_collect(collection_path, config):
    if not config.getoption("--all") and choice.is_left_to_ci(config, collection_path):
        return True
    return None


def _named(config):
    return any("::" in argument for argument in config.args)


_QUICK = pytest.StashKey()


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    """Makes no items of what the default suite leaves out: three quarters of all choices."""
    if metafunc.config.getoption("--all") or _named(metafunc.config):
        return
    found = metafunc.config.stash.setdefault(_QUICK, {})
    if metafunc._calls:
        found[metafunc.definition.nodeid] = choice.leave_out(metafunc)


def pytest_collection_modifyitems(config, items):
    """Drops slow tests, unless asked for by `--all` or by name; else runs them first."""
    of_ci, named = choice.of_ci(config, items), _named(config)
    quick_names = config.stash.get(_QUICK, {})
    slow, quick = choice.of_suite(items, all_names=not named, quick_names=quick_names)
    turn, every = config.getoption("--turn"), config.getoption("--every")
    if not (config.getoption("--exhaustive") or named):
        slow = choice.thinned(slow, turn // every)
    chosen = [*slow, *quick] if config.getoption("--all") or named else quick
    if not config.getoption("--all"):
        chosen = [x for x in chosen if x not in of_ci]
    # Most tests are one of many alike, with other options: each share has some of every kind.
    chosen = choice.share(chosen, every, turn)
    kept = set(chosen)
    config.hook.pytest_deselected(items=[x for x in items if x not in kept])
    items[:] = chosen


class PeakMemory:
    """Prints the largest resident memory of each worker, or of the process that ran all tests."""

    def __init__(self):
        self.peaks = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        """xdist's hook, at the end of a worker."""
        self.peaks.append(getattr(node, "workeroutput", {}).get("peak", 0))

    def pytest_terminal_summary(self, terminalreporter):
        peaks = self.peaks or [_peak()]
        text = ", ".join(f"{x:.2f}" for x in sorted(peaks))
        terminalreporter.write_line(f"peak memory per worker: {text} GB")


def _peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / GIGABYTE


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak"] = _peak()


@pytest.fixture
def x64():
    """64-bit types, for tests that compare with float64."""
    with in_64_bits():
        yield


@pytest.fixture
def standard_promotion():
    """For peers that rely on implicit promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def as_users_run_it(standard_promotion):
    """Without the strict rules of tests."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(autouse=True)
def _fresh_trace_counts():
    """`chex.assert_max_traces` counts by the function's name, across tests."""
    chex.clear_trace_counter()


def pytest_runtest_setup(item):
    for marker in item.iter_markers("not_in_jax_0_8"):
        oldest.skip(*marker.args)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """Frees the compiled programs of earlier tests, which would take 5 GB in the end."""
    if _resident() > LIMIT:
        jax.clear_caches()
        gc.collect()
        # Without it, freed memory stays with the process. Only the C library of Linux has it.
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)


def _resident():
    """The memory of this process now, in GB; where there is no /proc, the most that it had."""
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return _peak()
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30
