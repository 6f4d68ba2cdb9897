"""What wrappers tell what is inside of them: to nobody else, and beside no keyword of a user."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from jgrad._inputs import around
from jgrad._trees.told import NOTHING, told
from tests.support.loops import assert_equal, step_of

W = {"w": jnp.linspace(0.5, 1.5, 6).reshape(3, 2), "b": jnp.arange(3.0)}
G = jax.tree.map(lambda x: jnp.cos(3 * x), W)
BAD = {"w": G["w"], "b": G["b"].at[1].set(jnp.nan)}
LOUD = jax.tree.map(lambda x: 3 * x, G)
ADAM = jgrad.adam(0.1)

WRAPPERS = {
    "skip_nonfinite": jgrad.skip_nonfinite,
    "skip_nonfinite in a branch": lambda tx: jgrad.skip_nonfinite(tx, branch=True),
    "skip_nonfinite, accumulate": lambda tx: jgrad.skip_nonfinite(
        optax.chain(tx, jgrad.accumulate(optax.scale(1.0), 1))
    ),
    "skip_spikes": jgrad.skip_spikes,
    "accumulate": lambda tx: jgrad.accumulate(tx, 1),
    "watch": jgrad.watch,
    "watch, every": lambda tx: jgrad.watch(tx, every=2),
    "hyperball": lambda tx: jgrad.hyperball(tx, 0.1, leaves={"w": True, "b": False}),
    "master_weights": jgrad.master_weights,
    "stochastic_rounding": jgrad.stochastic_rounding,
    "schedule_free": lambda tx: jgrad.schedule_free(tx),
    "pack_small": lambda tx: jgrad.pack_small(tx),
    "chain": lambda tx: optax.chain(jgrad.clip_by_global_norm(1.0), tx),
}
every_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)

# What users may call an argument of theirs, as wrappers call what they tell.
THEIRS = {"commit": "3cf1e65", "notes": "epoch 3", "then": 1, "undecayed": None, "trace": object()}


def strict(seen):
    """A transformation of somebody who takes one keyword, and no other."""

    def update(updates, state, params=None, *, value):
        seen.append(value)
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def observing(seen):
    """One that takes all, and looks at it."""

    def update(updates, state, params=None, **extra_args):
        seen.append(extra_args)
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


# ---- keywords ----------------------------------------------------------------------------------


@pytest.mark.slow(one_in=4)
@every_wrapper
def test_keywords_are_those_of_the_caller(wrap):
    """All arrive, nothing else does, and what is ours takes none of them for its own."""
    seen = []
    tx = wrap(optax.chain(observing(seen), jgrad.gradient_descent(0.1)))
    given = {"loss": 1.0, "value": 2.0}
    state = tx.init(W)
    seen.clear()
    found = tx.update(G, state, W, **given, **THEIRS)
    assert seen
    assert all(extra == given | THEIRS for extra in seen)
    assert_equal(found, tx.update(G, state, W, **given))


@every_wrapper
def test_one_who_takes_a_single_keyword(wrap):
    seen = []
    tx = wrap(optax.chain(strict(seen), jgrad.gradient_descent(0.1)))
    if wrap is jgrad.skip_spikes:  # whose `loss=` is for what is inside, too
        return
    tx.update(G, tx.init(W), W, value=2.0)
    assert seen[-1] == 2.0


def test_an_option_may_have_these_names():
    """Of a method that a user writes."""

    @jgrad.optimizer_of_leaf
    def method(g, *, notes: float = 2.0):
        return notes * g

    assert_equal(method(0.5).update(G, method(0.5).init(W), W)[0], jax.tree.map(lambda g: -g, G))


# ---- when it is current ------------------------------------------------------------------------


@every_wrapper
def test_it_ends_with_the_call(wrap):
    """Nothing is told afterwards, nor where the call has raised."""
    seen = []

    def update(updates, state, params=None, *, value, **extra_args):
        seen.append(told())
        if value is None:
            raise ZeroDivisionError
        return updates, state

    tx = wrap(optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update))
    state = tx.init(W)
    tx.update(G, state, W, loss=1.0, value=1.0)
    assert told() is NOTHING
    with pytest.raises(ZeroDivisionError):
        tx.update(G, state, W, loss=1.0, value=None)
    assert told() is NOTHING
    assert seen


def test_a_step_inside_of_a_loss():
    """What is not called for the update is told only what says nothing of its gradients."""
    inside, own = [], jgrad.adam(0.2)

    def update(updates, state, params=None, *, value_fn, **_):
        return updates, value_fn(params)

    def value_fn(w):
        steps, state = own.update(BAD, own.init(w), w)
        inside.append(steps)
        return jnp.sum(state.mw["w"])

    line_search = optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), update)
    tx = jgrad.skip_nonfinite(optax.chain(line_search, ADAM))
    tx.update(G, tx.init(W), W, value_fn=value_fn)
    assert_equal(inside[-1], own.update(BAD, own.init(W), W)[0])


# ---- transformations of others between ours -----------------------------------------------------


def between(update):
    """A decorator: a transformation around another one, by (inner, g, state, w) -> (updates, state)."""

    def third_party(tx):
        return optax.GradientTransformation(
            tx.init, lambda g, s, w=None: update(tx.update, g, s, w)
        )

    return third_party


def twice(inner, g, s, w):
    a, s = inner(g, s, w)
    b, s = inner(g, s, w)
    return jax.tree.map(lambda x, y: (x + y) / 2, a, b), s


def first_of_two(inner, g, s, w):
    a, s = inner(g, s, w)
    return a, inner(g, s, w)[1]


def other_gradients(inner, g, s, w):
    return inner(jax.tree.map(jnp.tanh, g), s, w)


def other_updates(inner, g, s, w):
    u, s = inner(g, s, w)
    return jax.tree.map(lambda x: x + 0.01, u), s


def other_parameters(inner, g, s, w):
    u, s = inner(g, s, jax.tree.map(lambda x: 2 * x, w))
    return jax.tree.map(lambda x: x / 2, u), s


def in_jit(inner, g, s, w):
    return jax.jit(inner)(g, s, w)


def in_vmap(inner, g, s, w):
    one = jax.tree.map(lambda x: x[None], (g, s, w))
    return jax.tree.map(lambda x: x[0], jax.vmap(inner)(*one))


def in_a_branch(inner, g, s, w):
    return jax.lax.cond(w["b"][1] > 0, lambda: inner(g, s, w), lambda: (g, s))


def in_a_loop(inner, g, s, w):
    return jax.lax.fori_loop(0, 2, lambda _, x: inner(g, x[1], w), (g, s))


def where_large(inner, g, s, w):
    u, new = inner(g, s, w)
    return jax.tree.map(lambda a, b: jnp.where(w["b"][1] > 0, a, b), (u, new), (w, s))


HANDS_NOTHING_ON = {
    f.__name__: between(f)
    for f in (
        *(twice, first_of_two, other_gradients, other_updates, other_parameters),
        *(in_jit, in_vmap, in_a_branch, in_a_loop, where_large),
    )
}
OF_OPTAX = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 100),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 1),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": False}),
    "partition": lambda tx: optax.partition({"a": tx, "b": tx}, {"w": "a", "b": "b"}),
    "two": lambda tx: optax.chain(tx, optax.add_decayed_weights(0.1), optax.trace(0.5), tx),
}
THIRD_PARTIES = HANDS_NOTHING_ON | OF_OPTAX
third_parties = pytest.mark.parametrize("third_party", THIRD_PARTIES.values(), ids=THIRD_PARTIES)


@pytest.mark.slow(one_in=10, always=["loss-in_jit"])
@third_parties
@pytest.mark.parametrize("decides", ["gradients", "loss"])
def test_a_step_that_is_skipped(third_party, decides, standard_promotion):
    """As if it had not been there, whatever stands between the decision and the method."""
    tx = third_party(jgrad.adam(0.1))
    safe = jgrad.skip_spikes(tx) if decides == "loss" else jgrad.skip_nonfinite(tx)
    update = jax.jit(safe.update) if decides == "loss" else safe.update
    w, state, expected = W, safe.init(W), tx.init(W)
    for g, loss in (G, 1.0), ((G, jnp.nan) if decides == "loss" else (BAD, 1.0)), (LOUD, 1.0):
        steps, new = update(g, state, w, loss=loss)
        if g is BAD or jnp.isnan(loss):
            assert_equal(steps, jax.tree.map(jnp.zeros_like, W))
            assert_equal(new.inner, state.inner)
        else:
            alone, expected = tx.update(g, expected, w)
            close(steps, alone)
            close(new.inner, expected)
            w = optax.apply_updates(w, steps)
        state = new
    assert int(state.skipped) == 1


def close(found, truth):
    for a, b in zip(*map(jax.tree.leaves, (found, truth)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.slow(one_in=4, always=["masked"])
@third_parties
def test_what_makes_nan_of_finite_gradients_is_looked_at(third_party, standard_promotion):
    """Inside of it, and behind it, if this is asked for."""
    spoil = optax.stateless(lambda updates, params: jax.tree.map(jnp.log, updates))
    for tx in third_party(optax.chain(spoil, ADAM)), optax.chain(third_party(ADAM), spoil):
        safe = jgrad.skip_nonfinite(tx, check_results=True)
        state = safe.init(W)
        steps, new = safe.update(G, state, W)
        assert_equal(steps, jax.tree.map(jnp.zeros_like, W))
        assert_equal(new.inner, state.inner)


@pytest.mark.slow(one_in=15)
@third_parties
def test_a_window_inside(third_party, standard_promotion):
    """A mini-batch that is not finite is left out, or the call; the window closes with the others."""
    tx = jgrad.accumulate(jgrad.gradient_descent(1.0), 2)
    safe = jgrad.skip_nonfinite(third_party(tx))
    state, w = safe.init(W), W
    update = jax.jit(safe.update)
    for g in G, BAD, LOUD, G, G:
        steps, state = update(g, state, w)
        assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves((steps, state)))
        w = optax.apply_updates(w, steps)
    assert int(state.skipped) == 1


def test_what_a_caller_says_of_a_window():
    """A mini-batch that is not finite is left out, though the caller says that it is finite."""
    tx = jgrad.skip_nonfinite(jgrad.accumulate(jgrad.gradient_descent(1.0), 2))
    state = tx.init(W)
    for g in G, BAD:
        steps, state = tx.update(g, state, W, finite=True)
    close(steps, jax.tree.map(jnp.negative, G))


@pytest.mark.slow(one_in=45)
@third_parties
@pytest.mark.parametrize("wrap", [jgrad.stochastic_rounding, jgrad.master_weights, lambda tx: tx])
def test_what_follows_in_a_kernel(third_party, wrap):
    """A whole step is bit for bit an update that is added, whoever stands around the method."""
    if third_party is OF_OPTAX["MultiSteps"]:
        return  # its sums are of the dtype of the parameters
    tx = wrap(third_party(jgrad.adam(0.1, moment_dtype="8bit")))
    w = {"w": jnp.linspace(0.5, 1, 4096).reshape(16, 256), "b": jnp.ones(3)}
    w = jax.tree.map(lambda x: x.astype(jnp.bfloat16), w)
    g = jax.tree.map(jnp.cos, w)
    state = tx.init(w)
    whole = jax.jit(lambda g, s, w: jgrad.apply_gradients(tx, g, s, w))(g, state, w)
    assert_equal(whole, jax.jit(step_of(tx))(w, state, g))


def test_a_compiled_update_is_that_of_each_wrapper():
    """JAX traces it once, and calls it again where something else is told."""
    compiled = jax.jit(ADAM.update)
    tx = optax.GradientTransformation(ADAM.init, compiled)
    state = ADAM.init(W)
    alone = ADAM.update(G, state, W)
    for loss, expected in (jnp.nan, (jax.tree.map(jnp.zeros_like, W), state)), (1.0, alone):
        safe = jgrad.skip_spikes(tx)
        steps, new = jax.jit(safe.update)(G, safe.init(W), W, loss=loss)
        close((steps, new.inner), expected)
    close(compiled(G, state, W), alone)
    watched = jgrad.watch(tx)
    close(watched.update(G, watched.init(W), W)[0], alone[0])


def test_no_decay_inside_of_a_branch():
    """`hyperball` is heard in branches, which know nothing of its arrays."""
    branch = optax.conditionally_transform(jgrad.adam(1.0, weight_decay=0.1), lambda step: step > 3)
    tx = jgrad.hyperball(branch, 0.1, leaves=True)
    w = {"w": jnp.ones((3, 2))}
    with pytest.raises(ValueError, match="leaf whose norm `hyperball` keeps"):
        jax.eval_shape(tx.update, w, tx.init(w), w)


# ---- what is kept ------------------------------------------------------------------------------


@pytest.fixture
def only_new_objects():
    """For `gc.collect`: what earlier tests made is hundreds of thousands."""
    gc.freeze()
    yield
    gc.unfreeze()


OTHERS = {
    "loss scale": lambda tx: jgrad.skip_nonfinite(tx, loss_scale=2.0**10),
    "average_params": lambda tx: jgrad.average_params(tx, 0.9),
    "offload": jgrad.offload,
    "adafactor": lambda tx: jgrad.adafactor(0.1),
    "three": lambda tx: jgrad.watch(jgrad.accumulate(jgrad.master_weights(tx), 2)),
}


@pytest.mark.parametrize("wrap", (WRAPPERS | OTHERS).values(), ids=WRAPPERS | OTHERS)
@pytest.mark.usefixtures("only_new_objects")
def test_a_trace_that_fails_is_forgotten(wrap):
    """A second one: of the first, JAX may keep something with what it caches of nested programs."""
    tx = wrap(jgrad.adam(0.1, moment_dtype=jnp.bfloat16))
    w = jax.tree.map(lambda x: x.astype(jnp.bfloat16), W)
    state, traced = tx.init(w), []

    def fails(g, state, w):
        tx.update(g, state, w, loss=1.0)
        traced.append(weakref.ref(g["w"]))
        raise ZeroDivisionError

    for _ in range(2):
        before = dict(around._makings)
        with pytest.raises(ZeroDivisionError):
            jax.make_jaxpr(fails)(w, state, w)
    gc.collect()
    assert traced[1]() is None
    assert around._makings.keys() <= before.keys()


@pytest.mark.usefixtures("only_new_objects")
def test_an_init_that_cannot_try_an_update_is_forgotten():
    tx = optax.chain(jgrad.clip_by_global_norm(1.0), ADAM, optax.contrib.reduce_on_plateau())
    before = dict(around._makings)
    jgrad.watch(tx).init(W)
    gc.collect()
    assert around._makings.keys() <= before.keys()


def test_who_follows_looks_at_each_leaf_once(monkeypatch):
    """Comparisons of identities grow as the leaves do; of one that is there twice nothing is known."""
    compared = []

    class Identity(int):
        __hash__ = int.__hash__

        def __eq__(self, other):
            compared.append(other)
            return int.__eq__(self, other)

    monkeypatch.setattr(around, "id", Identity, raising=False)
    weights = [*range(1000), 0]
    then = around.Then(weights, lambda i: None)
    assert len(compared) < 3000
    assert sum(then._index.get(i) is not None for i in weights) == 999
