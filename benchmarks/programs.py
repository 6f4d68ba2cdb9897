"""A step, compiled with what it changes donated, and what it took to compile it."""

import gc
import random
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


class Program:
    """The function `step(carry, inputs) -> carry`, to be called again and again.

    Attributes:
      carry: what the last call returned; to `build` it and the inputs, shapes are enough.
      inputs: of each call.
      traces: seconds of tracing and lowering, for each build.
      compiles: seconds of compiling, for each build.
    """

    def __init__(self, step: Callable[[Any, Any], Any], carry: Any, inputs: Any) -> None:
        self.carry = carry
        self.traces: list[float] = []
        self.compiles: list[float] = []
        self._step = step
        self.inputs = inputs

    def build(self) -> None:
        """Once more, as if for the first time."""
        jax.clear_caches()  # what a peer has traced before is no help here
        gc.collect()
        jitted = jax.jit(self._step, donate_argnums=0)
        start = time.perf_counter()
        lowered = jitted.trace(self.carry, self.inputs).lower()
        self.traces.append(time.perf_counter() - start)
        start = time.perf_counter()
        self._compiled = lowered.compile()
        self.compiles.append(time.perf_counter() - start)

    def __call__(self) -> Any:
        self.carry = self._compiled(self.carry, self.inputs)
        return self.carry

    @property
    def operations(self) -> int:
        """Of the compiled program, those inside fused kernels, too: what compile time goes by."""
        return len(re.findall(r"^ +(?:ROOT )?%\S+ = ", self.text, re.MULTILINE))

    @property
    def text(self) -> str:
        """The compiled program, in XLA's words."""
        return self._compiled.as_text()

    @property
    def temporary_bytes(self) -> int:
        """Of a call."""
        return self._compiled.memory_analysis().temp_size_in_bytes

    @property
    def peak_bytes(self) -> int:
        """Arguments, temporaries, and outputs that are not written in place of an argument."""
        found = self._compiled.memory_analysis()
        outputs = found.output_size_in_bytes - found.alias_size_in_bytes
        return found.argument_size_in_bytes + found.temp_size_in_bytes + outputs

    @property
    def bytes_accessed(self) -> float | None:
        """Read and written by a call; None for a program with a loop, whose body counts once."""
        return None if " while(" in self.text else self.counted_bytes

    @property
    def counted_bytes(self) -> float:
        """The same as XLA has it: the body of a loop once, and of branches the largest."""
        return self._compiled.cost_analysis()["bytes accessed"]


def build_in_turn(programs: Mapping[str, Program], builds: int) -> None:
    """Each once per round, in an order that changes by chance."""
    order = list(programs.values())
    shuffle = random.Random(0).shuffle
    for _ in range(builds):
        shuffle(order)
        for program in order:
            program.build()
