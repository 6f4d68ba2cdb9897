"""Muon beside `optax.contrib.muon`: matrices of one shape; and on devices.

`python -m benchmarks.muon` prints the collectives of one update on eight virtual devices, compiled
and not run: the section asks a process of its own for them, which has that many.
"""

import collections
import functools
import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jgrad
from benchmarks import collectives, measure
from benchmarks.measure import Ratio

DEVICES = 8
# (count, shape) of the matrices.
WORKS = {
    "300 matrices of 32 x 32": (300, (32, 32)),
    "24 matrices of 64 x 256": (24, (64, 256)),
    "8 matrices of 256 x 1024": (8, (256, 1024)),
}
RATE = 1e-3


class Result(NamedTuple):
    """One work, ours over optax's.

    Attributes:
      work: the matrices.
      step: of an update and its addition, parameters and state donated.
      build: of tracing and compiling it.
      temporaries: bytes that ours needs beside arguments and results, in copies of the parameters.
      theirs: likewise, optax's.
    """

    work: str
    step: Ratio
    build: Ratio
    temporaries: float
    theirs: float


class Program(NamedTuple):
    """A compiled step with its arguments, and the seconds that it took to make."""

    compiled: Any
    arguments: list[Any]
    seconds: float

    def step(self) -> Any:
        """One step; the next continues from it."""
        self.arguments[:2] = self.compiled(*self.arguments)
        return self.arguments[0]


def compare(work: str, *, rounds: int, builds: int) -> list[Result]:
    """Ours beside optax's."""
    count, shape = WORKS[work]
    keys = jax.random.split(jax.random.key(0), count)
    w = {f"{i:03}": jax.random.normal(key, shape) for i, key in enumerate(keys)}
    ours = jgrad.muon(RATE, matrices=True, adam_learning_rate=RATE)
    size = count * shape[0] * shape[1] * 4
    made = {
        "optax": functools.partial(_program, optax.contrib.muon(RATE), w),
        "jgrad": functools.partial(_program, ours, w),
    }
    programs: dict[str, list[Program]] = {name: [] for name in made}
    for _ in range(builds):
        for name, make in made.items():
            jax.clear_caches()
            programs[name].append(make())
    steps = measure.in_turn({name: own[-1].step for name, own in programs.items()}, rounds)
    built = {name: [x.seconds for x in own] for name, own in programs.items()}
    used = {
        name: own[-1].compiled.memory_analysis().temp_size_in_bytes / size
        for name, own in programs.items()
    }
    return [
        Result(
            work,
            Ratio.of(steps["jgrad"], steps["optax"]),
            Ratio.of(built["jgrad"], built["optax"]),
            used["jgrad"],
            used["optax"],
        )
    ]


def _program(tx: Any, w: Any) -> Program:
    def step(w: Any, state: Any, g: Any) -> Any:
        updates, state = tx.update(g, state, w)
        return optax.apply_updates(w, updates), state

    state = tx.init(w)
    made: list[Any] = []

    def build() -> None:
        made.append(jax.jit(step, donate_argnums=(0, 1)).lower(w, state, w).compile())

    seconds = measure.seconds(build)
    return Program(made[0], [jax.tree.map(jnp.copy, w), state, w], seconds)


class Traffic(NamedTuple):
    """The collectives of one update on eight devices: by kind, ours and optax's."""

    placed: str
    ours: dict[str, int]
    theirs: dict[str, int]


def traffic() -> list[Traffic]:
    """In a process with eight virtual devices."""
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.muon"]
    text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return [Traffic(*row) for row in json.loads(text.stdout.splitlines()[-1])]


def _compiled_traffic() -> list[Traffic]:
    """Of eight square matrices with rows or columns sharded, or on each device."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    ours = jgrad.muon(RATE, matrices=True, adam_learning_rate=RATE, shard_over="data")

    def count(tx: Any, spec: P) -> dict[str, int]:
        sharding = NamedSharding(mesh, spec)
        w = {f"{i}": jax.device_put(jnp.ones((256, 256)), sharding) for i in range(8)}
        state = jax.device_put(tx.init(w), NamedSharding(mesh, P()))
        state = jax.tree.map(lambda x: jax.device_put(x, sharding) if x.ndim == 2 else x, state)
        out = jax.tree.map(lambda x: x.sharding, (w, state))
        text = jax.jit(tx.update, out_shardings=out).lower(w, state, w).compile().as_text()
        return dict(collections.Counter(x.kind for x in collectives.of(text, DEVICES)))

    theirs = optax.contrib.muon(RATE)
    specs = {"rows sharded": P("data"), "columns sharded": P(None, "data"), "replicated": P()}
    return [Traffic(name, count(ours, s), count(theirs, s)) for name, s in specs.items()]


if __name__ == "__main__":
    print(json.dumps(_compiled_traffic()))
