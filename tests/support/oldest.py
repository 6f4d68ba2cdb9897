"""What JAX 0.8, the oldest version that is tested, does otherwise. A marker skips a test there:

@pytest.mark.not_in_jax_0_8("host memory")
"""

import jax
import pytest

IS_OLDEST = jax.__version_info__ < (0, 10)

WHY = {
    "host memory": "The CPU of JAX 0.8 moves nothing to its host's memory.",
    "names in pmap": "JAX 0.8 does not say inside `pmap` which device has a part of an array.",
    "sums that vary": "JAX 0.8 maps no sum over devices where it checks what varies over them.",
    "sums of one value": "JAX 0.8 cannot batch a sum of what is the same on all devices.",
    "explicit tangents": "JAX 0.8 has no types for such tangents of a custom rule.",
    "traces": "JAX 0.8 keeps what was traced in a cache that `jax.clear_caches` does not clear.",
    "joined sums": "The XLA of older versions joins no sums on CPUs.",
    "temporaries": "The XLA of older versions writes more out.",
    "branches": "The XLA of older versions copies what a branch reads.",
}


def skip(what):
    """Ends the test here on JAX 0.8."""
    reason = WHY[what]
    if IS_OLDEST:
        pytest.skip(reason)
