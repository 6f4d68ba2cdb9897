"""Arithmetic on the arrays of one leaf, and how to apply it to many leaves.

No trees, no checks, no state. May import from `_trees`.
"""
