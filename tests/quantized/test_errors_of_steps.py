"""Steps of Adam with moments in few bits, beside float64: `studies/memory.py` has the cases."""

import jax.numpy as jnp
import pytest

from studies.memory import CASES, errors

LIMITS = {"8bit": {"A": 0.15, "B": 0.15, "C": 0.25}, "bfloat16": dict.fromkeys("ABC", 0.03)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "case"),
    [
        *(("8bit", case) for case in "BC"),
        ("bfloat16", "B"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (("8bit", "A"), ("bfloat16", "A"), ("bfloat16", "C"))
        ),
    ],
)
def test_e32_e36_errors_of_steps(form, case):
    """The root of the mean square, the longest step, and v of weights whose gradients fell."""
    found = errors(CASES[case], form if form == "8bit" else jnp.bfloat16)
    assert found.relative <= LIMITS[form][case]
    assert found.longest <= 2 * found.exact_longest
    if case != "C":
        assert 0.85 <= found.fallen <= 1.15
