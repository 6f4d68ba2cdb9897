"""SOAP: Adam in the basis of the eigenvectors of Shampoo's factors, and these factors.

May import from `_muon`, for matrices and how they are distributed, from `_optimizers`, for Adam,
and from `_inputs`, `_layers`, `_arithmetic` and `_trees`.
"""
