"""PyTorch's steps on the same leaves, where it is installed.

It has no LARS and no LAMB. Its optimizers have a fused form, which reads and writes each array
once, and a foreach form, which goes through all arrays operation by operation.

Its threads wait for each other, leaf by leaf: where the machine has other things to do, its times
grow many times over while JAX's hardly do.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.methods import RATE
from benchmarks.workloads import Tree

try:
    import torch
except ImportError:
    torch = None

_FORMS = ("foreach", "fused")


def version() -> str:
    """What is timed, in a few words."""
    return f"torch {torch.__version__}" if _is_usable() else "torch not timed"


def steps(method: str, params: Tree, grads: Tree) -> dict[str, Callable[[], Any]]:
    """A step for each form that there is."""
    if not _is_usable():
        return {}
    optimizers: dict[str, Callable[..., Any]] = {
        "momentum": functools.partial(torch.optim.SGD, lr=RATE, momentum=0.9),
        "Adam": functools.partial(torch.optim.Adam, lr=RATE, eps=1e-8),
    }
    if method not in optimizers:
        return {}
    torch.set_num_threads(os.cpu_count() or 1)
    return {
        f"torch {form}": _step(functools.partial(optimizers[method], **{form: True}), params, grads)
        for form in _FORMS
    }


def _step(make: Callable[..., Any], params: Tree, grads: Tree) -> Callable[[], Any]:
    # The optimizers write to the parameters and only read the gradients, which need no copy.
    weights = [torch.from_dlpack(x).clone() for x in params.values()]
    for w, g in zip(weights, grads.values(), strict=True):
        w.grad = torch.from_dlpack(g)
    optimizer = make(weights)

    def step() -> None:
        optimizer.step()
        if weights[0].is_cuda:
            torch.cuda.synchronize()

    return step


def _is_usable() -> bool:
    """Whether there is a PyTorch for the device that JAX uses."""
    backend = jax.default_backend()
    return torch is not None and (
        backend == "cpu" or (backend == "gpu" and torch.cuda.is_available())
    )
