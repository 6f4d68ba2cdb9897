"""States as a whole: how they are sharded, and how they are converted. Nothing here wraps anything.

May import from `_wrappers`, `_inputs`, `_packed`, `_arithmetic` and `_trees`.
"""
