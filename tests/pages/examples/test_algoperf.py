"""The submission of `studies/algoperf`, on a miniature of the benchmark's MNIST workload."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.pages.examples import algoperf_steps
from tests.pages.examples.algoperf_steps import SHOWN

ROOT = algoperf_steps.DATA.parents[2]
with np.load(algoperf_steps.DATA) as _data:
    THEIRS = dict(_data)


class Workload:
    """As `algoperf/workloads/mnist/mnist_jax/workload.py`; it also counts how often it is traced."""

    step_hint = algoperf_steps.STEP_HINT

    def __init__(self):
        self.traced = []

    def model_fn(
        self,
        params,
        augmented_and_preprocessed_input_batch,
        model_state,
        mode,
        rng,
        update_batch_norm,
        dropout_rate=0.0,
    ):
        assert mode is algoperf_steps.ForwardPassMode.TRAIN
        self.traced.append(update_batch_norm)
        x = augmented_and_preprocessed_input_batch["inputs"]
        first, second = params["Dense_0"], params["Dense_1"]
        x = jax.nn.sigmoid(x @ first["kernel"] + first["bias"][None])
        if model_state is not None:  # what normalization would keep
            model_state = {"mean": x.mean(0)} if update_batch_norm else model_state
        return x @ second["kernel"] + second["bias"][None], model_state

    def loss_fn(self, label_batch, logits_batch, mask_batch=None, label_smoothing=0.0):
        targets = optax.smooth_labels(jax.nn.one_hot(label_batch, 5), label_smoothing)
        losses = -jnp.sum(targets * jax.nn.log_softmax(logits_batch), axis=-1)
        mask = jnp.ones(len(losses)) if mask_batch is None else mask_batch
        return {"summed": (losses * mask).sum(), "n_valid_examples": mask.sum()}


@pytest.fixture
def submission(monkeypatch):
    for name, module in algoperf_steps.interface().items():
        monkeypatch.setitem(sys.modules, name, module)
    return algoperf_steps.submission(ROOT / "studies/algoperf/submission.py")


def trained(submission, workload, model_state=None):
    """As the benchmark's runner does it: parameters and the model's state after each step."""
    params, batches = jax.tree.map(jnp.asarray, algoperf_steps.problem())
    state = submission.init_optimizer_state(workload, params, model_state, None, None)
    queue = iter(batches)
    for i in range(len(batches)):
        batch = submission.data_selection(
            workload, queue, state, params, model_state, None, i, None
        )
        args = workload, params, None, model_state, None, batch, None, state, [], i, None
        state, params, model_state = submission.update_params(*args)
        args = workload, params, None, model_state, None, None, state, [], i, None
        state, params, model_state = submission.prepare_for_eval(*args)
        yield params, model_state


def flat(params):
    shapes = algoperf_steps.SHAPES
    return np.concatenate([np.ravel(params[x][y]) for x in shapes for y in shapes[x]])


def test_steps_of_the_leader(submission, x64, standard_promotion):
    """What is evaluated is the leader's after each step, in a warm-up and behind it."""
    workload = Workload()
    found = list(trained(submission, workload))
    assert sorted(map(int, THEIRS)) == list(SHOWN)
    for i in SHOWN:
        np.testing.assert_allclose(flat(found[i - 1][0]), THEIRS[str(i)], rtol=1e-12, atol=1e-13)
    assert len(workload.traced) == 2  # batches with and without weights


def test_statistics_are_taken_at_the_average(submission, x64, standard_promotion):
    """In every third step, as there: these are the parameters that are evaluated."""
    start = {"mean": jnp.zeros(8)}
    found = list(trained(submission, Workload(), start))
    params, batches = algoperf_steps.problem()
    before = [params, *(params for params, _ in found)]
    for i, (_, statistics) in enumerate(found):
        last, w = i - i % 3, before[i - i % 3]["Dense_0"]
        x = batches[last]["inputs"] @ np.asarray(w["kernel"]) + np.asarray(w["bias"])
        np.testing.assert_allclose(statistics["mean"], (1 / (1 + np.exp(-x))).mean(0), rtol=1e-9)
