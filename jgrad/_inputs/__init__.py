"""From what users may pass to what the arithmetic needs, for updates and transformations alike.

Numbers, trees, options per leaf, state. May import from `_layers`, `_arithmetic` and
`_trees`; knows no method by name, and no form of a leaf.
"""
