"""The step in the backward pass: each layer is updated as soon as its gradient is known.

`scan_layers` says in a loss where the layers are, `losses` finds them there, and `passes` goes
forward and backward through the loss. `portions` says what of a state belongs to one layer and has
the arrays of all, `share_updates` is the update of one share, `calls` checks what a step is called
with, and `step_in_backward` takes the step. May import from `_wrappers`, `_inputs`, `_packed`,
`_layers`, `_kernels`, `_arithmetic` and `_trees`; knows no method and no wrapper but
`apply_gradients` by name.
"""
