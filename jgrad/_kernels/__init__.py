"""The step of one 8-bit leaf on each platform: kernels for TPUs, two passes of XLA for GPUs.

May import `_arithmetic`, `_quantized` and `_trees`; knows no method. What a kernel computes is a
function of one leaf, which is passed to it.
"""
