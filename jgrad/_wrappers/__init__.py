"""Transformations around transformations, and what stands beside them.

One wrapper, one file, named as the public function. `wrapped` and `finite` are what they share. May
import from `_inputs`, `_packed`, `_layers`, `_quantized`, `_arithmetic` and `_trees`; a wrapper
does not know which optimizer is inside.
"""
