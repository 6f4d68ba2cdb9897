"""What PyTorch makes of the inputs of its own tests, kept in `tests/data/torch_inputs.json`.

    python -m tests.pages.torch_inputs

in an environment with PyTorch, NumPy, psutil and expecttest writes the file, with the inputs and error
inputs that `torch.testing._internal.common_optimizers` has for the four methods of `METHODS`, those for
other devices included, and those of `OWN`. The weights of each input are after the first gradient and
after the last, in float64. Tensors among the options are given in float64, too: with those of float32
PyTorch computes the size of a step in float32. Muon's products are in float64: its cast to bfloat16 is
taken out for the run.
"""

import json
import pathlib
import unittest.mock
import warnings

import numpy as np

DATA = pathlib.Path(__file__).parents[2] / "tests" / "data" / "torch_inputs.json"
METHODS = ("SGD", "Adam", "AdamW", "Muon")
DEVICES = ("cpu", "cuda", "mps")
FLAGS = ("foreach", "fused", "capturable", "differentiable")  # how it is computed, not what
STEPS = 6
_BETAS = [
    ("betas of 0", {"betas": (0.0, 0.0)}),
    ("first beta of 0", {"betas": (0.0, 0.999), "weight_decay": 0.1}),
    ("second beta of 0", {"betas": (0.9, 0.0)}),
    ("lr of 0", {"lr": 0.0, "weight_decay": 0.1}),
    ("large eps", {"eps": 0.1, "weight_decay": 0.1, "maximize": True}),
]
OWN = {
    "SGD": [("lr of 0", {"lr": 0.0, "momentum": 0.9}),
     ("maximize w/ nesterov", {"momentum": 0.9, "nesterov": True, "maximize": True})],
    "Adam": _BETAS,
    "AdamW": _BETAS,
    "Muon": [("momentum of 0", {"momentum": 0.0}), ("without nesterov", {"nesterov": False, "weight_decay": 0.0})],
}  # fmt: skip


def problem(method):
    """First weights, and the gradients; of Muon two matrices, one wide and one tall."""
    shapes = ((3, 5), (4, 2)) if method == "Muon" else ((2, 3), (3,))
    draws = np.random.RandomState(0)
    draw = lambda: {name: draws.randn(*shape) for name, shape in zip("wb", shapes, strict=True)}
    return draw(), [draw() for _ in range(STEPS)]


def _as_json(x, of_tensor):
    import torch

    if isinstance(x, torch.Tensor):
        return of_tensor(x)
    if isinstance(x, dict):
        return {k: _as_json(v, of_tensor) for k, v in x.items()}
    return [_as_json(v, of_tensor) for v in x] if isinstance(x, (list, tuple)) else x


def _options(kwargs):
    """Options; tensors by their numbers."""
    return _as_json(kwargs, lambda x: {"tensor": x.tolist()})


def _shapes(params):
    """Parameters by their shapes and dtypes."""
    dtype = lambda x: str(x.dtype).partition(".")[2]
    return _as_json(params, lambda x: {"shape": list(x.shape), "dtype": dtype(x)})


def _wide(x):
    import torch

    if isinstance(x, tuple):
        return tuple(_wide(v) for v in x)
    return x.double() if isinstance(x, torch.Tensor) else x


def trained(method, kwargs):
    """The weights after the first gradient and after the last."""
    import torch

    weights, grads = problem(method)
    params = [torch.nn.Parameter(torch.tensor(x)) for x in weights.values()]
    kwargs = {k: _wide(v) for k, v in kwargs.items() if k not in FLAGS}
    optimizer = getattr(torch.optim, method)(params, **kwargs)
    found = []
    for g in grads:
        for p, x in zip(params, g.values(), strict=True):
            p.grad = torch.tensor(x)
        with unittest.mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
            optimizer.step()
        found.append([x for p in params for x in p.detach().reshape(-1).tolist()])
    return [found[0], found[-1]]


def inputs(info):
    """Name and options of each input of a method."""
    method = info.optim_cls.__name__
    given = [x for device in DEVICES for x in info.optim_inputs_func(device=device)]
    return {x.desc: x.kwargs for x in given} | dict(OWN[method])


def errors(info):
    """Each error input, with what PyTorch says."""
    import torch

    for given in info.optim_error_inputs_func(device="cpu", dtype=torch.float64):
        x = given.optimizer_error_input
        params = [torch.nn.Parameter(torch.ones(2, 3))] if x.params is None else x.params
        row = {"desc": x.desc, "params": _shapes(params), "kwargs": _options(x.kwargs)}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                optimizer = info.optim_cls(params, **x.kwargs)
                for p in optimizer.param_groups[0]["params"]:
                    p.grad = torch.ones_like(p)
                optimizer.step()
        except (TypeError, ValueError, RuntimeError, UserWarning) as error:
            yield row | {"message": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        else:
            raise AssertionError(f"PyTorch takes {row}")


def main():
    import torch
    from torch.testing._internal import common_optimizers

    found = {"torch": torch.__version__, "inputs": {}, "errors": {}}
    for info in common_optimizers.optim_db:
        method = info.optim_cls.__name__
        if method in METHODS:
            found["inputs"][method] = [
                {"desc": k, "kwargs": _options(v), "weights": trained(method, v)}
                for k, v in inputs(info).items()
            ]
            found["errors"][method] = list(errors(info))
    lines = {
        kind: ",\n".join(
            f"{json.dumps(method)}: [\n" + ",\n".join(json.dumps(row) for row in rows) + "]"
            for method, rows in found[kind].items()
        )
        for kind in ("inputs", "errors")
    }
    body = ",\n".join(f'"{kind}": {{\n{text}}}' for kind, text in lines.items())
    DATA.write_text(f'{{"torch": "{found["torch"]}",\n{body}}}\n')


if __name__ == "__main__":
    main()
