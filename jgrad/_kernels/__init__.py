"""The step of one leaf in 8 bits on each platform: kernels for TPUs, two passes of XLA for GPUs.

May import `_arithmetic`, `_quantized` and `_trees`; knows no method. What a kernel computes is a
function of one leaf, which it is given.
"""
