"""Steps of AlgoPerf's leading submission, kept in `tests/data/algoperf_steps.npz`.

    python -m tests.pages.examples.algoperf_steps PATH

where PyTorch and NumPy are installed, and PATH is a checkout of
github.com/mlcommons/submissions_algorithms at 12c8e4ea, writes the file. Its
`schedule_free_adamw_v2/submission.py` is run as it is, in float64, on a miniature of the benchmark's
MNIST workload (algoperf/workloads/mnist of mlcommons/algorithmic-efficiency at 2c90454f): the same
calls and loss, 12 inputs, 8 sigmoids and 5 classes, and 400 steps hinted at, 6 of them a warm-up. The
file has the parameters after each step in `SHOWN`, which are those that are evaluated.
"""

import enum
import importlib.util
import pathlib
import sys
import types

import numpy as np

DATA = pathlib.Path(__file__).parents[2] / "data" / "algoperf_steps.npz"
SHOWN = (1, 2, 6, 7, 20)
STEP_HINT = 400
SHAPES = {"Dense_0": {"kernel": (12, 8), "bias": (8,)}, "Dense_1": {"kernel": (8, 5), "bias": (5,)}}


class ForwardPassMode(enum.Enum):
    TRAIN = 0
    EVAL = 1


def interface():
    """What submissions import of the benchmark."""
    spec = types.ModuleType("algoperf.spec")
    spec.ForwardPassMode = ForwardPassMode
    names = "Workload ParameterContainer ParameterTypeTree ModelAuxiliaryState Hyperparameters"
    names += " RandomState OptimizerState UpdateReturn Tensor LossType"
    vars(spec).update(dict.fromkeys(names.split(), object))
    utils = types.ModuleType("algoperf.pytorch_utils")
    utils.pytorch_setup = lambda: (False, 0, "cpu", 0)
    package = types.ModuleType("algoperf")
    package.spec = spec
    return {"algoperf": package, "algoperf.spec": spec, "algoperf.pytorch_utils": utils}


def problem():
    """First parameters, and the batches; every third has two examples that do not count."""
    draws = np.random.RandomState(0)
    params = {
        layer: {name: draws.randn(*shape) for name, shape in shapes.items()}
        for layer, shapes in SHAPES.items()
    }
    batches = []
    for i in range(SHOWN[-1]):
        batch = {"inputs": draws.randn(16, 12), "targets": draws.randint(5, size=16)}
        batches.append(batch | ({"weights": np.arange(16) < 14} if i % 3 == 2 else {}))
    return params, batches


def submission(path):
    found = importlib.util.spec_from_file_location("submission", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def trained(path):
    """The parameters after the steps in `SHOWN`, in the order of `SHAPES`."""
    import torch
    import torch.nn.functional as F

    sys.modules.update(interface())
    theirs = submission(path)
    params, batches = problem()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(
                torch.nn.Linear(*shapes["kernel"], dtype=torch.float64)
                for shapes in SHAPES.values()
            )

        def forward(self, x):
            return self.layers[1](torch.sigmoid(self.layers[0](x)))

    class Workload:
        step_hint = STEP_HINT

        def model_fn(self, params, augmented_and_preprocessed_input_batch, model_state, **_):
            return params(augmented_and_preprocessed_input_batch["inputs"]), None

        def loss_fn(self, label_batch, logits_batch, mask_batch, label_smoothing):
            losses = F.cross_entropy(
                logits_batch, label_batch, reduction="none", label_smoothing=label_smoothing
            )
            mask = torch.ones_like(losses) if mask_batch is None else mask_batch
            return {"summed": (losses * mask).sum(), "n_valid_examples": mask.sum()}

    model, workload = Model(), Workload()
    for layer, values in zip(model.layers, params.values(), strict=True):
        layer.weight.data = torch.tensor(values["kernel"].T.copy())
        layer.bias.data = torch.tensor(values["bias"])
    state = theirs.init_optimizer_state(workload, model, None, None, None)
    found = {}
    for i, batch in enumerate(batches, 1):
        batch = {name: torch.tensor(x) for name, x in batch.items()}
        args = workload, model, None, None, None, batch, None, state, [], i - 1, None
        state, model, _ = theirs.update_params(*args)
        if i in SHOWN:
            arrays = [x.detach().numpy() for y in model.layers for x in (y.weight.T, y.bias)]
            found[str(i)] = np.concatenate([x.ravel() for x in arrays])
    return found


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1]) / "submissions/self_tuning/schedule_free_adamw_v2"
    np.savez_compressed(DATA, **trained(folder / "submission.py"))
