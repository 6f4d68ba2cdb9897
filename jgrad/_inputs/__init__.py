"""From what users may pass to what the arithmetic needs, for updates and transformations alike.

Numbers, trees, options per leaf, state. May import from `_packed`, `_layers`, `_arithmetic`,
`_kernels`, `_quantized` and `_trees`; knows no method by name.
"""
