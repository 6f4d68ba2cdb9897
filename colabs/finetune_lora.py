"""Fine-tune a frozen model with LoRA.

Adapters of rank 4 teach a frozen network to read digits upside down. Here `pretrained` trains it;
you would read yours from a file. Install `flax`, `orbax-checkpoint` and `scikit-learn`, and run
`python colabs/finetune_lora.py`. Run it again, and it goes on from the last checkpoint.

What is frozen has no gradient, no moments and no place in the checkpoint, since `nnx.DiffState`,
`nnx.Optimizer` and `nnx.state` are given `nnx.LoRAParam`. `nnx.Param` would train everything, since
`LoRAParam` is a subclass of it. Clipping and weight decay need no mask: they never see frozen
leaves. Where updates are discarded instead, their gradients still count in the clipped norm.

An adapter adds `x @ a @ b` to what its layer returns, and `b` begins at zero. In LoRA+ (Hayou et
al., 2024) `b` learns 16 times as fast as `a`, so `jgrad.by_path` gives each its learning rate.
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

STEPS, SAVED = 400, nnx.Any(nnx.LoRAParam, nnx.OptState)
RATES = jgrad.by_path({"**/lora_a": 2e-3, "**/lora_b": 32e-3})
TX = optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.adam(RATES, weight_decay=0.01))


def loss_of(model: nnx.Module, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x / 16), y).mean()


@nnx.jit(static_argnames="wrt")
def step(model: nnx.Module, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array, wrt: type):
    loss, grads = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, wrt))(model, x, y)
    optimizer.update(model, grads)
    return loss


def pretrained(x: np.ndarray, y: np.ndarray) -> nnx.Sequential:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(64, 256, rngs=rngs), nnx.relu, nnx.Linear(256, 10, rngs=rngs))
    optimizer = nnx.Optimizer(model, jgrad.adam(2e-3), wrt=nnx.Param)
    for i in range(150):
        step(model, optimizer, x[i % 10 :: 10], y[i % 10 :: 10], wrt=nnx.Param)
    return model


def train(folder: str = "lora_checkpoints", steps: int = STEPS):
    x, x_test, y, y_test = train_test_split(*load_digits(return_X_y=True), random_state=0)
    model = pretrained(x, y)
    x, x_test = x[:, ::-1], x_test[:, ::-1]  # upside down
    print(f"test accuracy {np.mean(model(x_test / 16).argmax(1) == y_test):.1%} without adapters")
    model.layers[0] = nnx.LoRA(64, 4, 256, base_module=model.layers[0], rngs=nnx.Rngs(0))
    model.layers[2] = nnx.LoRA(256, 4, 10, base_module=model.layers[2], rngs=nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.LoRAParam)
    with ocp.CheckpointManager(pathlib.Path(folder).absolute()) as files:
        if done := files.latest_step() or 0:
            like = ocp.args.StandardRestore(nnx.state((model, optimizer), SAVED))
            nnx.update((model, optimizer), files.restore(done, args=like))
            print(f"going on after step {done}")
        for i in range(done + 1, steps + 1):
            rows = np.random.default_rng(i).integers(len(x), size=128)
            loss = step(model, optimizer, x[rows], y[rows], wrt=nnx.LoRAParam)
            if i % 100 == 0:
                print(f"step {i}: loss {loss:.4f}")
                files.save(i, args=ocp.args.StandardSave(nnx.state((model, optimizer), SAVED)))
    accuracy = float(np.mean(model(x_test / 16).argmax(1) == y_test))
    print(f"test accuracy {accuracy:.1%}")
    return model, optimizer, accuracy


if __name__ == "__main__":
    train(*sys.argv[1:2])
