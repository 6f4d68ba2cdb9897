"""Transformations around transformations, and related functions.

Each wrapper is one file, named after the public function. They share `hand_over`, `inside`,
`decisions` and `parameters`. May import from `_forms`, `_inputs`, `_packed`, `_layers`,
`_arithmetic`, `_kernels`, `_quantized` and `_trees`; a wrapper does not know which optimizer is
inside.
"""
