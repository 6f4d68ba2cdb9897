"""Newton-Schulz: the orthogonal matrix nearest to each matrix in a stack, by products alone.

    X <- X / |X|;   for each (a, b, c):  A = X X^H;  X <- a X + (b A + c A A) X

Each step maps every singular value s to a s + b s^3 + c s^5, and keeps the singular vectors. Stacks
are processed in chunks, by one loop whose body is compiled once.

On CPUs, and if X is wide, several steps are combined into one polynomial of the small Gram matrix R
= X X^H, as in Dao-AILab's Gram Newton-Schulz:

    R = X X^H;  Q = 1;  for each (a, b, c):  Z = a + b R + c R R;  Q <- Z Q;  R <- Z R Z;   X <- Q X
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jgrad._arithmetic import numerics
from jgrad._arithmetic.leafwise import Function, jit_static_kwargs
from jgrad._trees import checks

# Bytes of a chunk. On CPUs a chunk with its two squares should stay in the second-level cache: 300
# matrices of 32 x 32 take 3.6 ms at once, 3.1 in chunks of 64 kB, 3.2 of 128 kB, 5 of 256 kB, and
# 4.3 one by one; 24 of 64 x 256 take 3.7, 3.5, 3.4, 4.4 and 3.5. On a TPU it should stay in VMEM,
# and according to XLA's counts it does. On other devices, small products wait for each other, so
# chunks are large, bounded by memory; this is unmeasured.
_CPU_CHUNK = 2**17
_TPU_CHUNK = 2**25
_CHUNK = 2**28

# How many steps are combined in one Q. Q multiplies large and small singular values by very
# different numbers. Over five steps, with a spectrum that decays by 1e6, float32 loses up to 30
# times as much as step by step; over three, up to four times. With factors in bfloat16, as on a
# TPU, weak directions are wrong by half after two steps, so this is only for products in full
# precision.
_TOGETHER = 3
_WIDE = 2  # columns per row from which steps by R need fewer operations


class Coefficients(NamedTuple):
    """The polynomials of the steps, hashable.

    Attributes:
      triples: (a, b, c) of each step.
      divisor: of the normalized matrix, so that a rounding does not lift it above 1.
    """

    triples: tuple[tuple[float, float, float], ...]
    divisor: float = 1.0


_JORDAN = (3.4445, -4.7750, 2.0315)

COEFFICIENTS = {
    # Keller Jordan's: 5 equal steps, singular values end between 0.68 and 1.13.
    "jordan": Coefficients((_JORDAN,) * 5),
    # Jiacheng You's: a polynomial for each step.
    "you": Coefficients(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        )
    ),
    # Amsel et al. (2025), 5 steps, safety 2e-2, cushion 2.
    "polar_express": Coefficients(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        1.02,
    ),
    # DeepSeek V4: Jordan's steps, and two that end at 1 to a few digits.
    "deepseek_v4": Coefficients((_JORDAN,) * 8 + ((2.0, -1.5, 0.5),) * 2),
}


def read_coefficients(function: str, coefficients: object) -> Coefficients:
    """Those of a name, or triples of numbers."""
    if isinstance(coefficients, str):
        checks.one_of(function, "coefficients", coefficients, COEFFICIENTS)
        return COEFFICIENTS[coefficients]
    names = ", ".join(map(repr, COEFFICIENTS))
    expected = f"one of {names}, or a sequence of triples (a, b, c), one for each step"
    begin = f"{function}: `coefficients`"
    try:
        rows = np.asarray(coefficients).astype(np.float64, casting="same_kind")  # no complex ones
    except (TypeError, ValueError):
        raise TypeError(f"{begin}: {checks.describe(coefficients)}, expected {expected}.") from None
    if rows.ndim != 2 or rows.shape[1] != 3 or len(rows) == 0:
        raise ValueError(f"{begin}: numbers of shape {rows.shape}, expected {expected}.")
    if not np.all(np.isfinite(rows)):
        raise ValueError(f"{begin}: {rows.tolist()}, expected finite numbers.")
    return Coefficients(tuple(tuple(row) for row in rows.tolist()))


def check_compute_dtype(function: str, dtype: DTypeLike | None) -> np.dtype | None:
    """None, or a floating dtype, whose products are summed in float32."""
    if dtype is None:
        return None
    expected = "None, or a real floating dtype such as bfloat16"
    return checks.floating_dtype(function, "compute_dtype", dtype, expected)


def read_steps(function: str, coefficients: object, compute_dtype: DTypeLike | None) -> Function:
    """`orthogonalized` with options of a user."""
    return functools.partial(
        orthogonalized,
        coefficients=read_coefficients(function, coefficients),
        compute_dtype=check_compute_dtype(function, compute_dtype),
    )


@jit_static_kwargs
def orthogonalized(
    x: jax.Array, *, coefficients: Coefficients, compute_dtype: np.dtype | None
) -> jax.Array:
    """Each matrix of a stack (count, m, n) with m <= n, in float32 or wider; 0 stays 0."""
    x = numerics.widen(x, numerics.real_dtype(x))
    if 0 in x.shape:
        return x
    on_chunk = functools.partial(_chunk, coefficients=coefficients, compute_dtype=compute_dtype)
    on_cpu = functools.partial(on_chunk, by_gram=compute_dtype is None)
    return jax.lax.platform_dependent(
        x,
        cpu=functools.partial(_in_chunks, f=on_cpu, size=_CPU_CHUNK),
        tpu=functools.partial(_in_chunks, f=on_chunk, size=_TPU_CHUNK),
        default=functools.partial(_in_chunks, f=on_chunk, size=_CHUNK),
    )


def _in_chunks(x: jax.Array, f: Function, size: int) -> jax.Array:
    """`f` of the stack, some matrices at a time: as many as `size` bytes hold, and one at least.

    Each chunk is written where it was read, so that results need no stack of their own.
    """
    count, *shape = x.shape
    most = max(1, size // (math.prod(shape) * x.dtype.itemsize))
    if count <= most:
        return f(x)
    chunks = -(-count // most)
    # As few chunks, of a size that divides the count if there is one that is not much smaller.
    length = next((k for k in range(most, most // 2, -1) if count % k == 0), -(-count // chunks))
    chunks = -(-count // length)
    missing = chunks * length - count
    if missing:
        x = jax.lax.pad(x, np.zeros((), x.dtype), ((0, missing, 0), (0, 0, 0), (0, 0, 0)))

    def body(i: jax.Array, x: jax.Array) -> jax.Array:
        new = f(jax.lax.dynamic_slice_in_dim(x, i * length, length))
        return jax.lax.dynamic_update_slice_in_dim(x, new, i * length, 0)

    x = jax.lax.fori_loop(0, chunks, body, x)
    return x[:count] if missing else x


def _chunk(
    x: jax.Array,
    *,
    coefficients: Coefficients,
    compute_dtype: np.dtype | None,
    by_gram: bool = False,
) -> jax.Array:
    """Each matrix of a chunk."""
    x = _normalized(x, coefficients.divisor)
    iterated = functools.partial(_iterated, coefficients=coefficients, compute_dtype=compute_dtype)
    if by_gram and x.shape[2] >= _WIDE * x.shape[1]:
        iterated = functools.partial(_iterated_by_gram, triples=coefficients.triples)
    # On CPUs, products of one matrix are faster than those of a stack of one.
    return iterated(x[0])[None] if len(x) == 1 else iterated(x)


def _normalized(x: jax.Array, divisor: float) -> jax.Array:
    """X / (divisor |X|), at every scale of X; 0 where X is.

    Scaled by its largest element always: a second pass over a chunk costs little beside products.
    """
    scale = numerics.normal_scale(jax.lax.stop_gradient(numerics.magnitude(x)), (1, 2))
    x = numerics.scaled(x, 1 / scale)
    norm = numerics.safe_sqrt(jnp.sum(numerics.abs_squared(x), axis=(1, 2))).reshape(-1, 1, 1)
    return numerics.scaled(x, 1 / jnp.where(norm == 0, jnp.ones_like(norm), norm * divisor))


def _iterated(
    x: jax.Array, *, coefficients: Coefficients, compute_dtype: np.dtype | None
) -> jax.Array:
    """The steps, of one matrix or of a stack; sums of products are in the dtype of `x`."""

    def step(x: jax.Array, factors: jax.Array) -> tuple[jax.Array, None]:
        a, b, c = factors[0], factors[1], factors[2]
        square = product(x, x, adjoint=True)
        return a * x + product(b * square + c * product(square, square), x), None

    product = functools.partial(_product, dtype=compute_dtype)
    triples = jnp.asarray(np.array(coefficients.triples), x.dtype)
    return jax.lax.scan(step, x, triples)[0]


def _iterated_by_gram(
    x: jax.Array, *, triples: tuple[tuple[float, float, float], ...]
) -> jax.Array:
    """The steps, of one matrix or of a stack, some at a time by the Gram matrix."""
    product = numerics.product
    one = jnp.eye(x.shape[-2], dtype=x.dtype).reshape((1,) * (x.ndim - 2) + 2 * (x.shape[-2],))
    for start in range(0, len(triples), _TOGETHER):
        together = triples[start : start + _TOGETHER]
        r, q = product(x, x, adjoint_y=True), one
        for i, (a, b, c) in enumerate(together):
            z = a * one + b * r + c * product(r, r)
            q = z if i == 0 else product(z, q)
            if i + 1 < len(together):
                r = product(product(z, r), z)
        x = product(q, x)
    return x


def _product(
    x: jax.Array, y: jax.Array, *, dtype: np.dtype | None, adjoint: bool = False
) -> jax.Array:
    """X Y, or X Y^H, of matrices or stacks, their elements rounded to `dtype` before."""
    if dtype is not None and jnp.iscomplexobj(x):
        parts = [(x.real, y.real), (x.imag, y.imag), (x.real, y.imag), (x.imag, y.real)]
        rr, ii, ri, ir = (_product(p, q, dtype=dtype, adjoint=adjoint) for p, q in parts)
        sign = 1 if adjoint else -1
        return jax.lax.complex(rr + sign * ii, ir - sign * ri)
    wide = x.dtype
    if dtype is not None:
        x, y = x.astype(dtype), y.astype(dtype)
    return numerics.product(x, y, adjoint_y=adjoint, preferred_element_type=wide)
