"""optax's own tests, with jgrad in its place: what is listed here fails, each with its reason, and no other.

`python -m studies.clients --optax` runs all files. The tests here run those that take seconds.
"""

import pytest

from studies import clients

LONG = (
    "_src/alias_test.py",
    "_src/linesearch_test.py",
    "contrib/_common_test.py",
    "contrib/_muon_test.py",
    "transforms/_accumulation_test.py",
)
FILES = [file for file in clients.OPTAX if file not in LONG]

_ABSTRACT = "takes the shapes of parameters: here `jax.eval_shape(tx.init, shapes)` does"
_STATE = "reads or compares optax's chain of states: one optimizer is one `OptState` here"
_ROUNDED = "asks for 1e-6 after five steps: optax's corrections are 1e-4 from those of float64"
_PACKED = "compares trees by `==`, which `Packed` has not"
_SKIPPED = "counts updates that are not finite, which `skip_nonfinite` has made zeros"
# Of some wrappers, by the message of the failure.
NO_PARAMETERS = "master_weights: the master copy needs the parameters"

JGRAD = {
    **{f"_src/alias_test.py::AliasTest::test_explicit_dtype{n}": _STATE for n in (6, 18, 30, 42)},
    "contrib/_muon_test.py::MuonTest::test_dim_nums_combinations_frobenius": _STATE,
    **{
        f"_src/sharding_test.py::ShardingTest::test_init_with_abstract_input_{name}": _ABSTRACT
        for name in ("adam", "adamw", "lamb", "lars", "sgd")
    },
    "contrib/_schedule_free_test.py::ScheduleFreeTest::test_schedule_free_adamw": _ROUNDED,
    "transforms/_masking_test.py::MaskedTest::test_masked_state_structure": _STATE,
    "tree_utils/_state_utils_test.py::StateUtilsTest::test_adam": _STATE,
    "tree_utils/_state_utils_test.py::StateUtilsTest::test_map_non_params_to_none": _STATE,
}
WRAPPERS = JGRAD | {
    **{
        f"_src/float64_test.py::Float64Test::test_mixed_dtype_input_outputs_{name}": _PACKED
        for name in ("adam", "adamw", "lamb")
    },
    **{
        f"transforms/_conditionality_test.py::ConditionalityTest::test_apply_if_finite_{name}": _SKIPPED
        for name in ("sgd", "sgd_extra_args", "stateful_sgd")
    },
}


@pytest.fixture
def compiled_once(tmp_path, monkeypatch):
    """Most programs of the three runs are the same."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def lost(theirs, ours):
    """What passes with optax and not so, with its messages."""
    assert sum(ours["calls"].values()) > 50
    names = clients.passed(theirs) - clients.passed(ours)
    return {name: ours["messages"].get(name, "") for name in names}


def listed(names):
    """Those of the files that run here."""
    return sorted(name for name in names if name.partition("::")[0] in FILES)


@pytest.mark.slow
def test_what_fails(compiled_once):
    theirs, ours, wrapped = (clients.run_optax(x, FILES) for x in ("optax", "jgrad", "wrappers"))
    assert sorted(lost(theirs, ours)) == listed(JGRAD)
    messages = lost(theirs, wrapped)
    found = {name for name, message in messages.items() if NO_PARAMETERS not in message}
    assert len(messages) > len(found)
    assert sorted(found) == listed(WRAPPERS)
