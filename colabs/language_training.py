"""A training of the language model: its settings, what is refused, its steps, and its checkpoints.

What a step computes depends on parameters, state and the number of the step alone: a run that goes
on after a checkpoint has the bits of one that was never stopped.
"""

import functools
import math
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jgrad
import language_model
import recipes
from checkpoints import CheckpointError, Checkpoints, check_settings
from text import Split, Text

_AXIS = "data"
_WINDOWS = 256  # at least so many are cut from a text to measure a loss


class Settings(NamedTuple):
    """What decides the numbers of a run, by the names of the flags."""

    optimizer: str = "adamw"
    recipe: str = "float32"
    packed: bool = False
    devices: int = 1
    zero: bool = False
    rate: float | None = None  # None for that of the optimizer
    weight_decay: float = 0.1
    accumulate: int = 1
    steps: int = 1400
    warmup: int | None = None  # None for one in 14 updates; after what it depends on
    clip: float = 1.0
    skip: bool = False
    spikes: bool = False
    watch: int = 0
    ema: float = 0.0
    step_in_backward: bool = False
    batch: int = 8
    length: int = 128
    layers: int = 3
    width: int = 96
    heads: int = 4
    seed: int = 0

    def checked(self) -> "Settings":
        """These settings, with a rate and a warm-up.

        Raises:
          SettingsError: a value that is not known, or two that do not go together.
        """
        if problem := self._problem():
            raise SettingsError(problem)
        rate = recipes.OPTIMIZERS[self.optimizer].rate if self.rate is None else self.rate
        warmup = self._scaled_warmup() if self.warmup is None else self.warmup
        return self._replace(rate=rate, warmup=warmup)

    def _scaled_warmup(self) -> int:
        return self.steps // self.accumulate // 14

    def _problem(self) -> str:
        if self.optimizer not in recipes.OPTIMIZERS:
            return _unknown("optimizer", self.optimizer, recipes.OPTIMIZERS)
        if self.recipe not in recipes.RECIPES:
            return _unknown("recipe", self.recipe, recipes.RECIPES)
        if self.optimizer == "muon" and (self.packed or self.zero):
            given = "--zero" if self.zero else "--packed"
            return f"{given} packs parameters, and Muon's matrices are not packed: leave it out."
        if self.zero and self.devices == 1:
            return "--zero shards the state over devices: give --devices=2 or more, too."
        if self.packed and self.devices > 1 and not self.zero:
            return (
                f"--packed with --devices={self.devices} needs --zero, which shards a packed state "
                "with the fewest bytes moved: add it, or leave out --packed."
            )
        if self.step_in_backward:
            given = {"packed": self.packed, "zero": self.zero, "accumulate": self.accumulate > 1}
            if needs_all := [name for name, is_given in given.items() if is_given]:
                return (
                    "--step_in_backward updates each layer as soon as its gradient is known, and "
                    f"--{needs_all[0]} needs those of all layers at once: leave out one of them."
                )
        if self.batch % self.devices:
            each = f"of which each of the {self.devices} devices takes an equal part"
            return f"--batch={self.batch}, expected a multiple of {self.devices}, {each}."
        if self.width % (2 * self.heads):
            each = "since each head has pairs of elements"
            return f"--width={self.width}, expected a multiple of 2 * {self.heads} heads, {each}."
        if self.steps % self.accumulate:
            expected = f"expected a multiple of --accumulate={self.accumulate}"
            return f"--steps={self.steps}, {expected}, so that the last step makes an update."
        if self.warmup is not None and self.warmup >= self.steps // self.accumulate:
            updates = f"fewer than the {self.steps // self.accumulate} updates of the whole run"
            steps = (self.warmup + 1) * self.accumulate
            return (
                f"--warmup={self.warmup}, expected {updates}: leave it out for "
                f"--warmup={self._scaled_warmup()}, or give --steps={steps} or more."
            )
        return ""

    def about(self, text: Text) -> dict[str, Any]:
        """What has to be the same when a run goes on: all but the layout on devices."""
        own = self._asdict()
        for name in _LAYOUT:
            del own[name]
        return {**own, "text": f"{zlib.crc32(text.codes.tobytes()):08x}"}

    @classmethod
    def of_saved(cls, about: dict[str, Any]) -> "Settings":
        """Those of a checkpoint; a flag that it does not know has its default."""
        return cls(**{name: x for name, x in about.items() if name in cls._fields})


_LAYOUT = ("packed", "devices", "zero", "step_in_backward")  # of which a checkpoint knows nothing
_MODEL = ("layers", "width", "heads")  # the same with --resume_as, too


class SettingsError(ValueError):
    """Settings that make no sense, and what to do."""


def _unknown(name: str, value: str, known: Any) -> str:
    return f"--{name}={value} is not known: choose {', '.join(known)}."


# ---- steps ---------------------------------------------------------------------------------------


class Program(NamedTuple):
    """What is compiled for a run, on one device or sharded over several.

    Attributes:
      start: () -> the first (parameters, state); parameters are a tree, or packed.
      step: (parameters, state, windows) -> (parameters, state, loss); the first two are donated.
      loss: (parameters, windows) -> loss.
    """

    start: Callable[[], tuple[Any, Any]]
    step: Callable[[Any, Any, np.ndarray], tuple[Any, Any, jax.Array]]
    loss: Callable[[Any, np.ndarray], jax.Array]


@functools.lru_cache(maxsize=4)
def program(settings: Settings) -> Program:
    """That of a run, compiled once for equal settings.

    Without `zero`, `jit` shards batch and state over devices; with it, `shard_map` does.

    Raises:
      SettingsError: more devices than there are, or what the library refuses.
    """
    here = jax.devices()
    if len(here) < settings.devices:
        most = f"expected at most {len(here)}, as many as JAX has here"
        raise SettingsError(f"--devices={settings.devices}, {most}.")
    mesh = Mesh(here[: settings.devices], (_AXIS,), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec(_AXIS))
    tx = _transformation(settings)
    first = jax.jit(functools.partial(_first, settings), out_shardings=whole)
    like = jax.eval_shape(first, jax.random.key(settings.seed))
    shardings = whole, jgrad.state_shardings(tx, like, whole, shard_over=_AXIS)
    init = jax.jit(tx.init, out_shardings=shardings[1])
    loss = functools.partial(_loss, heads=settings.heads)

    def start() -> tuple[Any, Any]:
        params = first(jax.random.key(settings.seed))
        return params, init(params)

    def step(params: Any, state: Any, codes: jax.Array) -> tuple[Any, Any, jax.Array]:
        if settings.step_in_backward:  # a first pass is made if `tx` needs it, as for clipping
            return jgrad.step_in_backward(tx, loss, first_pass=True)(params, state, codes)
        value, grads = jgrad.value_and_grad(loss)(params, codes)
        known = {"loss": value} if settings.spikes else {}
        updates, state = tx.update(grads, state, params, **known)
        if settings.zero:
            value = jax.lax.pmean(value, _AXIS)
        return optax.apply_updates(params, updates), state, value

    if settings.zero:
        specs = jax.tree.map(lambda x: x.spec, shardings)
        step = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(*specs, PartitionSpec(_AXIS)),
            out_specs=(*specs, PartitionSpec()),
            check_vma=False,
        )
    step = jax.jit(
        step,
        in_shardings=(*shardings, rows),
        out_shardings=(*shardings, whole),
        donate_argnums=(0, 1),
    )
    return Program(start, step, jax.jit(loss, in_shardings=(None, rows)))


def _transformation(settings: Settings) -> recipes.Transformation:
    updates = settings.steps // settings.accumulate
    tx = recipes.transformation(
        settings.optimizer,
        settings.recipe,
        optax.warmup_cosine_decay_schedule(0.0, settings.rate, settings.warmup, updates),
        weight_decay=settings.weight_decay,
        clip=settings.clip,
        accumulate=settings.accumulate,
        skip=settings.skip,
        ema=settings.ema,
        spikes=settings.spikes,
        watch=settings.watch * settings.accumulate,
        shard_over=_AXIS if settings.devices > 1 and not settings.zero else None,
        mesh_axis=_AXIS if settings.zero else None,
    )
    return jgrad.zero(tx, _AXIS) if settings.zero else tx


def _first(settings: Settings, key: jax.Array) -> Any:
    """First parameters: bfloat16 numbers in every recipe, so that all start alike."""
    dtype = recipes.RECIPES[settings.recipe].dtype
    params = language_model.init(key, layers=settings.layers, width=settings.width)
    params = jax.tree.map(lambda x: jax.lax.reduce_precision(x, 8, 7).astype(dtype), params)
    if not (settings.packed or settings.zero):
        return params
    layer_axes = language_model.LAYER_AXES
    return jgrad.pack(params, layer_axes=layer_axes, multiple_of=settings.devices)


def _loss(params: Any, codes: jax.Array, *, heads: int) -> jax.Array:
    return language_model.loss(jgrad.unpack(params), codes, heads=heads)


def evaluated(params: Any, state: Any, settings: Settings) -> Any:
    """The parameters whose loss counts: the average, where there is one."""
    return optax.tree.get(state, "average") if settings.ema else params


def measured(params: Any, state: Any, settings: Settings, text: Text) -> float:
    """The loss on a text that counts, in nats per byte."""
    return loss_of(evaluated(params, state, settings), settings, text)


def loss_of(params: Any, settings: Settings, text: Text) -> float:
    """The loss of some parameters on a text, in nats per byte."""
    loss = program(settings.checked()).loss
    return float(np.mean([loss(params, codes) for codes in windows(text, settings)]))


def bytes_on_one_device(tree: Any) -> int:
    """What the arrays of a tree take on the first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


# ---- a run ---------------------------------------------------------------------------------------


class History(NamedTuple):
    """Losses in nats per byte since the first step, also of a run that went on.

    Attributes:
      training: of each step.
      validation: (steps done, loss) in order.
    """

    training: list[float]
    validation: list[tuple[int, float]]


class Run(NamedTuple):
    """What a training has come to.

    Attributes:
      params: the last ones, a tree or packed.
      state: the last one.
      history: the losses.
    """

    params: Any
    state: Any
    history: History


def train(
    settings: Settings,
    split: Split,
    *,
    checkpoints: Checkpoints | None = None,
    save_every: int = 100,
    validate_every: int = 100,
    resume_as: bool = False,
    on_start: Callable[[int, Any], None] = lambda done, state: None,
    on_other_settings: Callable[[int, jgrad.Account], None] = lambda done, account: None,
    on_report: Callable[[int, dict[str, Any]], None] = lambda done, numbers: None,
    on_step: Callable[[int, float, float], None] = lambda done, loss, seconds: None,
) -> Run:
    """Trains from the last checkpoint, or from the start, to the end.

    Args:
      settings: what to train.
      split: the texts.
      checkpoints: where steps are saved; None to save nothing.
      save_every: steps between checkpoints; the last step is always saved.
      validate_every: steps between validation losses; the last step is always validated.
      resume_as: whether a run may go on that was begun with other settings of the optimizer.
      on_start: called with the number of steps done, and the state.
      on_other_settings: called with the number of steps done, and what became of the state.
      on_report: called with the number of steps done, and what `watch` measured in the last.
      on_step: called with the number of steps done, a loss, and the seconds of the step.

    Raises:
      SettingsError: settings that make no sense.
      CheckpointError: a checkpoint that was altered, or is of another run.
    """
    settings = settings.checked()
    about = settings.about(split.training)
    done = (checkpoints and checkpoints.latest()) or 0
    saved, history = _saved(checkpoints, about, done, resume_as=resume_as)
    start, step, _ = program(settings)
    params, state = start()
    if done and not resume_as:
        params, state = checkpoints.restore((params, state), done)
    elif done:
        old = checkpoints.restore(program(saved).start(), done)
        params, state, account = carried_over(*old, like=(params, state))
        on_other_settings(done, account)

    on_start(done, state)
    for i in range(done, settings.steps):
        codes = split.training.batch(
            i, seed=settings.seed, windows=settings.batch, length=settings.length + 1
        )
        before = time.perf_counter()
        params, state, value = step(params, state, codes)
        history.training.append(float(value))
        seconds = time.perf_counter() - before
        is_last = i + 1 == settings.steps
        if is_last or (i + 1) % validate_every == 0:
            history.validation.append((i + 1, measured(params, state, settings, split.validation)))
        if checkpoints and (is_last or (i + 1) % save_every == 0):
            saved = {"settings": about, "history": history}
            checkpoints.save(i + 1, (params, state), about=saved)
        on_step(i + 1, history.training[-1], seconds)
        if settings.watch:
            numbers = jgrad.report(state)
            if int(numbers["measured"]) == int(numbers["calls"]):
                on_report(i + 1, jax.device_get(numbers))
    return Run(params, state, history)


def carried_over(params: Any, state: Any, like: Any) -> tuple[Any, Any, jgrad.Account]:
    """Parameters and state in the form and the places of others, and what became of the state."""
    exact = optax.tree.get(state, "master", params)
    exact = jax.tree.map(lambda x, p: p if x is None else x, exact, params, is_leaf=_is_none)
    new_params, new_state = like
    found, account = jgrad.carry_over(state, like=new_state, params=exact)
    dtype = jax.tree.leaves(new_params)[0].dtype
    new = jgrad.pack(jax.tree.map(lambda x: x.astype(dtype), exact), like=new_params)
    shardings = jax.tree.map(lambda x: x.sharding, like)
    return *jax.device_put((new, found), shardings), account


def _is_none(x: Any) -> bool:
    return x is None


def _saved(
    checkpoints: Checkpoints | None, about: dict[str, Any], done: int, *, resume_as: bool
) -> tuple[Settings, History]:
    """The settings and the losses until a checkpoint, if that is one of this run."""
    if not (checkpoints and done):
        return Settings(), History([], [])
    saved = checkpoints.about(done)
    try:
        settings, (training, validation) = dict(saved["settings"]), saved["history"]
    except (KeyError, TypeError):
        remedy = "give another --checkpoint_folder"
        raise CheckpointError(f"Step {done} was saved by another program: {remedy}.") from None
    if settings["text"] != about["text"]:
        remedy = "go on with that one, or give another --checkpoint_folder"
        raise CheckpointError(
            f"Until step {done} the sources of another version of Python were learned: {remedy}."
        )
    before = Settings.of_saved(settings)
    own = {name: about[name] for name in (_MODEL if resume_as else before._fields) if name in about}
    folder = "--checkpoint_folder" + ("" if resume_as else ", or --resume_as")
    check_settings(own, before._asdict(), done, folder=folder)
    return before, History(training, [(step, loss) for step, loss in validation])


def windows(text: Text, settings: Settings) -> np.ndarray:
    """Batches of windows, over the whole of a text, by which a loss is measured."""
    batches = math.ceil(_WINDOWS / settings.batch)
    found = text.spread(batches * settings.batch, settings.length + 1)
    return found.reshape(batches, settings.batch, -1)
