"""SOAP on the language model: steps to the loss of AdamW, and the time of a step.

    OPENBLAS_NUM_THREADS=1 python -m studies.soap_text

The transformer of `colabs/language_model.py` in float32, by AdamW, Muon and SOAP, whose bases turn
every ten steps, or in each. All have a warm-up, a cosine to 0, no weight decay, and Adam with betas
of 0.9 and 0.95 for what is no matrix of a layer. Steps of Muon and SOAP have the root mean square
of AdamW's, so one range of learning rates, powers of two, is right for all. Each method's is
searched at the second length with a seed that is not shown, by the validation loss; others are
tried while the best is at an end. Then lengths, each with a schedule of its own, are trained from
every seed, more of them by AdamW and Muon: the steps that these take to the loss of another method
at the second length are interpolated on a logarithmic scale. Steps are timed in turns. An hour on
two busy cores.
"""

import functools
import itertools
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
from studies.soap import tuned

_LENGTHS = flags.DEFINE_list("lengths", ["160", "320", "640", "1280"], "Steps.")
_SEEDS = flags.DEFINE_integer("text_seeds", 3, "How many seeds.", lower_bound=1)
_BATCH = flags.DEFINE_integer("text_batch", 16, "Windows of 32 bytes in a batch.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("text_rounds", 15, "Rounds of timing.", lower_bound=1)

_CHUNK = 40  # steps that are timed at once
_SEARCHED_ON = 100  # a seed
_HIDDEN = jgrad.by_path({"layers/norm_*": False, "layers/*": True}, rest=False)
_MATRICES: dict[str, Any] = {"matrices": _HIDDEN, "layer_axes": language_model.LAYER_AXES}
_SOAP = functools.partial(jgrad.soap, adam_beta1=0.9, **_MATRICES)


class Method(NamedTuple):
    """How it is made of a learning rate, and how many of the lengths are trained."""

    make: Callable[[Any], optax.GradientTransformation]
    lengths: int = 2


_MUON = functools.partial(jgrad.muon, scale="match_rms_adamw", adam_beta2=0.95, **_MATRICES)
METHODS = {
    "AdamW": Method(functools.partial(jgrad.adam, beta2=0.95), 4),
    "Muon": Method(_MUON, 3),
    "SOAP": Method(_SOAP),
    "SOAP, `every=1`": Method(functools.partial(_SOAP, every=1)),
}


class Trainer:
    """One method, compiled once for all rates, seeds and lengths."""

    def __init__(self, make: Callable[[Any], optax.GradientTransformation], split: Any) -> None:
        self._training, self._tested = split.training, jnp.asarray(split.validation.spread(1024))
        self._begin = jax.jit(make(0.1).init)
        self._loss = jax.jit(language_model.loss)

        @jax.jit
        def run(peak: jax.Array, steps: jax.Array, carry: Any, data: Any) -> Any:
            def rate(done: Any) -> Any:
                warmup = steps // 20
                x = (done - warmup) / (steps - warmup)
                return peak * jnp.minimum(done / warmup, 0.5 + 0.5 * jnp.cos(jnp.pi * x))

            def step(carry: Any, batch: Any) -> tuple[Any, None]:
                w, state = carry
                grads = jax.grad(language_model.loss)(w, batch)
                updates, state = make(rate).update(grads, state, w)
                return (optax.apply_updates(w, updates), state), None

            return jax.lax.scan(step, carry, data)[0]

        self._run = run

    def start(self, seed: int) -> Any:
        w = language_model.init(jax.random.key(seed))
        return w, self._begin(w)

    def chunk(self, rate: float, steps: int, carry: Any, first: int, seed: int) -> Any:
        batch = functools.partial(self._training.batch, seed=seed, windows=_BATCH.value)
        data = np.stack([batch(i) for i in range(first, first + _CHUNK)])
        return self._run(jnp.asarray(rate), jnp.asarray(steps), carry, data)

    def loss(self, rate: float, steps: int, seed: int) -> float:
        """On the validation text behind the last step; infinite where it is not a number."""
        carry = self.start(seed)
        for first in range(0, steps, _CHUNK):
            carry = self.chunk(rate, steps, carry, first, seed)
        found = float(self._loss(carry[0], self._tested))
        return found if math.isfinite(found) else math.inf


def steps_to(goal: float, losses: dict[int, float]) -> float | None:
    """At which a loss is reached, between lengths whose losses fall."""
    known = sorted(losses.items())
    for (a, high), (b, low) in itertools.pairwise(known):
        if high >= goal >= low:
            return float(a * (b / a) ** ((high - goal) / max(high - low, 1e-12)))
    return None


def times(trainers: dict[str, Trainer], rates: dict[str, float]) -> dict[str, list[float]]:
    """Seconds of a step, of each in turn; the first chunk, in which SOAP begins, is not timed."""
    ready = {k: x.chunk(rates[k], 480, x.start(0), 0, 0) for k, x in trainers.items()}
    found: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(_ROUNDS.value):
        for name, trainer in trainers.items():
            start = time.perf_counter()
            jax.block_until_ready(trainer.chunk(rates[name], 480, ready[name], 0, 0))
            found[name].append((time.perf_counter() - start) / _CHUNK)
    return found


def main(argv: list[str]) -> None:
    del argv
    lengths, seeds, split = sorted(map(int, _LENGTHS.value)), range(_SEEDS.value), text.load()
    middle = lengths[1]
    trainers = {name: Trainer(x.make, split) for name, x in METHODS.items()}
    rates: dict[str, float] = {}
    losses: dict[str, dict[int, float]] = {}
    for name, trainer in trainers.items():
        searched = functools.partial(trainer.loss, steps=middle, seed=_SEARCHED_ON)
        rates[name], tried = tuned(searched, 0.008)
        print(name, {rate: round(x, 4) for rate, x in sorted(tried.items())}, flush=True)
        losses[name] = {}
        for steps in lengths[: METHODS[name].lengths]:
            found = [trainer.loss(rates[name], steps, seed) for seed in seeds]
            losses[name][steps] = statistics.mean(found)
            print(f"  {steps}: {' '.join(f'{x:.4f}' for x in found)}", flush=True)
    seconds = times(trainers, rates)
    base = seconds["AdamW"]
    print("| method | rate | losses | AdamW's steps | Muon's | time of a step | ms |")
    for name, own in losses.items():
        needed = [steps_to(own[middle], losses[other]) for other in ("AdamW", "Muon")]
        ratio = statistics.median(a / b for a, b in zip(seconds[name], base, strict=True))
        cells = [name, f"{rates[name]:g}", ", ".join(f"{x:.3f}" for x in own.values())]
        cells += ["" if x is None else f"{x / middle:.2f}" for x in needed]
        cells += [f"{ratio:.2f}", f"{statistics.median(seconds[name]) * 1e3:.1f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    app.run(main)
