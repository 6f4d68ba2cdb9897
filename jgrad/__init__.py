"""jgrad: gradients and optimizers for JAX, as pure functions on pytrees.

The public names, grouped by what they are for.
"""

# Gradients.
from jgrad.execution import execute_with_gradients as execute_with_gradients
from jgrad.gradients import grad as grad
from jgrad.gradients import hvp as hvp
from jgrad.gradients import stop_gradient as stop_gradient
from jgrad.gradients import value_and_grad as value_and_grad
from jgrad.jacobians import jac as jac
from jgrad.jacobians import value_and_jac as value_and_jac

# Many arrays as one.
from jgrad.layouts import Layout as Layout
from jgrad.packing import Packed as Packed
from jgrad.packing import pack as pack
from jgrad.packing import unpack as unpack

# Functional updates with explicit state.
from jgrad.steps.adam import adam_step as adam_step
from jgrad.steps.adam import adam_update as adam_update
from jgrad.steps.descent import gradient_descent_update as gradient_descent_update
from jgrad.steps.descent import optimizer_update as optimizer_update
from jgrad.steps.lamb import lamb_update as lamb_update
from jgrad.steps.lars import lars_update as lars_update

# Transformations around others, and beside them.
from jgrad.transforms.accumulation import AccumulateState as AccumulateState
from jgrad.transforms.accumulation import accumulate as accumulate

# Transformations, the `init`/`update` pairs of optax.
from jgrad.transforms.adam import adam as adam
from jgrad.transforms.adam import scale_by_adam as scale_by_adam
from jgrad.transforms.averaging import EmaState as EmaState
from jgrad.transforms.averaging import ema as ema
from jgrad.transforms.clipping import clip_by_global_norm as clip_by_global_norm
from jgrad.transforms.clipping import global_norm as global_norm
from jgrad.transforms.gradient_descent import gradient_descent as gradient_descent
from jgrad.transforms.lamb import lamb as lamb
from jgrad.transforms.lars import lars as lars
from jgrad.transforms.master import MasterState as MasterState
from jgrad.transforms.master import master_weights as master_weights
from jgrad.transforms.shardings import state_shardings as state_shardings
from jgrad.transforms.skipping import SkipState as SkipState
from jgrad.transforms.skipping import skip_nonfinite as skip_nonfinite
from jgrad.transforms.small_leaves import pack_small as pack_small
from jgrad.transforms.state import OptState as OptState
from jgrad.transforms.trust_ratio import scale_by_trust_ratio as scale_by_trust_ratio
from jgrad.transforms.zero import zero as zero

# The oldest face: variables, and updates in place that return the new value.
from jgrad.variables import inplace_decrement as inplace_decrement
from jgrad.variables import inplace_increment as inplace_increment
from jgrad.variables import inplace_update as inplace_update
from jgrad.variables import is_variable as is_variable
from jgrad.variables import variable as variable
from jgrad.variables import variable_data as variable_data

__version__ = "0.4.0"

# The names above and not the modules they come from, for `help(jgrad)`.
__all__ = [name for name, x in vars().items() if hasattr(x, "__module__") and name[0] != "_"]
