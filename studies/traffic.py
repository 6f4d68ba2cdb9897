"""Data-parallel training on paper: `python -m studies.traffic`.

What each device sends, keeps, reads and writes, for more parameters and devices than there are
here. Bytes over rates: nothing is timed. The bytes were compared with programs compiled for 2, 4
and 8 devices.

Nothing overlaps here, which makes what is not compute look larger than it is. Latency is left out,
and a ring of 512 devices has 511 hops each way; so are activations.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from absl import app

from benchmarks import markdown
from benchmarks.collectives import Collective

PARAMETERS = (10**9, 10**10, 10**11)
DEVICES = (8, 64, 512)

LOSS = 4  # bytes, of which the mean is taken by an all-reduce too
COUNTER = 4  # bytes of the number of steps, on each device


@dataclasses.dataclass(frozen=True)
class Machine:
    """A device and its links: an H100 SXM in a DGX H100, by NVIDIA's data sheets of both.

    Attributes:
      flops: operations per second in bfloat16 matrix products, without sparsity.
      memory: bytes.
      memory_rate: bytes read or written per second.
      node: devices joined by NVLink.
      nvlink_rate: bytes per second that a device sends.
      network_rate: likewise, by its own network card of 400 Gb/s.
      busy: the part of `flops` that training reaches; Llama 3 says 0.38 to 0.43 on H100s.
      reached: the part of the rates that is reached, a guess.
      tokens: per device and step.
    """

    flops: float = 989e12
    memory: float = 80e9
    memory_rate: float = 3.35e12
    node: int = 8
    nvlink_rate: float = 450e9
    network_rate: float = 50e9
    busy: float = 0.4
    reached: float = 0.8
    tokens: int = 8192


class Part(NamedTuple):
    """Parameters of one dtype.

    Attributes:
      elements: how many.
      itemsize: bytes of each, of its gradient and of its update.
      state: bytes of state for each: Adam's moments in float32.
    """

    elements: int
    itemsize: int = 4
    state: int = 8


class Way(NamedTuple):
    """How to train with parameters that are whole on each device.

    Attributes:
      cut: whether a device has its share of the state, and not all.
      packed: whether the model is in packed buffers.
      gathers: how often all-gathers move as much as there are parameters.
      scatters: whether a reduce-scatter is asked for; else XLA may find one, see `moved`.
    """

    cut: bool
    packed: bool
    gathers: int
    scatters: bool = False


WAYS = {
    "replicated": Way(cut=False, packed=False, gathers=0),
    "jit": Way(cut=True, packed=False, gathers=1),
    # XLA cuts the gradient of each leaf, gathers it to put it in its buffer, and cuts that.
    "jit, packed": Way(cut=True, packed=True, gathers=2),
    "zero": Way(cut=True, packed=True, gathers=1, scatters=True),
}
COMPARED = ("replicated", "jit", "zero")


# How often a device sends such an array, less its own share, in a ring.
_ROUNDS = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}


def moved(way: Way, parts: Iterable[Part], *, finds_scatter: bool = True) -> list[Collective]:
    """The collectives of a step, before XLA merges some.

    `finds_scatter`: whether XLA turns an all-reduce, where each device goes on with a share, into a
    reduce-scatter. For GPUs and TPUs it does; for CPUs it does not.
    """
    scatters = way.scatters or (way.cut and finds_scatter)
    kinds = ["reduce-scatter" if scatters else "all-reduce", *["all-gather"] * way.gathers]
    found = [Collective(kind, x.elements * x.itemsize) for x in parts for kind in kinds]
    return [*found, Collective("all-reduce", LOSS)]


def sent(found: Iterable[Collective], devices: int) -> float:
    """Bytes by each device, in rings."""
    return sum(_ROUNDS[x.kind] * x.whole for x in found) * (devices - 1) / devices


def by_link(total: float, devices: int, machine: Machine) -> tuple[float, float]:
    """Bytes that a device sends by NVLink and by network.

    There are as many rings as devices in a node, each with its part of all bytes, and each leaves
    the node by a card of its own.
    """
    outside = total / machine.node if devices > machine.node else 0.0
    return total - outside, outside


def state_bytes(way: Way, parts: Iterable[Part], devices: int) -> int:
    """On each device."""
    return sum(x.elements * x.state // (devices if way.cut else 1) for x in parts) + COUNTER


def memory_bytes(way: Way, parts: Sequence[Part], devices: int) -> int:
    """Of parameters, gradients and state on each device; gradients twice while they are packed."""
    arrays = 3 if way.packed else 2
    return sum(arrays * x.elements * x.itemsize for x in parts) + state_bytes(way, parts, devices)


def update_bytes(way: Way, parts: Iterable[Part], devices: int) -> float:
    """Read and written on each device by the update and by packing, not by collectives.

    Adam's 28 per parameter are one loop where XLA sees all of it, and /n where state is cut. `zero`
    returns updates: the loop writes those, and whole parameters are changed after the gather.
    """
    total = 0.0
    for elements, itemsize, state in parts:
        loop, added = (2, 3) if way.scatters else (3, 0)
        shared = (loop * itemsize + 2 * state) / (devices if way.cut else 1)
        copied = 4 if way.packed else 0  # read and write parameters unpacked, gradients packed
        total += elements * (shared + (added + copied) * itemsize)
    return total


class Seconds(NamedTuple):
    """Of a step, one thing after the other."""

    compute: float
    update: float
    links: float


def seconds(way: Way, parts: Sequence[Part], devices: int, machine: Machine) -> Seconds:
    """Six operations per parameter and token: two forward, four backward."""
    operations = 6 * sum(x.elements for x in parts) * machine.tokens
    inside, outside = by_link(sent(moved(way, parts), devices), devices, machine)
    return Seconds(
        operations / (machine.flops * machine.busy),
        update_bytes(way, parts, devices) / (machine.memory_rate * machine.reached),
        max(inside / machine.nvlink_rate, outside / machine.network_rate) / machine.reached,
    )


def table(machine: Machine) -> str:
    """A row for each number of parameters, in float32, and of devices; one figure for each way."""
    columns = ["parameters", "devices", "state, GB", "memory, GB", "NVLink, GB", "network, GB"]
    columns += ["update, GB", "compute, ms", "update, ms", "links, ms", "not compute"]
    rows = []
    for elements, n in itertools.product(PARAMETERS, DEVICES):
        about = f"{elements / 1e9:g} billion: {4 * elements / 1e9:g} GB"
        ways = (_figures(WAYS[name], Part(elements), n, machine) for name in COMPARED)
        cells = (x[:1] if len(set(x)) == 1 else x for x in zip(*ways, strict=True))
        rows.append([about, str(n), *(" / ".join(x) for x in cells)])
    return markdown.table(columns, rows)


def _figures(way: Way, part: Part, devices: int, machine: Machine) -> list[str]:
    """Without times where memory is too small, since there is no such step."""
    memory = memory_bytes(way, [part], devices)
    links = by_link(sent(moved(way, [part]), devices), devices, machine)
    update = update_bytes(way, [part], devices)
    times = seconds(way, [part], devices, machine)
    texts = [f"{x / 1e9:.4g}" for x in (state_bytes(way, [part], devices), memory, *links, update)]
    if memory > machine.memory:
        texts[1] += " (no)"
        return [*texts, "-", "-", "-", "-"]
    texts += [f"{1e3 * x:.3g}" for x in times]
    return [*texts, f"{1 - times.compute / sum(times):.0%}"]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    machine = Machine()
    print(
        f"{machine}\n\n{' / '.join(COMPARED)}, as XLA compiles them for GPUs; (no): does not fit\n"
    )
    print(table(machine))


if __name__ == "__main__":
    app.run(main)
