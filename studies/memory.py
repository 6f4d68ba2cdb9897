"""What moments in few bits do to Adam's steps, beside float64.

    python -m studies.memory

Gradients are sigma (mu + noise), with mu and noise normal and a size sigma for each weight; the
logarithm of sigma is normal, too. Each case is another spread of sizes within a block, or sizes
that fall. 4096 weights, since fewer stay in float32.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app

import jgrad

_WEIGHTS = 4096
_BETA1, _BETA2 = 0.9, 0.999
_FALL_AT, _FALL_TO = 1000, 0.03


class Case(NamedTuple):
    """One kind of gradients.

    Attributes:
      spread: deviation of the logarithm of sizes.
      falls: whether every second weight's gradients fall to 3% at step 1000.
      steps: how many.
    """

    spread: float
    falls: bool
    steps: int


CASES = {"A": Case(0.5, False, 4000), "B": Case(0.5, True, 4000), "C": Case(2.0, False, 2500)}


class Errors(NamedTuple):
    """Of the steps, in the second half of the training.

    Attributes:
      rms: root of the mean square of the difference from the exact steps.
      relative: the same as a part of the exact steps' root of the mean square.
      longest: the longest step.
      exact_longest: the longest exact one.
      fallen: mean of v as a part of the exact one, at the end, of the weights whose gradients fell.
    """

    rms: float
    relative: float
    longest: float
    exact_longest: float
    fallen: float


def errors(case: Case, moment_dtype: Any, *, seed: int = 0) -> Errors:
    """Of `scale_by_adam` with moments in this form."""
    g = _gradients(case, seed)
    tx = jgrad.scale_by_adam(
        beta1=_BETA1,
        beta2=_BETA2,
        epsilon=0.0,
        bias_correction="moments",
        moment_dtype=moment_dtype,
    )
    w = jnp.zeros(_WEIGHTS)

    def body(state: Any, g: jax.Array) -> tuple[Any, jax.Array]:
        u, state = tx.update(g, state, w)
        return state, u

    @jax.jit
    def train(g: jax.Array) -> tuple[Any, jax.Array]:
        half = case.steps // 2
        state, _ = jax.lax.scan(lambda s, g: (body(s, g)[0], None), tx.init(w), g[:half])
        return jax.lax.scan(body, state, g[half:])

    state, steps = train(jnp.asarray(g))
    exact, v = _exact(g)
    off, size = (np.mean(np.square(x)) ** 0.5 for x in (np.asarray(steps) - exact, exact))
    return Errors(
        rms=off,
        relative=off / size,
        longest=np.max(np.abs(steps)),
        exact_longest=np.max(np.abs(exact)),
        fallen=np.mean((_values(state.vw) / v)[_fallen()]),
    )


def _fallen() -> np.ndarray:
    return np.arange(_WEIGHTS) % 2 == 1


def _gradients(case: Case, seed: int) -> np.ndarray:
    """A row for each step, float32."""
    rng = np.random.default_rng(seed)
    sigma, mu = np.exp(case.spread * rng.normal(size=_WEIGHTS)), rng.normal(size=_WEIGHTS)
    g = sigma * (mu + rng.normal(size=(case.steps, _WEIGHTS)))
    if case.falls:
        g[_FALL_AT:, _fallen()] *= _FALL_TO
    return g.astype(np.float32)


def _exact(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The second half of the steps, and the last second moments, in float64."""
    m, v, steps = np.zeros(_WEIGHTS), np.zeros(_WEIGHTS), []
    for t, row in enumerate(rows, 1):
        g = row.astype(float)
        m = _BETA1 * m + (1 - _BETA1) * g
        v = _BETA2 * v + (1 - _BETA2) * g * g
        if t > len(rows) // 2:
            steps.append(m / (1 - _BETA1**t) / np.sqrt(v / (1 - _BETA2**t)))
    return np.stack(steps), v


def _values(x: Any) -> np.ndarray:
    """A second moment, in whichever form, as float64."""
    if not isinstance(x, jgrad.Blocks):
        return np.asarray(x.astype(jnp.float32), float)
    code = np.asarray(x.codes, int)
    octave, eighths = np.divmod(code, 8)
    numbers = np.where(code == 0, 0, (1 + eighths / 8) * 2.0 ** (octave - 30))
    return numbers * np.repeat(np.asarray(x.scale, float), 256)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    print("| case | moments | rms | part of the steps | longest step | exact | v of the fallen |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, case in CASES.items():
        for form in (None, jnp.bfloat16, "8bit"):
            found = errors(case, form)
            title = "float32" if form is None else form if form == "8bit" else "bfloat16"
            print(f"| {name} | {title} | " + " | ".join(f"{x:.3f}" for x in found) + " |")


if __name__ == "__main__":
    app.run(main)
