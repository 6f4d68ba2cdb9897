"""From what a user may give to what the arithmetic takes, once for both faces of a method.

Numbers, trees, options per leaf, state. May import from `_packed`, `_layers`, `_arithmetic`,
`_kernels`, `_quantized` and `_trees`; knows no method by name.
"""
