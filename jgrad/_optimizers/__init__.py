"""One method, one file: its equation, its functional update and its `init`/`update` pair.

The update and the pair call the same function of one leaf. May import from `_forms`, `_inputs`,
`_layers`, `_arithmetic` and `_trees`, and from the method that it builds upon.
"""
