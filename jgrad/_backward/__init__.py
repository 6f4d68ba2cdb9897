"""The step in the backward pass: each layer is updated as soon as its gradient is known.

`scan_layers` says in a loss where the layers are, `losses` cuts a loss there, `slices` says what of
a state belongs to one layer, and `step_in_backward` does the step. May import from `_wrappers`,
`_inputs`, `_packed` and `_trees`; knows no method and no wrapper by name.
"""
