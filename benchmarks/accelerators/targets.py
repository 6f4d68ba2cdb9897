"""Machines to compile for that are not there.

A TPU is known to its compiler by the name of a topology, as "v5e:4x4"; a GPU is described by a file
beside this one. Both compilers are packages of the extra `accelerators`.

    target = TARGETS["v5e"]
    reason = missing(target)  # None where this machine can compile for it
    chips = devices(target, "v5e:4x4")
"""

import functools
import importlib
import importlib.util
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

# What libtpu reads when it is loaded. It then asks no server which TPU this is, and several
# processes may compile at once.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
INSTALL = 'pip install ".[accelerators]", on Linux on x86-64'


class Target(NamedTuple):
    """A kind of machine.

    Attributes:
      title: what a table calls it.
      platform: JAX's name for which is lowered.
      package: what has the compiler.
      topology: the smallest one; its first device stands for one alone.
      memory: bytes of HBM of a device, as its data sheet says.
    """

    title: str
    platform: str
    package: str
    topology: str
    memory: float

    @property
    def options(self) -> dict[str, Any]:
        """Of the compiler. Without a GPU there is nothing to time kernels on."""
        return {"xla_gpu_autotune_level": 0} if self.platform == "cuda" else {}

    @property
    def has_host(self) -> bool:
        """Whether there is memory of a host: a GPU that is described by a file has none."""
        return self.platform == "tpu"


def _tpu(name: str, topology: str, memory: float) -> Target:
    return Target(f"TPU {name}", "tpu", "libtpu", topology, memory)


def _gpu(name: str, memory: float) -> Target:
    return Target(name, "cuda", "jax_plugins.xla_cuda12", "1x1x1", memory)


TARGETS = {
    "v5e": _tpu("v5e", "v5e:2x2", 16e9),
    "v6e": _tpu("v6e", "v6e:2x2", 32e9),
    "v5p": _tpu("v5p", "v5p:2x2x1", 95e9),
    "h100": _gpu("H100", 80e9),
    "a100": _gpu("A100", 80e9),
}


@functools.cache
def missing(target: Target, topology: str = "") -> str | None:
    """Why this machine cannot compile for it, in one line; None where it can."""
    try:
        found = importlib.util.find_spec(target.package)
    except ModuleNotFoundError:
        found = None
    if not found:
        return f"{target.title}: no compiler ({target.package}); {INSTALL}"
    try:
        devices(target, topology)
    except Exception as error:
        reason = str(error).splitlines()[0][:120]
        return (
            f"{target.title}: its compiler does not know {topology or target.topology} ({reason})"
        )
    return None


@functools.cache
def devices(target: Target, topology: str = "") -> Sequence[jax.Device]:
    """Those of a topology: "v5e:4x4" of a TPU, "1x1x8" (slices, hosts, GPUs of each) of a GPU."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    topology = topology or target.topology
    if target.platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    _load_cuda()
    file = pathlib.Path(__file__).with_name(f"{target.title.lower()}.txtpb")
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name=target.title,
        target_config=file.read_text(),
        topology=topology,
    ).devices


@functools.cache
def _load_cuda() -> None:
    """Loads the plugin, unless JAX has done it, which it does when it first looks for devices."""
    jax.devices("cpu")
    try:
        importlib.import_module("jax_plugins.xla_cuda12").initialize()
    except Exception as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
