"""Muon, orthogonalization, and what all methods for matrices share.

May import from `_optimizers`, for Adam, and from `_inputs`, `_packed`, `_layers`,
`_arithmetic` and `_trees`. Options that say where matrices are, are read in `_inputs`.
"""
