"""Every optimizer once more, in float64 NumPy, leaf by leaf, as its paper writes it.

Nothing of jgrad is imported, and nothing is shared between methods beyond what their papers share.
An optimizer is a generator: it is sent the gradients of each step and yields the weights after it.
Trees are flat lists of arrays here; `decay` and `trust` are lists of bools, the masks.
"""

from collections.abc import Generator, Iterable

import numpy as np

Leaves = list[np.ndarray]
Optimizer = Generator[Leaves, Leaves, None]


def trajectory(optimizer: Optimizer, gradients: Iterable[Leaves]) -> list[Leaves]:
    """The weights after each step."""
    next(optimizer)
    return [optimizer.send(g) for g in gradients]


def _double(leaves: Leaves) -> Leaves:
    return [np.asarray(x).astype(np.result_type(np.asarray(x).dtype, np.float64)) for x in leaves]


def _norm(x: np.ndarray) -> float:
    """The 2-norm, scaled by the largest element so that float64 itself cannot overflow."""
    largest = np.max(np.abs(x), initial=0.0)
    if largest == 0 or not np.isfinite(largest):
        return float(largest)
    return float(largest * np.sqrt(np.sum(np.abs(x / largest) ** 2)))


def gradient_descent(
    w: Leaves, lr, *, momentum=None, nesterov=False, weight_decay=0.0, decay=None
) -> Optimizer:
    """Sutskever et al. (2013), equations 1 to 4, in PyTorch's arrangement: the rate outside."""
    w = _double(w)
    decay = decay or [True] * len(w)
    buffer = [np.zeros_like(x) for x in w]
    t = 0
    while True:
        g = _double((yield [x.copy() for x in w]))
        rate = lr(t) if callable(lr) else lr
        for i in range(len(w)):
            d = g[i] + (weight_decay * w[i] if decay[i] else 0.0)
            if momentum is not None:
                buffer[i] = momentum * buffer[i] + d
                d = d + momentum * buffer[i] if nesterov else buffer[i]
            w[i] = w[i] - rate * d
        t += 1


def _adam_direction(m, v, t, beta1, beta2, epsilon, bias_correction):
    if bias_correction == "moments":  # algorithm 1
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        return m_hat / (np.sqrt(v_hat) + epsilon)
    alpha = 1.0
    if (
        bias_correction == "step_size"
    ):  # the end of section 2, with Ivy's epsilon in the denominator
        alpha = np.sqrt(1 - beta2**t) / (1 - beta1**t + epsilon)
    return alpha * m / (np.sqrt(v) + epsilon)


def adam(
    w: Leaves, lr, *, beta1=0.9, beta2=0.999, epsilon=1e-7, weight_decay=0.0, decay=None,
    bias_correction="step_size",
) -> Optimizer:  # fmt: skip
    """Kingma and Ba (2015); decoupled decay of Loshchilov and Hutter (2019), algorithm 2."""
    w = _double(w)
    decay = decay or [True] * len(w)
    m = [np.zeros_like(x) for x in w]
    v = [np.zeros(x.shape) for x in w]
    t = 0
    while True:
        g = _double((yield [x.copy() for x in w]))
        rate = lr(t) if callable(lr) else lr
        t += 1
        for i in range(len(w)):
            m[i] = beta1 * m[i] + (1 - beta1) * g[i]
            v[i] = beta2 * v[i] + (1 - beta2) * np.abs(g[i]) ** 2
            d = _adam_direction(m[i], v[i], t, beta1, beta2, epsilon, bias_correction)
            if decay[i]:
                d = d + weight_decay * w[i]
            w[i] = w[i] - rate * d


def lars(
    w: Leaves, lr, *, trust_coefficient=0.001, momentum=0.9, nesterov=False, weight_decay=0.0,
    decay=None, trust=None, epsilon=0.0, rate_in_momentum=True, rule="paper",
) -> Optimizer:  # fmt: skip
    """You, Gitman and Ginsburg (2017), algorithm 1; `rule="ivy"` as IVY's own source computes it."""
    w = _double(w)
    decay, trust = decay or [True] * len(w), trust or [True] * len(w)
    buffer = [np.zeros_like(x) for x in w]
    t = 0
    while True:
        g = _double((yield [x.copy() for x in w]))
        rate = lr(t) if callable(lr) else lr
        t += 1
        for i in range(len(w)):
            lam = weight_decay if decay[i] else 0.0
            w_norm, g_norm = _norm(w[i]), _norm(g[i])
            if rule == "ivy":
                ratio = trust_coefficient * w_norm / (g_norm + 1e-12)
                ratio = ratio / (w_norm * lam) if lam > 0 and w_norm > 0 else ratio
                d = g[i]
            else:
                zero = w_norm == 0 or g_norm == 0
                ratio = (
                    trust_coefficient * w_norm / (g_norm + lam * w_norm + epsilon)
                    if not zero
                    else 1.0
                )
                d = g[i] + lam * w[i]
            if not trust[i]:
                ratio = 1.0
            inside = rate_in_momentum or momentum is None
            d = ratio * d * (rate if inside else 1.0)
            if momentum is not None:
                buffer[i] = momentum * buffer[i] + d
                d = momentum * buffer[i] + d if nesterov else buffer[i]
            w[i] = w[i] - d * (1.0 if inside else rate)


def lamb(
    w: Leaves, lr, *, beta1=0.9, beta2=0.999, epsilon=1e-7, weight_decay=0.0, decay=None,
    trust=None, min_trust_ratio=0.0, max_trust_ratio=10.0, bias_correction="step_size", rule="paper",
) -> Optimizer:  # fmt: skip
    """You et al. (2020), algorithm 2; `rule="ivy"` as Ivy's own source computes it."""
    w = _double(w)
    decay, trust = decay or [True] * len(w), trust or [True] * len(w)
    m = [np.zeros_like(x) for x in w]
    v = [np.zeros(x.shape) for x in w]
    t = 0
    while True:
        g = _double((yield [x.copy() for x in w]))
        rate = lr(t) if callable(lr) else lr
        t += 1
        for i in range(len(w)):
            m[i] = beta1 * m[i] + (1 - beta1) * g[i]
            v[i] = beta2 * v[i] + (1 - beta2) * np.abs(g[i]) ** 2
            delta = _adam_direction(m[i], v[i], t, beta1, beta2, epsilon, bias_correction)
            u = delta + (weight_decay * w[i] if decay[i] else 0.0)
            w_norm, u_norm = _norm(w[i]), _norm(u)
            if rule == "ivy":
                ratio = min(w_norm / (u_norm + 1e-12), max_trust_ratio)
                u = delta
            elif w_norm == 0 or u_norm == 0:
                ratio = 1.0
            else:
                ratio = min(max(w_norm / u_norm, min_trust_ratio), max_trust_ratio)
            w[i] = w[i] - rate * (ratio if trust[i] else 1.0) * u
