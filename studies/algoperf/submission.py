"""Schedule-free AdamW for AlgoPerf in JAX: each step is that of the leading PyTorch submission.

That submission is `schedule_free_adamw_v2`, first under the self-tuning rules of leaderboard 0.6
(github.com/mlcommons/submissions_algorithms at 12c8e4ea). AlgoPerf's runner is given this file:

    python submission_runner.py --framework=jax --tuning_ruleset=self \\
        --submission_path=.../submission.py --workload=mnist --experiment_dir=... --data_dir=...

The parameters that the runner holds are the average, as there, so it evaluates them as they are.
The point at which the gradient is taken is computed from the state in each step.
"""

import functools

import jax
import jax.numpy as jnp
from algoperf import spec
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jgrad

LEARNING_RATE = 0.0025
BETA = 0.9
BETA2 = 0.9955159689799007
EPSILON = 1e-8
WEIGHT_DECAY = 0.08121616522670176
WARMUP = 0.02 * 0.75  # of the steps that a workload hints at
LABEL_SMOOTHING = 0.2

BATCH_SIZES = {
    "criteo1tb": 262_144,
    "fastmri": 16,
    "imagenet_resnet": 1024,
    "imagenet_resnet_gelu": 512,
    "imagenet_resnet_silu": 512,
    "imagenet_vit": 1024,
    "librispeech_conformer": 224,
    "librispeech_deepspeech": 128,
    "ogbg": 512,
    "wmt": 128,
    "finewebedu_lm": 64,
    "mnist": 16,
}


def get_batch_size(workload_name):
    return BATCH_SIZES[workload_name]


def schedule_free_adamw(warmup_steps):
    def rate(done):
        return LEARNING_RATE * jnp.minimum((done + 1) * (1 / max(warmup_steps, 1)), 1)

    def corrected(done):
        """The bias of the second moment is corrected here, and so in weight decay, too."""
        return rate(done) * jnp.sqrt(-jnp.expm1((done + 1) * jnp.log(BETA2)))

    adam = jgrad.adam(
        corrected,
        beta1=0.0,
        beta2=BETA2,
        epsilon=EPSILON,
        bias_correction=None,
        weight_decay=WEIGHT_DECAY,
    )
    return jgrad.schedule_free(adam, beta=BETA, learning_rate=rate)


def init_optimizer_state(workload, model_params, model_state, hyperparameters, rng):
    tx = schedule_free_adamw(int(WARMUP * workload.step_hint))
    return jitted(tx.init)(model_params), tx.update


@functools.cache
def jitted(function, static_argnums=()):
    """Everything but the batch is replicated over the devices."""
    replicated = NamedSharding(Mesh(jax.devices(), ("batch",)), PartitionSpec())
    return jax.jit(function, static_argnums=static_argnums, out_shardings=replicated)


def statistics_at(workload, params, model_state, batch, rng):
    """Those of batch normalization, at these parameters."""
    mode = spec.ForwardPassMode.TRAIN
    return workload.model_fn(params, batch, model_state, mode, rng, update_batch_norm=True)[1]


def train_step(workload, update, state, model_state, batch, rng):
    def loss(params):
        logits, new_model_state = workload.model_fn(
            params,
            batch,
            model_state,
            spec.ForwardPassMode.TRAIN,
            rng,
            update_batch_norm=False,
        )
        losses = workload.loss_fn(
            label_batch=batch["targets"],
            logits_batch=logits,
            mask_batch=batch.get("weights"),
            label_smoothing=LABEL_SMOOTHING,
        )
        return losses["summed"] / losses["n_valid_examples"], new_model_state

    y = jax.tree.map(lambda x, z: BETA * x + (1 - BETA) * z, state.average, state.z)
    grads, model_state = jax.grad(loss, has_aux=True)(y)
    _, state = update(grads, state, y)
    return state, state.average, model_state


def update_params(
    workload,
    current_param_container,
    current_params_types,
    model_state,
    hyperparameters,
    batch,
    loss_type,
    optimizer_state,
    eval_results,
    global_step,
    rng,
    train_state=None,
):
    state, update = optimizer_state
    if jax.tree.leaves(model_state) and global_step % 3 == 0:
        args = current_param_container, model_state, batch, rng
        model_state = jitted(statistics_at, 0)(workload, *args)
    step = jitted(train_step, (0, 1))
    state, params, model_state = step(workload, update, state, model_state, batch, rng)
    return (state, update), params, model_state


def prepare_for_eval(
    workload,
    current_param_container,
    current_params_types,
    model_state,
    hyperparameters,
    loss_type,
    optimizer_state,
    eval_results,
    global_step,
    rng,
):
    return optimizer_state, current_param_container, model_state


def data_selection(
    workload,
    input_queue,
    optimizer_state,
    current_param_container,
    model_state,
    hyperparameters,
    global_step,
    rng,
):
    return next(input_queue)
