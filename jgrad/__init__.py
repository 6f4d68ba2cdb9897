"""jgrad: gradients and optimizers for JAX, as pure functions on pytrees.

The public names, by what they are for. `help(jgrad.adam)` explains one of them.

Gradients

    grad            the gradient of a function
    value_and_grad  its value and gradient, from one evaluation
    jac             its Jacobian
    value_and_jac   its value and Jacobian, from one evaluation
    hvp             the product of its Hessian with a vector
    stop_gradient   the same values, as constants for differentiation

Optimizers: `init`/`update` pairs, as optax has them

    gradient_descent  gradient descent, with or without momentum
    adam              Adam, and AdamW with weight decay
    lion              Lion: the sign of an average
    lars              LARS: momentum with a rate for each layer
    lamb              LAMB: Adam with a rate for each layer
    adafactor         Adafactor: second moments by rows and columns
    muon              Muon for matrices, AdamW for other leaves
    soap              SOAP for matrices, AdamW for other leaves
    hidden_matrices   which leaves Muon is for, by names and shapes

Parts of optimizers, for `optax.chain`

    scale_by_adam         Adam's direction
    scale_by_lion         Lion's direction
    scale_by_muon         Muon's direction
    scale_by_trust_ratio  the rate of each layer that LAMB takes
    clip_by_global_norm   all gradients scaled down together
    ema                   an exponential moving average of the parameters

Options

    by_path  options by the path of a leaf

Wrappers: what goes around an optimizer

    accumulate           one update for several mini-batches
    skip_nonfinite       steps that are not finite are skipped; loss scaling
    skip_spikes          steps whose loss is far above those before are left out
    master_weights       float32 copies of half-precision parameters
    stochastic_rounding  bfloat16 parameters without copies
    schedule_free        an average of the steps in place of a schedule
    hyperball            matrices keep their norm, and turn by an angle
    offload              the state in host memory between steps
    pack_small           small leaves packed inside each update
    zero                 the state sharded over devices, inside `shard_map` or `pmap`
    watch                norms, ratios and counters of each step
    report               what `watch` measured, and counters of wrappers

Whole steps

    apply_gradients   new parameters and the new state
    step_in_backward  each layer is updated as soon as its gradient is known
    scan_layers       the layers of a model in a loss, for `step_in_backward`
    leaf_programs     what a program for a TPU makes of each leaf in 8 bits

Updates with explicit state

    optimizer_update         weights after a step along a direction
    gradient_descent_update  weights after a step of gradient descent
    adam_step                Adam's direction and new moments
    adam_update              weights and moments after a step of Adam
    lion_update              weights and the moment after a step of Lion
    lars_update              weights after a step of LARS
    lamb_update              weights and moments after a step of LAMB

Functions of trees

    orthogonalize  matrices with singular values close to 1
    global_norm    the norm of all leaves together

Packed trees: many arrays as one

    pack    the leaves of a tree in one buffer per dtype
    unpack  the tree again
    Packed  what `pack` returns
    Layout  where each leaf is in the buffers

States of optimizers

    state_shardings    how a state is sharded, for `jit` and for checkpoints
    carry_over         a state in the form of another recipe, and an account of it
    Account            what `carry_over` did with each part of a state
    quantized          the old name of `carry_over`
    unquantized        likewise, for a state in 8 bits as arrays
    OptState           state of every optimizer
    SoapState          state of `soap`
    SoapFactors        averages and bases of a matrix in it
    Blocks             an array in 8 bits
    Factors            squares by rows and columns
    AccumulateState    state of `accumulate`
    WeightedAccumulateState  state of `accumulate(..., weighted=True)`
    SkipState          state of `skip_nonfinite`
    ClipState          state of `clip_by_global_norm(..., of="previous")`
    SpikeState         state of `skip_spikes`
    MasterState        state of `master_weights`
    StochasticState    state of `stochastic_rounding`
    EmaState           state of `ema`
    ScheduleFreeState  state of `schedule_free`
    HyperballState     state of `hyperball`
    WatchState         state of `watch`

Names kept for Ivy

    execute_with_gradients  a value, and gradients of chosen outputs by chosen inputs
    variable                a tree with floating leaves
    is_variable             whether something is an array
    variable_data           the array behind a variable: itself
    inplace_update          the new value, in the shapes and dtypes of the old
    inplace_increment       the sum, in the dtypes of the old value
    inplace_decrement       the difference, in the dtypes of the old value
"""

from jgrad._backward.scan_layers import scan_layers
from jgrad._backward.step_in_backward import step_in_backward
from jgrad._gradients.grad import grad, hvp, stop_gradient, value_and_grad
from jgrad._gradients.jac import jac, value_and_jac
from jgrad._inputs.by_path import by_path
from jgrad._inputs.state import OptState
from jgrad._ivy.execution import execute_with_gradients
from jgrad._ivy.variables import (
    inplace_decrement,
    inplace_increment,
    inplace_update,
    is_variable,
    variable,
    variable_data,
)
from jgrad._muon.hidden_matrices import hidden_matrices
from jgrad._muon.muon import muon, scale_by_muon
from jgrad._muon.orthogonalize import orthogonalize
from jgrad._optimizers.adafactor import adafactor
from jgrad._optimizers.adam import adam, adam_step, adam_update, scale_by_adam
from jgrad._optimizers.gradient_descent import (
    gradient_descent,
    gradient_descent_update,
    optimizer_update,
)
from jgrad._optimizers.lamb import lamb, lamb_update
from jgrad._optimizers.lars import lars, lars_update
from jgrad._optimizers.lion import lion, lion_update, scale_by_lion
from jgrad._optimizers.trust_ratio import scale_by_trust_ratio
from jgrad._packed.layouts import Layout
from jgrad._packed.packing import Packed, pack, unpack
from jgrad._soap.factors import SoapFactors, SoapState
from jgrad._soap.soap import soap
from jgrad._states.account import Account
from jgrad._states.carry_over import carry_over, quantized, unquantized
from jgrad._states.state_shardings import state_shardings
from jgrad._trees.blocks import Blocks
from jgrad._trees.factors import Factors
from jgrad._trees.other_names import explained_absence as _explained_absence
from jgrad._wrappers.accumulate import AccumulateState, WeightedAccumulateState, accumulate
from jgrad._wrappers.apply_gradients import apply_gradients
from jgrad._wrappers.clip import ClipState, clip_by_global_norm, global_norm
from jgrad._wrappers.ema import EmaState, ema
from jgrad._wrappers.hyperball import HyperballState, hyperball
from jgrad._wrappers.leaf_programs import leaf_programs
from jgrad._wrappers.master_weights import MasterState, master_weights
from jgrad._wrappers.offload import offload
from jgrad._wrappers.pack_small import pack_small
from jgrad._wrappers.schedule_free import ScheduleFreeState, schedule_free
from jgrad._wrappers.skip_nonfinite import SkipState, skip_nonfinite
from jgrad._wrappers.skip_spikes import SpikeState, skip_spikes
from jgrad._wrappers.stochastic_rounding import StochasticState, stochastic_rounding
from jgrad._wrappers.watch import WatchState, report, watch
from jgrad._wrappers.zero import zero

__version__ = "1.1.0"


def __getattr__(name: str) -> object:
    """An error that says what a name of other libraries, or one that is gone, is called here."""
    if name == "muon_update":
        raise AttributeError("jgrad.muon_update: a name of 0.6, expected `jgrad.muon`, its method.")
    raise AttributeError(_explained_absence(name, __all__))


# In the groups and the order of the docstring.
__all__ = [  # noqa: RUF022
    # Gradients
    "grad",
    "value_and_grad",
    "jac",
    "value_and_jac",
    "hvp",
    "stop_gradient",
    # Optimizers: `init`/`update` pairs, as optax has them
    "gradient_descent",
    "adam",
    "lion",
    "lars",
    "lamb",
    "adafactor",
    "muon",
    "soap",
    "hidden_matrices",
    # Parts of optimizers, for `optax.chain`
    "scale_by_adam",
    "scale_by_lion",
    "scale_by_muon",
    "scale_by_trust_ratio",
    "clip_by_global_norm",
    "ema",
    # Options
    "by_path",
    # Wrappers: what goes around an optimizer
    "accumulate",
    "skip_nonfinite",
    "skip_spikes",
    "master_weights",
    "stochastic_rounding",
    "schedule_free",
    "hyperball",
    "offload",
    "pack_small",
    "zero",
    "watch",
    "report",
    # Whole steps
    "apply_gradients",
    "step_in_backward",
    "scan_layers",
    "leaf_programs",
    # Updates with explicit state
    "optimizer_update",
    "gradient_descent_update",
    "adam_step",
    "adam_update",
    "lion_update",
    "lars_update",
    "lamb_update",
    # Functions of trees
    "orthogonalize",
    "global_norm",
    # Packed trees: many arrays as one
    "pack",
    "unpack",
    "Packed",
    "Layout",
    # States of optimizers
    "state_shardings",
    "carry_over",
    "Account",
    "quantized",
    "unquantized",
    "OptState",
    "SoapState",
    "SoapFactors",
    "Blocks",
    "Factors",
    "AccumulateState",
    "WeightedAccumulateState",
    "SkipState",
    "ClipState",
    "SpikeState",
    "MasterState",
    "StochasticState",
    "EmaState",
    "ScheduleFreeState",
    "HyperballState",
    "WatchState",
    # Names kept for Ivy
    "execute_with_gradients",
    "variable",
    "is_variable",
    "variable_data",
    "inplace_update",
    "inplace_increment",
    "inplace_decrement",
]
