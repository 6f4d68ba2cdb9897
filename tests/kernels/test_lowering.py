"""Every method in 8 bits, lowered for TPU and GPU by JAX alone: no compiler package is needed.

Its function of one leaf has to be made of operations that a kernel of Pallas has.
"""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import export

import jgrad
from tests.cases import CASES
from tests.support.kernels import ADAM, normal

# The structure of `tests.cases.params`, for masks; three leaves have whole rows.
SHAPES = {"layer": {"w": (16, 256), "b": (3,)}, "rest": [(2, 8, 256), (16, 256), (3,)]}
IN_8_BITS = [case for case in CASES if case.rounded]


def calls(tx, w, step=jgrad.apply_gradients):
    """How many kernels a program for both platforms has: none of them is for the GPU."""
    f = jax.jit(functools.partial(step, tx))
    exported = export.export(f, platforms=["tpu", "cuda"])(w, tx.init(w), w)
    assert exported.platforms == ("tpu", "cuda")
    return exported.mlir_module().count("tpu_custom_call")


@pytest.mark.slow(one_in=24)
@pytest.mark.parametrize(
    ("case", "form"),
    [(case, form) for case in IN_8_BITS for form in ("tree", "packed")[: 1 + case.packs]],
    ids=str,
)
def test_every_method(case, form):
    w = normal(SHAPES)
    tx = case.tx(moment_dtype="8bit")
    # SOAP has a kernel for each moment of a matrix: they are in different bases.
    kernels = 1 if form == "packed" else 3 if case.packs or case.make is jgrad.muon else 6
    assert calls(tx, jgrad.pack(w) if form == "packed" else w) == kernels


WRAPPERS = {
    "stochastic": jgrad.stochastic_rounding,
    "master": jgrad.master_weights,
    "skip(clip)": lambda tx: jgrad.skip_nonfinite(
        optax.chain(jgrad.clip_by_global_norm(1.0), tx), loss_scale=4.0
    ),
    "accumulate": lambda tx: jgrad.accumulate(tx, 2),
}


@pytest.mark.slow(always=["skip(clip)"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_in_a_wrapper(wrapper):
    dtype = jnp.bfloat16 if wrapper in ("stochastic", "master") else jnp.float32
    assert calls(WRAPPERS[wrapper](ADAM()), normal(SHAPES, 0, dtype)) == 3
