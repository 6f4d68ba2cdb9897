"""Steps of the authors' implementations in PyTorch, kept in `tests/data/upstream_steps.npz`.

    python3 -m venv scratch && scratch/bin/pip install torch numpy schedulefree==1.4.1 heavyball==3.2.1 emerging-optimizers==0.3.0
    scratch/bin/python -m tests.pages.upstream_steps

writes the file; the last package asks for Python 3.12. Each of `ROWS` has the weights after the updates
in `SHOWN`, of schedule-free ones their averages, too. heavyball runs in float64 without its compiler,
schedulefree in float64; emerging-optimizers takes float32 alone. Weights, gradients and options are
float32 numbers, in which some of them keep their options.
"""

import functools
import pathlib
import typing

import numpy as np

DATA = pathlib.Path(__file__).parents[1] / "data" / "upstream_steps.npz"
SHOWN = (1, 2, 8)
SHAPES = {"wide": (3, 5), "tall": (6, 2), "square": (4, 4)}

_AVERAGED = {"lr": 1 / 8, "weight_decay": 1 / 8, "warmup_steps": 4}
_ADAMW = _AVERAGED | {"betas": (7 / 8, 63 / 64), "eps": 1e-30}
_MUON = {"lr": 1 / 16, "weight_decay": 1 / 8}
_EMERGING = _MUON | {"momentum": 7 / 8, "fp32_matmul_prec": "highest"}
_PLAIN = {"nesterov": True, "coefficient_type": "simple", "scale_mode": "shape_scaling"}
_HEAVY = _MUON | {"betas": (7 / 8, 63 / 64)}
_BALL = {"lr": 1 / 16, "weight_decay": 0.0}

# By name: (package, class, options).
ROWS: dict[str, tuple[str, str, dict]] = {
    "schedule-free, reference": ("schedulefree", "AdamWScheduleFreeReference", _ADAMW),
    "schedule-free, paper": ("schedulefree", "AdamWScheduleFreePaper", _ADAMW),
    "schedule-free, in place": ("schedulefree", "AdamWScheduleFree", _ADAMW),
    "schedule-free, power 1": ("schedulefree", "AdamWScheduleFree", _ADAMW | {"r": 1.0}),
    "schedule-free SGD": ("schedulefree", "SGDScheduleFree", _AVERAGED | {"momentum": 7 / 8}),
    # A warm-up of n is one of n + 1 there.
    "schedule-free, heavyball": ("heavyball", "SFAdamW", _ADAMW | {"warmup_steps": 3}),
    "schedule-free, heavyball, power 1": ("heavyball", "SFAdamW", _ADAMW | {"warmup_steps": 3, "r": 1.0}),
    "muon": ("emerging", "Muon", _EMERGING | _PLAIN),
    "muon, no nesterov": ("emerging", "Muon", _EMERGING | _PLAIN | {"nesterov": False}),
    "muon, quintic": ("emerging", "Muon", _EMERGING | _PLAIN | {"coefficient_type": "quintic"}),
    "muon, polar_express": ("emerging", "Muon", _EMERGING | _PLAIN | {"coefficient_type": "polar_express"}),
    "muon, deepseekv4": ("emerging", "Muon",
     _EMERGING | _PLAIN | {"coefficient_type": "deepseekv4", "num_ns_steps": 10}),
    "muon, spectral": ("emerging", "Muon", _EMERGING | _PLAIN | {"scale_mode": "spectral"}),
    "muon, unit_rms_norm": ("emerging", "Muon", _EMERGING | _PLAIN | {"scale_mode": "unit_rms_norm"}),
    "muon, bfloat16": ("emerging", "Muon", _EMERGING | _PLAIN | {"fp32_matmul_prec": "medium"}),
    "muon, heavyball": ("heavyball", "Muon", _HEAVY | {"heavyball_momentum": True}),
    "muon, heavyball, no nesterov": ("heavyball", "Muon", _HEAVY | {"nesterov": False}),
    "muon, heavyball, EMA": ("heavyball", "Muon", _HEAVY),
    "normuon": ("emerging", "AdaptiveMuon",
     _EMERGING | _PLAIN | {"moment2_method": "normuon", "beta2": 7 / 8, "scale_mode": "spectral"}),
    "hyperball": ("emerging", "MuonHyperball", _EMERGING | _PLAIN | _BALL),
    "hyperball, radius": ("emerging", "MuonHyperball", _EMERGING | _PLAIN | _BALL | {"hyperball_radius": 2.0}),
    "hyperball, heavyball": ("heavyball", "HyperBallAdamW", _BALL | {"betas": (7 / 8, 63 / 64), "eps": 1e-30}),
}  # fmt: skip


def problem():
    """First weights, and the gradients."""
    draws = np.random.RandomState(0)
    draw = lambda: {
        name: draws.randn(*shape).astype(np.float32).astype(np.float64)
        for name, shape in SHAPES.items()
    }
    return draw(), [draw() for _ in range(SHOWN[-1])]


def classes(package):
    """The names of a package, as it runs on a CPU."""
    if package == "heavyball":
        import heavyball

        heavyball.utils.compile_mode = None
        return heavyball
    if package == "schedulefree":
        import schedulefree

        return schedulefree
    if not hasattr(typing, "override"):  # before Python 3.12
        typing.override = lambda f: f
    from emerging_optimizers import orthogonalized_optimizers

    return orthogonalized_optimizers


def trained(package, name, options):
    """Weights after the updates in `SHOWN`, each with the averages if there are some."""
    import torch

    wide = package != "emerging"
    options = options | ({"storage_dtype": "float64"} if package == "heavyball" else {})
    weights, grads = problem()
    as_tensor = functools.partial(torch.tensor, dtype=torch.float64 if wide else torch.float32)
    params = [torch.nn.Parameter(as_tensor(x)) for x in weights.values()]
    optimizer = getattr(classes(package), name)(params, **options)
    shown = lambda: np.concatenate([p.detach().numpy().ravel() for p in params])
    averaged = "warmup_steps" in options
    found = []
    for i, g in enumerate(grads, 1):
        if averaged:
            optimizer.train()
        for p, x in zip(params, g.values(), strict=True):
            p.grad = as_tensor(x)
        optimizer.step()
        if i in SHOWN:
            found.append([shown()])
            if averaged:
                optimizer.eval()
                found[-1].append(shown())
    return np.array(found)


if __name__ == "__main__":
    np.savez_compressed(DATA, **{name: trained(*row) for name, row in ROWS.items()})
