"""Trains the digits with several processes, each with a share of the optimizer's state.

    python colabs/train_distributed.py

starts two processes on this machine. Each reads its part of every batch, and `jgrad.zero` averages
gradients and gives each a share of the state to keep and to update. Checkpoints are saved as
training goes; the same command goes on after the last one, also with another number of processes.
Sent SIGTERM, it saves before it ends, with the exit status 75: not done yet.

On two machines, a process on each with all of its accelerators, and a folder that both see; this is
the first of them, the other has `--first_process=1`:

    python colabs/train_distributed.py --processes=2 --local_processes=1 --first_process=0 \\
        --coordinator=first-machine:1234 --devices=0 --folder=/shared/digits

The processes of a machine are children of the command. When one of them is lost it ends the others,
and says what happened and how to go on, in the last line.
"""

# ruff: noqa: E402 (first what is missing)
import extras

extras.need("sklearn", "rich", "orbax")

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from absl import app, flags, logging
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.progress import Progress

import jgrad
import processes
from bits import digest
from checkpoints import CheckpointError, Checkpoints, check_settings, whole_steps
from digits import Digits, accuracy, init, load, loss

_PROCESSES = flags.DEFINE_integer("processes", 2, "Processes on all machines.", lower_bound=1)
_LOCAL = flags.DEFINE_integer(
    "local_processes", None, "Processes on this machine; all of them by default.", lower_bound=1
)
_FIRST = flags.DEFINE_integer("first_process", 0, "The first one here.", lower_bound=0)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "host:port of process 0; a free port of this machine by default."
)
_DEVICES = flags.DEFINE_integer(
    "devices",
    1,
    "Virtual CPU devices of each process; 0 for the accelerators that are there.",
    lower_bound=0,
)
_FOLDER = flags.DEFINE_string("folder", "digits_checkpoints", "Where checkpoints are.")
_STEPS = flags.DEFINE_integer("steps", 400, "Steps to train.", lower_bound=1)
_SAVE_EVERY = flags.DEFINE_integer("save_every", 100, "Steps between checkpoints.", lower_bound=1)
_LOG_EVERY = flags.DEFINE_integer("log_every", 100, "Steps between lines.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 256, "Digits in a batch.", lower_bound=1, upper_bound=1437)
_HIDDEN = flags.DEFINE_integer("hidden", 128, "Width of the two hidden layers.", lower_bound=1)
_RATE = flags.DEFINE_float("rate", 0.01, "Highest learning rate.", lower_bound=0)
_SEED = flags.DEFINE_integer("seed", 0, "Of the initial weights and the order of the digits.")
_PROCESS = flags.DEFINE_integer("process", None, "Which process this is; the command sets it.")

_AXIS = "data"


# ---- one process ---------------------------------------------------------------------------------


def train() -> bool:
    """Trains from the last checkpoint, or from the start; returns whether it came to its end."""
    checkpoints = Checkpoints(_FOLDER.value)
    done = checkpoints.latest() or 0
    about = {x.name: x.value for x in (_STEPS, _BATCH, _HIDDEN, _RATE, _SEED)}
    if done:
        check_settings(about, checkpoints.about(done), done)
    train_set, test_set = load()
    mesh = jax.make_mesh((jax.device_count(),), (_AXIS,), axis_types=(AxisType.Auto,))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, _RATE.value, _STEPS.value // 10, _STEPS.value
    )
    tx = optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.lamb(schedule, weight_decay=1e-4))
    tx = jgrad.zero(tx, _AXIS)
    params, state, step = start(tx, mesh)
    if done:
        params, state = checkpoints.restore((params, state), done)
        say(f"Going on after step {done}.")
    if asked_before(done + 1) and done < _STEPS.value:
        say_asked_to_end(f"before step {done + 1}")
        return False
    rows = NamedSharding(mesh, PartitionSpec(_AXIS))
    whole = functools.partial(jax.make_array_from_process_local_data, rows)
    if done < _STEPS.value:
        first = min(_STEPS.value, (done // _SAVE_EVERY.value + 1) * _SAVE_EVERY.value)
        say(f"Compiling the train step. The next checkpoint is saved after step {first}.")
    with progress() as advance:
        advance(done)
        for i, batch in enumerate(batches(train_set, done), done + 1):
            params, state, value = step(params, state, jax.tree.map(whole, batch))
            jax.block_until_ready(value)  # a process that is lost is seen here
            advance(i)
            if i % _LOG_EVERY.value == 0:
                say(f"step {i}: loss {value:.4f}")
            stops = multihost_utils.reached_preemption_sync_point(i)
            if stops or i % _SAVE_EVERY.value == 0 or i == _STEPS.value:
                check_equal(params)
                checkpoints.save(i, (params, state), about=about)
            if stops and i < _STEPS.value:
                say_asked_to_end(f"saved step {i}")
                return False
    found = accuracy(jgrad.unpack(jax.device_get(params)), test_set)
    say(f"Test accuracy {found:.1%}.")
    print(f"process {jax.process_index()}: parameters {digest(params)}", flush=True)
    return True


def start(
    tx: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> tuple[jgrad.Packed, Any, Callable[..., Any]]:
    """Parameters on every device, their state in shares, and a train step."""

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, PartitionSpec()))
    def packed() -> jgrad.Packed:
        params = init(jax.random.key(_SEED.value), hidden=_HIDDEN.value)
        return jgrad.pack(params, multiple_of=mesh.size)

    params = packed()
    shardings = jgrad.state_shardings(tx, params, shard_over=_AXIS)
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    specs = jax.tree.map(lambda x: x.spec, shardings)

    # Donated: half the memory, but after a step that failed there is nothing left to be saved.
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), specs, PartitionSpec(_AXIS)),
        out_specs=(PartitionSpec(), specs, PartitionSpec()),
        check_vma=False,
    )
    def step(params: jgrad.Packed, state: Any, batch: Digits) -> tuple[Any, ...]:
        def of_part(params: jgrad.Packed) -> jax.Array:
            return loss(jgrad.unpack(params), batch)

        value, grads = jgrad.value_and_grad(of_part)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(value, _AXIS)

    return params, state, step


def batches(digits: Digits, done: int) -> Iterator[Digits]:
    """This process's part of each batch after the first ones: known by its number alone."""
    per_epoch = len(digits.labels) // _BATCH.value
    part = _BATCH.value // jax.process_count()
    for step in range(done, _STEPS.value):
        epoch, number = divmod(step, per_epoch)
        if number == 0 or step == done:
            order = np.random.default_rng((_SEED.value, epoch)).permutation(len(digits.labels))
        first = number * _BATCH.value + jax.process_index() * part
        chosen = order[first : first + part]
        yield Digits(digits.images[chosen], digits.labels[chosen])


def check_equal(params: jgrad.Packed) -> None:
    """Parameters are the same on every process; nothing else would say that they went apart."""
    own = np.frombuffer(bytes.fromhex(digest(params)), np.uint32)
    multihost_utils.assert_equal(own, "parameters differ between processes")


def asked_before(step: int) -> bool:
    """Whether SIGTERM came, to any process, before a step, which is the first of this run.

    All agree. JAX chooses the number after the last one that was asked for, which is 1 at first: in
    a run that goes on, where that is left out, a SIGTERM that came until then has no effect.
    """
    return any(multihost_utils.reached_preemption_sync_point(i) for i in range(step))


def say_asked_to_end(what: str) -> None:
    """The command says how to go on; without it, the first process does."""
    say(" ".join([f"Asked to end: {what}.", *([how_to_resume()] if processes.is_alone() else [])]))


def say(text: str) -> None:
    """By the first process alone."""
    if jax.process_index() == 0:
        print(text, flush=True)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[int], None]]:
    """A function that shows how many steps are done, on the first process."""
    with Progress(disable=jax.process_index() != 0) as bar:
        task = bar.add_task("training", total=_STEPS.value)
        yield lambda done: bar.update(task, completed=done)


# ---- the command ---------------------------------------------------------------------------------


def launch() -> int:
    """Starts the processes of this machine, and says how they ended."""
    local = check_processes()
    coordinator = _COORDINATOR.value or f"localhost:{processes.free_port()}"
    commands = {
        i: [*sys.argv, f"--coordinator={coordinator}", f"--process={i}"]
        for i in range(_FIRST.value, _FIRST.value + local)
    }
    ended = processes.run(commands, processes.environment(_DEVICES.value))
    for line in ended.failed:
        print(line)
    if ended.lost or ended.asked:
        print(f"Training stopped. {how_to_resume()}", flush=True)
    return 1 if ended.failed else processes.ASKED if ended.asked else 0


def check_processes() -> int:
    """How many processes this machine has, from flags that fit each other."""
    first, every = _FIRST.value, _PROCESSES.value
    local = every - first if _LOCAL.value is None else _LOCAL.value
    devices = every * max(_DEVICES.value, 1)
    if first >= every:
        problem = (
            f"--first_process={first}, expected at most {every - 1}: there are {every} processes"
        )
    elif first + local > every:
        most = f"at most {every - first}: there are {every} processes"
        problem = f"--local_processes={local}, expected {most}"
    elif local < every and not _COORDINATOR.value:
        problem = "--coordinator: expected host:port of process 0, which is not told"
    elif local > 1 and not _DEVICES.value:
        problem = "--devices=0, expected --local_processes=1: each takes all accelerators"
    elif _BATCH.value % devices:
        problem = f"--batch={_BATCH.value}, expected a multiple of the {devices} devices"
    else:
        return local
    raise app.UsageError(problem)


def how_to_resume() -> str:
    """For every message about an end that was not the end."""
    saved = whole_steps(_FOLDER.value)
    if not saved:
        return "Nothing was saved: the same command starts anew."
    return f"The same command goes on after step {saved[-1]}, saved in {_FOLDER.value}."


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # orbax and JAX tell of every step
    if _PROCESS.value is None:
        return launch()
    jax.distributed.initialize(
        _COORDINATOR.value, _PROCESSES.value, _PROCESS.value, heartbeat_timeout_seconds=10
    )
    return processes.to_the_end(train, refused=CheckpointError)


if __name__ == "__main__":
    app.run(main)
