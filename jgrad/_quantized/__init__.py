"""Numbers in 8 bits and in bfloat16: codes, blocks that share a scale, and stochastic rounding.

May import from `_trees`. The folders above store moments in `Blocks`; the rules of `_arithmetic`
read them as they read any other dtype, widened to float32.
"""
