"""Published LARS, LAMB and Adam implementations, in float64 NumPy, each as its own source has it.

Nothing of jgrad, and nothing of `optimizers.py`, is used. The protocol is the one of that file: a
generator that is sent the gradients of each step and yields the weights after it; trees are flat
lists; `decay`, `trust` and `skip` are lists of bools. Defaults are those of the sources, except
that PyTorch's SGD has no momentum by default. Norms are safe here and are not in the sources.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

Leaves = list[np.ndarray]
Optimizer = Generator[Leaves, Leaves, None]
OF_LEAVES = ("decay", "trust", "skip")  # options with a bool for each leaf


def _norm(x: np.ndarray) -> float:
    """The 2-norm, scaled by the largest element, since squares overflow and vanish."""
    largest = float(np.max(np.abs(x), initial=0.0))
    if largest == 0 or not np.isfinite(largest):
        return largest
    return largest * float(np.sqrt(np.sum((x / largest) ** 2)))


def of_leaf(step: Callable[..., Any]) -> Callable[..., Optimizer]:
    """An optimizer, of the step of one leaf.

    `step(w, g, t, rate, *moments)` returns the new weights and moments, which begin at zero; t is 1
    in the first step.
    """
    kinds = [x.kind for x in inspect.signature(step).parameters.values()]
    moments = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) - 4

    @functools.wraps(step)
    def optimizer(w: Leaves, lr: Any, **options: Any) -> Optimizer:
        lists = {name: options.pop(name) for name in OF_LEAVES if options.get(name) is not None}
        w = [np.array(x, np.float64) for x in w]
        states = [[np.zeros(x.shape)] * moments for x in w]
        for t in itertools.count(1):
            grads = [np.array(g, np.float64) for g in (yield [x.copy() for x in w])]
            rate = lr(t - 1) if callable(lr) else lr
            for i, g in enumerate(grads):
                own = {name: bools[i] for name, bools in lists.items()}
                w[i], *states[i] = step(w[i], g, t, rate, *states[i], **options, **own)

    return optimizer


# ---- LARS --------------------------------------------------------------------------------------


@of_leaf
def mlperf_lars(
    w, g, t, rate, accum, *,
    eeta=0.001, momentum=0.9, weight_decay=0.0001, epsilon=0.0, skip=False, nesterov=False,
):  # fmt: skip
    """MLPerf's ResNet-50 in TensorFlow.

    mlcommons/training, image_classification/tensorflow/official/resnet/mlperf_lars_optimizer.py
    at 91cf88b; the momentum is `ApplyMomentum` of tensorflow/core/kernels/training_ops.cc, called
    with a rate of 1 and a gradient that has the rate in it. Leaves in `skip` (biases, batch norm)
    have neither decay nor ratio. A zero norm makes the ratio 1 and leaves the decay.
    The TensorFlow 2 file beside it, image_classification/tensorflow2/lars_optimizer.py at 615ad0a,
    is the same but for `epsilon or backend_config.epsilon()`: its epsilon of 0 is 1e-7.
    """
    if not skip:
        w_norm, g_norm = _norm(w), _norm(g)
        if w_norm > 0 and g_norm > 0:
            rate = rate * eeta * w_norm / (g_norm + weight_decay * w_norm + epsilon)
        g = g + weight_decay * w
    g = g * rate
    accum = accum * momentum + g
    return w - (g + accum * momentum if nesterov else accum), accum


@of_leaf
def apex_larc(
    w, g, t, rate, buffer, *,
    trust_coefficient=0.02, epsilon=1e-8, momentum=0.9, nesterov=False, weight_decay=0.0, decay=True,
):  # fmt: skip
    """apex's LARC with `clip=False` around PyTorch's SGD: the rate is outside the momentum.

    NVIDIA/apex, apex/parallel/LARC.py at 0bfb830; pytorch/pytorch, torch/optim/sgd.py at 0316fdc.
    LARC takes the decay from SGD and adds it to the gradient itself, inside the test for zero
    norms: where a norm is zero, the leaf has neither ratio nor decay.
    """
    lam = weight_decay if decay else 0.0
    param_norm, grad_norm = _norm(w), _norm(g)
    if param_norm != 0 and grad_norm != 0:
        ratio = trust_coefficient * param_norm / (grad_norm + param_norm * lam + epsilon)
        g = (g + lam * w) * ratio
    buffer = momentum * buffer + g  # from zero: SGD begins with g itself
    return w - rate * (g + momentum * buffer if nesterov else buffer), buffer


@of_leaf
def optax_lars(
    w, g, t, rate, trace, *,
    weight_decay=0.0, decay=True, trust_coefficient=0.001, epsilon=0.0, trust=True, momentum=0.9,
    nesterov=False,
):  # fmt: skip
    """optax.lars of optax 0.2.8.

    google-deepmind/optax, optax/_src/alias.py: add_decayed_weights, masked(scale_by_trust_ratio),
    scale_by_learning_rate, trace, in this order. The ratio is eta |w| / |g + lambda w|, of the
    norm of the sum, and 1 where |w| or that norm is zero.
    """
    u = g + weight_decay * w if decay else g
    if trust:
        w_norm, u_norm = _norm(w), _norm(u)
        if w_norm != 0 and u_norm != 0:
            u = u * (trust_coefficient * w_norm / (u_norm + epsilon))
    u = -rate * u
    trace = u + momentum * trace
    return w + (u + momentum * trace if nesterov else trace), trace


@of_leaf
def ivy_lars(w, g, t, rate, *, decay_lambda=0.0):
    """Ivy's lars_update: no momentum, and decay divides the rate.

    ivy-llc/ivy, ivy/functional/ivy/gradients.py at 006d439: `lr |w| / (|g| + 1e-12)`, and if
    `decay_lambda > 0` that, divided by `|w| decay_lambda`; nothing decays. Weights that are all
    zero stay so, and become NaN with decay, by 0 / 0.
    """
    w_norm = _norm(w)
    rate = w_norm * rate / (_norm(g) + 1e-12)
    if decay_lambda > 0:
        rate = rate / (w_norm * decay_lambda) if w_norm > 0 else np.nan
    return (w - g * rate,)


# ---- LAMB --------------------------------------------------------------------------------------


@of_leaf
def paper_lamb(
    w, g, t, rate, m, v, *,
    beta1=0.9, beta2=0.999, epsilon=1e-6, weight_decay=0.0, decay=True, trust=True,
):  # fmt: skip
    """You et al. (2020), algorithm 2, with phi(z) = z.

    arXiv:1904.00962 leaves phi and epsilon open, and does not speak of zero norms; both are read
    in tensorflow/addons, tensorflow_addons/optimizers/lamb.py at 00beec0, to which the authors
    point: no clamp, and a ratio of 1 where |w| or |r + lambda w| is zero.
    """
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
    u = m_hat / (np.sqrt(v_hat) + epsilon)
    if decay:
        u = u + weight_decay * w
    ratio = 1.0
    if trust:
        w_norm, u_norm = _norm(w), _norm(u)
        ratio = w_norm / u_norm if w_norm > 0 and u_norm > 0 else 1.0
    return w - rate * ratio * u, m, v


@of_leaf
def _apex_lamb(
    w, g, t, rate, m, v, *,
    beta1=0.9, beta2=0.999, epsilon=1e-6, weight_decay=0.01, decay=True, bias_correction=True,
    grad_averaging=True, use_nvlamb=False,
):  # fmt: skip
    beta3 = 1 - beta1 if grad_averaging else 1.0
    correction1 = 1 - beta1**t if bias_correction else 1.0
    correction2 = 1 - beta2**t if bias_correction else 1.0
    lam = weight_decay if decay else 0.0
    m = m * beta1 + beta3 * g
    v = v * beta2 + (1 - beta2) * g * g
    u = m / correction1 / (np.sqrt(v / correction2) + epsilon) + lam * w
    if use_nvlamb or lam != 0:
        w_norm, u_norm = _norm(w), _norm(u)
        rate = rate * (w_norm / u_norm) if u_norm != 0 and w_norm != 0 else rate
    return w - rate * u, m, v


def apex_lamb(w: Leaves, lr: Any, *, max_grad_norm: float = 1.0, **options: Any) -> Optimizer:
    """apex's FusedLAMB with `adam_w_mode=True`.

    NVIDIA/apex, apex/optimizers/fused_lamb.py at 16fadfe and csrc/multi_tensor_lamb.cu at 06a83ce.
    All gradients are divided by `norm / max_grad_norm` where their global norm is above
    `max_grad_norm`, before the moments (inf turns that off; 0 does not). Without `grad_averaging`
    the first moment takes the whole gradient, and the second its share. The ratio of leaves
    without decay is 1, unless `use_nvlamb`; so is that of a zero norm. No clamp.
    """
    optimizer = _apex_lamb(w, lr, **options)
    weights = next(optimizer)
    while True:
        grads = [np.array(g, np.float64) for g in (yield weights)]
        global_norm = _norm(np.array([_norm(g) for g in grads]))
        clip = global_norm / max_grad_norm if global_norm > max_grad_norm else 1.0
        weights = optimizer.send([g / clip for g in grads])


@of_leaf
def deepspeed_lamb(
    w, g, t, rate, m, v, *,
    beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0, decay=True, min_coeff=0.01,
    max_coeff=10.0, bias_correction="step_size",
):  # fmt: skip
    """DeepSpeed's FusedLamb with `eps_inside_sqrt=False` and `max_grad_norm=0`, the defaults.

    microsoft/DeepSpeed, deepspeed/ops/lamb/fused_lamb.py at 077e674 and
    csrc/lamb/fused_lamb_cuda_kernel.cu at 06076c6, the same in release 0.19.8: there the ratio is
    of moments without correction, and `lr sqrt(1 - beta2^t) / (1 - beta1^t)` multiplies all that
    comes after it, ratio and decay too. That is "step_size". "moments" is the main branch,
    deepspeedai/DeepSpeed at e5d277f, which corrects m and v instead. None is
    `bias_correction=False` of both. The clamp leaves the ratio of 1 of a zero norm alone.
    """
    correction1 = correction2 = 1.0
    if bias_correction == "step_size":
        rate = rate * np.sqrt(1 - beta2**t) / (1 - beta1**t)
    elif bias_correction == "moments":
        correction1, correction2 = 1 - beta1**t, 1 - beta2**t
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    u = m / correction1 / (np.sqrt(v / correction2) + epsilon)
    u = u + (weight_decay if decay else 0.0) * w
    w_norm, u_norm = _norm(w), _norm(u)
    coeff = 1.0
    if w_norm != 0 and u_norm != 0:
        coeff = max(min(w_norm / u_norm, max_coeff), min_coeff)
    return w - rate * coeff * u, m, v


@of_leaf
def ivy_lamb(
    w, g, t, rate, mw, vw, *,
    beta1=0.9, beta2=0.999, epsilon=1e-7, max_trust_ratio=10, decay_lambda=0.0,
):  # fmt: skip
    """Ivy's lamb_update, from moments of zero: decay is in the norm, not in the step.

    ivy-llc/ivy, ivy/functional/ivy/gradients.py at 006d439. Adam's direction has epsilon in both
    denominators, and the ratio is `min(|w| / (|delta + decay_lambda w| + 1e-12), max)`: 0 where w
    is. (The class LAMB of ivy/stateful/optimizers.py starts its moments at the first g and g^2.)
    """
    alpha = (1 - beta2**t) ** 0.5 / (1 - beta1**t + epsilon)
    mw = beta1 * mw + (1 - beta1) * g
    vw = beta2 * vw + (1 - beta2) * g**2
    delta = alpha * mw / (np.maximum(vw, 0.0) ** 0.5 + epsilon)
    r1 = _norm(w)
    r2 = _norm(delta + decay_lambda * w) if decay_lambda > 0 else _norm(delta)
    return w - delta * (min(r1 / (r2 + 1e-12), max_trust_ratio) * rate), mw, vw


# ---- Adam --------------------------------------------------------------------------------------


@of_leaf
def torch_adamw(
    w, g, t, rate, exp_avg, exp_avg_sq, *,
    beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01, decay=True,
):  # fmt: skip
    """PyTorch's AdamW: decay by the rate first, then Adam with corrected moments.

    pytorch/pytorch, torch/optim/adamw.py at 002d2f0, `_single_tensor_adamw`.
    """
    if decay:
        w = w * (1 - rate * weight_decay)
    exp_avg = exp_avg + (1 - beta1) * (g - exp_avg)
    exp_avg_sq = exp_avg_sq * beta2 + (1 - beta2) * g * g
    denom = np.sqrt(exp_avg_sq) / np.sqrt(1 - beta2**t) + epsilon
    return w - rate / (1 - beta1**t) * exp_avg / denom, exp_avg, exp_avg_sq


@of_leaf
def keras_adam(
    w, g, t, rate, m, v, *, beta1=0.9, beta2=0.999, epsilon=1e-7, weight_decay=0.0, decay=True
):
    """Keras' Adam and AdamW: decay by the rate first, then Adam with a corrected step size.

    keras-team/keras, keras/src/optimizers/adam.py at 13de96a, and `_apply_weight_decay` of
    base_optimizer.py at 001750d. Epsilon is the paper's "epsilon hat", beside the uncorrected
    sqrt(v). tensorflow/tensorflow, tensorflow/python/training/adam.py at 026004e, is the same
    with an epsilon of 1e-8 and without decay.
    """
    alpha = rate * np.sqrt(1 - beta2**t) / (1 - beta1**t)
    if decay:
        w = w - w * weight_decay * rate
    m = m + (g - m) * (1 - beta1)
    v = v + (g**2 - v) * (1 - beta2)
    return w - m * alpha / (np.sqrt(v) + epsilon), m, v


@of_leaf
def apex_adam(
    w, g, t, rate, m, v, *,
    beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0, decay=True, bias_correction=True,
):  # fmt: skip
    """apex's FusedAdam with `adam_w_mode=True`, with or without correction of the moments.

    NVIDIA/apex, apex/optimizers/fused_adam.py and csrc/multi_tensor_adam.cu at 004da4e.
    """
    correction1 = 1 - beta1**t if bias_correction else 1.0
    correction2 = 1 - beta2**t if bias_correction else 1.0
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    u = m / correction1 / (np.sqrt(v / correction2) + epsilon)
    u = u + (weight_decay if decay else 0.0) * w
    return w - rate * u, m, v
