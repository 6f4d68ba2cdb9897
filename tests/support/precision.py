"""64-bit types for a part of a test."""

import contextlib

import jax


@contextlib.contextmanager
def in_64_bits():
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)
