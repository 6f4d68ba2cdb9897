"""How XLA compiles the tests' programs: quickly by default, as users have them with `--all`.

Two thirds of a first run were LLVM's optimization of programs that run once, so the default tests
do without. What it costs: their programs are not those of users. Hence `pytest --all` and runs with
XLA_FLAGS of the caller's own, as CI has them, keep XLA's defaults.
"""

import importlib.metadata
import os
import sys

_LEVEL = "xla_backend_optimization_level"
_EMITTERS = "xla_cpu_use_fusion_emitters"
# From 0.12 on it is unknown, and an unknown flag ends the process.
_HAS_EMITTERS = [int(x) for x in importlib.metadata.version("jaxlib").split(".")[:2]] < [0, 12]
_FAST = [f"--{_LEVEL}=0", *([f"--{_EMITTERS}=false"] if _HAS_EMITTERS else [])]


def set_flags() -> None:
    """Before JAX starts, where the caller has set none. Workers of xdist inherit them."""
    if not os.environ.get("XLA_FLAGS") and "--all" not in sys.argv:
        os.environ["XLA_FLAGS"] = " ".join(_FAST)


def exact() -> dict[str, bool] | None:
    """Options of `jax.jit` for two programs whose bits are compared, though not all kernels are alike.

    On CPUs with FMA, LLVM joins a product and a sum of one kernel to one rounding. XLA's fusion
    emitters make the same kernels of the same operations; without them, what else is in a kernel
    decides which products are joined.
    """
    return {_EMITTERS: True} if _HAS_EMITTERS else None


def as_users_have() -> dict[str, bool | int]:
    """Options of `jax.jit` for XLA's defaults, where LLVM's optimization decides about a rounding."""
    return {_LEVEL: 3} | (exact() or {})
