"""Muon, orthogonalization, and what every method of matrices has beside Adam's leaves.

May import from `_optimizers`, for Adam, and from `_inputs`, `_packed`, `_layers`, `_kernels`,
`_arithmetic` and `_trees`. Where matrices are is read in `_inputs`, for all methods.
"""
