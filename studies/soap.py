"""SOAP beside AdamW and Muon, each with a rate of its own: two equations and the language model.

    python -m studies.soap

- `poisson`: u'' = f on [-1, 1], zero at both ends, u = sin(2 pi x) + sin(9 pi x) / 10; a
  perceptron 1-32-32-32-1 times 1 - x^2, and the residual at 128 points. Float64.
- `burgers`: u_t + u u_x = nu u_xx, nu = 0.1 / pi, u = -sin(pi x) at first and zero at both ends; a
  perceptron 2-32-32-32-1 in a form that has these values, and the residual at 512 points. Float64;
  the solution is Cole's and Hopf's, by quadrature. `steep` is the same with nu = 0.02 / pi, where
  so few points do not show the residual of the front.
- `text`: the transformer of `colabs/language_model.py`, in float32, batches of each seed.

What is compared is the relative 2-norm of the error, and the test loss of the text. All methods
have a warm-up and a cosine, and no weight decay. The highest rate is picked on other seeds than are
shown (by the median of three; of the text, on one), from powers of two times another number, of
which more are tried while the best is at an end. Muon has the matrices between others, SOAP every
matrix, of the text both those of its layers. Chunks of steps are timed in turns; a ratio to AdamW's
is the median of pairs. An hour on two shared cores.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import jgrad
import language_model
import text

_NAMES = ["poisson", "burgers", "steep", "text"]
_SEEDS = flags.DEFINE_integer("soap_seeds", 3, "How many seeds.", lower_bound=1)
_STEPS = flags.DEFINE_integer("soap_steps", 0, "Steps; 0 for those of each task.", lower_bound=0)
_ROUNDS = flags.DEFINE_integer("soap_rounds", 9, "Rounds of timing.", lower_bound=1)
_TASKS = flags.DEFINE_multi_enum("soap_task", _NAMES, _NAMES, "What to train.")

_TUNED_ON = 100  # the first seed of the search for a rate
_CHUNK = 40  # steps that are timed at once


class Task(NamedTuple):
    """What is trained.

    Attributes:
      init: first weights from a key.
      loss: of weights and a batch.
      error: what is compared, of weights.
      data: for a seed and a number of steps, batches along the first axis, or None.
      steps: how many.
      layer_axes: over which layers are stacked.
      exact: whether in float64.
      tuned_on: seeds of the search for a rate.
      left_out: methods that take too long.
    """

    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, Any], jax.Array]
    error: Callable[[Any], jax.Array]
    data: Callable[[int, int], Any]
    steps: int
    layer_axes: Any = None
    exact: bool = True
    tuned_on: int = 3
    left_out: tuple[str, ...] = ()


class Method(NamedTuple):
    """A recipe.

    Attributes:
      make: the optimizer for a rate and a task.
      rate: in the middle of those that are tried.
      longer: how many times the steps of a task are taken.
    """

    make: Callable[[Any, Task], optax.GradientTransformation]
    rate: float
    longer: int = 1


def _adamw(rate: Any, task: Task) -> optax.GradientTransformation:
    del task
    return jgrad.adam(rate)


def _hidden(params: Any) -> Any:
    """The matrices between others; of the text, those of its layers."""
    if isinstance(params, dict):
        return jgrad.by_path({"layers/norm_*": False, "layers/*": True}, rest=False)(params)
    inner = range(1, len(params) - 1)
    return [{"w": i in inner, "b": False} for i in range(len(params))]


def _all(params: Any) -> Any:
    """Every matrix; of the text, those of its layers."""
    return (
        _hidden(params) if isinstance(params, dict) else [{"w": True, "b": False} for _ in params]
    )


def _muon(rate: Any, task: Task) -> optax.GradientTransformation:
    own = {"scale": "match_rms_adamw", "layer_axes": task.layer_axes}
    return jgrad.muon(rate, matrices=_hidden, **own)


def _soap(rate: Any, task: Task, every: int = 10) -> optax.GradientTransformation:
    own = {"every": every, "layer_axes": task.layer_axes}
    return jgrad.soap(rate, matrices=_all, **own)


METHODS = {
    "AdamW": Method(_adamw, 0.004),
    "AdamW, twice the steps": Method(_adamw, 0.004, 2),
    "Muon": Method(_muon, 0.008),
    "SOAP": Method(_soap, 0.004),
    "SOAP, every=1": Method(functools.partial(_soap, every=1), 0.004),
}


# ---- two equations -------------------------------------------------------------------------------


def _perceptron(key: jax.Array, widths: tuple[int, ...]) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(key, len(widths) - 1)
    return [
        {"w": jax.random.normal(own, (into, out)) * (2 / (into + out)) ** 0.5, "b": jnp.zeros(out)}
        for own, into, out in zip(keys, widths[:-1], widths[1:], strict=True)
    ]


def _output(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    """Of one point."""
    *inner, last = params
    for layer in inner:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x @ last["w"] + last["b"])[0]


def _slope(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The value and the first derivative."""
    return jax.jvp(f, (x,), (jnp.ones_like(x),))


def _second(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> tuple[jax.Array, ...]:
    """The value and two derivatives."""
    (u, du), (_, ddu) = jax.jvp(lambda x: _slope(f, x), (x,), (jnp.ones_like(x),))
    return u, du, ddu


def _relative(found: jax.Array, exact: Any) -> jax.Array:
    return jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact)


def poisson() -> Task:
    """Of two waves."""
    points, tested = np.linspace(-1, 1, 128), np.linspace(-1, 1, 501)
    waves = ((2 * np.pi, 1.0), (9 * np.pi, 0.1))
    exact = sum(part * np.sin(k * tested) for k, part in waves)
    given = sum(-part * k**2 * np.sin(k * points) for k, part in waves)

    def u(params: Any, x: jax.Array) -> jax.Array:
        return (1 - x**2) * _output(params, x[None])

    def loss(params: Any, batch: Any) -> jax.Array:
        del batch
        *_, ddu = jax.vmap(lambda x: _second(functools.partial(u, params), x))(jnp.asarray(points))
        return jnp.mean((ddu - given) ** 2)

    def error(params: Any) -> jax.Array:
        return _relative(jax.vmap(lambda x: u(params, x))(jnp.asarray(tested)), exact)

    init = functools.partial(_perceptron, widths=(1, 32, 32, 32, 1))
    return Task(init, loss, error, lambda seed, steps: None, 4000)


def burgers_exact(t: np.ndarray, x: np.ndarray, viscosity: float) -> np.ndarray:
    """Cole (1951) and Hopf (1950): a quotient of two averages over normal numbers."""
    nodes, weights = np.polynomial.hermite.hermgauss(200)
    y = x[..., None] - np.sqrt(4 * viscosity * t)[..., None] * nodes
    powers = -np.cos(np.pi * y) / (2 * np.pi * viscosity)
    parts = weights * np.exp(powers - powers.max(-1, keepdims=True))
    return -np.sum(parts * np.sin(np.pi * y), -1) / np.sum(parts, -1)


def burgers(viscosity: float = 0.1 / math.pi) -> Task:
    """Of a wave that becomes steep."""
    draws = np.random.default_rng(0).random((512, 2)) * (1, 2) - (0, 1)
    tested = [x.ravel() for x in np.meshgrid(np.linspace(0, 1, 21), np.linspace(-1, 1, 201))]

    def u(params: Any, t: jax.Array, x: jax.Array) -> jax.Array:
        return -jnp.sin(jnp.pi * x) + t * (1 - x**2) * _output(params, jnp.stack([t, x]))

    def residual(params: Any, t: jax.Array, x: jax.Array) -> jax.Array:
        value, dx, ddx = _second(lambda x: u(params, t, x), x)
        _, dt = _slope(lambda t: u(params, t, x), t)
        return dt + value * dx - viscosity * ddx

    def loss(params: Any, batch: Any) -> jax.Array:
        del batch
        of_points = jax.vmap(functools.partial(residual, params))
        return jnp.mean(of_points(*jnp.asarray(draws).T) ** 2)

    def error(params: Any) -> jax.Array:
        found = jax.vmap(functools.partial(u, params))(*map(jnp.asarray, tested))
        return _relative(found, burgers_exact(*tested, viscosity))

    init = functools.partial(_perceptron, widths=(2, 32, 32, 32, 1))
    return Task(init, loss, error, lambda seed, steps: None, 2000)


# ---- the language model --------------------------------------------------------------------------


def of_text() -> Task:
    """Two layers of width 64 on 16 windows of 32 bytes; 115,000 parameters."""
    split = text.load()
    tested = split.test.spread(1024)

    def error(params: Any) -> jax.Array:
        return language_model.loss(params, jnp.asarray(tested))

    def data(seed: int, steps: int) -> np.ndarray:
        return split.training.batches(steps, seed=seed)

    own = language_model
    left_out = ("SOAP, every=1",)
    return Task(own.init, own.loss, error, data, 480, own.LAYER_AXES, False, 1, left_out)


TASKS = {
    "poisson": poisson,
    "burgers": burgers,
    "steep": functools.partial(burgers, 0.02 / math.pi),
    "text": of_text,
}


# ---- training ------------------------------------------------------------------------------------


class Trainer:
    """One method on one task, compiled once for all rates and seeds."""

    def __init__(self, task: Task, method: Method, steps: int) -> None:
        self.task, self.steps = task, method.longer * steps

        def step(peak: jax.Array, carry: Any, batch: Any) -> tuple[Any, None]:
            w, state = carry
            tx = method.make(self._schedule(peak), task)
            updates, state = tx.update(jax.grad(task.loss)(w, batch), state, w)
            return (optax.apply_updates(w, updates), state), None

        @jax.jit
        def run(peak: jax.Array, w: Any, state: Any, data: Any) -> Any:
            own = functools.partial(step, peak)
            return jax.lax.scan(own, (w, state), data, None if data is not None else _CHUNK)[0]

        self._run = run
        self._begin = jax.jit(lambda w: method.make(0.1, task).init(w))
        self._error = jax.jit(task.error)

    def _schedule(self, peak: jax.Array) -> Callable[[Any], Any]:
        of_one = optax.warmup_cosine_decay_schedule(0.0, 1.0, self.steps // 20, self.steps)
        return lambda done: peak * of_one(done)

    def chunk(self, peak: float, w: Any, state: Any, data: Any) -> Any:
        return self._run(jnp.asarray(peak), w, state, data)

    def start(self, seed: int) -> tuple[Any, Any, Any]:
        w = self.task.init(jax.random.key(seed))
        return w, self._begin(w), self.task.data(seed, self.steps)

    def error(self, peak: float, seed: int) -> float:
        """After all steps; infinite where it is not a number."""
        w, state, data = self.start(seed)
        for first in range(0, self.steps, _CHUNK):
            own = None if data is None else data[first : first + _CHUNK]
            w, state = self.chunk(peak, w, state, own)
        found = float(self._error(w))
        return found if math.isfinite(found) else math.inf

    def median(self, peak: float, seeds: range) -> float:
        return statistics.median(self.error(peak, seed) for seed in seeds)


def tuned(error: Callable[[float], float], middle: float) -> tuple[float, dict[float, float]]:
    """The best of rates, with neighbours of the best in the end; and all errors."""
    found = {rate: error(rate) for rate in (middle / 2, middle, 2 * middle)}
    for _ in range(6):
        best = min(found, key=found.__getitem__)
        missing = [rate for rate in (best / 2, 2 * best) if rate not in found]
        if not missing:
            break
        found |= {rate: error(rate) for rate in missing}
    return min(found, key=found.__getitem__), found


def ratios(trainers: dict[str, Trainer], rates: dict[str, float], rounds: int) -> dict[str, float]:
    """Times of a chunk, as medians of ratios to the first's, which is timed in the same round.

    It is the second chunk, since the first update of SOAP is another.
    """
    ready = {}
    for name, trainer in trainers.items():
        w, state, data = trainer.start(0)
        data = None if data is None else data[:_CHUNK]
        w, state = jax.block_until_ready(trainer.chunk(rates[name], w, state, data))
        ready[name] = (rates[name], w, state, data)
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(rounds):
        for name, trainer in trainers.items():
            start = time.perf_counter()
            jax.block_until_ready(trainer.chunk(*ready[name]))
            times[name].append(time.perf_counter() - start)
    first = next(iter(times.values()))
    return {
        name: statistics.median(a / b for a, b in zip(own, first, strict=True))
        for name, own in times.items()
    }


def lines(task: Task, steps: int, seeds: int, rounds: int) -> list[str]:
    """Of Markdown, one for each method."""
    steps = max(_CHUNK, steps - steps % _CHUNK)
    methods = {name: x for name, x in METHODS.items() if name not in task.left_out}
    trainers = {name: Trainer(task, method, steps) for name, method in methods.items()}
    rates, rows = {}, {}
    for name, trainer in trainers.items():
        tried = functools.partial(trainer.median, seeds=range(_TUNED_ON, _TUNED_ON + task.tuned_on))
        rates[name], errors = tuned(tried, METHODS[name].rate)
        shown = ", ".join(f"{rate:g}: {errors[rate]:.3g}" for rate in sorted(errors))
        rows[name] = sorted(trainer.error(rates[name], seed) for seed in range(seeds))
        print(f"  {name}: {shown}; of seeds {rows[name]}", flush=True)
    times = ratios(trainers, rates, rounds)
    found = ["| method | rate | error | of seeds | time of a step |", "| --- " * 5 + "|"]
    for name, errors in rows.items():
        cells = [name, f"{rates[name]:g}", f"{statistics.median(errors):.3g}"]
        cells += [f"{errors[0]:.3g} to {errors[-1]:.3g}", f"{times[name]:.2f}"]
        found.append(f"| {' | '.join(cells)} |")
    return found


def main(argv: list[str]) -> None:
    del argv
    for name in _TASKS.value:
        task = TASKS[name]()
        steps = _STEPS.value or task.steps
        print(f"\n{name}, {steps} steps, {_SEEDS.value} seeds", flush=True)
        with jax.enable_x64(task.exact):
            print("\n".join(lines(task, steps, _SEEDS.value, _ROUNDS.value)), flush=True)


if __name__ == "__main__":
    app.run(main)
