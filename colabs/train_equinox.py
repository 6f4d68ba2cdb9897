"""Train an equinox model.

`eqx.filter_jit` compiles the step of a whole model, which 8-bit Adam trains. The data are
scikit-learn's digits. Install `equinox` and `scikit-learn`, and run
`python colabs/train_equinox.py`. Run it again, and it goes on from the last checkpoint, to exactly
the weights of an unbroken run. Delete the folder of checkpoints to start anew.

An equinox model is a pytree, but some of its leaves are not arrays, such as the activation. `init`
is therefore given `eqx.filter(model, eqx.is_inexact_array)`, which has None in their place, and
`eqx.filter_value_and_grad` returns gradients of the same form. `update` may be given the whole
model, since jgrad leaves alone what has no gradient. Do pass it: some examples for optax call
`update(grads, state)`, but weight decay and `watch` have to read the weights.

Adam's moments are stored in 8 bits in every leaf of at least 4096 elements, here in the weights of
the first two layers. The other leaves stay in float32.

`eqx.filter_jit(donate="all")` lets new arrays take the memory of the old. A model that you have
passed is gone afterwards, so use the one that is returned. `eqx.tree_serialise_leaves` writes the
number of the step, the model and the state to one file. The file is written beside the old one and
then renamed: whenever the run is killed, a whole checkpoint is there.
"""

import pathlib
import sys
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jgrad

STEPS = 600
RATE = optax.cosine_decay_schedule(2e-3, STEPS)
TX = jgrad.adam(RATE, weight_decay=0.01, moment_dtype="8bit")


def loss_of(model: eqx.Module, x: jax.Array, y: jax.Array) -> jax.Array:
    scores = jax.vmap(model)(x / 16)
    return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()


@eqx.filter_jit(donate="all")
def step(model: eqx.Module, state: Any, x: np.ndarray, y: np.ndarray) -> tuple[Any, ...]:
    loss, grads = eqx.filter_value_and_grad(loss_of)(model, x, y)
    updates, state = TX.update(grads, state, model)
    return eqx.apply_updates(model, updates), state, loss


def train(folder: str = "equinox_checkpoints", steps: int = STEPS):
    x, x_test, y, y_test = train_test_split(*load_digits(return_X_y=True), random_state=0)
    model = eqx.nn.MLP(64, 10, width_size=256, depth=2, key=jax.random.key(0))
    state, done = TX.init(eqx.filter(model, eqx.is_inexact_array)), 0
    file, new = (pathlib.Path(folder, name) for name in ("digits.eqx", "new.eqx"))
    file.parent.mkdir(exist_ok=True)
    if file.exists():
        done, model, state = eqx.tree_deserialise_leaves(file, (done, model, state))
        print(f"going on after step {done}")
    for i in range(done + 1, steps + 1):
        rows = np.random.default_rng(i).integers(len(x), size=128)
        model, state, loss = step(model, state, x[rows], y[rows])
        if i % 100 == 0:
            print(f"step {i}: loss {loss:.4f}")
            eqx.tree_serialise_leaves(new, (i, model, state))
            new.replace(file)
    accuracy = float(np.mean(jax.vmap(model)(x_test / 16).argmax(1) == y_test))
    print(f"test accuracy {accuracy:.1%}")
    return model, state, accuracy


if __name__ == "__main__":
    train(*sys.argv[1:2])
