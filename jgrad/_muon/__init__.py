"""Muon, and what is needed for it alone: where matrices are, and their orthogonalization.

May import from `_optimizers`, for Adam, and from `_inputs`, `_packed`, `_layers`, `_kernels`,
`_arithmetic` and `_trees`. Outside of this folder only `pack` knows of matrices: it keeps their
rows together.
"""
