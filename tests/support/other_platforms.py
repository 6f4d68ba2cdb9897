"""Programs of platforms that are not at hand, run on the CPU.

Where a program depends on the platform, a CPU never runs what a GPU or a TPU would, and a test on a
CPU cannot see a mistake there. A program that is lowered for another platform is portable as long
as it has no custom call of that platform: no kernel of a TPU, no decomposition of a GPU.
"""

import jax
from jax import export


def as_on(platform, f):
    """The function, as the program of another platform has it: "cuda", "rocm" or "tpu"."""
    anywhere = [export.DisabledSafetyCheck.platform()]
    of_platform = export.export(jax.jit(f), platforms=[platform], disabled_checks=anywhere)

    def call(*args):
        return of_platform(*args).call(*args)

    return call
