"""Whatever a user gives as an option works, or is refused by an error that says where it came from.

Whether a value that works should have been refused is not asked here: `test_messages.py` says what
is said of which. Nothing is computed: `init` and `update` are traced.
"""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jgrad
from tests.support import messages
from tests.support.errors import assert_error
from tests.support.public import EXPORTED

PARAMS = {"w": jnp.ones((64, 128)), "b": jnp.ones(2)}  # one leaf for 8 bits, one too small for them
MESH = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
ADAM = jgrad.adam(0.1)


class Class:
    """Of a user."""


VALUES = {}
for _line in (messages.DATA.parent / "values.txt").read_text().splitlines()[2:]:
    _name, _, _value = _line.partition("  =  ")
    VALUES[_name] = eval(_value, messages.NAMES | globals())

# What transformations need: the arguments of their factories, and those of their updates.
NEEDED = {
    "learning_rate": 0.1,
    "matrices": {"w": True, "b": False},
    "adam_learning_rate": 0.1,
    "tx": ADAM,
    "every": 2,
    "decay": 0.9,
    "leaves": {"w": True, "b": False},
    "max_norm": 1.0,
    "axis_name": "x",
}
CALL = {"skip_spikes": {"loss": 1.0}}


def updated(tx, name=""):
    """Traces an `init` and an `update`."""

    def both(params):
        params = jgrad.pack(params) if name == "zero" else params
        return tx.update(params, tx.init(params), params, **CALL.get(name, {}))[0]

    traced, spec = both, PartitionSpec()
    if name == "zero":
        traced = jax.shard_map(both, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=False)
    jax.eval_shape(traced, PARAMS)


LAYERS = {"layers": {"w": jnp.ones((2, 3, 3))}}
X = jnp.ones(3)


def scanned(**options):
    return jgrad.scan_layers(lambda layer, carry, *x: carry, LAYERS, X, **options)


def stepped(**options):
    def loss(params):
        return jnp.sum(jgrad.scan_layers(lambda layer, x: x @ layer["w"], params["layers"], X))

    step = jgrad.step_in_backward(ADAM, loss, **options)
    jax.eval_shape(step, LAYERS, jax.eval_shape(ADAM.init, LAYERS))


def of_path(**options):
    updated(jgrad.adam(jgrad.by_path({"w": 0.1}, **{"rest": 0.2} | options)))


def of_leaf(function=lambda g: g, **options):
    updated(jgrad.optimizer_of_leaf(function, **options)(0.1))


def sharded(**options):
    replicated = NamedSharding(MESH, PartitionSpec())
    jgrad.state_shardings(ADAM, PARAMS, **{"params_shardings": replicated} | options)


def carried(**options):
    state = ADAM.init(PARAMS)
    jgrad.carry_over(state, **{"like": state, "params": PARAMS} | options)


def differentiated(name):
    return lambda **options: getattr(jgrad, name)(jnp.sum, **options)(X)


# Public functions that make no transformation, to be called with any of their options.
OTHERS = {
    **{x: differentiated(x) for x in ("grad", "value_and_grad", "jac", "value_and_jac")},
    "hvp": functools.partial(jgrad.hvp, jnp.sum, (X,), (X,)),
    "stop_gradient": functools.partial(jgrad.stop_gradient, X),
    "hidden_matrices": lambda **options: jgrad.hidden_matrices(**options)(PARAMS),
    "optimizer_of_leaf": of_leaf,
    "by_path": of_path,
    "report": lambda: jgrad.report(jgrad.skip_nonfinite(ADAM).init(PARAMS)),
    "apply_gradients": functools.partial(
        jgrad.apply_gradients, ADAM, PARAMS, ADAM.init(PARAMS), PARAMS
    ),
    "step_in_backward": stepped,
    "scan_layers": scanned,
    "leaf_programs": functools.partial(jgrad.leaf_programs, ADAM, PARAMS),
    "optimizer_update": functools.partial(jgrad.optimizer_update, X, X, 0.1),
    "gradient_descent_update": functools.partial(jgrad.gradient_descent_update, X, X, 0.1),
    "adam_step": functools.partial(jgrad.adam_step, X, X, X, 1),
    "adam_update": functools.partial(jgrad.adam_update, X, X, 0.1, X, X, 1),
    "adan_update": functools.partial(jgrad.adan_update, X, X, 0.1, X, X, X, X, 1),
    "lion_update": functools.partial(jgrad.lion_update, X, X, 0.1, X),
    "lars_update": functools.partial(jgrad.lars_update, X, X, 0.1),
    "lamb_update": functools.partial(jgrad.lamb_update, X, X, 0.1, X, X, 1),
    "orthogonalize": functools.partial(jgrad.orthogonalize, {"w": PARAMS["w"]}),
    "global_norm": functools.partial(jgrad.global_norm, PARAMS),
    "pack": functools.partial(jgrad.pack, PARAMS),
    "unpack": functools.partial(jgrad.unpack, PARAMS),
    "state_shardings": sharded,
    "carry_over": carried,
    "execute_with_gradients": functools.partial(
        jgrad.execute_with_gradients, lambda x: x["w"].sum(), PARAMS
    ),
    "variable": functools.partial(jgrad.variable, X),
    "is_variable": functools.partial(jgrad.is_variable, X),
    "variable_data": functools.partial(jgrad.variable_data, X),
    "inplace_update": functools.partial(jgrad.inplace_update, X, X),
    "inplace_increment": functools.partial(jgrad.inplace_increment, X, X),
    "inplace_decrement": functools.partial(jgrad.inplace_decrement, X, X),
}
FUNCTIONS = {
    name: inspect.signature(function).parameters.values()
    for name in EXPORTED
    if inspect.isfunction(function := getattr(jgrad, name))
}
FACTORIES = [name for name in FUNCTIONS if name not in OTHERS]
# What a user's function raises there has no note of its option.
WITHOUT_NOTE = {("step_in_backward", "gradients")}
# All arguments of factories, and what other functions have defaults for.
OPTIONS = [
    pytest.param(name, x.name, id=f"{name}-{x.name}")
    for name, parameters in FUNCTIONS.items()
    for x in parameters
    if (name in FACTORIES or x.default is not x.empty) and (name, x.name) not in WITHOUT_NOTE
]


def made(name, **options):
    """The transformation of a factory; what a new one needs beside is a row of `NEEDED`."""
    required = [x.name for x in FUNCTIONS[name] if x.default is x.empty or x.name in NEEDED]
    missing = [x for x in required if x not in NEEDED]
    row = f'"{name}": functools.partial(jgrad.{name}, ...)'
    assert not missing, (
        f"{name} needs {missing}. If it makes a transformation, give them values in NEEDED of "
        f"{__name__}; if not, it needs a row in OTHERS: {row}, with its required arguments."
    )
    return getattr(jgrad, name)(**{x: NEEDED[x] for x in required} | options)


def test_a_function_without_a_row_is_told_what_it_needs():
    with pytest.raises(AssertionError, match=r'a row in OTHERS: "adam_update": functools.partial'):
        made("adam_update")


def call(name, options):
    if name in OTHERS:
        OTHERS[name](**options)
    else:
        updated(made(name, **options), name)


def is_ours(error):
    """Whether it begins with a function of jgrad; or is a user's, and a note says of what."""
    if not isinstance(error, (TypeError, ValueError, NotImplementedError)):
        return False
    notes = [x for x in getattr(error, "__notes__", ()) if "` was called with " in x]
    return any(x.partition(":")[0] in FUNCTIONS for x in (str(error), *notes))


@pytest.mark.slow(one_in=24, always=["adam-learning_rate", "muon-mesh_axes", "by_path-rest"])
@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_any_value_works_or_is_refused(name, option):
    call(name, {})
    raw = {}
    for shown, value in VALUES.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of JAX: it has no float64 for a dtype
                call(name, {option: value})
        except Exception as error:
            if not is_ours(error):
                raw[shown] = f"{type(error).__name__}: {error}"
    assert raw == {}


FLAGS = [
    (name, x.name) for name in FUNCTIONS for x in FUNCTIONS[name] if isinstance(x.default, bool)
]


@pytest.mark.parametrize(("name", "flag"), [x for x in FLAGS if x != ("scan_layers", "remat")])
def test_flags(name, flag):
    """What is true in a condition is no flag: "no" is."""
    for value, came in ("no", "'no' of type str"), (1, "1 of type int"), (None, "None"):
        message = f"{name}: `{flag}`: {came}, expected True or False."
        assert_error(TypeError, message, functools.partial(call, name, {flag: value}))


# ---- empty containers ----------------------------------------------------------------------------


test_an_empty_container_is_no_leaf_for_all = messages.test_of("empty_containers", globals())


@pytest.mark.parametrize("empty", [{}, (), []], ids=repr)
def test_an_empty_container_is_no_number(empty):
    came = f"{empty} of type {type(empty).__name__}, expected one number."
    for begin, make in {
        "clip_by_global_norm: `max_norm`": lambda: jgrad.clip_by_global_norm(empty),
        "schedule_free: `learning_rate`": lambda: jgrad.schedule_free(ADAM, learning_rate=empty),
        "lamb: `max_trust_ratio`": lambda: jgrad.lamb(0.1, max_trust_ratio=empty),
    }.items():
        assert_error(ValueError, f"{begin}: {came}", make)


def test_of_no_parameters_an_empty_container_has_the_structure():
    tx = jgrad.adam({}, weight_decay=0.1, weight_decay_mask={})
    assert tx.update({}, tx.init({}), {})[0] == {}


# ---- counters of states --------------------------------------------------------------------------


COUNTERS = {
    "None": (TypeError, None, "None, expected an int32 scalar."),
    "True": (TypeError, True, "True of type bool, expected an int32 scalar."),
    "text": (TypeError, "x", "'x' of type str, expected an int32 scalar."),
    "complex": (TypeError, 1j, "1j of type complex, expected an int32 scalar."),
    "a float": (TypeError, 3.0, "3.0 of type float, expected an int32 scalar."),
    "a mean": (TypeError, jnp.float32(3), "an array of float32 and shape (), expected an int32 scalar."),
    "a bool": (TypeError, np.array(True), "an array of bool and shape (), expected an int32 scalar."),
    "a key": (TypeError, jax.random.key(0), "an array of key<fry> and shape (), expected an int32 scalar."),
    "negative": (ValueError, -5, "-5, expected a number in [0, 2^31)."),
    "NumPy's": (ValueError, np.int32(-5), "-5, expected a number in [0, 2^31)."),
    "two": (ValueError, jnp.zeros(2, jnp.int32), "shape (2,), expected (); map `update` over the models, as "
            "you did `init`."),
}  # fmt: skip
STATEFUL = {x: made(x) for x in FACTORIES if x not in ("zero", "pack_small", "offload")}
STATEFUL["weighted"] = jgrad.accumulate(ADAM, 2, weighted=True)


def counters_of(tx):
    """The state, and the names of its counters."""
    state = tx.init(PARAMS)
    roles = getattr(state, "__jgrad_fields__", None)
    return state, [
        x for x, role in roles.roles.items() if role in ("step", "count")
    ] if roles else []


@pytest.mark.parametrize("name", STATEFUL)
def test_a_counter_is_an_integer(name):
    tx = STATEFUL[name]
    state, counters = counters_of(tx)
    for field in counters:
        for error, value, problem in COUNTERS.values():
            broken = state._replace(**{field: value})
            message = f"{tx.call[0]}: `state.{field}`: {problem}"
            assert_error(error, message, lambda: tx.update(PARAMS, broken, PARAMS))  # noqa: B023


def test_the_counters_are_found():
    found = {name: counters_of(tx)[1] for name, tx in STATEFUL.items()}
    assert found["adam"] == found["soap"] == ["step"]
    assert found["accumulate"] == found["weighted"] == ["mini_step", "count", "skipped"]
    assert found["skip_spikes"] == ["skipped", "accepted", "streak", "restarts"]
    assert found["skip_nonfinite"] == ["skipped", "streak"]
    assert {x: found[x] for x in found if found[x] == ["done"]}.keys() == {
        "average_params", "hyperball", "schedule_free", "stochastic_rounding"
    }  # fmt: skip


@pytest.mark.parametrize("count", [3, np.int32(3), np.array(3), jnp.int32(3)], ids=type)
def test_counters_of_files_are_taken(count):
    """Some formats give NumPy's integers, or Python's."""
    tx = jgrad.stochastic_rounding(ADAM)
    state = tx.init(PARAMS)
    state = state._replace(done=count, inner=state.inner._replace(step=count))
    new = tx.update(PARAMS, state, PARAMS)[1]
    assert int(new.done) == int(new.inner.step) == 4
    assert new.done.dtype == new.inner.step.dtype == jnp.int32


# ---- what is no tree of arrays -------------------------------------------------------------------


OF_SHAPES = "call it under `jax.eval_shape` if you only have shapes"
OF_OTHERS = (
    "put None in the place of other leaves, as `eqx.filter(model, eqx.is_inexact_array)` does"
)
SHAPE = jax.ShapeDtypeStruct((3, 2), jnp.float32)
NO_ARRAYS = [
    ({"w": SHAPE}, " at ['w']: a ShapeDtypeStruct of float32 and shape (3, 2)", OF_SHAPES),
    ("x", ": 'x' of type str", OF_OTHERS),
    ({1}, ": {1} of type set", OF_OTHERS),
]


@pytest.mark.parametrize("name", ["adam", "lion", "adafactor", "muon", "soap", "scale_by_muon"])
@pytest.mark.parametrize(("tree", "came", "remedy"), NO_ARRAYS, ids=["shapes", "text", "set"])
def test_init_of_what_is_no_tree_of_arrays(name, tree, came, remedy):
    """Before a method asks where its matrices are."""
    tx = made(name, **{"matrices": True} if "muon" in name or name == "soap" else {})
    message = f"{name}: `params`{came}, expected an array of numbers; {remedy}."
    assert_error(TypeError, message, lambda: tx.init(tree))


def with_calls(count):
    """An update with this counter in its report."""
    tx = STATEFUL["watch"]
    state = tx.init(PARAMS)
    return tx.update(PARAMS, state._replace(report=state.report | {"calls": count}), PARAMS)


test_what_is_no_number = messages.test_of("no_arrays", globals())


# ---- integers as numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adam", "muon"])
@pytest.mark.parametrize("one", [jnp.int32(1), lambda done: done + 1], ids=["array", "schedule"])
def test_an_integer_array_is_the_number_that_it_is(name, one):
    """As an integer of Python is: epsilon in the arithmetic of floats."""
    option = "adam_epsilon" if name == "muon" else "epsilon"
    steps = [made(name, **{option: x}) for x in (one, 1.0)]
    new, expected = (tx.update(PARAMS, tx.init(PARAMS), PARAMS)[0] for tx in steps)
    assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, new, expected)))


# ---- functions of users --------------------------------------------------------------------------


def wrong(x, y):
    return x


FUNCTIONS_OF_USERS = {
    "adam: `learning_rate` was called with the number of updates.": lambda: jgrad.adam(
        {"w": 0.1, "b": wrong}
    ),
    "accumulate: `every` was called with the number of updates.": lambda: jgrad.accumulate(
        ADAM, wrong
    ),
    "hyperball: `radius` was called with the shape of a layer.": lambda: made(
        "hyperball", radius=wrong
    ),
}


@pytest.mark.parametrize("note", FUNCTIONS_OF_USERS)
def test_a_note_says_which_option_a_function_is(note):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'") as caught:
        updated(FUNCTIONS_OF_USERS[note]())
    assert note in caught.value.__notes__
