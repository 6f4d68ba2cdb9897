"""Each method, ours and optax's, and the forms in which a model may be given to it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import optax

import jgrad


class Method(NamedTuple):
    """Ours and optax's, with options that make the numbers the same.

    All but LARS with decay, where the trust ratios differ, and the work does not.

    Attributes:
      jgrad: makes ours.
      optax: makes optax's.
      floor: bytes per float32 parameter that a step must move: each input read once and each output
        written once, and what is needed again after the norms read twice.
    """

    jgrad: Callable[[], optax.GradientTransformation]
    optax: Callable[[], optax.GradientTransformation]
    floor: int


RATE = 1e-3
_DECAY: dict[str, Any] = {"weight_decay": 0.01}

METHODS: dict[str, Method] = {
    "momentum": Method(
        functools.partial(jgrad.gradient_descent, RATE, momentum=0.9),
        functools.partial(optax.sgd, RATE, momentum=0.9),
        floor=20,
    ),
    "Adam": Method(
        functools.partial(jgrad.adam, RATE),
        functools.partial(optax.adam, RATE, eps=1e-8),
        floor=28,
    ),
    "LARS": Method(
        functools.partial(jgrad.lars, RATE, **_DECAY),
        functools.partial(optax.lars, RATE, **_DECAY),
        floor=28,
    ),
    "LAMB": Method(
        functools.partial(jgrad.lamb, RATE, **_DECAY, epsilon=1e-8, max_trust_ratio=1e30),
        functools.partial(optax.lamb, RATE, eps=1e-8, **_DECAY),
        floor=40,
    ),
}


class Form(NamedTuple):
    """How an update is used.

    Attributes:
      make: the transformation of a method.
      pack: what becomes of a tree of parameters or gradients before the first step.
    """

    make: Callable[[Method], optax.GradientTransformation]
    pack: Callable[[Any], Any]


FORMS: dict[str, Form] = {
    "optax": Form(lambda method: method.optax(), lambda tree: tree),
    "tree": Form(lambda method: method.jgrad(), lambda tree: tree),
    "packed": Form(lambda method: method.jgrad(), jgrad.pack),
    # A tree in, a tree out, and small leaves packed inside.
    "small packed": Form(lambda method: jgrad.pack_small(method.jgrad()), lambda tree: tree),
}
