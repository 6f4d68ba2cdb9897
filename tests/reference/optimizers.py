"""Every optimizer once more, in float64 NumPy, leaf by leaf, as its paper writes it.

Nothing of jgrad is imported, and nothing is shared between methods beyond what their papers share.
An optimizer is a generator: it is sent the gradients of each step and yields the weights after it.
`state` is what it goes on from: the steps done, first moments and second ones.
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


def _start(w: Leaves, state) -> tuple[int, Leaves, Leaves]:
    """The step and the moments of before: copies of them, or zeros."""
    if state is None:
        return 0, [np.zeros_like(x) for x in w], [np.zeros(x.shape) for x in w]
    t, m, v = state
    return t, [x.copy() for x in m], [x.copy() for x in v]


def _double(leaves: Leaves) -> Leaves:
    return [np.asarray(x).astype(np.result_type(np.asarray(x).dtype, np.float64)) for x in leaves]


def _norm(x: np.ndarray) -> float:
    """The 2-norm, scaled by the largest element so that float64 itself cannot overflow."""
    largest = np.max(np.abs(x), initial=0.0)
    if largest == 0 or not np.isfinite(largest):
        return float(largest)
    return float(largest * np.sqrt(np.sum(np.abs(x / largest) ** 2)))


def _towards_zero(u: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Where subtracting a little of u makes |w| smaller: the slope of |w - s u| is negative."""
    if np.iscomplexobj(u):
        return np.real(u * np.conj(w)) > 0
    return (np.sign(u) == np.sign(w)) & (w != 0)


def _decayed(w: np.ndarray, u: np.ndarray, rate, decay, rule) -> np.ndarray:
    """w - rate u, with decay: Loshchilov and Hutter (2019), its rate apart, and Chen et al. (2025)."""
    if rule == "independent":
        return w - rate * u - decay * w
    if rule == "cautious":
        return w - rate * (u + decay * np.where(_towards_zero(u, w), w, 0))
    assert rule == "decoupled"
    return w - rate * (u + decay * w)


def gradient_descent(
    w: Leaves, lr, *, momentum=None, nesterov=False, weight_decay=0.0, decay=None,
    weight_decay_rule="coupled", state=None,
) -> Optimizer:  # fmt: skip
    """Sutskever et al. (2013), equations 1 to 4, in PyTorch's arrangement: the rate outside."""
    w = _double(w)
    decay = decay or [True] * len(w)
    t, buffer, _ = _start(w, state)
    while True:
        g = _double((yield [x.copy() for x in w]))
        rate = lr(t) if callable(lr) else lr
        for i in range(len(w)):
            lam = weight_decay if decay[i] else 0.0
            d = g[i] + (lam * w[i] if weight_decay_rule == "coupled" else 0.0)
            if momentum is not None:
                buffer[i] = momentum * buffer[i] + d
                d = d + momentum * buffer[i] if nesterov else buffer[i]
            if weight_decay_rule == "coupled":
                w[i] = w[i] - rate * d
            else:
                w[i] = _decayed(w[i], d, rate, lam, weight_decay_rule)
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
    w: Leaves, lr, *, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0, decay=None,
    weight_decay_rule="decoupled", bias_correction="moments", state=None,
) -> Optimizer:  # fmt: skip
    """Kingma and Ba (2015); decoupled decay of Loshchilov and Hutter (2019), algorithm 2."""
    w = _double(w)
    decay = decay or [True] * len(w)
    t, m, v = _start(w, state)
    while True:
        g = _double((yield [x.copy() for x in w]))
        rate = lr(t) if callable(lr) else lr
        t += 1
        for i in range(len(w)):
            m[i] = beta1 * m[i] + (1 - beta1) * g[i]
            v[i] = beta2 * v[i] + (1 - beta2) * np.abs(g[i]) ** 2
            d = _adam_direction(m[i], v[i], t, beta1, beta2, epsilon, bias_correction)
            w[i] = _decayed(w[i], d, rate, weight_decay if decay[i] else 0.0, weight_decay_rule)


def adan(
    w: Leaves, lr, *, beta1=0.98, beta2=0.92, beta3=0.99, epsilon=1e-8, weight_decay=0.0, decay=None,
    weight_decay_rule="decoupled", state=None,
) -> Optimizer:  # fmt: skip
    """Xie et al. (2022), algorithm 1, whose beta_k are 1 - beta_k here.

    With the bias corrections of the authors' code; g_0 = g_1, so that the first difference is 0.
    """
    w = _double(w)
    decay = decay or [True] * len(w)
    t, m, n = _start(w, state)
    v, old = [np.zeros_like(x) for x in w], None
    b1, b2, b3 = 1 - beta1, 1 - beta2, 1 - beta3
    while True:
        g = _double((yield [x.copy() for x in w]))
        rate = lr(t) if callable(lr) else lr
        t += 1
        old = g if old is None else old
        for i in range(len(w)):
            m[i] = (1 - b1) * m[i] + b1 * g[i]
            v[i] = (1 - b2) * v[i] + b2 * (g[i] - old[i])
            n[i] = (1 - b3) * n[i] + b3 * np.abs(g[i] + (1 - b2) * (g[i] - old[i])) ** 2
            m_hat, v_hat, n_hat = (
                m[i] / (1 - beta1**t),
                v[i] / (1 - beta2**t),
                n[i] / (1 - beta3**t),
            )
            u = (m_hat + (1 - b2) * v_hat) / (np.sqrt(n_hat) + epsilon)
            w[i] = _decayed(w[i], u, rate, weight_decay if decay[i] else 0.0, weight_decay_rule)
        old = g


def lion(
    w: Leaves, lr, *, beta1=0.9, beta2=0.99, weight_decay=0.0, decay=None,
    weight_decay_rule="decoupled", state=None,
) -> Optimizer:  # fmt: skip
    """Chen et al. (2023), algorithm 2; the sign of a complex number is NumPy's, x / |x|."""
    w = _double(w)
    decay = decay or [True] * len(w)
    t, m, _ = _start(w, state)
    while True:
        g = _double((yield [x.copy() for x in w]))
        rate = lr(t) if callable(lr) else lr
        t += 1
        for i in range(len(w)):
            c = np.sign(beta1 * m[i] + (1 - beta1) * g[i])
            m[i] = beta2 * m[i] + (1 - beta2) * g[i]
            w[i] = _decayed(w[i], c, rate, weight_decay if decay[i] else 0.0, weight_decay_rule)


def lars(
    w: Leaves, lr, *, trust_coefficient=0.001, momentum=0.9, nesterov=False, weight_decay=0.0,
    decay=None, weight_decay_rule="coupled", trust=None, epsilon=0.0, rate_in_momentum=True,
    rule="paper", state=None,
) -> Optimizer:  # fmt: skip
    """You, Gitman and Ginsburg (2017), algorithm 1; `rule="ivy"` as IVY's own source computes it."""
    w = _double(w)
    decay, trust = decay or [True] * len(w), trust or [True] * len(w)
    t, buffer, _ = _start(w, state)
    while True:
        g = _double((yield [x.copy() for x in w]))
        rate = lr(t) if callable(lr) else lr
        t += 1
        for i in range(len(w)):
            after = weight_decay if decay[i] else 0.0
            lam = after if weight_decay_rule == "coupled" else 0.0
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
            d = d * (1.0 if inside else rate)
            if weight_decay_rule == "coupled":
                w[i] = w[i] - d
            else:
                after = after * (1.0 if weight_decay_rule == "independent" else rate)
                rule_of_step = weight_decay_rule.replace("independent", "decoupled")
                w[i] = _decayed(w[i], d, 1.0, after, rule_of_step)


def lamb(
    w: Leaves, lr, *, beta1=0.9, beta2=0.999, epsilon=1e-6, weight_decay=0.0, decay=None,
    weight_decay_rule="decoupled", trust=None, min_trust_ratio=0.0, max_trust_ratio=10.0,
    bias_correction="moments", rule="paper", state=None,
) -> Optimizer:  # fmt: skip
    """You et al. (2020), algorithm 2; `rule="ivy"` as Ivy's own source computes it."""
    w = _double(w)
    decay, trust = decay or [True] * len(w), trust or [True] * len(w)
    t, m, v = _start(w, state)
    while True:
        g = _double((yield [x.copy() for x in w]))
        rate = lr(t) if callable(lr) else lr
        t += 1
        for i in range(len(w)):
            m[i] = beta1 * m[i] + (1 - beta1) * g[i]
            v[i] = beta2 * v[i] + (1 - beta2) * np.abs(g[i]) ** 2
            delta = _adam_direction(m[i], v[i], t, beta1, beta2, epsilon, bias_correction)
            lam = weight_decay if decay[i] else 0.0
            u = {
                "decoupled": delta + lam * w[i],
                "cautious": delta + lam * np.where(_towards_zero(delta, w[i]), w[i], 0),
                "independent": delta,
            }[weight_decay_rule]
            w_norm, u_norm = _norm(w[i]), _norm(u)
            if rule == "ivy":
                ratio = min(w_norm / (u_norm + 1e-12), max_trust_ratio)
                u = delta
            elif w_norm == 0 or u_norm == 0:
                ratio = 1.0
            else:
                ratio = min(max(w_norm / u_norm, min_trust_ratio), max_trust_ratio)
            apart = lam * w[i] if weight_decay_rule == "independent" else 0.0
            w[i] = w[i] - rate * (ratio if trust[i] else 1.0) * u - apart


# Keller Jordan's coefficients, and those of Jiacheng You and of Amsel et al. (2025).
_STEPS = {
    "jordan": [(3.4445, -4.7750, 2.0315)] * 5,
    "you": [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
     (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)],
    "polar_express": [(8.156554524902461, -22.48329292557795, 15.878769915207462),
     (4.042929935166739, -2.808917465908714, 0.5000178451051316),
     (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
     (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
     (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)],
    "deepseek_v4": [(3.4445, -4.7750, 2.0315)] * 8 + [(2, -1.5, 0.5)] * 2,
}  # fmt: skip


def newton_schulz(d: np.ndarray, coefficients="jordan") -> np.ndarray:
    """`zeropower_via_newtonschulz5` of KellerJordan/Muon, of one matrix (out, in), without epsilon."""
    tall = d.shape[0] > d.shape[1]
    x = d.T if tall else d
    norm = _norm(x)
    x = x / (norm * (1.02 if coefficients == "polar_express" else 1.0)) if norm > 0 else x
    steps = _STEPS[coefficients] if isinstance(coefficients, str) else coefficients
    for a, b, c in steps:
        gram = x @ x.conj().T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def _axes(x: np.ndarray, output_axes, layer_axes) -> tuple[list[int], list[int], list[int]]:
    """Those of layers, outputs and inputs; there may be none."""

    def axes(value):
        value = () if value is None else value if isinstance(value, tuple) else (value,)
        return sorted(axis % x.ndim for axis in value) if x.ndim else []

    layers = axes(layer_axes)
    outputs = [axis for axis in axes(output_axes) if axis not in layers]
    return layers, outputs, [axis for axis in range(x.ndim) if axis not in layers + outputs]


def as_matrices(x: np.ndarray, output_axes=-1, layer_axes=None) -> np.ndarray:
    """(layers, outputs, inputs)"""
    layers, outputs, inputs = axes = _axes(x, output_axes, layer_axes)
    shape = [int(np.prod([x.shape[axis] for axis in own])) for own in axes]
    return x.transpose(layers + outputs + inputs).reshape(shape)


def from_matrices(y: np.ndarray, shape, output_axes=-1, layer_axes=None) -> np.ndarray:
    """The array, from what `as_matrices` made of it: by the places of its elements."""
    places = as_matrices(np.arange(int(np.prod(shape))).reshape(shape), output_axes, layer_axes)
    flat = np.zeros(places.size, y.dtype)
    flat[places.ravel()] = y.ravel()
    return flat.reshape(shape)


def _chosen(x: np.ndarray, fraction: float, rows_only: bool) -> list[np.ndarray]:
    """Rows and columns of a matrix that take part in a step: all of one of them."""
    chosen = [np.arange(side) for side in x.shape]
    if fraction < 1:
        axis = 0 if rows_only or x.shape[0] <= x.shape[1] else 1
        norms = np.sum(np.abs(x), axis=1 - axis)
        count = int(np.ceil(np.round(fraction * x.shape[axis], 9)))
        chosen[axis] = np.argsort(-norms, kind="stable")[:count]
    return chosen


def muon_scale(scale, out: int, into: int) -> float:
    """The factor of each recipe: Jordan's, Moonlight's and dion's."""
    if callable(scale):
        return scale(out, into)
    return {
        None: 1.0,
        "original": max(1, out / into) ** 0.5,
        "match_rms_adamw": 0.2 * max(out, into) ** 0.5,
        "spectral": (out / into) ** 0.5,
    }[scale]


def muon(
    w: Leaves, lr, *, matrices, momentum=0.95, nesterov=True, weight_decay=0.0, decay=None,
    weight_decay_rule="decoupled",
    scale="original", coefficients="jordan", rule="muon", output_axes=-1, layer_axes=None,
    adam_learning_rate=None, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, normuon_beta=0.95, adam_weight_decay=None,
    fraction=1.0, error_decay=0.95, state=None,
) -> Optimizer:  # fmt: skip
    """KellerJordan/Muon `muon.py`, `SingleDeviceMuonWithAuxAdam`; NorMuon as in dion's `normuon.py`.

    With a `fraction` below 1 it is Dion2, of NorMuon Dion3 (Ahn, Amsel and Langford 2025; microsoft/dion
    `dion2.py`, `nordion2.py` at 0a059a4): m' = m + g, neither `momentum` nor `nesterov` in it.
    ceil(fraction * side) rows of m' with the largest 1-norms, or columns where there are fewer columns
    than rows, are orthogonalised as one matrix, and its rows and columns are the step, by the scale of
    the whole matrix. They then decay in m' by `error_decay`; the others wait, and so do their second
    moments. Weights decay everywhere, "cautious" where there is a step. NorMuon always takes rows,
    which are outputs, since they have its second moments. Of equal norms the first is taken.
    """
    w = _double(w)
    decay = decay or [True] * len(w)
    t, m, v = _start(w, state)
    second = [None] * len(w)
    while True:
        g = _double((yield [x.copy() for x in w]))
        at = lambda x, t=t: x(t) if callable(x) else x
        rate, mu = at(lr), at(momentum)
        adam_rate = rate if adam_learning_rate is None else at(adam_learning_rate)
        t += 1
        for i in range(len(w)):
            wd = weight_decay if matrices[i] or adam_weight_decay is None else adam_weight_decay
            wd = wd if decay[i] else 0.0
            if not matrices[i]:
                m[i] = adam_beta1 * m[i] + (1 - adam_beta1) * g[i]
                v[i] = adam_beta2 * v[i] + (1 - adam_beta2) * np.abs(g[i]) ** 2
                d = _adam_direction(m[i], v[i], t, adam_beta1, adam_beta2, adam_epsilon, "moments")
                w[i] = _decayed(w[i], d, adam_rate, wd, weight_decay_rule)
                continue
            if fraction < 1:
                d = m[i] = m[i] + g[i]
            else:
                m[i] = mu * m[i] + (1 - mu) * g[i]
                d = mu * m[i] + (1 - mu) * g[i] if nesterov else m[i]
            stack = as_matrices(d, output_axes, layer_axes)
            update, kept = np.zeros_like(stack), np.ones(stack.shape)
            for j, x in enumerate(stack):
                chosen = np.ix_(*_chosen(x, fraction, rows_only=rule == "normuon"))
                o = newton_schulz(x[chosen], coefficients)
                if rule == "normuon":
                    if second[i] is None:
                        second[i] = np.zeros(stack.shape[:2])
                    rows, own = chosen[0][:, 0], second[i][j]
                    mean = np.mean(np.abs(o) ** 2, axis=1)
                    own[rows] = normuon_beta * own[rows] + (1 - normuon_beta) * mean
                    new = o / (np.sqrt(own[rows]) + 1e-8)[:, None]
                    o = new * (_norm(o) / _norm(new)) if _norm(new) > 0 else o
                update[j][chosen] = muon_scale(scale, *x.shape) * o
                kept[j][chosen] = error_decay
            if fraction < 1:
                m[i] = m[i] * from_matrices(kept, m[i].shape, output_axes, layer_axes)
            update = from_matrices(update, w[i].shape, output_axes, layer_axes)
            w[i] = _decayed(w[i], update, rate, wd, weight_decay_rule)


def _factored(v: list[np.ndarray], epsilon, rule) -> np.ndarray:
    """The estimate of squares from the averages of one layer: by rows and columns, or as they are."""
    if len(v) == 1:
        estimate = v[0]
    else:
        mean = v[0].mean()
        estimate = np.outer(*v) / (mean if rule == "paper" else max(mean, epsilon))
    return estimate if rule == "paper" else np.maximum(estimate, epsilon**2)


def adafactor(
    w: Leaves, lr, *, layer_axes=None, output_axes=-1, beta2_decay=0.8, beta2_cap=None,
    epsilon=(1e-30, 1e-3), clip_threshold=1.0, momentum=None, rate_in_momentum=True,
    scale_by_parameter=True, min_side=128, weight_decay=0.0, decay=None,
    weight_decay_rule="decoupled", rule="paper", per_layer=True,
) -> Optimizer:  # fmt: skip
    """Shazeer and Stern (2018), algorithms 4 to 6.

    The paper has matrices and vectors. Here a leaf is a stack of matrices by `layer_axes` and
    `output_axes`, as for `muon`, whatever its rank. A matrix has one average for each output and each
    input where it has axes of both, and at least `min_side` outputs and `min_side` inputs, otherwise
    one for each element. All is per layer: averages, the clipping max(1, RMS(u) / clip_threshold),
    and the scale max(epsilon[1], RMS(w)), by the weights of before the step and before their decay.
    `beta2_cap` is that of Zhai et al. (2022).

    The paper has no equation for momentum. It averages the steps, with rate and scale in them, as the
    authors' tensor2tensor and optax do, or without `rate_in_momentum` the clipped and scaled
    directions. Decay is not in the paper either: w' = w - lr (scale u + decay w). That of
    optax.adafactor is the rule "independent".

    `rule="torch"` is torch.optim.Adafactor of 2.14, which differs in this:
    - The relative step size is min(lr, 1 / sqrt(t)); decay has lr.
    - epsilon[0] is not added to squares: it is a bound from below for the mean of the averages of the
      outputs, and its square one for the estimate. None is that of float64, as by default there.
    - Every array of rank two or more is factored: `min_side=1`.
    - Of rank three or more, outputs and inputs are the last two axes and each index of the others has
      averages of its own, but clipping and scale are those of the whole array:
      `layer_axes=(0, ..., n - 3)` and `per_layer=False`.
    """
    w = _double(w)
    decay = decay or [True] * len(w)
    both = [all(_axes(x, output_axes, layer_axes)[1:]) for x in w]
    stacks = lambda leaves: [as_matrices(x, output_axes, layer_axes) for x in leaves]
    rms = lambda x: _norm(x) / x.size**0.5
    t, m = 0, [np.zeros_like(x) for x in w]
    v = [[None] * len(stack) for stack in stacks(w)]
    while True:
        g = _double((yield [x.copy() for x in w]))
        rate = lr(t) if callable(lr) else lr
        t += 1
        beta = min(1 - t**-beta2_decay, 1.0 if beta2_cap is None else beta2_cap)
        rho = min(rate, t**-0.5) if rule == "torch" else rate
        least = np.finfo(np.float64).eps if epsilon[0] is None else epsilon[0]
        for i, (grads, weights) in enumerate(zip(stacks(g), stacks(w), strict=True)):
            u = np.empty_like(grads)
            for j, x in enumerate(grads):
                squares = np.abs(x) ** 2 + (least if rule == "paper" else 0.0)
                new = [squares]
                if both[i] and min(x.shape) >= min_side:
                    new = [squares.mean(1), squares.mean(0)]
                old = v[i][j] or [0.0] * len(new)
                v[i][j] = [beta * a + (1 - beta) * b for a, b in zip(old, new, strict=True)]
                u[j] = x / np.sqrt(_factored(v[i][j], least, rule))
            for part in range(len(u)) if per_layer else [slice(None)]:
                if clip_threshold is not None:
                    u[part] = u[part] / max(1.0, rms(u[part]) / clip_threshold)
                if scale_by_parameter:
                    u[part] = u[part] * max(epsilon[1], rms(weights[part]))
            step = from_matrices(u, w[i].shape, output_axes, layer_axes)
            if momentum is None:
                step = rho * step
            elif rate_in_momentum:
                step = m[i] = momentum * m[i] + (1 - momentum) * rho * step
            else:
                m[i] = momentum * m[i] + (1 - momentum) * step
                step = rho * m[i]
            after = weight_decay if decay[i] else 0.0
            after = after * (1.0 if weight_decay_rule == "independent" else rate)
            rule_of_step = weight_decay_rule.replace("independent", "decoupled")
            w[i] = _decayed(w[i], step, 1.0, after, rule_of_step)


def first_basis(a: np.ndarray) -> np.ndarray:
    """Eigenvectors, that of the largest eigenvalue first."""
    return np.linalg.eigh(a)[1][:, ::-1]


def next_basis(a: np.ndarray, q: np.ndarray, lift=0.0) -> tuple[np.ndarray, np.ndarray]:
    """A step of the power iteration: the basis, and the order in which the columns of `q` went in.

    The diagonal of the triangular factor is not negative, so that the basis does not depend on the
    platform, if `a` has full rank. heavyball lifts it to full rank, by a part of its largest value.
    """
    values = np.real(np.diag(q.conj().T @ a @ q))
    order = np.argsort(-values, kind="stable")
    q = q[:, order]
    new, triangle = np.linalg.qr(a @ q + lift * np.max(values) * q)
    diagonal = np.diag(triangle)
    size = np.abs(diagonal)
    return new * np.where(size > 0, diagonal / np.where(size > 0, size, 1), 1), order


def _soap_of_matrix(
    g, m, v, own, t, *, betas, every, epsilon, max_side, bases, bias_correction, lift
):
    """The direction, and new m and v; `own` has the factors and bases of both sides, and is changed.

    `t` is the number of updates before this one: in the first, only factors and bases are made.
    """
    beta1, beta2, shampoo_beta = betas
    squares = [g @ g.conj().T, g.conj().T @ g]
    small = [size <= max_side for size in g.shape]
    direction = None
    if t == 0:
        own["factors"] = [np.zeros_like(x) for x in squares]
    else:
        left, right = own["bases"]
        turned = left.conj().T @ g @ right
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * np.abs(turned) ** 2
        n = left.conj().T @ m @ right
        if bias_correction == "moments":
            n = n / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + epsilon)
        else:
            n = n * (1 - beta2**t) ** 0.5 / (1 - beta1**t) / (np.sqrt(v) + epsilon)
        direction = left @ n @ right.conj().T
    own["factors"] = [
        shampoo_beta * old + (1 - shampoo_beta) * x
        for old, x in zip(own["factors"], squares, strict=True)
    ]
    if t == 0:
        own["bases"] = [
            first_basis(a) if chosen else np.eye(len(a), dtype=a.dtype)
            for a, chosen in zip(own["factors"], small, strict=True)
        ]
        own["bases"] = own["bases"] if bases is None else list(bases)
    elif every(t) if callable(every) else t % every == 0:
        for side in (0, 1):
            if small[side]:
                factor, basis = own["factors"][side], own["bases"][side]
                own["bases"][side], order = next_basis(factor, basis, lift)
                v = np.take(v, order, axis=side)
    return direction, m, v


def soap(
    w: Leaves, lr, *, matrices, beta1=0.95, beta2=0.95, shampoo_beta=0.95, every=10, epsilon=1e-8,
    max_side=8192, weight_decay=0.0, decay=None, weight_decay_rule="decoupled", first_step="skip",
    bias_correction="moments", output_axes=-1, layer_axes=None, adam_learning_rate=None,
    adam_beta1=None, adam_beta2=None, adam_epsilon=None, adam_weight_decay=None, bases=None,
    kept=None, lift=0.0,
) -> Optimizer:  # fmt: skip
    """Vyas et al. (2024), algorithms 3 and 4, of each matrix (outputs, inputs) of a chosen leaf.

    In the paper's order: the step in the present bases, then L, R and, in every `every`-th step, the
    bases. As there, the momentum is kept in the basis of the weights and turned in each step. What
    the paper leaves to the authors' nikhilvyas/SOAP, `soap.py`, is as there:
    - The first update makes L, R and the bases, by `eigh`, and moves nothing, by decay neither. Bias
      corrections and `every` count the updates after it: bases are new behind updates 11, 21, ...
    - Before a power step the columns of a basis are put in the order of diag(Q^T L Q), largest first,
      and v, whose rows and columns they are, alike.
    - A side above `max_side` keeps the identity.

    What is not: corrections are Adam's own, `bias_correction="moments"`, where the authors have
    epsilon beside the uncorrected root of v, "step_size". Decay is subtracted with the step, of the
    weights before it; the authors decay the weights behind it, w' = (1 - lr decay)(w - lr n). Signs
    of bases are those of `next_basis`; no update depends on them. Other leaves are AdamW's from the
    first update on, where the authors let them wait, too; None is the number of SOAP.

    `first_step="adam"`: the first update is a step of Adam, g / (|g| + epsilon) and decay, whose
    moments are forgotten. In the bases of the same gradient it would be a quotient of roundings.

    Where a gradient is not square, the first L or R has a null space, in which eigenvectors are
    arbitrary, and if it has two dimensions or more, updates depend on them. To compare two programs,
    hand over the first bases of one: `bases`, for each leaf a list with (left, right) of each layer.
    `every` may also be a function that says, of the number of updates before, whether bases are due.
    `kept`, an empty dict, is given "m", "v" and "sides" after each step: v is of shape (layers,
    outputs, inputs), sides a list of {"factors": [left, right], "bases": [left, right]}.
    """
    w = _double(w)
    decay = decay or [True] * len(w)
    or_else = lambda given, default: default if given is None else given
    of_adam = [
        or_else(adam_beta1, beta1), or_else(adam_beta2, beta2), or_else(adam_epsilon, epsilon),
    ]  # fmt: skip
    of_soap = {
        "betas": (beta1, beta2, shampoo_beta), "every": every, "epsilon": epsilon,
        "max_side": max_side, "bias_correction": bias_correction, "lift": lift,
    }  # fmt: skip
    axes = output_axes, layer_axes
    t, m, v = _start(w, None)
    owns: list = [None] * len(w)
    for i, x in enumerate(w):
        if matrices[i]:
            v[i] = np.zeros(as_matrices(x, *axes).shape)
            owns[i] = [{} for _ in v[i]]
    while True:
        g = _double((yield [x.copy() for x in w]))
        rate = lr(t) if callable(lr) else lr
        adam_rate = or_else(adam_learning_rate, rate)
        adam_rate = adam_rate(t) if callable(adam_rate) else adam_rate
        for i in range(len(w)):
            if not matrices[i]:
                b1, b2, small = of_adam
                m[i] = b1 * m[i] + (1 - b1) * g[i]
                v[i] = b2 * v[i] + (1 - b2) * np.abs(g[i]) ** 2
                d = _adam_direction(m[i], v[i], t + 1, b1, b2, small, "moments")
                wd = or_else(adam_weight_decay, weight_decay) if decay[i] else 0.0
                w[i] = _decayed(w[i], d, adam_rate, wd, weight_decay_rule)
                continue
            grads, moments = as_matrices(g[i], *axes), as_matrices(m[i], *axes)
            found = [
                _soap_of_matrix(
                    x, moments[j], v[i][j], owns[i][j], t, **of_soap,
                    bases=None if bases is None else bases[i][j],
                )
                for j, x in enumerate(grads)
            ]  # fmt: skip
            m[i] = from_matrices(np.stack([x[1] for x in found]), w[i].shape, *axes)
            v[i] = np.stack([x[2] for x in found])
            if t > 0:
                d = from_matrices(np.stack([x[0] for x in found]), w[i].shape, *axes)
            elif first_step == "adam":
                d = g[i] / (np.abs(g[i]) + epsilon)
            else:
                continue
            w[i] = _decayed(w[i], d, rate, weight_decay if decay[i] else 0.0, weight_decay_rule)
        t += 1
        if kept is not None:
            kept.update(m=m, v=v, sides=owns)
