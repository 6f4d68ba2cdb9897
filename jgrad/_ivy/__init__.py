"""Names kept for Ivy: `execute_with_gradients`, variables, and updates in place.

May import from `_inputs`, `_packed`, `_layers`, `_gradients`, `_arithmetic` and `_trees`.
"""
