"""20 of LightBench's 51 problems, written anew from their definitions, each at two difficulties.

A function for each problem takes "easy" or "hard". Its docstring is the equation and the file of
lightbench 0.1.1 that defines it; what differs from that file stands in `changed`.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Params = Any
Array = jax.Array
Win = Callable[[Params, Array], Array]

LEVELS = ("easy", "hard")
_SIZE = 4096  # elements; fewer are not stored in 8 bits


class Problem(NamedTuple):
    """What is optimized.

    Attributes:
      init: the first parameters, from a key.
      loss: a scalar, of parameters and the key of a step.
      win: whether these parameters with this loss are a solution.
      changed: what differs from upstream.
      optimum: parameters that win, where they are known.
    """

    init: Callable[[Array], Params]
    loss: Callable[[Params, Array], Array]
    win: Win
    changed: str = ""
    optimum: Params = None


def _normal(*shape: int) -> Callable[[Array], Params]:
    return lambda key: {"x": jax.random.normal(key, shape)}


def _below(target: float) -> Win:
    return lambda params, loss: loss <= target


def _near(target: Any, tolerance: float) -> Win:
    """Root of the mean square of the distance."""
    return lambda params, loss: jnp.sqrt(jnp.mean((params["x"] - target) ** 2)) < tolerance


def _zeros(*shape: int) -> Params:
    return {"x": jnp.zeros(shape)}


def _ramp(n: int, first: int = 1) -> Array:
    return jnp.arange(first, first + n, dtype=jnp.float32)


def quadratic_varying_scale(level: str) -> Problem:
    """sum(s x^2), s = (1 ... n) / sum(1 ... n); `quadratic_varying_scale.py`"""
    n = {"easy": 16, "hard": _SIZE}[level]
    s = _ramp(n) / jnp.sum(_ramp(n))
    changed = "rms of x below 1e-4, not 1e-7; hard: 4096 elements, not 8192"
    return Problem(
        _normal(n), lambda p, key: jnp.sum(s * p["x"] ** 2), _near(0.0, 1e-4), changed, _zeros(n)
    )


def quadratic_varying_target(level: str) -> Problem:
    """mean((x - t)^2), t = (0 ... n - 1) / |(0 ... n - 1)|; `quadratic_varying_target.py`"""
    n = {"easy": 16, "hard": _SIZE}[level]
    t = _ramp(n, 0) / jnp.linalg.norm(_ramp(n, 0))
    changed = "rms of x - t below 1e-4, not 1e-8; hard: 4096 elements, not 8192"
    return Problem(
        _normal(n), lambda p, key: jnp.mean((p["x"] - t) ** 2), _near(t, 1e-4), changed, {"x": t}
    )


def absolute_varying_scale(level: str) -> Problem:
    """sum(s |x|), s = (1 ... n) / sum(1 ... n); `absolute_varying_scale.py`"""
    n = {"easy": 16, "hard": _SIZE}[level]
    s = _ramp(n) / jnp.sum(_ramp(n))
    changed = "rms of x below 1e-2, not 1e-7; hard: 4096 elements, not 8192"
    return Problem(
        _normal(n),
        lambda p, key: jnp.sum(s * jnp.abs(p["x"])),
        _near(0.0, 1e-2),
        changed,
        _zeros(n),
    )


def quadratic_outliers(level: str) -> Problem:
    """mean(c x^2), c = spike with probability i / (n + 1), else 1; `quadratic_outliers.py`"""
    spike = {"easy": 16.0, "hard": 8192.0}[level]
    chance = _ramp(_SIZE) / (1 + _SIZE)

    def loss(p: Params, key: Array) -> Array:
        spikes = jax.random.uniform(key, chance.shape) < chance
        return jnp.mean(jnp.where(spikes, spike, 1.0) * p["x"] ** 2)

    changed = "4096 elements, not 128; rms of x below 1e-2, not 1e-7"
    return Problem(_normal(_SIZE), loss, _near(0.0, 1e-2), changed, _zeros(_SIZE))


def quadratic_quantized_gradient(level: str) -> Problem:
    """mean(x^2), its gradient in bins of max|x|; `quadratic_quantized_gradient.py`"""
    half = {"easy": 16.0, "hard": 4.0}[level]

    def loss(p: Params, key: Array) -> Array:
        x = p["x"]
        step = jax.lax.stop_gradient(jnp.max(jnp.abs(x)) / half)
        rounded = jax.lax.stop_gradient(step * jnp.round(x / jnp.where(step == 0, 1.0, step)))
        along = x * rounded
        return jnp.mean(jax.lax.stop_gradient(x**2 - along) + along)

    changed = (
        "4096 elements, not 128; rms of x below 1e-5, not 1e-7; "
        "32 and 8 bins, which upstream's options misname"
    )
    return Problem(_normal(_SIZE), loss, _near(0.0, 1e-5), changed, _zeros(_SIZE))


def _noisy(noise: Callable[[Array], Array], level: str, win: dict[str, float]) -> Problem:
    """mean((x + noise / offset)^2)"""
    offset = {"easy": 16.0, "hard": 4.0}[level]
    changed = f"rms of x below {win['easy']:g} and {win['hard']:g}, not 1e-3"
    return Problem(
        _normal(_SIZE),
        lambda p, key: jnp.mean((p["x"] + noise(key) / offset) ** 2),
        _near(0.0, win[level]),
        changed,
        _zeros(_SIZE),
    )


def gradient_noise_scale_white(level: str) -> Problem:
    """mean((x + normal / offset)^2), offset = 16 or 4; `gradient_noise_scale_white.py`"""
    win = {"easy": 0.03, "hard": 0.1}
    return _noisy(lambda key: jax.random.normal(key, (_SIZE,)), level, win)


def gradient_noise_scale_heavy_tailed(level: str) -> Problem:
    """mean((x + Cauchy / offset)^2), offset = 16 or 4; `gradient_noise_scale_heavy_tailed.py`"""
    win = {"easy": 0.1, "hard": 0.3}
    return _noisy(lambda key: jax.random.cauchy(key, (_SIZE,)), level, win)


def batch_size_scaling(level: str) -> Problem:
    """mean((x + e |x| / (|e| b^(u/4)))^2), e normal, u uniform; `batch_size_scaling.py`"""
    batch = {"easy": 8192.0, "hard": 128.0}[level]

    def loss(p: Params, key: Array) -> Array:
        first, second = jax.random.split(key)
        noise = jax.random.normal(first, (_SIZE,))
        size = jax.lax.stop_gradient(jnp.sqrt(jnp.sum(p["x"] ** 2)))
        size = size / (jnp.sqrt(jnp.sum(noise**2)) + 1e-6)
        root = batch ** (jax.random.uniform(second) / 4)
        return jnp.mean((p["x"] + noise * size / root) ** 2)

    changed = "4096 elements, not 1024; rms of x below 1e-3, not 1e-8"
    return Problem(_normal(_SIZE), loss, _near(0.0, 1e-3), changed, _zeros(_SIZE))


def constrained_optimization_relu(level: str) -> Problem:
    """mean((x - 2)^2 + penalty max(0, x - 1)), x = 0 first; `constrained_optimization_relu.py`"""
    penalty = {"easy": 1e2, "hard": 1e6}[level]

    def loss(p: Params, key: Array) -> Array:
        return jnp.mean((p["x"] - 2) ** 2 + penalty * jax.nn.relu(p["x"] - 1))

    def win(p: Params, loss: Array) -> Array:
        return jnp.all(jnp.abs(p["x"] - 1) < 1e-2)

    changed = "4096 elements, not 16; all of x within 1e-2 of 1, not 1e-3"
    return Problem(lambda key: _zeros(_SIZE), loss, win, changed, {"x": jnp.ones(_SIZE)})


def scale_invariant(level: str) -> Problem:
    """mean(log(1 + x^2)), x normal times 10^-r ... 10^r first; `scale_invariant.py`"""
    r = {"easy": 2, "hard": 4}[level]
    scale = jnp.asarray(np.logspace(-r, r, _SIZE), jnp.float32)

    def init(key: Array) -> Params:
        return {"x": scale * jax.random.normal(key, scale.shape)}

    changed = "4096 elements, not 512; loss below 1e-2, not 1e-3"
    return Problem(
        init, lambda p, key: jnp.mean(jnp.log1p(p["x"] ** 2)), _below(1e-2), changed, _zeros(_SIZE)
    )


def ill_conditioned(level: str) -> Problem:
    """mean(s x^2), s = 10^-r ... 10^r, r = 2 or 4; `ill_conditioned.py`"""
    r = {"easy": 2, "hard": 4}[level]
    s = jnp.asarray(np.logspace(-r, r, _SIZE), jnp.float32)
    changed = "4096 elements, not 512"
    return Problem(
        _normal(_SIZE),
        lambda p, key: jnp.mean(s * p["x"] ** 2),
        _below(1e-3),
        changed,
        _zeros(_SIZE),
    )


def _layers(scales: tuple[float, ...]) -> Callable[[Array], Params]:
    def init(key: Array) -> Params:
        x = jax.random.normal(key, (len(scales), _SIZE))
        return {f"layer{i}": s * x[i] for i, s in enumerate(scales)}

    return init


_NO_LAYERS = {f"layer{i}": jnp.zeros(_SIZE) for i in range(3)}


def layer_wise_scale(level: str) -> Problem:
    """(s mean(x^2) + mean(y^2) + mean(z^2) / s) / 3, s = 10 or 1000; `layer_wise_scale.py`"""
    s = {"easy": 1e1, "hard": 1e3}[level]

    def loss(p: Params, key: Array) -> Array:
        x, y, z = (jnp.mean(p[f"layer{i}"] ** 2) for i in range(3))
        return (s * x + y + z / s) / 3

    changed = "4096 elements in a layer, not 1024"
    return Problem(_layers((1.0, 1.0, 1.0)), loss, _below(1e-4), changed, _NO_LAYERS)


def parameter_scale(level: str) -> Problem:
    """(mean(x^2) + mean(y^2) + mean(z^2)) / 3, at s, 1 and 1 / s first; `parameter_scale.py`"""
    s = {"easy": 1e1, "hard": 1e3}[level]

    def loss(p: Params, key: Array) -> Array:
        x, y, z = (jnp.mean(p[f"layer{i}"] ** 2) for i in range(3))
        return (x + y + z) / 3

    changed = "4096 elements in a layer, not 1024; s = 10, and 1000 of its medium, not 1e5"
    return Problem(_layers((s, 1.0, 1 / s)), loss, _below(1e-4), changed, _NO_LAYERS)


def sparse_gradient(level: str) -> Problem:
    """mean(m x^2), m = 1 in a random part of 2 p, p = 1/8 or 1/64; `sparse_gradient.py`"""
    p_on = {"easy": 2**-3, "hard": 2**-6}[level]

    def loss(p: Params, key: Array) -> Array:
        masks = jax.random.uniform(key, (2, _SIZE)) < p_on
        return jnp.mean(jnp.where(masks.any(0), p["x"], 0.0) ** 2)

    changed = (
        "4096 elements, not 65536; hard: p of its medium, not 1/256; "
        "both masks of a step are new, where upstream has one of the last step"
    )
    return Problem(_normal(_SIZE), loss, _below(1e-4), changed, _zeros(_SIZE))


def exploding_gradient(level: str) -> Problem:
    """mean(exp(s |x|)), s = 2 or 8; `exploding_gradient.py`"""
    s = {"easy": 2.0, "hard": 8.0}[level]
    changed = (
        "4096 elements, not 2, and s as its options say, which upstream interchanges; "
        "rms of x below 0.03, not 0.01"
    )
    return Problem(
        _normal(_SIZE),
        lambda p, key: jnp.mean(jnp.exp(s * jnp.abs(p["x"]))),
        _near(0.0, 0.03),
        changed,
        _zeros(_SIZE),
    )


def wide_linear(level: str) -> Problem:
    """mean((A x - cumsum(A))^2), A normal, of 16 rows; `wide_linear.py`"""
    n = {"easy": 32, "hard": 64}[level]
    target = jnp.triu(jnp.ones((n, n)))

    def loss(p: Params, key: Array) -> Array:
        a = jax.random.normal(key, (16, n))
        return jnp.mean((a @ p["x"] - jnp.cumsum(a, axis=1)) ** 2)

    changed = (
        "hard: 64 x 64, not 2048 x 2048; rms of x - target below 0.03, not 1e-3; "
        "x - target, where upstream has x + target, which no method reaches"
    )
    return Problem(_normal(n, n), loss, _near(target, 0.03), changed, {"x": target})


def _powers(level: str, target: Callable[[int, int], Array], below: float, size: str) -> Problem:
    """mean((x - t)^(2 i)), row i of `powers`"""
    powers = {"easy": 8, "hard": 32}[level]
    n = _SIZE // powers
    t, power = target(powers, n), np.arange(1, powers + 1).reshape(-1, 1)

    def loss(p: Params, key: Array) -> Array:
        return jnp.mean(jnp.power((p["x"] - t) ** 2, jnp.asarray(power, jnp.float32)))

    def init(key: Array) -> Params:
        return {"x": 2 * jax.random.uniform(key, (powers, n))}

    return Problem(init, loss, _below(below), size, {"x": t})


def powers(level: str) -> Problem:
    """mean((x - 1)^(2 i)) in row i of 8 or 32, x in 0 ... 2 first; `powers.py`"""
    changed = "4096 elements, not 512 or 2048; loss below 1e-6, not 1e-8"
    return _powers(level, lambda rows, n: jnp.ones((rows, n)), 1e-6, changed)


def powers_varying_target(level: str) -> Problem:
    """mean((x - t)^(2 i)) in row i of 8 or 32, t from 0 to 1; `powers_varying_target.py`"""

    def target(rows: int, n: int) -> Array:
        return _ramp(rows * n, 0).reshape(n, rows).T / (rows * n)

    changed = "4096 elements, not 512 or 2048"
    return _powers(level, target, 1e-6, changed)


def _dense(sizes: list[int], key: Array) -> Params:
    """Layers as torch makes them: uniform within one over the root of the inputs."""
    keys = jax.random.split(key, 2 * (len(sizes) - 1))
    params = {}
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        for name, shape, own in ("w", (a, b), keys[2 * i]), ("b", (b,), keys[2 * i + 1]):
            params[f"{name}{i}"] = jax.random.uniform(own, shape, minval=-1, maxval=1) / a**0.5
    return params


def _forward(params: Params, x: Array) -> Array:
    layers = len(params) // 2
    for i in range(layers):
        x = x @ params[f"w{i}"] + params[f"b{i}"][None]
        x = x if i == layers - 1 else jax.nn.relu(x)
    return x


def class_imbalance_rare(level: str) -> Problem:
    """mean(0.25 (1 - q)^2 (-log q)), q that of the class, one is rare; `class_imbalance_rare.py`"""
    n, inputs, hidden, rare, noise = {
        "easy": (100, 32, 24, 0.1, 0.2),
        "hard": (100, 64, 64, 0.02, 0.4),
    }[level]
    y = np.arange(n) < int(n * rare)
    drawn = noise * np.random.default_rng(0).normal(size=(n, inputs))
    x = jnp.asarray(np.where(y, 1.0, -1.0)[:, None] + drawn, jnp.float32)

    def loss(p: Params, key: Array) -> Array:
        log_q = jax.nn.log_softmax(_forward(p, x))[np.arange(n), y.astype(int)]
        return -jnp.mean(0.25 * (1 - jnp.exp(log_q)) ** 2 * log_q)

    def win(p: Params, loss: Array) -> Array:
        found = jnp.argmax(_forward(p, x), axis=1) == 1
        right, called = jnp.sum(found & y), jnp.sum(found)
        recall, precision = right / y.sum(), right / jnp.maximum(called, 1)
        f1 = 2 * precision * recall / jnp.maximum(precision + recall, 1e-7)
        return jnp.logical_and(f1 >= 0.99, loss <= 1e-5)

    changed = (
        "100 samples, not 2000 and 10000; hard: 64 hidden units, not 48; "
        "f1 of 0.99 and a loss below 1e-5, not f1 of 0.7 and 0.14"
    )
    return Problem(lambda key: _dense([inputs, hidden, hidden // 2, 2], key), loss, win, changed)


def memory_constrained(level: str) -> Problem:
    """mean((net(a) - b)^2), a and b normal, dense layers with ReLU; `memory_constrained.py`"""
    layers, batch = {"easy": (2, 32), "hard": (4, 64)}[level]
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(batch, n)), jnp.float32) for n in (64, 1))
    sizes = [64] * (layers + 1) + [1]

    def loss(p: Params, key: Array) -> Array:
        return jnp.mean((_forward(p, a) - b) ** 2)

    changed = (
        "2 and 4 hidden layers of 64, not 8 of 64 and 256; 32 and 64 samples, not 64 and 256; "
        "without the limit on memory"
    )
    return Problem(lambda key: _dense(sizes, key), loss, _below(0.1), changed)


PROBLEMS: dict[str, Callable[[str], Problem]] = {
    f.__name__: f
    for f in (
        quadratic_varying_scale,
        quadratic_varying_target,
        absolute_varying_scale,
        quadratic_outliers,
        quadratic_quantized_gradient,
        gradient_noise_scale_white,
        gradient_noise_scale_heavy_tailed,
        batch_size_scaling,
        constrained_optimization_relu,
        scale_invariant,
        ill_conditioned,
        layer_wise_scale,
        parameter_scale,
        sparse_gradient,
        exploding_gradient,
        wide_linear,
        powers,
        powers_varying_target,
        class_imbalance_rare,
        memory_constrained,
    )
}
