"""Steps of Adafactor, SOAP and Dion as others have them, kept in `tests/data/upstream_methods.npz`.

    python3.13 -m venv scratch
    scratch/bin/pip install torch==2.14.1 heavyball==3.2.1 emerging-optimizers==0.3.0 pytorch-optimizer==4.1.0
    git clone https://github.com/nikhilvyas/SOAP scratch/soap
    git clone https://github.com/microsoft/dion scratch/dion && git -C scratch/dion checkout 0a059a4
    PYTHONPATH=scratch/soap:scratch/dion:$PWD scratch/bin/python -m tests.pages.upstream_methods

writes the file: for each of `ROWS` its leaves after the updates in `SHOWN`, one after the other. All runs in
float64: where a file names float32 or bfloat16, it is given float64 for it, and none is compiled.
"""

import contextlib
import importlib
import pathlib
from unittest import mock

import numpy as np

DATA = pathlib.Path(__file__).parents[1] / "data" / "upstream_methods.npz"
SHOWN = (1, 2, 11, 25)
SHAPES = {
    "wide": (3, 4), "tall": (6, 5), "square": (4, 4), "long": (3, 8), "stack": (2, 3, 4), "bias": (7,),
}  # fmt: skip
MATRICES = ("wide", "tall", "square", "long")
# Of these, no first factor has a null space of two dimensions, where eigenvectors are arbitrary.
NEARLY_SQUARE = ("wide", "tall", "square")

RATE, DECAY, EPSILON = 1 / 16, 1 / 8, 1 / 1024
_RATES = {"lr": RATE, "weight_decay": DECAY}
_SOAP = _RATES | {"betas": (7 / 8, 15 / 16), "shampoo_beta": 31 / 32, "eps": EPSILON}
_DION = _RATES | {"fraction": 0.4, "adjust_lr": None}

# By name: (module, class, options, leaves).
ROWS: dict[str, tuple[str, str, dict, tuple[str, ...]]] = {
    "adafactor": ("torch.optim", "Adafactor", {"lr": 1 / 4}, (*MATRICES, "stack", "bias")),
    "adafactor, decay": ("torch.optim", "Adafactor",
     _RATES | {"beta2_decay": -0.5, "eps": (1 / 64, 1.0), "d": 1.25}, (*MATRICES, "stack", "bias")),
    "soap, authors": ("soap", "SOAP", _SOAP | {"precondition_frequency": 10, "max_precond_dim": 6},
     (*MATRICES, "bias")),
    "soap, authors, every 3": ("soap", "SOAP", _SOAP | {"precondition_frequency": 3}, NEARLY_SQUARE),
    "soap, pytorch-optimizer": ("pytorch_optimizer.optimizer.soap", "SOAP",
     _SOAP | {"precondition_frequency": 10, "max_precondition_dim": 6}, (*MATRICES, "bias")),
    "soap, heavyball": ("heavyball", "SOAP",
     _SOAP | {"precondition_frequency": 8, "max_precond_dim": 6, "merge_dims": False, "eps": 1e-30},
     (*MATRICES, "bias")),
    "soap, emerging": ("emerging_optimizers.soap.soap", "SOAP",
     _SOAP | {"fp32_matmul_prec": "highest", "qr_fp32_matmul_prec": "highest"}, NEARLY_SQUARE),
    "dion2": ("dion.dion2", "Dion2", _DION | {"ef_decay": 7 / 8}, (*MATRICES, "stack")),
    "dion2, spectral": ("dion.dion2", "Dion2", _DION | {"ef_decay": 7 / 8, "adjust_lr": "spectral_norm"},
     MATRICES),
    "dion3": ("dion.nordion2", "NorDion2", _DION | {"mu": 7 / 8, "muon_beta2": 15 / 16}, (*MATRICES, "stack")),
}  # fmt: skip


def problem(leaves):
    """First weights, and the gradients."""
    draws = np.random.RandomState(0)
    draw = lambda: {name: draws.randn(*shape) for name, shape in SHAPES.items()}
    every = [draw() for _ in range(1 + SHOWN[-1])]
    first, *grads = [{name: x[name] for name in leaves} for x in every]
    return first, grads


def newton_schulz(x, epsilon=None):
    """Keller Jordan's, in the dtype of the matrix."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def in_float64(narrow):
    """Where functions are not compiled, and dtypes of these names are float64."""
    import torch

    patches = contextlib.ExitStack()
    patch = lambda owner, name, value: patches.enter_context(mock.patch.object(owner, name, value))
    patch(torch, "compile", lambda f=None, **_: f if f is not None else lambda f: f)
    for name in narrow:
        patch(torch, name, torch.float64)
    if narrow:
        patch(torch.Tensor, "float", torch.Tensor.double)
    return patches


def trained(module, name, options, leaves):
    """The leaves after the updates in `SHOWN`."""
    import torch

    torch.set_default_dtype(torch.float64)
    narrow = ["float32", "bfloat16"]
    if module == "heavyball":
        import heavyball

        narrow, heavyball.utils.compile_mode = [], None
        options = options | {"storage_dtype": "float64"}
    if module.startswith("dion"):
        options = options | {"newton_schulz_func": newton_schulz}
    weights, grads = problem(leaves)
    params = [torch.nn.Parameter(torch.tensor(x)) for x in weights.values()]
    found = []
    with in_float64(narrow):
        optimizer = getattr(importlib.import_module(module), name)(params, **options)
        for i, g in enumerate(grads, 1):
            for p, x in zip(params, g.values(), strict=True):
                p.grad = torch.tensor(x)
            optimizer.step()
            if i in SHOWN:
                found.append(np.concatenate([p.detach().numpy().ravel() for p in params]))
    return np.array(found)


if __name__ == "__main__":
    np.savez_compressed(DATA, **{name: trained(*row) for name, row in ROWS.items()})
