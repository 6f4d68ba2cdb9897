"""Training steps around a transformation, as the tests take them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax


def step_of(tx):
    """(weights, state, gradients) -> (new weights, new state)."""

    def step(w, state, g, **extra):
        updates, state = tx.update(g, state, w, **extra)
        return optax.apply_updates(w, updates), state

    return step


def step_on(mesh, tx, specs, of_state, check_vma=True, **names):
    """`step_of` in `shard_map`, compiled; `names` are of extra arguments, each with its spec."""

    def step(w, state, g, *extra):
        return step_of(tx)(w, state, g, **dict(zip(names, extra, strict=True)))

    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(specs, of_state, specs, *names.values()),
            out_specs=(specs, of_state),
            check_vma=check_vma,
        )
    )


def with_loss(tx, loss=1.0):
    """A transformation that is told a loss at each call."""
    return told(tx, loss=loss)


def told(tx, **extra):
    """A transformation whose updates have these extra arguments at each call."""
    return optax.GradientTransformationExtraArgs(tx.init, functools.partial(tx.update, **extra))


@functools.lru_cache(maxsize=32)
def compiled(tx):
    """`step_of`, compiled once for a transformation."""
    return jax.jit(step_of(tx))


def every_step(tx, w, grads):
    """Weights and state after each step."""
    state, found = tx.init(w), []
    for g in grads:
        w, state = compiled(tx)(w, state, g)
        found.append((w, state))
    return found


def run(tx, w, grads):
    """The weights after each step, and the last state."""
    found = every_step(tx, w, grads)
    return [w for w, _ in found], found[-1][1]


def train(tx, w, grads):
    """The last weights and state."""
    return [(w, tx.init(w)), *every_step(tx, w, grads)][-1]


def stack(trees):
    """Trees as one, with an axis for them in front of each leaf."""
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def assert_equal(a, b):
    """Equal in structure, shapes, dtypes and bit for bit."""
    chex.assert_trees_all_equal_structs(a, b)
    chex.assert_trees_all_equal_shapes_and_dtypes(a, b)
    chex.assert_trees_all_equal(a, b)


def norm(x):
    """The Euclidean norm of one array, in double precision."""
    return float(np.linalg.norm(np.ravel(np.asarray(x, complex))))


def assert_within(found, expected, bounds):
    """Equal in structure, shapes and dtypes; the difference of each leaf has a norm within its bound."""
    chex.assert_trees_all_equal_structs(found, expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    rows = (jax.tree.leaves(tree) for tree in (found, expected, bounds))
    for a, b, bound in zip(*rows, strict=True):
        assert norm(np.asarray(a, complex) - np.asarray(b, complex)) <= bound, (a, b, bound)
