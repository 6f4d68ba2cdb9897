"""Train a flax nnx model on a mesh.

Weights and their 8-bit moments are sharded by the names of mesh axes that you give to kernels. The
mesh is two devices for the batch by two for the layers, and the data are scikit-learn's digits.
Install `flax>=0.12`, `orbax-checkpoint` and `scikit-learn`, and run
`python colabs/train_sharded_nnx.py`. A CPU becomes four virtual devices; with a single GPU, set
`JAX_PLATFORMS=cpu`. Run it again, and it goes on from the last checkpoint, on a mesh of any shape.

`nnx.with_partitioning` names the axes beside each kernel. A moment in 8 bits is two variables. Its
codes are sharded as the weights are, and its scales along all axes but the last, where 256 elements
share one scale. So shard the last axis over n devices only if its length is a multiple of 256 n, as
in layer 0, or shard another axis, as in layer 2. Then 8 bits need no further communication.

Under `jax.set_mesh`, flax puts each variable where its names say. `create` is compiled, so that no
kernel is ever whole on one device. `nnx.get_named_sharding` reads the names of model and optimizer
alike, for whatever else needs shardings.
"""

import os
import sys

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jgrad

STEPS = 300
TX = jgrad.adam(optax.cosine_decay_schedule(3e-3, STEPS), moment_dtype="8bit")


@nnx.jit
def create() -> tuple[nnx.Sequential, nnx.Optimizer]:
    rngs, init = nnx.Rngs(0), nnx.initializers.lecun_normal()
    wide, narrow = (nnx.with_partitioning(init, x) for x in ((None, "model"), ("model", None)))
    first = nnx.Linear(64, 512, rngs=rngs, kernel_init=wide)
    model = nnx.Sequential(first, nnx.relu, nnx.Linear(512, 10, rngs=rngs, kernel_init=narrow))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def loss_of(model: nnx.Sequential, x: jax.Array, y: jax.Array) -> jax.Array:
    scores = model(jax.lax.with_sharding_constraint(x / 16, jax.P("data")))
    return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()


@nnx.jit(donate_argnums=(0, 1))  # new arrays take the memory of the old
def step(model: nnx.Sequential, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
    optimizer.update(model, grads)
    return loss


def train(folder: str = "sharded_checkpoints", steps: int = STEPS, shape=(2, 2)):
    x, x_test, y, y_test = train_test_split(*load_digits(return_X_y=True), random_state=0)
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), ocp.CheckpointManager(os.path.abspath(folder)) as files:
        model, optimizer = create()
        if done := files.latest_step() or 0:
            like = ocp.args.StandardRestore(nnx.state((model, optimizer)))
            nnx.update((model, optimizer), files.restore(done, args=like))
        for i in range(done + 1, steps + 1):
            rows = np.random.default_rng(i).integers(len(x), size=128)
            loss = step(model, optimizer, x[rows], y[rows])
            if i % 100 == 0:
                print(f"step {i}: loss {loss:.4f}")
                files.save(i, args=ocp.args.StandardSave(nnx.state((model, optimizer))))
        accuracy = float(np.mean(model(x_test / 16).argmax(1) == y_test))
    print(f"test accuracy {accuracy:.1%}, shardings of a moment's codes and scales:")
    print(*(v[...].sharding.spec for v in optimizer.opt_state.mw["layers"][0]["kernel"]))
    return model, optimizer, accuracy


if __name__ == "__main__":
    os.environ.setdefault("PJRT_NPROC", "8")  # virtual devices need more threads than their number
    jax.config.update("jax_num_cpu_devices", 4)
    train(*sys.argv[1:2])
