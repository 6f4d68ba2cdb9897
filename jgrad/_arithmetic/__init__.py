"""Arithmetic on the arrays of one leaf, and running it over many leaves.

No trees, no checks, no state. May import from `_quantized` and `_trees`, for arrays in 8 bits.
"""
