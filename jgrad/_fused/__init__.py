"""Leaves in 8 bits in one pass over each, where XLA would write moments in float32 in between.

May import from `_quantized` and `_trees`. A traced step comes in, and the same step goes out: as
one kernel for each leaf on a TPU, in two passes of XLA on a GPU, and as it is elsewhere.
"""
