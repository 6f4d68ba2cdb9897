"""Train a flax linen model.

A `TrainState` trains a convolutional network by 8-bit Adam with accumulated gradients. The data are
scikit-learn's digits. Install `flax`, `orbax-checkpoint` and `scikit-learn`, and run
`python colabs/train_linen.py`. Run it again, and it goes on from the last checkpoint, to exactly
the weights of an unbroken run. Delete the folder of checkpoints to start anew.

Any optax transformation may be the `tx`. This one averages the gradients of two mini-batches, skips
steps whose gradients are not finite, and stores moments in 8 bits where a leaf has at least 4096
elements. The optimizer counts its updates, here half as many as the calls that `state.step` counts,
and gives that number to a schedule, so plan schedules in updates.

`apply_gradients` passes only gradients to `tx.update`. For a wrapper that needs more, such as the
loss for `skip_spikes`, call `state.tx.update` yourself, and keep the results by `state.replace`.
"""

import functools
import pathlib
import sys

import flax.linen as nn
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jgrad

STEPS, EVERY = 400, 2
RATE = optax.cosine_decay_schedule(3e-3, STEPS // EVERY)
ADAM = jgrad.adam(RATE, weight_decay=0.01, moment_dtype="8bit")
TX = jgrad.skip_nonfinite(jgrad.accumulate(ADAM, every=EVERY))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(-1, 8, 8, 1) / 16
        for width in 16, 32:
            x = nn.max_pool(nn.relu(nn.Conv(width, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x.reshape(len(x), -1))))


@functools.partial(jax.jit, donate_argnums=0)  # new arrays take the memory of the old
def step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_of(params: optax.Params) -> jax.Array:
        scores = state.apply_fn(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


def train(folder: str = "linen_checkpoints", steps: int = STEPS):
    x, x_test, y, y_test = train_test_split(*load_digits(return_X_y=True), random_state=0)
    model = Model()
    params = model.init(jax.random.key(0), x[:1])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=TX)
    with ocp.CheckpointManager(pathlib.Path(folder).absolute()) as files:
        if done := files.latest_step() or 0:
            state = files.restore(done, args=ocp.args.StandardRestore(state))
            print(f"going on after call {done}")
        for i in range(done + 1, steps + 1):
            rows = np.random.default_rng(i).integers(len(x), size=128)
            state, loss = step(state, x[rows], y[rows])
            if i % 100 == 0:
                updates = optax.tree.get(state.opt_state, "step")  # through all wrappers
                print(f"call {state.step}, update {updates}: loss {loss:.4f}")
                files.save(i, args=ocp.args.StandardSave(state))
    accuracy = float(np.mean(model.apply(state.params, x_test).argmax(1) == y_test))
    print(f"test accuracy {accuracy:.1%}")
    return state, accuracy


if __name__ == "__main__":
    train(*sys.argv[1:2])
