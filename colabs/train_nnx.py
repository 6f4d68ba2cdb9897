"""Train a flax nnx model.

An `nnx.Optimizer` trains a network by 8-bit Adam, with norms to watch and checkpoints by orbax. The
data are scikit-learn's digits. Install `flax`, `orbax-checkpoint` and `scikit-learn`, and run
`python colabs/train_nnx.py`. Stop it whenever you like: the same command goes on from the last
checkpoint, and ends with exactly the weights of an unbroken run. Delete the folder to start anew.

`nnx.Optimizer` accepts any optax transformation, so you change only the line that makes `TX`. Here
the kernels of `a` and `b` have moments in 8 bits; leaves under 4096 elements stay in float32.

`wrt=nnx.Param` names the variables to train, since batch statistics and random keys are variables,
too. `watch` measures norms in every 50th compiled step, and `jgrad.report` reads them by name.

To go on from a run of optax with its moments, make the new optimizer, then call
`state, account = jgrad.carry_over(old.opt_state, like=new.opt_state)` and
`nnx.update(new.opt_state, nnx.state(state))`.
"""

import pathlib
import sys

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jgrad

STEPS = 600
RATE = optax.cosine_decay_schedule(2e-3, STEPS)
TX = jgrad.watch(jgrad.adam(RATE, weight_decay=0.01, moment_dtype="8bit"), every=50)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        sizes = (64, 256), (256, 256), (256, 10)
        self.a, self.b, self.c = (nnx.Linear(m, n, rngs=rngs) for m, n in sizes)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.c(nnx.relu(self.b(nnx.relu(self.a(x / 16)))))


def loss_of(model: Model, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


@nnx.jit(donate_argnums=(0, 1))  # new arrays take the memory of the old
def step(model: Model, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
    optimizer.update(model, grads)
    return loss


def train(folder: str = "nnx_checkpoints", steps: int = STEPS):
    x, x_test, y, y_test = train_test_split(*load_digits(return_X_y=True), random_state=0)
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    with ocp.CheckpointManager(pathlib.Path(folder).absolute()) as files:
        if done := files.latest_step() or 0:
            like = ocp.args.StandardRestore(nnx.state((model, optimizer)))
            nnx.update((model, optimizer), files.restore(done, args=like))
            print(f"going on after step {done}")
        for i in range(done + 1, steps + 1):
            rows = np.random.default_rng(i).integers(len(x), size=128)
            loss = step(model, optimizer, x[rows], y[rows])
            if i % 100 == 0:
                report = {k: float(v[...]) for k, v in jgrad.report(optimizer.opt_state).items()}
                print(f"step {i}: loss {loss:.4f}, update / weights {report['update_ratio']:.1e}")
                files.save(i, args=ocp.args.StandardSave(nnx.state((model, optimizer))))
    accuracy = float(np.mean(model(x_test).argmax(1) == y_test))
    print(f"test accuracy {accuracy:.1%}")
    return model, optimizer, accuracy


if __name__ == "__main__":
    train(*sys.argv[1:2])
