"""SOAP: Adam in the eigenvectors of Shampoo's factors, and these factors.

May import from `_muon`, for matrices and how they are dealt out, from `_optimizers`, for Adam, and
from `_inputs`, `_layers`, `_kernels`, `_arithmetic` and `_trees`.
"""
