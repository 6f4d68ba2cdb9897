"""8-bit and bfloat16 numbers: codes, blocks that share a scale, and stochastic rounding.

May import from `_trees`. The folders above store moments in `Blocks`; the rules of `_arithmetic`
read them like any other dtype, widened to float32.
"""
