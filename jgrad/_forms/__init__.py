"""Forms in which a leaf of a state is stored: in 8 bits, at random, by rows and columns.

`jgrad` imports each, which puts it into the table of `_trees/forms.py`; nothing else knows them by
name but what makes them. May import from `_inputs`, `_layers`, `_kernels`, `_arithmetic`,
`_quantized` and `_trees`.
"""
