"""Schedule-free AdamW and SGD in float64 NumPy, from the authors' `adamw_schedulefree_reference.py`."""

import numpy as np


def adamw(w, lr, *, beta=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, r=0.0, power=2.0):
    """A generator: it is sent gradients at y, leaf by leaf, and yields (y, x)."""
    z = [np.asarray(p).astype(np.result_type(np.asarray(p).dtype, np.float64)) for p in w]
    x = [p.copy() for p in z]
    v = [np.zeros(p.shape) for p in z]
    y = [p.copy() for p in z]
    total = largest = 0.0
    k = 0
    while True:
        grads = yield [p.copy() for p in y], [p.copy() for p in x]
        rate = lr(k) if callable(lr) else lr
        largest = max(rate, largest)
        weight = (k + 1) ** r * largest**power
        total += weight
        c = weight / total if total > 0 else 0.0
        for i, g in enumerate(grads):
            g = np.asarray(g).astype(z[i].dtype)
            v[i] = beta2 * v[i] + (1 - beta2) * np.abs(g) ** 2
            denominator = np.sqrt(v[i] / (1 - beta2 ** (k + 1))) + eps
            z[i] = z[i] - rate * weight_decay * y[i] - rate * g / denominator
            x[i] = (1 - c) * x[i] + c * z[i]
            y[i] = beta * x[i] + (1 - beta) * z[i]
        k += 1
