"""Transformations around transformations, and what stands beside them.

One wrapper, one file, named as the public function. What they share: `hand_over`, `inside`,
`decisions` and `parameters`. May import from `_inputs`, `_packed`, `_layers`,
`_arithmetic`, `_kernels`, `_quantized` and `_trees`; a wrapper does not know which optimizer is
inside.
"""
