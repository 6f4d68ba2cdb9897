"""What PyTorch makes of the left columns of docs/from_elsewhere.md, kept in `tests/data/torch.json`.

    python -m tests.pages.torch_numbers

in an environment with PyTorch and NumPy writes the file. Weights `w` (2, 3) and `b` (3,) and six
gradients are drawn by NumPy's `RandomState(0)`, in float64, every second gradient a tenth as large. For
each row the file has the nine weights after each gradient, to 12 digits; of averages the averaged
weights; of `GradScaler`, whose third gradient is infinite, the scale as a tenth number; of Adam both
moments, as well. `DAMPENED` is a row that is no line of ours.
"""

import json
import pathlib
import re

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "torch.json"
STEPS = 6
DAMPENED = "torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5)"


def table():
    """(PyTorch's line, ours) of each row that is trained."""
    text = (ROOT / "docs" / "from_elsewhere.md").read_text()
    text = text.partition("\n## Optimizers\n")[2].partition("\n## Kernels and Muon\n")[0]
    rows = re.findall(r"^\| (.+?) \| `(.+?)`", text, re.MULTILINE)
    return [(theirs.strip("`"), ours) for theirs, ours in rows]


def problem():
    """First weights, and the gradients."""
    draws = np.random.RandomState(0)
    draw = lambda: {"w": draws.randn(2, 3), "b": draws.randn(3)}
    weights = draw()
    grads = [draw() for _ in range(STEPS)]
    return weights, [
        {k: x / (10 if i % 2 else 1) for k, x in g.items()} for i, g in enumerate(grads)
    ]


def trained(line):
    """Numbers after each gradient, by a line of the table."""
    import torch

    weights, grads = problem()
    model = torch.nn.Module()
    for name, x in weights.items():
        model.register_parameter(name, torch.nn.Parameter(torch.tensor(x)))
    w, b = params = [model.w, model.b]
    names = vars(torch.optim.swa_utils) | {"torch": torch, "params": params, "w": w, "b": b}
    names["model"] = model
    sgd = names["sgd"] = torch.optim.SGD(params, lr=0.1)
    # Made before the first step: an optimizer, a schedule, an average or a scaler.
    made = None if line.startswith(("torch.nn", "(loss")) else eval(line, names)
    optimizer = made if isinstance(made, torch.optim.Optimizer) else sgd
    found = []
    for i, g in enumerate(grads):
        for p, x in zip(params, (g["w"], g["b"]), strict=True):
            p.grad = torch.tensor(x) if p.grad is None else p.grad
            p.grad.copy_(torch.tensor(x))
        shown = [w, b]
        if line.startswith("torch.nn"):
            eval(line, names)
        if isinstance(made, torch.amp.GradScaler):
            scale = made.scale(torch.ones((), dtype=torch.float64))
            for p in params:
                p.grad *= scale if i != 2 else torch.inf
            made.step(sgd)
            made.update()
            shown.append(torch.tensor(made.get_scale()))
        elif line.startswith("(loss"):
            halves = [[torch.tensor(x[k]) / 2 for k in ("w", "b")] for x in grads[i - 1 : i + 1]]
            if i % 2:
                for p, old, new in zip(params, *halves, strict=True):
                    p.grad = old + new
                sgd.step()
        else:
            optimizer.step()
        if isinstance(made, torch.optim.lr_scheduler.LRScheduler):
            made.step()
        if isinstance(made, torch.optim.swa_utils.AveragedModel):
            made.update_parameters(model)
            shown = [made.module.w, made.module.b]
        if type(made) is torch.optim.Adam:
            kinds = ("exp_avg", "exp_avg_sq")
            shown += [made.state[p][kind] for kind in kinds for p in params]
        found.append([float(f"{x:.12g}") for p in shown for x in p.detach().reshape(-1).tolist()])
    return found


if __name__ == "__main__":
    rows = {line: trained(line) for line in (*dict(table()), DAMPENED)}
    lines = (f"{json.dumps(line)}: {json.dumps(numbers)}" for line, numbers in rows.items())
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n")
