"""A bigram model: each byte given the one before it, as often as it came after it in a text."""

import numpy as np

from text import VOCABULARY


def log_probabilities(codes: np.ndarray) -> np.ndarray:
    """log p(next | byte), counted with one more for each pair, of shape (byte, next).

    p(b | a) = (count(a, b) + 1) / (count(a) + 256)
    """
    pairs = codes[:-1].astype(np.int64) * VOCABULARY + codes[1:]
    counts = np.bincount(pairs, minlength=VOCABULARY**2).reshape(VOCABULARY, VOCABULARY) + 1
    return np.log(counts / counts.sum(axis=1, keepdims=True))


def loss(table: np.ndarray, windows: np.ndarray) -> float:
    """Cross-entropy in nats of each byte of windows but the first, as of the language model."""
    return float(-table[windows[..., :-1], windows[..., 1:]].mean())
