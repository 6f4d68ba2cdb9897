"""What makes a layer, the norm of each at every scale, and trust ratios.

May import from `_arithmetic` and `_trees`; knows leaves, and that a subclass of `LayerAxes` may
find layers elsewhere.
"""
