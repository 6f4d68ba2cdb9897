"""What counts as a layer or a matrix, norms at every scale, and trust ratios.

May import from `_arithmetic` and `_trees`; knows leaves, and that subclasses of `LayerAxes` and
`ArraySpec` may find layers, and leaves, elsewhere.
"""
