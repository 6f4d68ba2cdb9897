"""The names under which coding stands in a traced program, where `_fused` finds it.

A nested `jax.jit` of such a name is a *region*: moments as files have them, in blocks along the
last axis. XLA inlines it, as it inlines every nested call.
"""

from jgrad._trees.blocks import SIZE, Blocks

DECODE = "jgrad_decode"  # (codes, scale) -> array
ENCODE = "jgrad_encode"  # (codes, scale, value, of_step, leaf, first, *others) -> (codes, scale)
ENCODE_IF = "jgrad_encode_if"  # (..., first, flag, *others): the old ones where it is False

REGIONS = frozenset({DECODE, ENCODE, ENCODE_IF})


def is_possible(x: Blocks) -> bool:
    """Whether an array is one of those."""
    codes, scale = x
    *lead, last = codes.shape or (0,)
    in_rows = lead and last % SIZE == 0 and scale.shape == (*lead, last // SIZE)
    return bool(in_rows) and x.form.is_named_by_dtype
