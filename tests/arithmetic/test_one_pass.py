"""Under the flag that lets XLA make loops with several results: one loop per array, the same numbers.

XLA reads the flag once, so the programs are built in a process that has it.
"""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from benchmarks.one_pass import FLAG
from benchmarks.recipes import program
from jgrad._arithmetic import one_pass

pytestmark = pytest.mark.usefixtures("standard_promotion")  # schedules of optax promote

SIZE = 256

# Bytes moved per parameter: each array is read once and written once.
CASES = {
    "Nesterov, decay": (
        lambda: jgrad.gradient_descent(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        20,
    ),
    "Adam": (lambda: jgrad.adam(0.1), 28),
    "AdamW": (lambda: jgrad.adam(optax.linear_schedule(0.1, 0.0, 9), weight_decay=0.1), 28),
    # The average reads the new weights again.
    "AdamW + ema": (lambda: optax.chain(jgrad.adam(0.1, weight_decay=0.1), jgrad.ema(0.9)), 40),
}


def measured(name, packed):
    """Bytes and temporaries per parameter, and the sums of weights after three steps."""
    rng = np.random.default_rng(0)
    w, g = (
        {k: jnp.asarray(rng.normal(size=(SIZE, SIZE)), jnp.float32) for k in "ab"} for _ in "wg"
    )
    w, g = (jgrad.pack(w), jgrad.pack(g)) if packed else (w, g)
    step = program(CASES[name][0](), w, g, {})
    step.build()
    for _ in range(3):
        step()
    new = jgrad.unpack(step.carry[0])
    elements = 2 * SIZE**2
    weights = [float(x[i, i]) for x in new.values() for i in range(20)]
    return step.counted_bytes / elements, step.temporary_bytes / elements, weights


@pytest.fixture(scope="module")
def with_flag():
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.arithmetic.test_one_pass"],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="Older versions of XLA lack the flag.")
@pytest.mark.parametrize("packed", [False, True], ids=["tree", "packed"])
@pytest.mark.parametrize("name", CASES)
def test_one_loop(name, packed, with_flag):
    moved, temporaries, weights = with_flag[f"{name}, {packed}"]
    assert moved <= 1.01 * CASES[name][1]
    assert temporaries <= 0.01
    np.testing.assert_allclose(weights, measured(name, packed)[2], rtol=2e-6)


def test_not_without_the_flag():
    """There the same form would move more."""
    assert not one_pass.is_chosen()
    moved, temporaries, _ = measured("Adam", packed=False)
    assert moved <= 40.4
    assert temporaries <= 0.01


if __name__ == "__main__":
    names = [(name, packed) for name in CASES for packed in (False, True)]
    print(json.dumps({f"{name}, {packed}": measured(name, packed) for name, packed in names}))
