"""The submission and PyTorch's, on AlgoPerf's own MNIST workloads, in float64.

    python -m studies.algoperf.mnist PATH

where `algoperf` is installed with JAX and PyTorch, and PATH is the `submission.py` of
`schedule_free_adamw_v2`. Both train 200 steps, 117 of them a warm-up, from the same parameters and
on the same batches, which are drawn: MNIST would have to be downloaded. Prints how far the
parameters moved, and the largest difference between them.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch._dynamo  # before TensorFlow, with which it cannot be loaded later
from algoperf.workloads.mnist.mnist_jax.workload import MnistWorkload as InJax
from algoperf.workloads.mnist.mnist_pytorch.workload import MnistWorkload as InTorch

from studies.algoperf import submission as ours
from tests.pages.examples import algoperf_steps

STEPS = 200


def batches(size):
    """Ten classes with noise, in the form of MNIST's."""
    draws = np.random.RandomState(0)
    means = draws.randn(10, 28, 28, 1)
    for _ in range(STEPS):
        targets = draws.randint(10, size=size)
        yield {"inputs": means[targets] + 2 * draws.randn(size, 28, 28, 1), "targets": targets}


def trained(submission, workload, params, as_array):
    state, model_state = submission.init_optimizer_state(workload, params, None, None, None), None
    for i, batch in enumerate(batches(submission.get_batch_size("mnist"))):
        batch = {k: as_array(x) for k, x in batch.items()}
        args = workload, params, None, model_state, None, batch, None, state, [], i, None
        state, params, model_state = submission.update_params(*args)
    return params


def main(path):
    jax.config.update("jax_enable_x64", True)
    workload = InJax()
    params, _ = workload.init_model_fn(jax.random.key(0))
    first = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    found = trained(ours, workload, jax.tree.map(jnp.asarray, first), jnp.asarray)

    workload = InTorch()
    model, _ = workload.init_model_fn([0])
    layers = {"Dense_0": "net.layer1", "Dense_1": "net.layer2"}
    model = model.double()
    values = {}
    for layer, name in layers.items():
        values[f"{name}.weight"] = torch.tensor(first[layer]["kernel"].T.copy())
        values[f"{name}.bias"] = torch.tensor(first[layer]["bias"])
    model.load_state_dict(values)
    theirs = trained(algoperf_steps.submission(path), workload, model, torch.tensor)
    values = {k: x.numpy() for k, x in theirs.state_dict().items()}
    for layer, name in layers.items():
        pairs = {"kernel": values[f"{name}.weight"].T, "bias": values[f"{name}.bias"]}
        for kind, x in pairs.items():
            moved = np.abs(x - first[layer][kind]).max()
            differs = np.abs(x - np.asarray(found[layer][kind])).max()
            print(f"{layer}.{kind}: moved by {moved:.3g}, differs by {differs:.3g}")


if __name__ == "__main__":
    main(sys.argv[1])
