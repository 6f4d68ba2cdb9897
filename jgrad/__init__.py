"""jgrad: gradients and optimizers for JAX, as pure functions on pytrees.

The public names, grouped by what they are for.
"""

# Gradients.
from jgrad._gradients.grad import (
    grad as grad,
    hvp as hvp,
    stop_gradient as stop_gradient,
    value_and_grad as value_and_grad,
)
from jgrad._gradients.jac import jac as jac, value_and_jac as value_and_jac

# The state of every optimizer.
from jgrad._inputs.state import OptState as OptState

# Names kept for Ivy.
from jgrad._ivy.execution import execute_with_gradients as execute_with_gradients
from jgrad._ivy.variables import (
    inplace_decrement as inplace_decrement,
    inplace_increment as inplace_increment,
    inplace_update as inplace_update,
    is_variable as is_variable,
    variable as variable,
    variable_data as variable_data,
)

# Optimizers: a functional update with explicit state, and an `init`/`update` pair.
from jgrad._optimizers.adam import (
    adam as adam,
    adam_step as adam_step,
    adam_update as adam_update,
    scale_by_adam as scale_by_adam,
)
from jgrad._optimizers.gradient_descent import (
    gradient_descent as gradient_descent,
    gradient_descent_update as gradient_descent_update,
    optimizer_update as optimizer_update,
)
from jgrad._optimizers.hidden_matrices import hidden_matrices as hidden_matrices
from jgrad._optimizers.lamb import (
    lamb as lamb,
    lamb_update as lamb_update,
    scale_by_trust_ratio as scale_by_trust_ratio,
)
from jgrad._optimizers.lars import lars as lars, lars_update as lars_update
from jgrad._optimizers.muon import muon as muon, scale_by_muon as scale_by_muon
from jgrad._optimizers.muon_update import muon_update as muon_update
from jgrad._optimizers.orthogonalize import orthogonalize as orthogonalize

# Many arrays as one.
from jgrad._packed.layouts import Layout as Layout
from jgrad._packed.packing import Packed as Packed, pack as pack, unpack as unpack

# An array in 8 bits.
from jgrad._trees.blocks import Blocks as Blocks

# Transformations around transformations, and what stands beside them.
from jgrad._wrappers.accumulate import AccumulateState as AccumulateState, accumulate as accumulate
from jgrad._wrappers.clip import (
    clip_by_global_norm as clip_by_global_norm,
    global_norm as global_norm,
)
from jgrad._wrappers.ema import EmaState as EmaState, ema as ema
from jgrad._wrappers.master_weights import (
    MasterState as MasterState,
    master_weights as master_weights,
)
from jgrad._wrappers.offload import offload as offload
from jgrad._wrappers.pack_small import pack_small as pack_small
from jgrad._wrappers.quantized import quantized as quantized, unquantized as unquantized
from jgrad._wrappers.schedule_free import (
    ScheduleFreeState as ScheduleFreeState,
    schedule_free as schedule_free,
)
from jgrad._wrappers.skip_nonfinite import SkipState as SkipState, skip_nonfinite as skip_nonfinite
from jgrad._wrappers.state_shardings import state_shardings as state_shardings
from jgrad._wrappers.stochastic_rounding import (
    StochasticState as StochasticState,
    stochastic_rounding as stochastic_rounding,
)
from jgrad._wrappers.zero import zero as zero

__version__ = "0.6.0"

# The names above, for `help(jgrad)`. Modules are private.
__all__ = [name for name in dir() if not name.startswith("_")]
