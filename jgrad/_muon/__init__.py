"""Muon, and what is needed for it alone: orthogonalization, and the parts of arrays with matrices.

May import from `_optimizers`, for Adam, and from `_inputs`, `_packed`, `_layers`, `_kernels`,
`_arithmetic` and `_trees`. Where matrices are is read in `_inputs`, for all methods; below it only
`pack` knows of them: it keeps their rows together.
"""
