"""jgrad in the place of optax, for the tests of others: `tests/pages/clients/swap.py`, `studies/clients.py`.

Of optax's own tests, what is listed here fails, each with its reason, and no other.
`python -m studies.clients --optax` runs all files. The test here runs those that take seconds.
"""

import chex
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from studies import clients
from tests.pages.clients import swap
from tests.support.loops import train

CALLS = {
    "adam": {"b1": 0.8, "b2": 0.99, "eps": 1e-3},
    "adamw": {"weight_decay": 0.1, "mask": {"a": True, "b": False}},
    "sgd": {"momentum": 0.9, "nesterov": True},
    "lion": {"b1": 0.8, "weight_decay": 0.1, "mask": {"a": True, "b": False}},
    "lamb": {"weight_decay": 0.1, "eps": 1e-3},
    "lars": {"weight_decay": 0.1, "eps": 1e-3, "momentum": 0.8, "nesterov": True},
}


def weights_of(tx, count=100):
    """After many steps; one leaf has gradients as small as epsilons differ in."""
    rng = np.random.default_rng(0)
    draw = lambda size: {"a": jnp.asarray(rng.normal(size=(size, 3))), "b": jnp.ones(size)}
    w, grads = draw(4), [draw(4) for _ in range(count)]
    grads = [g | {"b": 1e-6 * (i % 3) * g["b"]} for i, g in enumerate(grads)]
    return train(tx, w, grads)[0]


@pytest.mark.slow
@pytest.mark.parametrize("defaults", [True, False], ids=["defaults", "options"])
@pytest.mark.parametrize("name", CALLS)
def test_options_of_the_same_meaning(name, defaults, x64, standard_promotion):
    """In float64, where both compute the same; no ratio of LAMB is above 10."""
    options = {} if defaults else CALLS[name]
    expected = weights_of(getattr(optax, name)(0.01, **options))
    ours = swap.ours(name, 0.01, **options)
    chex.assert_trees_all_close(weights_of(ours), expected, rtol=1e-9)
    chex.assert_trees_all_close(weights_of(swap.wrapped(ours)), expected, rtol=1e-9)


def test_what_jgrad_does_not_have_is_left_to_optax():
    before = swap.calls.copy()
    tx = swap.ours("adam", 0.1, eps_root=1e-8)
    assert not isinstance(tx.init(jnp.ones(2)), jgrad.OptState)
    assert swap.calls - before == {"adam, left to optax": 1}
    assert isinstance(swap.ours("sgd", 0.1, nesterov=True).init(jnp.ones(2)), jgrad.OptState)


# ---- optax's own tests ---------------------------------------------------------------------------

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
        for name in ("adam", "adamw", "lamb", "lars", "lion", "sgd")
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
