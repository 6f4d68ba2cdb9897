"""Published LARS, LAMB and Adam implementations, in float64 NumPy, each as its own source has it.

Nothing of jgrad, and nothing of `optimizers.py`, is used. The protocol is the one of that file: a
generator that is sent the gradients of each step and yields the weights after it; trees are flat
lists; `decay`, `trust` and `skip` are lists of bools. Defaults are those of the sources, except
that PyTorch's SGD has no momentum by default. Norms are safe here and are not in the sources.
"""

import itertools
from collections.abc import Generator

import numpy as np

Leaves = list[np.ndarray]
Optimizer = Generator[Leaves, Leaves, None]


def _double(leaves: Leaves) -> Leaves:
    return [np.array(x, np.float64) for x in leaves]


def _zeros(leaves: Leaves) -> Leaves:
    return [np.zeros(np.shape(x)) for x in leaves]


def _norm(x: np.ndarray) -> float:
    """The 2-norm, scaled by the largest element, since squares overflow and vanish."""
    largest = float(np.max(np.abs(x), initial=0.0))
    if largest == 0 or not np.isfinite(largest):
        return largest
    return largest * float(np.sqrt(np.sum((x / largest) ** 2)))


def _rate(lr, updates: int) -> float:
    return lr(updates) if callable(lr) else lr


# ---- LARS --------------------------------------------------------------------------------------


def mlperf_lars(
    w: Leaves, lr, *, eeta=0.001, momentum=0.9, weight_decay=0.0001, epsilon=0.0, skip=None,
    nesterov=False,
) -> Optimizer:  # fmt: skip
    """MLPerf's ResNet-50 in TensorFlow.

    mlcommons/training, image_classification/tensorflow/official/resnet/mlperf_lars_optimizer.py
    at 91cf88b; the momentum is `ApplyMomentum` of tensorflow/core/kernels/training_ops.cc, called
    with a rate of 1 and a gradient that has the rate in it. Leaves in `skip` (biases, batch norm)
    have neither decay nor ratio. A zero norm makes the ratio 1 and leaves the decay.
    The TensorFlow 2 file beside it, image_classification/tensorflow2/lars_optimizer.py at 615ad0a,
    is the same but for `epsilon or backend_config.epsilon()`: its epsilon of 0 is 1e-7.
    """
    w, skip = _double(w), skip or [False] * len(w)
    accum = _zeros(w)
    for t in itertools.count():
        grads = _double((yield [x.copy() for x in w]))
        for i, g in enumerate(grads):
            scaled_lr = _rate(lr, t)
            if not skip[i]:
                w_norm, g_norm = _norm(w[i]), _norm(g)
                if w_norm > 0 and g_norm > 0:
                    scaled_lr *= eeta * w_norm / (g_norm + weight_decay * w_norm + epsilon)
                g = g + weight_decay * w[i]
            g = g * scaled_lr
            accum[i] = accum[i] * momentum + g
            w[i] = w[i] - (g + accum[i] * momentum if nesterov else accum[i])


def apex_larc(
    w: Leaves, lr, *, trust_coefficient=0.02, epsilon=1e-8, momentum=0.9, nesterov=False,
    weight_decay=0.0, decay=None,
) -> Optimizer:  # fmt: skip
    """apex's LARC with `clip=False` around PyTorch's SGD: the rate is outside the momentum.

    NVIDIA/apex, apex/parallel/LARC.py at 0bfb830; pytorch/pytorch, torch/optim/sgd.py at 0316fdc.
    LARC takes the decay from SGD and adds it to the gradient itself, inside the test for zero
    norms: where a norm is zero, the leaf has neither ratio nor decay.
    """
    w, decay = _double(w), decay or [True] * len(w)
    buffer: list[np.ndarray | None] = [None] * len(w)
    for t in itertools.count():
        grads = _double((yield [x.copy() for x in w]))
        for i, g in enumerate(grads):
            lam = weight_decay if decay[i] else 0.0
            param_norm, grad_norm = _norm(w[i]), _norm(g)
            if param_norm != 0 and grad_norm != 0:
                ratio = trust_coefficient * param_norm / (grad_norm + param_norm * lam + epsilon)
                g = (g + lam * w[i]) * ratio
            buffer[i] = g if buffer[i] is None else momentum * buffer[i] + g
            w[i] = w[i] - _rate(lr, t) * (g + momentum * buffer[i] if nesterov else buffer[i])


def optax_lars(
    w: Leaves, lr, *, weight_decay=0.0, decay=None, trust_coefficient=0.001, epsilon=0.0,
    trust=None, momentum=0.9, nesterov=False,
) -> Optimizer:  # fmt: skip
    """optax.lars of optax 0.2.8.

    google-deepmind/optax, optax/_src/alias.py: add_decayed_weights, masked(scale_by_trust_ratio),
    scale_by_learning_rate, trace, in this order. The ratio is eta |w| / |g + lambda w|, of the
    norm of the sum, and 1 where |w| or that norm is zero.
    """
    w, decay, trust = _double(w), decay or [True] * len(w), trust or [True] * len(w)
    trace = _zeros(w)
    for t in itertools.count():
        grads = _double((yield [x.copy() for x in w]))
        for i, g in enumerate(grads):
            u = g + weight_decay * w[i] if decay[i] else g
            if trust[i]:
                w_norm, u_norm = _norm(w[i]), _norm(u)
                if w_norm != 0 and u_norm != 0:
                    u = u * (trust_coefficient * w_norm / (u_norm + epsilon))
            u = -_rate(lr, t) * u
            trace[i] = u + momentum * trace[i]
            w[i] = w[i] + (u + momentum * trace[i] if nesterov else trace[i])


def ivy_lars(w: Leaves, lr, *, decay_lambda=0.0) -> Optimizer:
    """Ivy's lars_update: no momentum, and decay divides the rate.

    ivy-llc/ivy, ivy/functional/ivy/gradients.py at 006d439: `lr |w| / (|g| + 1e-12)`, and if
    `decay_lambda > 0` that, divided by `|w| decay_lambda`; nothing decays. Weights that are all
    zero stay so, and become NaN with decay, by 0 / 0.
    """
    w = _double(w)
    for t in itertools.count():
        grads = _double((yield [x.copy() for x in w]))
        for i, g in enumerate(grads):
            w_norm = _norm(w[i])
            rate = w_norm * _rate(lr, t) / (_norm(g) + 1e-12)
            if decay_lambda > 0:
                rate = rate / (w_norm * decay_lambda) if w_norm > 0 else np.nan
            w[i] = w[i] - g * rate


# ---- LAMB --------------------------------------------------------------------------------------


def paper_lamb(
    w: Leaves, lr, *, beta1=0.9, beta2=0.999, epsilon=1e-6, weight_decay=0.0, decay=None, trust=None
) -> Optimizer:
    """You et al. (2020), algorithm 2, with phi(z) = z.

    arXiv:1904.00962 leaves phi and epsilon open, and does not speak of zero norms; both are read
    in tensorflow/addons, tensorflow_addons/optimizers/lamb.py at 00beec0, to which the authors
    point: no clamp, and a ratio of 1 where |w| or |r + lambda w| is zero.
    """
    w, decay, trust = _double(w), decay or [True] * len(w), trust or [True] * len(w)
    m, v = _zeros(w), _zeros(w)
    for t in itertools.count(1):
        grads = _double((yield [x.copy() for x in w]))
        for i, g in enumerate(grads):
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g**2
            m_hat, v_hat = m[i] / (1 - beta1**t), v[i] / (1 - beta2**t)
            u = m_hat / (np.sqrt(v_hat) + epsilon)
            if decay[i]:
                u = u + weight_decay * w[i]
            ratio = 1.0
            if trust[i]:
                w_norm, u_norm = _norm(w[i]), _norm(u)
                ratio = w_norm / u_norm if w_norm > 0 and u_norm > 0 else 1.0
            w[i] = w[i] - _rate(lr, t - 1) * ratio * u


def apex_lamb(
    w: Leaves, lr, *, beta1=0.9, beta2=0.999, epsilon=1e-6, weight_decay=0.01, decay=None,
    bias_correction=True, grad_averaging=True, max_grad_norm=1.0, use_nvlamb=False,
) -> Optimizer:  # fmt: skip
    """apex's FusedLAMB with `adam_w_mode=True`.

    NVIDIA/apex, apex/optimizers/fused_lamb.py at 16fadfe and csrc/multi_tensor_lamb.cu at 06a83ce.
    All gradients are divided by `norm / max_grad_norm` where their global norm is above
    `max_grad_norm`, before the moments (inf turns that off; 0 does not). Without `grad_averaging`
    the first moment takes the whole gradient, and the second its share. The ratio of leaves
    without decay is 1, unless `use_nvlamb`; so is that of a zero norm. No clamp.
    """
    w, decay = _double(w), decay or [True] * len(w)
    m, v = _zeros(w), _zeros(w)
    beta3 = 1 - beta1 if grad_averaging else 1.0
    for t in itertools.count(1):
        grads = _double((yield [x.copy() for x in w]))
        global_norm = _norm(np.array([_norm(g) for g in grads]))
        clip = global_norm / max_grad_norm if global_norm > max_grad_norm else 1.0
        correction1 = 1 - beta1**t if bias_correction else 1.0
        correction2 = 1 - beta2**t if bias_correction else 1.0
        for i, g in enumerate(grads):
            lam = weight_decay if decay[i] else 0.0
            g = g / clip
            m[i] = m[i] * beta1 + beta3 * g
            v[i] = v[i] * beta2 + (1 - beta2) * g * g
            u = m[i] / correction1 / (np.sqrt(v[i] / correction2) + epsilon) + lam * w[i]
            rate = _rate(lr, t - 1)
            if use_nvlamb or lam != 0:
                w_norm, u_norm = _norm(w[i]), _norm(u)
                rate = rate * (w_norm / u_norm) if u_norm != 0 and w_norm != 0 else rate
            w[i] = w[i] - rate * u


def deepspeed_lamb(
    w: Leaves, lr, *, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0, decay=None,
    min_coeff=0.01, max_coeff=10.0, bias_correction="step_size",
) -> Optimizer:  # fmt: skip
    """DeepSpeed's FusedLamb with `eps_inside_sqrt=False` and `max_grad_norm=0`, the defaults.

    microsoft/DeepSpeed, deepspeed/ops/lamb/fused_lamb.py at 077e674 and
    csrc/lamb/fused_lamb_cuda_kernel.cu at 06076c6, the same in release 0.19.8: there the ratio is
    of moments without correction, and `lr sqrt(1 - beta2^t) / (1 - beta1^t)` multiplies all that
    comes after it, ratio and decay too. That is "step_size". "moments" is the main branch,
    deepspeedai/DeepSpeed at e5d277f, which corrects m and v instead. None is
    `bias_correction=False` of both. The clamp leaves the ratio of 1 of a zero norm alone.
    """
    w, decay = _double(w), decay or [True] * len(w)
    m, v = _zeros(w), _zeros(w)
    for t in itertools.count(1):
        grads = _double((yield [x.copy() for x in w]))
        rate, correction1, correction2 = _rate(lr, t - 1), 1.0, 1.0
        if bias_correction == "step_size":
            rate = rate * np.sqrt(1 - beta2**t) / (1 - beta1**t)
        elif bias_correction == "moments":
            correction1, correction2 = 1 - beta1**t, 1 - beta2**t
        for i, g in enumerate(grads):
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g * g
            u = m[i] / correction1 / (np.sqrt(v[i] / correction2) + epsilon)
            u = u + (weight_decay if decay[i] else 0.0) * w[i]
            w_norm, u_norm = _norm(w[i]), _norm(u)
            coeff = 1.0
            if w_norm != 0 and u_norm != 0:
                coeff = max(min(w_norm / u_norm, max_coeff), min_coeff)
            w[i] = w[i] - rate * coeff * u


def ivy_lamb(
    w: Leaves, lr, *, beta1=0.9, beta2=0.999, epsilon=1e-7, max_trust_ratio=10, decay_lambda=0.0
) -> Optimizer:
    """Ivy's lamb_update, from moments of zero: decay is in the norm, not in the step.

    ivy-llc/ivy, ivy/functional/ivy/gradients.py at 006d439. Adam's direction has epsilon in both
    denominators, and the ratio is `min(|w| / (|delta + decay_lambda w| + 1e-12), max)`: 0 where w
    is. (The class LAMB of ivy/stateful/optimizers.py starts its moments at the first g and g^2.)
    """
    w = _double(w)
    mw, vw = _zeros(w), _zeros(w)
    for t in itertools.count(1):
        grads = _double((yield [x.copy() for x in w]))
        alpha = (1 - beta2**t) ** 0.5 / (1 - beta1**t + epsilon)
        for i, g in enumerate(grads):
            mw[i] = beta1 * mw[i] + (1 - beta1) * g
            vw[i] = beta2 * vw[i] + (1 - beta2) * g**2
            delta = alpha * mw[i] / (np.maximum(vw[i], 0.0) ** 0.5 + epsilon)
            r1 = _norm(w[i])
            r2 = _norm(delta + decay_lambda * w[i]) if decay_lambda > 0 else _norm(delta)
            w[i] = w[i] - delta * (min(r1 / (r2 + 1e-12), max_trust_ratio) * _rate(lr, t - 1))


# ---- Adam --------------------------------------------------------------------------------------


def torch_adamw(
    w: Leaves, lr, *, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01, decay=None
) -> Optimizer:
    """PyTorch's AdamW: decay by the rate first, then Adam with corrected moments.

    pytorch/pytorch, torch/optim/adamw.py at 002d2f0, `_single_tensor_adamw`.
    """
    w, decay = _double(w), decay or [True] * len(w)
    exp_avg, exp_avg_sq = _zeros(w), _zeros(w)
    for t in itertools.count(1):
        grads = _double((yield [x.copy() for x in w]))
        rate = _rate(lr, t - 1)
        for i, g in enumerate(grads):
            if decay[i]:
                w[i] = w[i] * (1 - rate * weight_decay)
            exp_avg[i] = exp_avg[i] + (1 - beta1) * (g - exp_avg[i])
            exp_avg_sq[i] = exp_avg_sq[i] * beta2 + (1 - beta2) * g * g
            denom = np.sqrt(exp_avg_sq[i]) / np.sqrt(1 - beta2**t) + epsilon
            w[i] = w[i] - rate / (1 - beta1**t) * exp_avg[i] / denom


def keras_adam(
    w: Leaves, lr, *, beta1=0.9, beta2=0.999, epsilon=1e-7, weight_decay=0.0, decay=None
) -> Optimizer:
    """Keras' Adam and AdamW: decay by the rate first, then Adam with a corrected step size.

    keras-team/keras, keras/src/optimizers/adam.py at 13de96a, and `_apply_weight_decay` of
    base_optimizer.py at 001750d. Epsilon is the paper's "epsilon hat", beside the uncorrected
    sqrt(v). tensorflow/tensorflow, tensorflow/python/training/adam.py at 026004e, is the same
    with an epsilon of 1e-8 and without decay.
    """
    w, decay = _double(w), decay or [True] * len(w)
    m, v = _zeros(w), _zeros(w)
    for t in itertools.count(1):
        grads = _double((yield [x.copy() for x in w]))
        rate = _rate(lr, t - 1)
        alpha = rate * np.sqrt(1 - beta2**t) / (1 - beta1**t)
        for i, g in enumerate(grads):
            if decay[i]:
                w[i] = w[i] - w[i] * weight_decay * rate
            m[i] = m[i] + (g - m[i]) * (1 - beta1)
            v[i] = v[i] + (g**2 - v[i]) * (1 - beta2)
            w[i] = w[i] - m[i] * alpha / (np.sqrt(v[i]) + epsilon)


def apex_adam(
    w: Leaves, lr, *, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0, decay=None,
    bias_correction=True,
) -> Optimizer:  # fmt: skip
    """apex's FusedAdam with `adam_w_mode=True`, with or without correction of the moments.

    NVIDIA/apex, apex/optimizers/fused_adam.py and csrc/multi_tensor_adam.cu at 004da4e.
    """
    w, decay = _double(w), decay or [True] * len(w)
    m, v = _zeros(w), _zeros(w)
    for t in itertools.count(1):
        grads = _double((yield [x.copy() for x in w]))
        correction1 = 1 - beta1**t if bias_correction else 1.0
        correction2 = 1 - beta2**t if bias_correction else 1.0
        for i, g in enumerate(grads):
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g * g
            u = m[i] / correction1 / (np.sqrt(v[i] / correction2) + epsilon)
            u = u + (weight_decay if decay[i] else 0.0) * w[i]
            w[i] = w[i] - _rate(lr, t - 1) * u
