"""The functional updates: trees, shapes, dtypes, kinds, calls."""

import collections

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from tests.support import messages
from tests.support.choice import mostly_slow
from tests.support.compilations import compilations

W = {"a": jnp.array([1.0, 2.0, 3.0]), "b": {"c": jnp.array([4.0, 5.0, 6.0])}}
G = jax.tree.map(lambda x: 0.1 * x - 0.3, W)
Z = jax.tree.map(jnp.zeros_like, W)
X = W["a"]

Pair = collections.namedtuple("Pair", "x y")

UPDATES = {
    "optimizer_update": lambda w, g, lr=0.1, **k: jgrad.optimizer_update(w, g, lr, **k),
    "gradient_descent_update": lambda w, g, lr=0.1, **k: jgrad.gradient_descent_update(w, g, lr, **k),
    "lars_update": lambda w, g, lr=0.1, **k: jgrad.lars_update(w, g, lr, decay_lambda=0.1, **k),
    "adam_update": lambda w, g, lr=0.1, **k: jgrad.adam_update(w, g, lr, 0.0, 0.0, 1, **k),
    "lamb_update": lambda w, g, lr=0.1, **k: jgrad.lamb_update(w, g, lr, 0.0, 0.0, 1, decay_lambda=0.1, **k),
}  # fmt: skip
every_update = pytest.mark.parametrize("name", UPDATES)
two_updates = pytest.mark.parametrize("name", mostly_slow(UPDATES, "lars_update", "adam_update"))


def weights(found):
    """The new weights, which some functions return beside moments."""
    return found[0] if type(found) is tuple else found


# ---- trees -------------------------------------------------------------------------------------


@pytest.mark.slow(one_in=2)
@pytest.mark.bits
@two_updates
def test_an_array_stands_for_all_leaves(name):
    """One gradient and one rate for every leaf give what copies of them give."""
    update = UPDATES[name]
    found = update(W, X, 0.1)
    copied = update(W, jax.tree.map(lambda _: X, W), {"a": 0.1, "b": {"c": 0.1}})
    chex.assert_trees_all_equal(weights(found), weights(copied))


@pytest.mark.bits
@two_updates
@pytest.mark.slow(one_in=2)
def test_a_prefix_stands_for_what_is_below_it(name):
    """Of any shape that broadcasts, and of any option."""
    update = UPDATES[name]
    rates = {"a": jnp.array([0.0, 0.1, 0.2]), "b": jnp.full(1, 0.2)}
    has_betas = name in ("adam_update", "lamb_update")
    betas = {"beta1": {"a": 0.5, "b": 0.6}, "epsilon": {"a": 1e-3, "b": 0.1}}
    options = betas if has_betas else {}
    found = update(W, G, rates, **options)
    for key, rate in rates.items():
        alone = {option: values[key] for option, values in options.items()}
        chex.assert_trees_all_equal(
            weights(found)[key], weights(update(W[key], G[key], rate, **alone))
        )


@pytest.mark.slow(one_in=4)
@pytest.mark.bits
@every_update
def test_weights_take_the_finest_structure(name):
    """An array of weights under a tree of rates becomes a tree."""
    found = UPDATES[name](X, G["a"], {"slow": 0.1, "fast": 0.2})
    assert set(weights(found)) == {"slow", "fast"}
    for key, rate in (("slow", 0.1), ("fast", 0.2)):
        chex.assert_trees_all_equal(weights(found)[key], weights(UPDATES[name](X, G["a"], rate)))


def test_results_are_as_fine_as_what_they_come_from():
    """With an array of gradients the moments stay arrays, whatever the weights are."""
    w, mw, vw = jgrad.adam_update(W, X, 0.1, jnp.zeros(3), jnp.zeros(1), 1)
    assert jax.tree.structure(w) == jax.tree.structure(W)
    assert mw.shape == vw.shape == (3,)
    _, mw, vw = jgrad.adam_update(W, X, 0.1, Z, jnp.zeros(1), 1, beta2={"a": 0.9, "b": 0.8})
    assert jax.tree.structure(mw) == jax.tree.structure(W)
    assert set(vw) == {"a", "b"}
    delta, mw, vw = jgrad.adam_step(X, jnp.zeros(3), jnp.zeros(3), {"early": 1, "late": 9})
    assert set(delta) == {"early", "late"}
    assert mw.shape == vw.shape == (3,)


@pytest.mark.bits
@two_updates
def test_lists_of_numbers_are_arrays(name):
    """Unless another list holds arrays; then a list is a tree, such as one rate per layer."""
    update = UPDATES[name]
    rates = [0.1, 0.2, 0.3]
    chex.assert_trees_all_equal(update(X, G["a"], rates), update(X, G["a"], jnp.array(rates)))
    chex.assert_trees_all_equal(
        update([1.0, 2.0, 3.0], [0.1, 0.2, 0.3]), update(X, jnp.array([0.1, 0.2, 0.3]))
    )
    w, g = [X, 2 * X, 3 * X], [G["a"]] * 3
    found = weights(update(w, g, rates))
    chex.assert_trees_all_equal(
        found, [weights(update(x, G["a"], r)) for x, r in zip(w, rates, strict=True)]
    )


def test_numbers_in_other_nodes_are_leaves():
    """A NamedTuple of numbers, or a list of dicts of them, is a tree and no array."""
    pair = collections.namedtuple("Pair", ["a", "b"])
    ones = jnp.ones(3)
    found = jgrad.gradient_descent_update(pair(X, X), pair(ones, ones), pair(0.1, 0.2))
    chex.assert_trees_all_close(found, pair(X - 0.1, X - 0.2), rtol=1e-6)
    found = jgrad.gradient_descent_update([{"a": X}], [{"a": ones}], [{"a": 0.1}])
    chex.assert_trees_all_close(found, [{"a": X - 0.1}], rtol=1e-6)


@pytest.mark.bits
def test_lists_of_hyper_parameters_are_arrays():
    found = jgrad.adam_step(X, 0.0, 0.0, [3], beta1=[0.8])
    chex.assert_trees_all_equal(found, jgrad.adam_step(X, 0.0, 0.0, 3, beta1=0.8))


def test_numbers_may_be_none_where_weights_are():
    w, none = {"a": X, "b": None}, {"a": 0.1, "b": None}
    found = jgrad.lamb_update(
        w, w, none, none, none, none, beta1=none, epsilon=none, decay_lambda=none
    )
    alone = jgrad.lamb_update(X, X, *[0.1] * 4, beta1=0.1, epsilon=0.1, decay_lambda=0.1)
    chex.assert_trees_all_equal([tree["a"] for tree in found], list(alone))
    assert [tree["b"] for tree in found] == [None] * 3


@pytest.mark.slow(one_in=4)
@every_update
def test_any_pytree(name):
    """Types of nodes are kept."""
    w = Pair(X, (jnp.ones(3), [jnp.ones(3)]))
    found = weights(UPDATES[name](w, jax.tree.map(lambda x: 0.1 * x, w)))
    assert jax.tree.structure(found) == jax.tree.structure(w)


@every_update
def test_empty_tree(name):
    assert weights(UPDATES[name]({}, {})) == {}


@pytest.mark.parametrize("tree", [{}, [], (), {"a": {}, "b": []}], ids=repr)
@pytest.mark.parametrize("update", [jgrad.adam_update, jgrad.lamb_update], ids=["adam", "lamb"])
def test_empty_moments(update, tree):
    """Real Ivy takes them, as the pairs do; a number beside them stands for no leaf."""
    assert update(tree, tree, 0.1, tree, tree, 1) == (tree, tree, tree)
    assert update(tree, tree, tree, tree, tree, tree) == (tree, tree, tree)
    assert jgrad.adam_step(tree, tree, tree, 1) == (tree, tree, tree)
    assert jgrad.adam_step(tree, 0.0, jnp.zeros(1), 1) == (tree, tree, tree)


def test_moments_of_missing_gradients():
    m = jax.tree.map(jnp.ones_like, W)
    g = {"a": G["a"], "b": {"c": None}}
    w, mw, vw = jgrad.adam_update(W, g, 0.1, m, m, 1)
    chex.assert_trees_all_equal([x["b"] for x in (w, mw, vw)], [W["b"], m["b"], m["b"]])
    delta, mw, vw = jgrad.adam_step(g, m, m, 1)
    assert delta["b"]["c"] is None
    chex.assert_trees_all_equal([mw["b"], vw["b"]], [m["b"], m["b"]])


# ---- shapes and dtypes -------------------------------------------------------------------------


def test_moments_grow_to_the_weights():
    w, mw, vw = jgrad.adam_update(
        jnp.ones((2, 3)), jnp.ones((2, 3)), 0.1, jnp.zeros(1), jnp.zeros(3), 1
    )
    assert w.shape == mw.shape == vw.shape == (2, 3)


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("name", mostly_slow(UPDATES, "gradient_descent_update", "lamb_update"))
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        ("float16", "float16"),
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
        ("float32", "int32"),
        ("float64", "float16"),
        ("float16", "float64"),
    ],
)
def test_weights_keep_their_dtype(name, dtype, grad_dtype, x64):
    found = UPDATES[name](jnp.ones(3, dtype), jnp.ones(3, grad_dtype), jnp.float64(0.1))
    assert weights(found).dtype == dtype


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_moments_keep_their_dtypes(dtype):
    low = jnp.ones(3, dtype)
    w, mw, vw = jgrad.adam_update(X, X, 0.1, low, low.astype(jnp.float16), 1)
    assert (w.dtype, mw.dtype, vw.dtype) == (jnp.float32, dtype, jnp.float16)
    delta, _, _ = jgrad.adam_step(low, X, X, 1)
    assert delta.dtype == dtype


@pytest.mark.bits
def test_integers_are_read_as_floats():
    """In gradients, moments and numbers, as the documented examples need."""
    found = jgrad.adam_update(
        X, jnp.array([1, 2, 3]), 1, jnp.zeros(3, int), jnp.zeros(1, int), jnp.int32(1)
    )
    expected = jgrad.adam_update(X, X, 1.0, jnp.zeros(3), jnp.zeros(3), 1.0)
    chex.assert_trees_all_equal(found, expected)


# ---- gradients through the update --------------------------------------------------------------


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("name", mostly_slow(UPDATES, "gradient_descent_update", "lamb_update"))
def test_stop_gradients(name):
    loss = lambda w, stop: jnp.sum(weights(UPDATES[name](w, G["a"], stop_gradients=stop)))
    chex.assert_trees_all_equal(jax.grad(loss)(X, True), jnp.zeros(3))
    assert jnp.all(jax.grad(loss)(X, False) != 0)
    with pytest.raises(TypeError, match="expected True or False"):
        loss(X, 1)  # which is equal to True, of which there is a program


@pytest.mark.parametrize("update", [jgrad.adam_update, jgrad.lamb_update])
def test_stop_gradients_cuts_the_weights_only(update):
    loss = lambda g: sum(jnp.sum(x) for x in update(X, g, 0.1, jnp.zeros(3), jnp.zeros(3), 1)[1:])
    np.testing.assert_allclose(jax.grad(loss)(X), 0.1 + 0.002 * X, rtol=1e-6)


# ---- eager calls -------------------------------------------------------------------------------


def test_new_values_compile_nothing():
    """One program serves every rate, step, beta, and weight of Python's or JAX's making."""
    call = lambda w, lr, step, beta: jgrad.adam_update(
        w, G["a"], lr, Z["a"], Z["a"], step, beta1=beta
    )
    call(X, 0.1, 1, 0.9)
    jgrad.variable(jnp.full(3, 0.5))  # a weak type is made strong by a small program of its own
    others = [
        (X, 0.2, 2, 0.8),
        (X, 1, 3.5, 0.0),
        (X, np.float64(0.3), np.int32(4), np.float32(0.5)),
        (jnp.full(3, 0.5), 0.1, 1, 0.9),  # weakly typed
    ]
    assert compilations(lambda args: call(*args), *others) == 0


def test_an_eager_call_is_one_program():
    jaxpr = jax.make_jaxpr(lambda w, g: jgrad.adam_update(w, g, 0.1, Z, Z, 1))(W, G)
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["jit"]


@two_updates
def test_under_vmap_and_jit(name):
    stack = jnp.stack([X, 2 * X])
    found = jax.jit(jax.vmap(lambda w: weights(UPDATES[name](w, G["a"]))))(stack)
    expected = [weights(UPDATES[name](w, G["a"])) for w in stack]
    chex.assert_trees_all_close(found, jnp.stack(expected), rtol=1e-6)


test_calls_that_do_not_fit_the_signature = messages.test_of("signatures", globals())
