"""Compiles a function for a machine that is not there, and counts what the program does.

target = TARGETS["v5e"]
x = on_one_device(target, jax.ShapeDtypeStruct((2048, 1024), jnp.float32))
counts = Program(target, jnp.negative, (x,)).counts
counts.bytes / x.size  # 8: each float32 is read and written
"""

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jgrad
from benchmarks.accelerators import hlo
from benchmarks.accelerators.targets import Target, devices


class Counts(NamedTuple):
    """Of a compiled program, on each device.

    Attributes:
      bytes: of HBM that a run reads and writes, with the cheapest branch of each conditional.
      rare: what the dearest branches add to that.
      copied: of `bytes`, those from HBM to HBM with which nothing is computed.
      kernels: what a run launches.
      products: of matrices, in a run.
      collectives: how many of each kind, those of rare branches too, and those of loops once.
      arguments: bytes.
      temporaries: bytes beside arguments. Where the memory of a TPU is plenty, XLA packs arrays
        loosely: then those that live at once.
      host: bytes of arguments and temporaries in host memory.
      peak: bytes of all that lives at once, where the compiler says it; else 0.
      seconds: of tracing, lowering and compiling.
    """

    bytes: int
    rare: int
    copied: int
    kernels: int
    products: int
    collectives: dict[str, int]
    arguments: int
    temporaries: int
    host: int
    peak: int
    seconds: float


class Program:
    """A function, compiled.

    Attributes:
      text: XLA's, for `hlo`.
      counts: what it does.
    """

    def __init__(
        self,
        target: Target,
        f: Callable[..., Any],
        args: Sequence[Any],
        *,
        donate: Sequence[int] = (),
        out_shardings: Any = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Compiles `f` for shapes whose shardings are on devices of the target.

        Args:
          target: for what.
          f: a function.
          args: shapes.
          donate: positions of the arguments that it may write over.
          out_shardings: of the results.
          options: of the compiler, beside those of the target.
        """
        start = time.perf_counter()
        compiled = (
            jax.jit(f, donate_argnums=donate, out_shardings=out_shardings)
            .trace(*args)
            .lower(lowering_platforms=(target.platform,))
            .compile(compiler_options={**target.options, **options})
        )
        seconds = time.perf_counter() - start
        self.text = compiled.as_text()
        moved, memory = hlo.traffic(self.text), compiled.memory_analysis()
        arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        peak = getattr(memory, "peak_memory_in_bytes", 0)
        self.counts = Counts(
            bytes=moved.bytes,
            rare=moved.rare,
            copied=moved.copied,
            kernels=moved.kernels,
            products=moved.products,
            collectives=hlo.collectives(self.text),
            arguments=arguments,
            temporaries=min(temporaries, peak - arguments) if peak else temporaries,
            host=memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
            peak=peak,
            seconds=seconds,
        )


def mesh(target: Target, topology: str, **axes: int) -> Mesh:
    """All devices of a topology; with names of axes and their sizes."""
    found = devices(target, topology)
    return Mesh(np.array(found).reshape(tuple(axes.values())), tuple(axes))


def on_one_device(target: Target, tree: Any, memory_kind: str | None = None) -> Any:
    """Shapes of arrays, on the first device of the target, in that memory of it."""
    mesh = Mesh(np.array(devices(target)[:1]), ("x",))
    sharding = NamedSharding(mesh, P(), memory_kind=memory_kind)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def step(
    tx: optax.GradientTransformation,
    *,
    by_optax: bool = False,
    mesh_axes: Any = None,
    **options: Any,
) -> Callable[[Any, Any, Any], Any]:
    """Update and apply: of (params, state, grads), to donate the first two of.

    Args:
      tx: any transformation.
      by_optax: by `tx.update` and `optax.apply_updates`, in the place of `jgrad.apply_gradients`.
      mesh_axes: of `jgrad.apply_gradients` alone, since no `update` has it.
      options: of both.
    """
    tx = optax.with_extra_args_support(tx)

    def update(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        if not by_optax:
            return jgrad.apply_gradients(tx, grads, state, params, mesh_axes=mesh_axes, **options)
        updates, state = tx.update(grads, state, params, **options)
        return optax.apply_updates(params, updates), state

    return update


def step_counts(
    target: Target, tx: optax.GradientTransformation, params: Any, **options: Any
) -> Counts:
    """Of a donated step on one device, for the shapes of parameters."""
    state = on_one_device(target, jax.eval_shape(tx.init, params))
    params = on_one_device(target, params)
    return Program(target, step(tx, **options), (params, state, params), donate=(0, 1)).counts
