"""A traced step as a list of operations, with nested calls inlined."""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive

from jgrad._quantized.regions import REGIONS

# Calls that are their body, as far as values go. Private names, as are those of primitives and of
# their parameters in this folder, checked in JAX 0.7 to 0.12.
_CALLS = {
    "jgrad_step",
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
}


class Operation(NamedTuple):
    """An equation of a jaxpr.

    Attributes:
      name: of the primitive, or of a region of this library.
      primitive: what computes it.
      params: its static parameters.
      inputs: the values that it reads; a value is an entry of `Graph.types`.
      outputs: those that it computes.
      context: in which it was traced, such as `jax.set_mesh`.
    """

    name: str
    primitive: Primitive
    params: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    context: Any

    def run(self, args: Sequence[Any]) -> list[Any]:
        """What it computes of these arguments, where it was traced."""
        with self.scope():
            return self.bind(args)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which it was traced."""
        manager = getattr(self.context, "manager", None)  # private, checked in JAX 0.7 to 0.12
        return contextlib.nullcontext() if manager is None else manager

    def bind(self, args: Sequence[Any]) -> list[Any]:
        """Likewise, here: inside a kernel."""
        # Private, checked in JAX 0.7 to 0.12.
        found = self.primitive.get_bind_params(self.params)
        functions, params = found if isinstance(found, tuple) else ((), found)  # JAX 0.7
        results = self.primitive.bind(*functions, *args, **params)
        return list(results) if self.primitive.multiple_results else [results]


class Graph(NamedTuple):
    """A traced function.

    Attributes:
      types: the type of each value.
      constants: values that are known.
      inputs: the arguments.
      operations: in an order in which they can be computed.
      outputs: the results.
      maker: the operation that computes a value.
    """

    types: list[Any]
    constants: dict[int, Any]
    inputs: list[int]
    operations: list[Operation]
    outputs: list[int]
    maker: dict[int, Operation]

    @classmethod
    def of(cls, traced: ClosedJaxpr) -> "Graph":
        """The function as one list."""
        graph = cls([], {}, [], [], [], {})
        graph.inputs.extend(graph._new(v) for v in traced.jaxpr.invars)
        graph.outputs.extend(graph._inline(traced, graph.inputs))
        graph.maker.update((x, op) for op in graph.operations for x in op.outputs)
        return graph

    def shape(self, x: int) -> tuple[int, ...]:
        """Of a value."""
        return tuple(self.types[x].shape)

    def dtype(self, x: int) -> Any:
        """Of a value."""
        return self.types[x].dtype

    def is_literal(self, x: int) -> bool:
        """Whether a value is a scalar that is known."""
        return x in self.constants and self.shape(x) == ()

    def _constant(self, variable: Any, constant: Any) -> int:
        x = self._new(variable)
        self.constants[x] = constant
        return x

    def _new(self, variable: Any) -> int:
        self.types.append(variable.aval)
        return len(self.types) - 1

    def _inline(self, traced: ClosedJaxpr, inputs: Sequence[int]) -> list[int]:
        known: dict[Any, int] = dict(zip(traced.jaxpr.invars, inputs, strict=True))
        for variable, constant in zip(traced.jaxpr.constvars, traced.consts, strict=True):
            known[variable] = self._constant(variable, constant)

        def read(x: Any) -> int:
            return self._constant(x, x.val) if isinstance(x, Literal) else known[x]

        for eqn in traced.jaxpr.eqns:
            arguments = list(map(read, eqn.invars))
            if (body := _body(eqn)) is not None:
                results = self._inline(body, arguments)
            else:
                results = list(map(self._new, eqn.outvars))
                name = _name(eqn)
                context = getattr(eqn, "ctx", None)
                self.operations.append(
                    Operation(name, eqn.primitive, eqn.params, (*arguments,), (*results,), context)
                )
            known.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, traced.jaxpr.outvars))


def _name(eqn: JaxprEqn) -> str:
    if eqn.primitive.name in ("jit", "pjit") and eqn.params["name"] in REGIONS:
        return str(eqn.params["name"])
    return str(eqn.primitive.name)


def _body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The function that an equation calls, if the call says no more than that."""
    if eqn.primitive.name not in _CALLS or _name(eqn) in REGIONS:
        return None
    for name in ("in_shardings", "out_shardings"):
        if any(isinstance(x, jax.sharding.Sharding) for x in eqn.params.get(name, ())):
            return None
    body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return body if isinstance(body, ClosedJaxpr) else None
