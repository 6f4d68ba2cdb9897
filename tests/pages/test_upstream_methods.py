"""The references of Adafactor, SOAP and Dion against the steps of others, and each difference by its name.

Nothing of jgrad runs here: the references are what it is compared with. `tests/pages/upstream_methods.py`
says how the steps were made; all are float64, and agree to some roundings.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.pages import upstream_methods
from tests.pages.upstream_methods import DECAY, EPSILON, RATE, ROWS, SHAPES, SHOWN
from tests.reference import optimizers as reference

with np.load(upstream_methods.DATA) as _data:
    THEIRS = dict(_data)
OF_ROWS = [(name, leaf) for name, row in ROWS.items() for leaf in row[-1]]


def theirs(name, leaf):
    """A leaf after each of the updates in `SHOWN`."""
    leaves = ROWS[name][-1]
    ends = np.cumsum([np.prod(SHAPES[x]) for x in leaves])
    parts = np.split(THEIRS[name], ends[:-1], axis=1)[leaves.index(leaf)]
    return parts.reshape(len(SHOWN), *SHAPES[leaf])


def run(name, leaf, optimizer):
    """A leaf before the first and after each update, by a reference that is given it in a list."""
    first, grads = upstream_methods.problem(ROWS[name][-1])
    found = reference.trajectory(optimizer([first[leaf]]), [[g[leaf]] for g in grads])
    return [first[leaf], *(w for (w,) in found)]


def error(name, leaf, found):
    return max(np.max(np.abs(found[i] - x)) for i, x in zip(SHOWN, theirs(name, leaf), strict=True))


# ---- references with the options of each row ----------------------------------------------------


def adafactor(name, leaf, **other):
    own = {"rule": "torch", "min_side": 1, "epsilon": (None, 1e-3)}
    rate = 1 / 4
    if name == "adafactor, decay":
        own |= {"beta2_decay": 0.5, "epsilon": (1 / 64, 1.0), "clip_threshold": 1.25}
        own["weight_decay"], rate = DECAY, RATE
    if leaf == "stack":
        own |= {"layer_axes": 0, "per_layer": False}
    return run(name, leaf, lambda w: reference.adafactor(w, rate, **(own | other)))


def soap(name, leaf, **other):
    """Leaves that are no matrices wait for the first update there, as matrices of long sides do here."""
    own = {"beta1": 7 / 8, "beta2": 15 / 16, "shampoo_beta": 31 / 32, "epsilon": EPSILON}
    own |= {"weight_decay": DECAY, "max_side": 0 if leaf == "bias" else 6, "matrices": [True]}
    return run(name, leaf, lambda w: reference.soap(w, RATE, **(own | other)))


def soap_of_authors(name, leaf, **other):
    """Epsilon is beside the uncorrected root; the weights decay behind the step, without it the first."""
    own = {"bias_correction": "step_size", "weight_decay": 0.0}
    own["every"] = 3 if name.endswith("every 3") else 10
    found = soap(name, leaf, **(own | other))
    w = [found[0], found[1]]
    for step in np.diff(found, axis=0)[1:]:
        w.append((w[-1] + step) * (1 - RATE * DECAY))
    return w


def soap_of_heavyball(name, leaf, **other):
    """Updates are counted from the first one; factors are lifted to full rank before QR.

    Epsilon is a bound from below for the corrected root, and too small to matter in this row.
    """
    own = {"epsilon": 1e-30, "every": lambda before: (before + 1) % 8 == 0, "lift": 1e-8}
    return soap(name, leaf, **(own | other))


def soap_of_emerging(name, leaf):
    """New bases before each step, from its own gradient; the first update is a step, too."""
    first, grads = upstream_methods.problem(ROWS[name][-1])
    w, m, v = first[leaf], 0.0, np.zeros(SHAPES[leaf])
    factors, found = [0.0, 0.0], [first[leaf]]
    for t, g in enumerate((g[leaf] for g in grads), 1):
        squares = g @ g.T, g.T @ g
        factors = [31 / 32 * a + 1 / 32 * b for a, b in zip(factors, squares, strict=True)]
        if t == 1:
            bases = [reference.first_basis(a) for a in factors]
        for side in (0, 1) if t > 1 else ():
            bases[side], order = reference.next_basis(factors[side], bases[side])
            v = np.take(v, order, axis=side)
        left, right = bases
        m = 7 / 8 * m + 1 / 8 * g
        v = 15 / 16 * v + 1 / 16 * (left.T @ g @ right) ** 2
        root = np.sqrt(v / (1 - (15 / 16) ** t)) + EPSILON
        n = left @ (left.T @ m @ right / (1 - (7 / 8) ** t) / root) @ right.T
        w = w - RATE * (n + DECAY * w)
        found.append(w)
    return found


def dion(name, leaf, **other):
    own = {"matrices": [True], "fraction": 0.4, "error_decay": 7 / 8, "weight_decay": DECAY}
    own |= {"rule": "normuon" if name == "dion3" else "muon", "normuon_beta": 15 / 16}
    own["scale"] = "spectral" if name.endswith("spectral") else None
    own |= {"layer_axes": 0, "output_axes": 1} if leaf == "stack" else {"output_axes": 0}
    return run(name, leaf, lambda w: reference.muon(w, RATE, **(own | other)))


REFERENCES = {
    "adafactor": adafactor,
    "adafactor, decay": adafactor,
    "soap, authors": soap_of_authors,
    "soap, authors, every 3": soap_of_authors,
    "soap, pytorch-optimizer": soap_of_authors,
    "soap, heavyball": soap_of_heavyball,
    "soap, emerging": soap_of_emerging,
    "dion2": dion,
    "dion2, spectral": dion,
    "dion3": dion,
}


@pytest.mark.parametrize(("name", "leaf"), OF_ROWS)
def test_the_reference_is_what_others_do(name, leaf):
    # In the first step of emerging-optimizers gradients are diagonal: the rest is roundings over epsilon.
    tolerance = 2e-12 if name == "soap, emerging" else 1e-13
    assert error(name, leaf, REFERENCES[name](name, leaf)) < tolerance


# ---- optax ---------------------------------------------------------------------------------------


@pytest.mark.slow(one_in=12)
@pytest.mark.parametrize("average", [None, "of steps", "of directions"])
@pytest.mark.parametrize("leaf", ["wide", "tall", "long", "bias"])
def test_adafactor_of_optax(leaf, average, x64):
    """Of one matrix, in float64: its exponent of the decay is taken in float32, here in float64.

    Its own momentum is one of steps. Of directions, the rate behind it, is the order of big_vision.
    """
    decay = lambda step, power: 1 - (jnp.asarray(step, jnp.float64) + 1) ** -power
    rate = optax.scale_by_learning_rate(RATE, flip_sign=False)
    momentum = optax.ema(0.75, debias=False)
    tx = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=3, decay_rate_fn=decay),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
        *{None: [rate], "of steps": [rate, momentum], "of directions": [momentum, rate]}[average],
        optax.add_decayed_weights(DECAY),
        optax.scale(-1),
    )
    first, grads = jax.tree.map(jnp.asarray, upstream_methods.problem([leaf]))
    options = {"min_side": 3, "weight_decay": DECAY, "weight_decay_rule": "independent"}
    options |= {"momentum": average and 0.75, "rate_in_momentum": average != "of directions"}
    optimizer = reference.adafactor([first[leaf]], RATE, **options)
    ours = reference.trajectory(optimizer, [[g[leaf]] for g in grads])
    w, state, update = first, tx.init(first), jax.jit(tx.update)
    for g, (own,) in zip(grads, ours, strict=True):
        updates, state = update(g, state, w)
        w = optax.apply_updates(w, updates)
        np.testing.assert_allclose(w[leaf], own, rtol=1e-13, atol=1e-14)
