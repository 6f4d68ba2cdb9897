"""Published variants by their options, each against a reference written from its own source.

`VARIANTS` is the table of benchmarks/notes/variants.md; a test compares the two.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.cases import IVY
from tests.reference import variants as source
from tests.reference.optimizers import trajectory
from tests.support.pages import rows, section

STEPS = 200


def RATE(done):
    """A rate that changes: only so inside the momentum differs from outside."""
    return 0.02 / (1 + number(done))


def number(done):
    """An int of the reference, or a counter of JAX, as a float."""
    return jnp.asarray(done, float) if isinstance(done, jax.Array) else float(done)


USE = [True, False, True, True, False, True, True]


def corrected(beta1, beta2):
    """The rate with Adam's correction in it, for those who multiply everything by it."""

    def rate(done):
        t = number(done) + 1
        root = (1 - beta2**t) ** 0.5
        return RATE(done) * root / (1 - beta1**t)

    return rate


def lamb(max_norm=None, rate=RATE, **options):
    """LAMB after clipping, as apex has it."""
    own = jgrad.lamb(rate, max_trust_ratio=options.pop("max_trust_ratio", None), **options)
    return own if max_norm is None else optax.chain(jgrad.clip_by_global_norm(max_norm), own)


DECAYED = {"weight_decay": 0.1, "weight_decay_mask": USE}
TRUSTED = {"trust_ratio_mask": USE}
CLAMPS = {"min_trust_ratio": 0.01, "max_trust_ratio": 10.0}

# Name in the table: the reference, the same by jgrad's options.
VARIANTS = {
    "MLPerf LARS": (lambda w: source.mlperf_lars(w, RATE, weight_decay=0.1, skip=[not x for x in USE]),
     lambda: jgrad.lars(RATE, **DECAYED, **TRUSTED)),
    "MLPerf LARS, Nesterov": (lambda w: source.mlperf_lars(w, RATE, weight_decay=0.1, skip=[not x for x in USE],
     nesterov=True, epsilon=1e-3), lambda: jgrad.lars(RATE, nesterov=True, epsilon=1e-3, **DECAYED, **TRUSTED)),
    "apex LARC around SGD": (lambda w: source.apex_larc(w, RATE, weight_decay=0.1),
     lambda: jgrad.lars(RATE, trust_coefficient=0.02, epsilon=1e-8, rate_in_momentum=False, weight_decay=0.1)),
    "apex LARC around Nesterov's SGD": (lambda w: source.apex_larc(w, RATE, nesterov=True),
     lambda: jgrad.lars(RATE, trust_coefficient=0.02, epsilon=1e-8, rate_in_momentum=False, nesterov=True)),
    "optax LARS": (lambda w: source.optax_lars(w, RATE, weight_decay=0.1, decay=USE, trust=USE),
     lambda: jgrad.lars(RATE, rule="decayed_gradient", **DECAYED, **TRUSTED)),
    "Ivy LARS": (lambda w: source.ivy_lars(w, RATE),
     lambda: jgrad.lars(RATE, rule="ivy", trust_coefficient=1.0, momentum=None)),
    "Ivy LARS, decayed": (lambda w: source.ivy_lars(w, RATE, decay_lambda=0.3),
     lambda: jgrad.lars(RATE, rule="ivy", trust_coefficient=1.0, momentum=None, weight_decay=0.3)),
    "LAMB paper, phi(z) = z": (lambda w: source.paper_lamb(w, RATE, weight_decay=0.1, decay=USE, trust=USE),
     lambda: lamb(**DECAYED, **TRUSTED)),
    "apex LAMB": (lambda w: source.apex_lamb(w, RATE, weight_decay=0.1, decay=USE),
     lambda: lamb(1.0, **DECAYED, **TRUSTED)),
    "apex LAMB, use_nvlamb": (lambda w: source.apex_lamb(w, RATE, weight_decay=0.1, decay=USE, use_nvlamb=True),
     lambda: lamb(1.0, **DECAYED)),
    "apex LAMB, no bias correction": (lambda w: source.apex_lamb(w, RATE, weight_decay=0.1, use_nvlamb=True,
     bias_correction=False), lambda: lamb(1.0, epsilon=1e-6, bias_correction=None, weight_decay=0.1)),
    "DeepSpeed LAMB": (lambda w: source.deepspeed_lamb(w, RATE, weight_decay=0.1, decay=USE),
     lambda: lamb(rate=corrected(0.9, 0.999), epsilon=1e-8, bias_correction=None, **CLAMPS, **DECAYED)),
    "DeepSpeed LAMB, main branch": (lambda w: source.deepspeed_lamb(w, RATE, weight_decay=0.1, decay=USE,
     bias_correction="moments"), lambda: lamb(epsilon=1e-8, **CLAMPS, **DECAYED)),
    "DeepSpeed LAMB, BERT": (lambda w: source.deepspeed_lamb(w, RATE, weight_decay=0.1, decay=USE, max_coeff=0.3,
     bias_correction=None),
     lambda: lamb(epsilon=1e-8, bias_correction=None, **(CLAMPS | {"max_trust_ratio": 0.3}), **DECAYED)),
    "Ivy LAMB": (lambda w: source.ivy_lamb(w, RATE, decay_lambda=0.1),
     lambda: jgrad.lamb(RATE, rule="ivy", weight_decay=0.1, **IVY)),
    "PyTorch AdamW": (lambda w: source.torch_adamw(w, RATE, weight_decay=0.1, decay=USE),
     lambda: jgrad.adam(RATE, **DECAYED)),
    "Keras Adam": (lambda w: source.keras_adam(w, RATE),
     lambda: jgrad.adam(corrected(0.9, 0.999), epsilon=1e-7, bias_correction=None)),
    "Keras AdamW, epsilon near 0": (lambda w: source.keras_adam(w, RATE, epsilon=1e-15, weight_decay=0.1, decay=USE),
     lambda: jgrad.adam(RATE, epsilon=1e-15, bias_correction="step_size", **DECAYED)),
    "apex Adam": (lambda w: source.apex_adam(w, RATE, weight_decay=0.1, decay=USE),
     lambda: jgrad.adam(RATE, **DECAYED)),
    "apex Adam, no bias correction": (lambda w: source.apex_adam(w, RATE, weight_decay=0.1, decay=USE,
     bias_correction=False), lambda: jgrad.adam(RATE, bias_correction=None, **DECAYED)),
}  # fmt: skip

# LARC takes decay away with the ratio where a norm is zero; Ivy's LARS with decay is 0 / 0 there.
# Neither is followed, so these never meet a leaf or a gradient of zeros.
NO_ZEROS = ("apex LARC around SGD", "Ivy LARS, decayed")


def weights(zeros):
    """Ordinary, biases at zero, tiny, huge, negative, scalar, and mixed within one leaf."""
    rng = np.random.default_rng(0)
    return [
        rng.normal(size=(4, 3)),
        np.zeros(3) if zeros else rng.normal(size=3),
        1e-20 * rng.normal(size=5),
        1e15 * rng.normal(size=(2, 2)),
        -np.abs(rng.normal(size=6)),
        np.asarray(0.7),
        10.0 ** rng.uniform(-8, 8, size=8) * rng.normal(size=8),
    ]


def gradients(zeros):
    """Of scales of their own, step by step; now and then a leaf has none."""
    rng = np.random.default_rng(1)
    found = []
    for t in range(STEPS):
        step = [10.0 ** rng.uniform(-6, 3) * rng.normal(size=x.shape) for x in weights(zeros)]
        if zeros and t % 5 == 0:
            step[t % 7] = 0 * step[t % 7]
        found.append(step)
    return found


@pytest.mark.slow(always=["LAMB paper, phi(z) = z"])
@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name, x64):
    """200 steps, in double precision."""
    reference, make = VARIANTS[name]
    zeros = name not in NO_ZEROS
    expected = trajectory(reference(weights(zeros)), gradients(zeros))
    tx = make()

    def body(carry, g):
        w, state = carry
        updates, state = tx.update(g, state, w)
        w = optax.apply_updates(w, updates)
        return (w, state), w

    w = [jnp.asarray(x) for x in weights(zeros)]
    stacked = [jnp.stack(column) for column in zip(*gradients(zeros), strict=True)]
    _, found = jax.jit(lambda w, gs: jax.lax.scan(body, (w, tx.init(w)), gs))(w, stacked)
    for i, leaf in enumerate(found):
        wanted = np.stack([step[i] for step in expected])
        largest = np.max(np.abs(wanted), axis=0)  # of each element, on its way
        assert np.all(np.abs(leaf - wanted) <= 1e-10 * largest)
    assert np.all(found[0][-1] != found[0][0])


def test_table():
    """The note has a line for each."""
    table = rows(section("benchmarks/notes/variants.md", "Options"))
    assert [name for name, _ in table] == list(VARIANTS)
