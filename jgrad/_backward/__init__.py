"""The step in the backward pass: each layer is updated as soon as its gradient is known.

`scan_layers` marks the layers in a loss, `losses` finds them there, and `passes` runs the loss
forward and backward. `portions` knows which part of a state belongs to one layer, `share_updates`
is the update of one share, `calls` checks the arguments of a step, and `step_in_backward` takes the
step. May import from `_wrappers`, `_forms`, `_inputs`, `_layers`, `_arithmetic` and
`_trees`; knows no method and no wrapper but `apply_gradients` by name.
"""
