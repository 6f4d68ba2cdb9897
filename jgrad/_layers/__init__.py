"""What makes a layer or a matrix, the norm of each at every scale, trust ratios, Newton-Schulz.

May import from `_arithmetic` and `_trees`; knows leaves, and that a subclass of `LayerAxes` may
find layers elsewhere.
"""
