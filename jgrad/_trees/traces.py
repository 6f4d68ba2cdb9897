"""Which trace is at hand."""

from collections.abc import Hashable

from jgrad._trees import unpromised


def trace_state() -> Hashable:
    """Equal in one trace, and in no other: not inside a branch.

    Where JAX does not say it, each is another one: what wrappers tell each other is then forgotten,
    and they compute it again.
    """
    found = unpromised.find("get_opaque_trace_state")
    return object() if found is None else found()
