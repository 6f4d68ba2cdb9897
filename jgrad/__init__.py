"""jgrad: gradients and optimizers for JAX, as pure functions on pytrees.

The public names, grouped by what they are for.
"""

# Gradients.
from jgrad._gradients.grad import grad as grad
from jgrad._gradients.grad import hvp as hvp
from jgrad._gradients.grad import stop_gradient as stop_gradient
from jgrad._gradients.grad import value_and_grad as value_and_grad
from jgrad._gradients.jac import jac as jac
from jgrad._gradients.jac import value_and_jac as value_and_jac

# The state of every optimizer.
from jgrad._inputs.state import OptState as OptState

# Names kept for Ivy.
from jgrad._ivy.execution import execute_with_gradients as execute_with_gradients
from jgrad._ivy.variables import inplace_decrement as inplace_decrement
from jgrad._ivy.variables import inplace_increment as inplace_increment
from jgrad._ivy.variables import inplace_update as inplace_update
from jgrad._ivy.variables import is_variable as is_variable
from jgrad._ivy.variables import variable as variable
from jgrad._ivy.variables import variable_data as variable_data

# Optimizers: a functional update with explicit state, and an `init`/`update` pair.
from jgrad._optimizers.adam import adam as adam
from jgrad._optimizers.adam import adam_step as adam_step
from jgrad._optimizers.adam import adam_update as adam_update
from jgrad._optimizers.adam import scale_by_adam as scale_by_adam
from jgrad._optimizers.gradient_descent import gradient_descent as gradient_descent
from jgrad._optimizers.gradient_descent import gradient_descent_update as gradient_descent_update
from jgrad._optimizers.gradient_descent import optimizer_update as optimizer_update
from jgrad._optimizers.lamb import lamb as lamb
from jgrad._optimizers.lamb import lamb_update as lamb_update
from jgrad._optimizers.lamb import scale_by_trust_ratio as scale_by_trust_ratio
from jgrad._optimizers.lars import lars as lars
from jgrad._optimizers.lars import lars_update as lars_update

# Many arrays as one.
from jgrad._packed.layouts import Layout as Layout
from jgrad._packed.packing import Packed as Packed
from jgrad._packed.packing import pack as pack
from jgrad._packed.packing import unpack as unpack

# Transformations around transformations, and what stands beside them.
from jgrad._wrappers.accumulate import AccumulateState as AccumulateState
from jgrad._wrappers.accumulate import accumulate as accumulate
from jgrad._wrappers.clip import clip_by_global_norm as clip_by_global_norm
from jgrad._wrappers.clip import global_norm as global_norm
from jgrad._wrappers.ema import EmaState as EmaState
from jgrad._wrappers.ema import ema as ema
from jgrad._wrappers.master_weights import MasterState as MasterState
from jgrad._wrappers.master_weights import master_weights as master_weights
from jgrad._wrappers.pack_small import pack_small as pack_small
from jgrad._wrappers.skip_nonfinite import SkipState as SkipState
from jgrad._wrappers.skip_nonfinite import skip_nonfinite as skip_nonfinite
from jgrad._wrappers.state_shardings import state_shardings as state_shardings
from jgrad._wrappers.zero import zero as zero

__version__ = "0.5.0"

__all__ = [
    "AccumulateState",
    "EmaState",
    "Layout",
    "MasterState",
    "OptState",
    "Packed",
    "SkipState",
    "accumulate",
    "adam",
    "adam_step",
    "adam_update",
    "clip_by_global_norm",
    "ema",
    "execute_with_gradients",
    "global_norm",
    "grad",
    "gradient_descent",
    "gradient_descent_update",
    "hvp",
    "inplace_decrement",
    "inplace_increment",
    "inplace_update",
    "is_variable",
    "jac",
    "lamb",
    "lamb_update",
    "lars",
    "lars_update",
    "master_weights",
    "optimizer_update",
    "pack",
    "pack_small",
    "scale_by_adam",
    "scale_by_trust_ratio",
    "skip_nonfinite",
    "state_shardings",
    "stop_gradient",
    "unpack",
    "value_and_grad",
    "value_and_jac",
    "variable",
    "variable_data",
    "zero",
]
