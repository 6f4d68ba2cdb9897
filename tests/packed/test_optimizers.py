"""Optimizers on packed trees give the numbers of the tree, and take options as for the tree.

Bit for bit where elements do not know of each other, and to the rounding of a norm elsewhere.
"""

import jax
import jax.export
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import jgrad
from tests.cases import FEW, MASK, every_case
from tests.support.choice import mostly_slow
from tests.support.errors import assert_error
from tests.support.loops import assert_equal, train
from tests.support.packed_model import (
    DECAYS,
    PER_ELEMENT,
    RATES,
    SMALL,
    assert_close,
    gradients,
    normal,
)

every_size = pytest.mark.parametrize(
    "max_size", mostly_slow([None, SMALL], SMALL), ids=["all", "small"]
)


def assert_same(tx, *, exact, w=None, grads=None, **layout):
    """Weights and state after some steps, packed and not; and the way back into the layout."""
    w = normal(0) if w is None else w
    grads = gradients() if grads is None else grads
    packed = jgrad.pack(w, **layout)
    found = train(tx, packed, [jgrad.pack(g, like=packed) for g in grads])
    expected = train(tx, w, grads)
    assert_equal(jgrad.pack(jgrad.unpack(found), like=found), found)  # and zeros as padding
    (assert_equal if exact else assert_close)(jgrad.unpack(found), expected)


# ---- every optimizer, every option ---------------------------------------------------------------


@pytest.mark.slow(always=["lars_masked-small"])
@every_size
@pytest.mark.bits
@every_case((*FEW, "lamb_decayed"), lambda case: case.packs)
def test_every_optimizer(case, max_size):
    assert_same(case.tx(), exact=case.elementwise, max_size=max_size)


OPTIONS = {
    "rates": {"learning_rate": RATES},
    "a rate for each column": {"learning_rate": PER_ELEMENT},
    "schedule": {"learning_rate": optax.linear_schedule(0.1, 0.0, 4)},
    "schedule of rates": {"learning_rate": lambda t: {"layer": 0.1 / (1.0 + t.astype(float)), "rest": 0.1}},
    "decays": {"learning_rate": 0.1, "weight_decay": DECAYS},
    "masks": {"learning_rate": 0.1, "weight_decay": 0.1, "weight_decay_mask": MASK},
    "a function": {"learning_rate": 0.1, "weight_decay": 0.1,
     "weight_decay_mask": lambda w: jax.tree.map(lambda x: x.ndim > 1, w)},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("method", [jgrad.gradient_descent, jgrad.adam, jgrad.lars, jgrad.lamb])
def test_options_of_each_leaf(method, name):
    """Given for the tree, as ever."""
    options = dict(OPTIONS[name])
    if method in (jgrad.lars, jgrad.lamb) and "weight_decay_mask" in options:
        options["trust_ratio_mask"] = options["weight_decay_mask"]
    exact = method in (jgrad.gradient_descent, jgrad.adam)
    assert_same(method(**options), exact=exact, max_size=SMALL)


@pytest.mark.parametrize("is_packed", [False, True])
def test_functions_of_the_parameters_see_the_tree(is_packed):
    """With shapes and dtypes, those of the master copy where that is what is updated."""
    seen = []
    tx = jgrad.adam(0.1, weight_decay=0.1, weight_decay_mask=lambda w: seen.append(w) or True)
    tree = {"a": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.ones(4)}
    w = jgrad.pack(tree) if is_packed else tree
    for of_dtype, around in (
        (lambda x: x.dtype, tx),
        (lambda x: jnp.float32, jgrad.master_weights(tx)),
    ):
        around.update(w, around.init(w), w)
        shape = lambda x, of=of_dtype: jax.ShapeDtypeStruct(x.shape, of(x))
        assert seen.pop() == jax.tree.map(shape, tree)


@pytest.mark.slow
@every_size
@pytest.mark.parametrize("method", mostly_slow([jgrad.lars, jgrad.lamb], jgrad.lamb))
def test_layers_of_a_stack(method, max_size):
    """Known from packing; what is said again has to agree."""
    axes = {"layer": None, "rest": [(0, 2), None, None]}
    w, grads = normal(0), gradients()
    packed = jgrad.pack(w, layer_axes=axes, max_size=max_size)
    grads_packed = [jgrad.pack(g, like=packed) for g in grads]
    expected = train(method(0.1, layer_axes=axes), w, grads)
    for again in (None, axes):
        found = train(method(0.1, layer_axes=again), packed, grads_packed)
        assert_close(jgrad.unpack(found), expected)
    name = method.__name__
    message = f"{name}: `layer_axes` at ['rest'][0]: (1,), expected the axes with which it was packed, (0, 2)."
    tx = method(0.1, layer_axes={"layer": None, "rest": [1, None, None]})
    assert_error(ValueError, message, lambda: tx.update(packed, tx.init(packed), packed))


ELEMENTWISE = {
    "one leaf": ({"a": jnp.ones((3, 100))}, jnp.linspace(0, 1, 100)[None], None),
    "rates as long as a block": ({"a": jnp.ones(256), "b": jnp.ones(256)}, jnp.arange(256.0), 0),
    "rates as many as rows": ({"a": jnp.ones((2, 256))}, jnp.arange(256.0)[None], 1),
    "one element": ({"a": jnp.ones(300), "b": jnp.ones(3)}, jnp.ones((1,)), None),
}


@pytest.mark.slow(one_in=3)
@pytest.mark.bits
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_rate_for_each_element_of_all_leaves(name):
    """One array that all leaves of a buffer share is meant for each of them, not for the buffer."""
    w, rate, axes = ELEMENTWISE[name]
    packed, tx = jgrad.pack(w, layer_axes=axes), jgrad.gradient_descent(rate)
    found, _ = tx.update(packed, tx.init(packed), packed)
    assert_equal(jgrad.unpack(found), tx.update(w, tx.init(w), w)[0])
    found = jgrad.gradient_descent_update(packed, packed, rate)
    assert_equal(jgrad.unpack(found), jgrad.gradient_descent_update(w, w, rate))


# ---- around others -------------------------------------------------------------------------------


def test_flax_train_state():
    """flax asks parameters for a name."""
    packed = jgrad.pack(normal(0))
    state = TrainState.create(apply_fn=None, params=packed, tx=jgrad.adam(0.1))
    state = state.apply_gradients(grads=jgrad.pack(normal(1)))
    assert_close(jgrad.unpack(state.params), train(jgrad.adam(0.1), normal(0), [normal(1)])[0])


@pytest.mark.slow
def test_a_part_of_the_parameters_packed():
    """Beside arrays that are not, with options for both."""
    w = normal(0)
    options = {"weight_decay": 0.1, "weight_decay_mask": MASK, "trust_ratio_mask": MASK}
    tx = jgrad.lamb(RATES, **options)
    half = lambda tree: {"layer": jgrad.pack(tree["layer"]), "rest": tree["rest"]}
    found = train(tx, half(w), [half(g) for g in gradients()])
    assert_close(jgrad.unpack(found), train(tx, w, gradients()))


@pytest.mark.parametrize("platform", mostly_slow(["cuda", "tpu"], "cuda"))
@pytest.mark.parametrize("method", mostly_slow([jgrad.adam, jgrad.lamb], jgrad.lamb))
def test_a_step_for_other_machines(method, platform):
    """A whole step, with its gradient, is lowered for machines that are not at hand."""
    tx, packed = method(0.1, weight_decay=0.1), jgrad.pack(normal(0))

    def step(w, state):
        loss = lambda w: sum(jnp.sum(x**2) for x in jax.tree.leaves(jgrad.unpack(w)))
        updates, state = tx.update(jax.grad(loss)(w), state, w)
        return jax.tree.leaves((optax.apply_updates(w, updates), state))

    args = jax.tree.leaves((packed, tx.init(packed)))
    structure = jax.tree.structure((packed, tx.init(packed)))
    flat = jax.jit(lambda *args: step(*jax.tree.unflatten(structure, args)))
    exported = jax.export.export(flat, platforms=[platform])(*args)
    assert exported.platforms == (platform,)
    assert "stablehlo.while" not in exported.mlir_module()  # a loop over rows is for the CPU
