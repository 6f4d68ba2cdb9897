"""States as a whole: where their arrays lie, and in which form. Nothing here wraps an optimizer.

May import from `_wrappers`, `_inputs`, `_packed`, `_arithmetic`, `_quantized` and `_trees`.
"""
