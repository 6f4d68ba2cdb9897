"""States of flax's nnx: paths with and without the `value` of a variable are the same."""

import collections

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jgrad
from tests.support import messages


class Attention(nnx.Module):
    """With a layer that is called `value`, too."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.query, self.value = nnx.Linear(4, 2, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(3))

    def __call__(self, x):
        return self.query(x) * self.value(x) * self.scale.sum()


CLIP = jgrad.clip_by_global_norm(1.0, of="previous")
RECIPES = {
    "optax": optax.adam(0.1),
    "jgrad": jgrad.adam(0.1),
    "wrappers": jgrad.skip_nonfinite(optax.chain(jgrad.accumulate(jgrad.adam(0.1), 3))),
    "a number alone": optax.chain(CLIP, jgrad.adam(0.1)),
}


as_pure = getattr(nnx, "as_pure", None) or nnx.pure  # by its name in flax 0.12.1


def restored(path, state):
    with ocp.StandardCheckpointer() as files:
        files.save(path, state)
        files.wait_until_finished()
        return files.restore(path)


def leaves(state):
    return list(map(np.asarray, jax.tree.leaves(as_pure(state))))


def assert_same(found, expected):
    for x, y in zip(leaves(found), leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow(always=["jgrad"])
@pytest.mark.parametrize("name", RECIPES)
def test_each_form_from_each(tmp_path, name, standard_promotion):
    """States of variables, of arrays, dictionaries, whole optimizers, and files of each."""
    tx, model = RECIPES[name], Attention()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda m: jnp.sum(m(jnp.ones((3, 4)))))(model))
    params, state, whole = nnx.state(model, nnx.Param), optimizer.opt_state, nnx.state(optimizer)
    old = {
        "variables": state,
        "arrays": as_pure(state),
        "optimizer": whole,
        "dict": nnx.to_pure_dict(whole),
    }
    old |= {f"file of {key}": restored(tmp_path / key, x) for key, x in old.items()}
    likes = {
        "variables": jax.eval_shape(tx.init, params),
        "arrays": jax.eval_shape(tx.init, as_pure(params)),
        "dict": jax.eval_shape(tx.init, nnx.to_pure_dict(params)),
        "optimizer": state,
    }
    for before in old.values():
        for like in likes.values():
            found, account = jgrad.carry_over(before, like=like)
            assert jax.tree.structure(found) == jax.tree.structure(like)
            assert_same(found, state)
            assert not account.zero
            assert {"step", "mw/query/kernel", "mw/value/bias", "vw/scale"} <= {*account.kept}


def states():
    """Of arrays, of variables, and what a file has of these."""
    arrays = {"kernel": jnp.ones((4, 2)), "bias": jnp.ones(2)}
    old = jgrad.adam(0.1).init(arrays)
    old = old._replace(step=jnp.asarray(3), mw=arrays)
    variables = jax.tree.map(nnx.Param, arrays)
    in_file = {
        name: {key: {"value": x} for key, x in getattr(old, name).items()} for name in ("mw", "vw")
    }
    return old, jgrad.adam(0.1).init(variables), {"step": {"value": old.step}, **in_file}


@pytest.mark.parametrize("path", ["bias", "bias/value"])
def test_rename_and_reset(path):
    """A path is that of a variable or of its array, as you like."""
    old, like, in_file = states()
    new = {"kernel": nnx.Param(old.mw["kernel"]), "b": nnx.Param(jnp.ones(2))}
    renamed = jgrad.adam(0.1).init(new)
    for before in (old, in_file):
        rename = {path: path.replace("bias", "b")} if before is in_file else {"bias": "b"}
        state, account = jgrad.carry_over(before, like=renamed, rename=rename, strict=True)
        assert_same(state.mw["b"], old.mw["bias"])
        mask = jgrad.by_path({path: True}, rest=False)
        state, account = jgrad.carry_over(before, like=like, reset=mask)
        assert account.reset == ("mw/bias", "vw/bias")
        assert_same(state.mw["kernel"], old.mw["kernel"])


def test_parameters_of_variables():
    old = states()[0]
    params = jax.tree.map(lambda x: nnx.Param(x + 1), old.mw)
    tx = jgrad.average_params(jgrad.adam(0.1), 0.9)
    for given in (params, as_pure(params)):
        for w in (params, as_pure(params)):
            state, _ = jgrad.carry_over(old, like=jax.eval_shape(tx.init, w), params=given)
            assert_same(state.average, params)


class Heads(eqx.Module):
    query: jax.Array
    value: jax.Array


Pair = collections.namedtuple("Pair", "query value")


@pytest.mark.parametrize("kind", [Heads, Pair, dict])
def test_value_is_an_attribute_of_models_too(kind):
    """Only of a variable does it stand for the whole."""
    params = {"attn": kind(query=jnp.ones(2), value=2 * jnp.ones(3))}
    tx = jgrad.adam(0.1)
    state = tx.init(params)._replace(mw=params)
    file = in_dicts(state)
    jgrad.carry_over(state, like=file, strict=True)
    for old in (state, file):
        found, account = jgrad.carry_over(old, like=state, strict=True)
        assert_same(found, state)
        assert "mw/attn/value" in account.kept
    mask = jgrad.by_path({"attn/value": True}, rest=False)
    assert jgrad.carry_over(state, like=state, reset=mask)[1].reset == (
        "mw/attn/value",
        "vw/attn/value",
    )
    like = jax.eval_shape(jgrad.average_params(tx, 0.9).init, params)
    assert_same(jgrad.carry_over(state, like=like, params=params)[0].average, params)


def in_dicts(state):
    """As orbax reads a file without a target."""
    names = {"step": state.step}
    fields = {name: getattr(state, name)["attn"] for name in ("mw", "vw")}
    as_dict = lambda x: x if isinstance(x, dict) else {n: getattr(x, n) for n in ("query", "value")}
    return names | {name: {"attn": as_dict(x)} for name, x in fields.items()}


def test_a_field_of_a_pair_is_renamed_though_it_is_called_value():
    """Nothing but a variable itself may be named by the path of its array."""
    heads = Pair(jnp.ones(2), jnp.ones(3))
    old, like = (jgrad.adam(0.1).init({name: heads}) for name in ("attn", "new"))
    rename = {"attn/value": "new/value", "attn/query": "new/query"}
    jgrad.carry_over(old, like=like, rename=rename, strict=True)


def test_a_tree_in_a_variable():
    """What files of 1.0 have of it has the key `value` on the way."""
    params = {"a": nnx.Param({"w": jnp.ones(2)})}
    state = jgrad.adam(0.1).init(params)
    in_file = {name: {"a": {"value": {"w": jnp.ones(2)}}} for name in ("mw", "vw")}
    jgrad.carry_over({"step": state.step, **in_file}, like=state, strict=True)


def test_states_without_fields():
    """Of somebody's transformation, in plain containers."""
    arrays = {"noise": {"w": jnp.ones(2)}}
    both = arrays, jax.tree.map(nnx.Param, arrays)
    for old, like in (both, both[::-1]):
        state, account = jgrad.carry_over(old, like=like, strict=True)
        assert_same(state, arrays)
        assert account.kept == ("noise/w",)


def test_value_is_a_name_of_models_too():
    """Left out, or added, only where it stands alone, and for a path that is there."""
    heads = {"query": jnp.ones(2), "value": 2 * jnp.ones(2)}
    old = jgrad.adam(0.1).init({"heads": heads})._replace(mw={"heads": heads})
    state, account = jgrad.carry_over(old, like=old, strict=True)
    assert_same(state, old)
    one = jgrad.adam(0.1).init({"heads": heads["query"], "query": heads["query"]})
    _, account = jgrad.carry_over(old, like=one, rename={"heads/query": "query"})
    assert account.kept == ("step", "mw/query", "vw/query")
    assert account.dropped == ("mw/heads/value", "vw/heads/value")
    _, account = jgrad.carry_over(one, like=old, rename={"query": "heads/query"})
    assert account.kept == ("step", "mw/heads/query", "vw/heads/query")


X = jnp.ones(2)


def renamed(params, rename, new=None):
    """A state under other names; those of `like` are these, or one."""
    like = params if new is None else {new: next(iter(params.values()))}
    old, like = (jgrad.adam(0.1).init(x) for x in (params, like))
    return jgrad.carry_over(old, like=like, rename=rename)


test_message = messages.test_of("variables_of_states", globals())
