"""`execute_with_gradients`, beyond the cases of the oracle."""

import collections
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from tests.support import messages

X = jnp.array([1.0, 2.0])
Y = jnp.array([3.0, 4.0])
run = jgrad.execute_with_gradients


class Pair(NamedTuple):
    w: object
    b: object


def test_func_is_called_once_for_any_number_of_outputs():
    calls = []

    def f(x):
        calls.append(x)
        return {"a": jnp.sum(x), "b": jnp.sum(x**2), "c": jnp.sum(x**3)}

    _, grads = run(f, X, ret_grad_idxs=None)
    assert len(calls) == 1
    assert sorted(grads) == ["a", "b", "c"]


def test_one_pullback_per_output():
    """K outputs cost K backward passes over one forward pass."""

    def f(x):
        trunk = jnp.sin(x)
        return [jnp.sum(trunk * k) for k in (1.0, 2.0, 3.0)]

    jaxpr = str(jax.make_jaxpr(lambda x: run(f, x, ret_grad_idxs=None))(X))
    assert jaxpr.count(" sin ") == 1
    assert jaxpr.count(" cos ") == 1


def test_tuples_are_lists():
    value, grads = run(lambda xs: jnp.sum(xs[0] * xs[1][0]), (X, (Y,)), xs_grad_idxs=None)
    assert value == 11
    assert isinstance(grads, list)
    chex.assert_trees_all_equal(grads, [Y, [X]])
    _, first = run(lambda xs: jnp.sum(xs[0] * xs[1][0]), (X, (Y,)))
    chex.assert_trees_all_equal(first, Y)


def test_func_gets_the_structure_that_was_given():
    seen = []
    run(lambda xs: (seen.append(xs), jnp.sum(xs[0].w))[1], (Pair(X, None), {"k": [3]}))
    assert isinstance(seen[0], tuple)
    assert isinstance(seen[0][0], Pair)
    assert seen[0][1] == {"k": [3]}


def test_other_nodes_keep_their_type():
    """What was not chosen is `None` there, JAX's empty subtree."""
    f = lambda p: jnp.sum(p.w * p.b["x"])
    p = Pair(X, {"x": Y})
    _, everything = run(f, p)
    chex.assert_trees_all_equal(everything, Pair(Y, {"x": X}))
    for path in (("w",), (-2,)):
        _, one = run(f, p, xs_grad_idxs=(path,))
        assert isinstance(one, Pair)
        chex.assert_trees_all_equal(one.w, Y)
        assert one.b is None


def test_paths():
    """Negative positions, any order, bare keys, and a path that stops above the leaves."""
    xs = [X, {"a": Y, "b": [X, Y]}]
    f = lambda xs: jnp.sum(xs[0] * xs[1]["a"] * xs[1]["b"][1])
    _, grads = run(f, xs, xs_grad_idxs=((-1, "b", -1), (0,)))
    chex.assert_trees_all_equal(grads, [Y * Y, {"b": [X * Y]}])
    _, grads = run(f, xs, xs_grad_idxs=[[1]])
    chex.assert_trees_all_equal(grads, {"a": X * Y, "b": [jnp.zeros(2), X * Y]})
    _, grads = run(lambda d: jnp.sum(d["a"] * d["b"]), {"a": X, "b": Y}, xs_grad_idxs=("a",))
    chex.assert_trees_all_equal(grads, {"a": Y})


def test_integer_keys_of_dicts():
    """A dict is asked for all by default; a position is no key of it."""
    f = lambda d: jnp.sum(d[0] * d[7])
    _, grads = run(f, {0: X, 7: Y})
    chex.assert_trees_all_equal(grads, {0: Y, 7: X})
    _, grads = run(f, {0: X, 7: Y}, xs_grad_idxs=((7,),))
    chex.assert_trees_all_equal(grads, {7: X})
    with pytest.raises(ValueError, match=r"no 1 at \(\); expected one of 0, 7"):
        run(f, {0: X, 7: Y}, xs_grad_idxs=((1,),))


def test_integers_beside_floats_are_left_alone():
    xs = {"w": X, "n": jnp.arange(2)}
    _, grads = run(lambda d: jnp.sum(d["w"]) * d["n"].sum().astype(float), xs)
    chex.assert_trees_all_equal(grads, {"w": jnp.ones(2)})


def test_integers_asked_for_are_read_as_floats():
    """By path, or where there is nothing else."""
    seen = []

    def f(d):
        seen.append(d["n"].dtype)
        return jnp.sum(d["w"] * d["n"].astype(float))

    _, grads = run(f, {"w": X, "n": jnp.arange(2)}, xs_grad_idxs=(("n",),))
    chex.assert_trees_all_equal(grads, {"n": X})
    assert seen == [jnp.float32]
    _, grads = run(lambda n: jnp.sum(n), jnp.arange(3))
    chex.assert_trees_all_equal(grads, jnp.ones(3))


def test_python_number():
    value, grads = run(lambda x: x**3, 2.0)
    assert (value, grads) == (8.0, 12.0)


def test_gradients_have_the_dtype_of_their_leaf():
    x = jnp.array([1.0, 2.0], jnp.bfloat16)
    value, grads = run(lambda x: jnp.sum(x * x), x)
    assert value.dtype == grads.dtype == jnp.bfloat16


@pytest.mark.parametrize(("retain", "slope"), [(True, 2 * X), (False, jnp.zeros(2))])
def test_retain_grads(retain, slope):
    """It cuts the returned value from the graph, never the gradients."""
    f = lambda x: jnp.sum(x**2)
    chex.assert_trees_all_equal(jax.grad(lambda x: run(f, x, retain_grads=retain)[0])(X), slope)
    grads = lambda x: jnp.sum(run(f, x, retain_grads=retain)[1] * Y)
    chex.assert_trees_all_equal(jax.grad(grads)(X), 2 * Y)


def test_nested_calls():
    """A gradient of a gradient."""
    _, second = run(lambda x: jnp.sum(run(lambda x: jnp.sum(x**3), x)[1]), X)
    chex.assert_trees_all_close(second, 6 * X)


def test_outputs_of_a_named_tuple():
    """Keys are attribute names; the default means all that are scalars."""
    ret, grads = run(lambda x: Pair(jnp.sum(x), x), X)
    assert isinstance(ret, Pair)
    chex.assert_trees_all_equal(grads, {"w": jnp.ones(2)})


def test_outputs_that_are_not_arrays_are_handed_back():
    ret, grads = run(lambda x: (jnp.sum(x), "text", {"n": 3}), X)
    assert ret[1:] == ("text", {"n": 3})
    chex.assert_trees_all_equal(grads, {"0": jnp.ones(2)})


def test_zero_written_out():
    """The default, unless there is something at 0."""
    pair = collections.namedtuple("Pair", ["a", "b"])
    x = jnp.array(3.0)
    f = lambda xs: sum(leaf**2 for leaf in jax.tree.leaves(xs))
    grads = lambda xs, **kwargs: jgrad.execute_with_gradients(f, xs, **kwargs)[1]
    zero = {"xs_grad_idxs": [[0]]}
    assert set(grads({"a": x, "b": x}, **zero)) == {"a", "b"}
    assert set(grads({0: x, 1: x})) == {0, 1}
    assert set(grads({0: x, 1: x}, **zero)) == {0}
    assert grads(pair(x, x)) == pair(6.0, 6.0)
    assert grads(pair(x, x), **zero) == pair(6.0, None)
    assert grads([x, 2 * x], xs_grad_idxs=[[np.int64(-1)]]) == 12.0


def test_a_path_above_several_outputs():
    f = lambda x: (jnp.sum(x), {"a": jnp.sum(2 * x), "aux": x})
    _, grads = run(f, X, ret_grad_idxs=((1,),))
    chex.assert_trees_all_equal(grads, {"1_a": jnp.full(2, 2.0)})


def a_b_twice(x):
    return {"a": {"b": x**2}, "a_b": 5 * x}


test_message = messages.test_of("execution", globals())
