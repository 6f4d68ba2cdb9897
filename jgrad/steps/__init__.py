"""Functional updates with explicit state: new weights and moments from old ones and a gradient.

Each function is one compiled call, eager or not. At its door (`jgrad.arguments`) Python numbers
become scalars of one dtype, so that a new value is no new trace, and betas get their double-
precision forms; while tracing, structures, kinds and shapes are checked; then `jgrad.methods`
computes, and each result takes the dtype of what it replaces.

What they share:

- Trees. Any argument may be a pytree, a prefix of one, or an array or number, which stands for
  every leaf below it. A result is as fine as the finest argument that it is computed from.
- Shapes. A gradient has its parameter's shape. Moments and `lr` may have any shape that
  broadcasts to it. All other arguments have one element per leaf.
- Dtypes. Weights and moments keep theirs. The arithmetic is in float32, or in float64 where an
  array is. Integer gradients, moments and numbers are read as the default float dtype; integer
  weights are an error.
- `None` as a gradient leaves its leaf, and the moments of it, as they are.
"""
