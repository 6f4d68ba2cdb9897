"""What was measured of a contender, and how it compares with optax."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.measure import Ratio
from benchmarks.programs import Program


class Figures(NamedTuple):
    """Of one contender. What is not compiled has its steps alone.

    Attributes:
      steps: seconds of a step, for each round.
      traces: seconds of tracing and lowering, for each build.
      compiles: seconds of compiling, for each build.
      bytes_accessed: by a step; None where XLA does not know.
      temporary_bytes: of a step.
      counted_bytes: as `bytes_accessed`, with the body of a loop counted once.
    """

    steps: Sequence[float]
    traces: Sequence[float] = ()
    compiles: Sequence[float] = ()
    bytes_accessed: float | None = None
    temporary_bytes: int | None = None
    counted_bytes: float | None = None

    @classmethod
    def of(cls, steps: Sequence[float], program: Program) -> "Figures":
        """With what a program knows of itself."""
        return cls(
            steps,
            program.traces,
            program.compiles,
            program.bytes_accessed,
            program.temporary_bytes,
            program.counted_bytes,
        )

    @property
    def builds(self) -> list[float]:
        """Seconds from the function to the program, for each build."""
        return [a + b for a, b in zip(self.traces, self.compiles, strict=True)]

    @property
    def step(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.steps)

    @property
    def build(self) -> float:
        """Median seconds from the function to the program."""
        return statistics.median(self.builds)


class Result(NamedTuple):
    """A contender on a model.

    Attributes:
      work: the model, in words.
      method: the name of the method.
      form: the name of the form.
      leaves: of the model.
      elements: of the model.
      ours: what was measured.
      optax: what was measured of optax on the tree, or None.
      floor: bytes that a step must move, or None where nobody knows.
    """

    work: str
    method: str
    form: str
    leaves: int
    elements: int
    ours: Figures
    optax: Figures | None
    floor: float | None = None

    @property
    def step(self) -> Ratio | None:
        """Of the times of a step."""
        return self.optax and Ratio.of(self.ours.steps, self.optax.steps)
