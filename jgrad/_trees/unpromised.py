"""Names that JAX does not guarantee, looked up only when they are needed.

`jax.extend` and `jax.interpreters` may change with any release. `import jgrad` and a float32 step
need none of these names; if one is gone, the code that needs it raises an error that names it.
"""

import importlib
from typing import Any

import jax

# The modules in which each name may be, checked in JAX 0.8 to 0.12.
_HOMES = {
    **dict.fromkeys(("Literal", "Primitive"), ("jax.extend.core",)),
    "get_opaque_trace_state": ("jax.extend.core", "jax.core"),  # the latter up to JAX 0.8
    "eval_jaxpr": ("jax.core",),
    **dict.fromkeys(("dce_jaxpr", "dce_rules"), ("jax.interpreters.partial_eval",)),
    **dict.fromkeys(("lower_fun", "register_lowering"), ("jax.interpreters.mlir",)),
    "primitive_batchers": ("jax.interpreters.batching",),
    **dict.fromkeys(("Zero", "primitive_jvps"), ("jax.interpreters.ad",)),
    "enable_x64": ("jax",),
}


class Unpromised:
    """The names as attributes.

    Raises:
      ImportError: JAX has a name no more, and which part of this library needs it.
    """

    def __init__(self, feature: str) -> None:
        """`feature` is the part of this library, for the error."""
        self._feature = feature

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(name)
        if (value := find(name)) is None:
            expected = "expected a version that jgrad was tested with, see its README"
            raise ImportError(
                f"{self._feature}: JAX {jax.__version__} has no `{_HOMES[name][0]}.{name}`, "
                f"which it does not promise, {expected}."
            )
        vars(self)[name] = value
        return value


def find(name: str) -> Any:
    """One of the names; None if JAX does not have it."""
    for home in _HOMES[name]:
        try:
            return getattr(importlib.import_module(home), name)
        except (ImportError, AttributeError):
            continue
    return None
