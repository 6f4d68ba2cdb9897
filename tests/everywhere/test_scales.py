"""Gradients of every size that float32 has, with each option switched off: steps stay bounded.

A bound that one option happens to give, such as the clipping of Adafactor, is gone with it. The
truth is the reference in float64, which has the squares of all these gradients.
"""

import dataclasses
import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.cases import CASES
from tests.reference import optimizers as reference
from tests.support.choice import mostly_slow
from tests.wrappers.test_every_wrapper import WRAPPERS, Wrapper

RATE = 0.05
SCALES = (1e19, 1e25, 1e38, 1e-19, 1e-38)
# What options are where they do nothing, or the least.
OFF = {
    **dict.fromkeys(("weight_decay", "min_trust_ratio", "beta2_decay"), 0.0),
    **dict.fromkeys(("beta1", "shampoo_beta", "momentum", "error_decay", "normuon_beta"), 0.0),
    **dict.fromkeys(("epsilon", "adam_epsilon"), 0.0),
    **dict.fromkeys(("clip_threshold", "max_trust_ratio", "bias_correction", "beta2_cap"), None),
    **dict.fromkeys(("scale_by_parameter", "nesterov", "rate_in_momentum"), False),
}


def has(case, name):
    """Whether an option does something in a row that can be switched off."""
    if name not in inspect.signature(case.make).parameters:
        return False
    if name == "normuon_beta":
        return case.number("rule") == "normuon"
    if name == "rate_in_momentum":
        return case.number("momentum") is not None
    sums = "fraction" in case.options  # of gradients, in the place of a momentum
    if name == "error_decay":
        return sums
    return not (sums and name in ("momentum", "nesterov")) and case.number(name) is not None


def variants():
    """Each row, and each row with one of its options switched off."""
    found = {}
    for row in CASES:
        case = row.without_masks()
        found[case.name] = case
        for name, off in OFF.items():
            if has(case, name) and case.number(name) != off:
                value = (off, off) if isinstance(case.number(name), tuple) else off
                made = dataclasses.replace(case, options=case.options | {name: value})
                found[f"{case.name}-{name}"] = made
    return found


VARIANTS = variants()
QUICK = ("adam-epsilon", "lion", "lamb-max_trust_ratio", "adafactor-clip_threshold")
QUICK += ("adafactor_factored-clip_threshold", "adafactor_torch-clip_threshold")


def weights():
    rng = np.random.default_rng(0)
    return {"matrix": rng.normal(size=(4, 6)), "vector": rng.normal(size=5), "zero": np.zeros(3)}


def directions(steps=3):
    """Of gradients: elements from 1 to 3 in size, and each of one sign, so that averages are, too."""
    rng = np.random.default_rng(1)
    signs = jax.tree.map(lambda x: rng.choice([-1, 1], size=x.shape), weights())
    draw = lambda sign: sign * rng.uniform(1, 3, size=sign.shape)
    return [jax.tree.map(draw, signs) for _ in range(steps)]


def single(tree, scale=1.0):
    return jax.tree.map(lambda x: jnp.asarray(scale * x, jnp.float32), tree)


def largest(tree):
    """The largest element of each leaf."""
    return np.array([np.max(np.abs(x)) for x in jax.tree.leaves(tree)], np.float64)


def expected_sizes(case, w, grads):
    """The largest step of each leaf, in float64."""
    leaves = lambda tree: [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    options = dict(case.options)
    if case.has_matrices:
        options["matrices"] = jax.tree.leaves(options["matrices"](w))
    if options.get("max_trust_ratio", 0) is None:
        options["max_trust_ratio"] = np.inf
    optimizer = getattr(reference, case.make.__name__)(leaves(w), RATE, **options)
    after = [leaves(w), *reference.trajectory(optimizer, map(leaves, grads))]
    pairs = zip(after[1:], after[:-1], strict=True)
    return [largest([new - old for new, old in zip(*pair, strict=True)]) for pair in pairs]


@pytest.mark.slow(always=["lion", "adafactor-clip_threshold", "adafactor_factored-clip_threshold",
    "adafactor_torch-clip_threshold"])  # fmt: skip
@pytest.mark.parametrize("name", mostly_slow(VARIANTS, *QUICK))
def test_steps_of_methods(name):
    """Finite, and no longer than in float64; nor shorter, where the size of gradients is no matter."""
    case = VARIANTS[name]
    w, update = single(weights()), jax.jit(case.tx(RATE).update)
    # Ivy's ratio is no number where it is below the smallest, as in Ivy.
    is_bounded_below = case.options.get("rule") != "ivy"
    for scale in SCALES:
        grads = [single(g, scale) for g in directions()]
        state, after = case.tx(RATE).init(w), w
        for g, expected in zip(grads, expected_sizes(case, w, grads), strict=True):
            updates, state = update(g, state, after)
            after = optax.apply_updates(after, updates)
            chex.assert_tree_all_finite((updates, state, after))
            found = largest(updates)
            assert np.all(found <= 4 * expected + 1e-6 * largest(w)), (scale, found, expected)
            if scale > 1 and is_bounded_below:
                usual = expected < 10  # what grows with gradients saturates somewhere
                assert np.all((found >= expected / 4) | ~usual), (scale, found, expected)


LARS = functools.partial(jgrad.lars, RATE, trust_coefficient=1.0, momentum=None)
RATIOS = {
    "paper": LARS,
    "decayed_gradient": functools.partial(LARS, rule="decayed_gradient"),
    "scale_by_trust_ratio": lambda **axes: optax.chain(
        jgrad.scale_by_trust_ratio(**axes), optax.scale(-RATE)
    ),
}
# What makes a tree of a list of layers, what undoes it, and the axes of layers in it.
FORMS = {
    "tree": (list, list, None),
    "packed": (jgrad.pack, jgrad.unpack, None),
    "stacked": (jnp.stack, list, 0),
}


@pytest.mark.slow(always=["tree-paper", "stacked-scale_by_trust_ratio"])
@pytest.mark.parametrize("name", RATIOS)
@pytest.mark.parametrize("form", FORMS)
def test_layers_with_norms_above_the_largest_number(form, name):
    """Their steps are as long as those of others, and slopes are right."""
    rng = np.random.default_rng(2)
    draw = lambda: rng.choice([-1, 1], (64, 64)) * rng.uniform(1, 3, (64, 64))
    norm = lambda x: np.linalg.norm(np.asarray(x, np.float64))
    w, grads = [draw(), draw(), 1e-37 * draw()], [1e38 * draw(), draw(), 1e38 * draw()]
    directions = [g / norm(g) for g in grads]
    together, apart, layer_axes = FORMS[form]
    tx = RATIOS[name](layer_axes=layer_axes)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def moved(w, g):
        params = together(w)
        steps = apart(tx.update(together(g), tx.init(params), params)[0])
        return sum(jnp.sum(x * d) for x, d in zip(steps, single(directions), strict=True)), steps

    (_, steps), (of_weights, of_gradients) = moved(single(w), single(grads))
    for i in range(2):
        assert norm(steps[i] + RATE * norm(w[i]) * directions[i]) < 1e-5 * norm(w[i])
        assert norm(of_weights[i] + RATE * w[i] / norm(w[i])) < 1e-5
    assert 0 < norm(steps[2]) < 1e-30  # small numbers in a large unit are only that
    chex.assert_tree_all_finite((of_weights, of_gradients))


# Whose report has a norm, which is infinite above the largest number.
WATCH = next(f"{wrapper}-{i}" for i, wrapper in enumerate(WRAPPERS) if wrapper.name == "watch")
AROUND = {
    **{f"{wrapper}-{i}": wrapper for i, wrapper in enumerate(WRAPPERS)},
    "accumulate-unchecked": Wrapper("", lambda tx: jgrad.accumulate(tx, 2, check_finite=False)),
    "accumulate-sum": Wrapper("", lambda tx: jgrad.accumulate(tx, 2, mean=False)),
    "clip-previous": Wrapper(
        "", lambda tx: optax.chain(jgrad.clip_by_global_norm(1.0, of="previous"), tx)
    ),
    "skip-branch": Wrapper("", lambda tx: jgrad.skip_nonfinite(tx, branch=True)),
    "pack_small": Wrapper("", jgrad.pack_small),
}


@pytest.mark.slow(always=["adam-clip-previous"])
@pytest.mark.parametrize("name", mostly_slow(AROUND, "accumulate-sum", "clip-previous"))
@pytest.mark.parametrize("inner", mostly_slow([jgrad.adam, jgrad.gradient_descent], jgrad.adam))
def test_steps_in_wrappers(name, inner):
    """Finite; around Adam as long as those of gradients of size 1."""
    wrapper = AROUND[name]
    tx = wrapper.around(inner(RATE))
    w = jax.tree.map(lambda x: x.astype(wrapper.dtype), single(weights()))
    update = jax.jit(tx.update)
    usual = None
    for scale in (1.0, *SCALES):
        state, after, sizes = tx.init(w), w, []
        for g in directions(4):
            grads = jax.tree.map(lambda x: x.astype(wrapper.dtype), single(g, scale))
            updates, state = update(grads, state, after)
            after = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), after, updates)
            chex.assert_tree_all_finite((updates, state.inner if name == WATCH else state, after))
            sizes.append(largest(updates))
        found = np.max(sizes, 0)
        usual = found if usual is None else usual
        if inner is jgrad.adam:
            assert np.all(found <= 4 * usual), (scale, found, usual)
            assert scale < 1 or np.all(found >= usual / 4), (scale, found, usual)
