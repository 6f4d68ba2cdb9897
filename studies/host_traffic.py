"""What a step sends over the link to host memory, on paper: `python -m studies.host_traffic`.

Bytes over rates, as in `studies.traffic`: nothing is timed. `jgrad.step_in_backward` fetches the
weights of a layer for the forward pass and again for the backward pass, and its moments with the
latter; new weights and moments go back meanwhile. Layers are computed twice, so the forward pass
has 2 operations per parameter and token, the backward pass 6. Weights are in bfloat16.
"""

import itertools
import math
from typing import NamedTuple

from absl import app

from benchmarks import markdown
from studies.traffic import Machine

WEIGHT = 2  # bytes
MOMENTS = {"float32": 8.0, "bfloat16": 4.0, "8-bit": 2 + 8 / 256}  # bytes of both, with scales


class Host(NamedTuple):
    """A device and its host.

    Attributes:
      title: what a table calls it.
      flops: operations per second in bfloat16 matrix products, without sparsity.
      link: bytes per second each way, both at once.
      memory: bytes per second that the host's memory reads and writes together.
    """

    title: str
    flops: float
    link: float
    memory: float


HOSTS = (
    # Google names no link; PCIe 3.0 x16 is a guess.
    Host("TPU v5e", 197e12, 16e9, math.inf),
    # PCIe 5.0 x16; a Xeon 8480 has eight channels of DDR5-4800, for four GPUs of a DGX H100.
    Host("H100 SXM", 989e12, 64e9, 307e9),
    # NVLink-C2C has 900 GB/s both ways, LPDDR5X up to 512 GB/s.
    Host("GH200", 989e12, 450e9, 512e9),
)


class Pass(NamedTuple):
    """Forward or backward, per parameter.

    Attributes:
      there: bytes to the device.
      back: bytes to the host.
      operations: for each token.
    """

    there: float
    back: float
    operations: int


def passes(moments: float, *, weights: bool) -> tuple[Pass, Pass]:
    """Of a step with moments on the host, and with weights or not."""
    of_weights = WEIGHT if weights else 0
    both = of_weights + moments
    return Pass(of_weights, 0, 2), Pass(both, both, 6)


def seconds(one: Pass, host: Host, machine: Machine) -> float:
    """Of the link, per parameter."""
    on_link = max(one.there, one.back) / host.link
    return max(on_link, (one.there + one.back) / host.memory) / machine.reached


def tokens(found: tuple[Pass, Pass], host: Host, machine: Machine) -> float:
    """In a step, from which computing takes longer than the link does, in both passes."""
    rate = host.flops * machine.busy
    return max(seconds(one, host, machine) * rate / one.operations for one in found)


def table(machine: Machine) -> str:
    """A row for each thing that is on the host: bytes per parameter, and what devices need."""
    columns = ["on the host", "to the device", "back", *(host.title for host in HOSTS)]
    rows = []
    for weights, (dtype, moments) in itertools.product((False, True), MOMENTS.items()):
        found = passes(moments, weights=weights)
        name = f"{'weights, ' if weights else ''}{dtype} moments"
        moved = (sum(one.there for one in found), sum(one.back for one in found))
        rows.append([name, *(f"{x:.3g}" for x in moved), *_cells(found, machine)])
    return markdown.table(columns, rows)


def rates(machine: Machine) -> str:
    """From which these are computed."""
    names = (
        "products of matrices in bfloat16",
        "training reaches",
        "link to the host, each way",
        "memory of the host, both ways",
        "link and memory reach",
    )

    def cells(host: Host) -> list[str]:
        per_second = (f"{x / 1e9:.0f} GB/s" if x < math.inf else "-" for x in host[2:])
        return [
            f"{host.flops / 1e12:.0f} TFLOP/s",
            f"{machine.busy:.0%}",
            *per_second,
            f"{machine.reached:.0%}",
        ]

    columns = zip(names, *map(cells, HOSTS), strict=True)
    return markdown.table(["", *(host.title for host in HOSTS)], columns)


def _cells(found: tuple[Pass, Pass], machine: Machine) -> list[str]:
    return [
        f"{round(tokens(found, host, machine), -2):,.0f}; "
        f"{1e9 * sum(seconds(one, host, machine) for one in found):.2g} s"
        for host in HOSTS
    ]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    print("Tokens per step for which computing takes as long; seconds per billion parameters.\n")
    print(f"{table(Machine())}\n\n{rates(Machine())}")


if __name__ == "__main__":
    app.run(main)
