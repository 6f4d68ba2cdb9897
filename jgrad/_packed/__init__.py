"""Many arrays in one buffer: layouts, `pack` and `unpack`, and what an array stands for.

May import from `_layers`, `_arithmetic`, `_quantized` and `_trees`. Folders above ask
questions of a layout or of an `ArraySpec`; they do not look into buffers.
"""
