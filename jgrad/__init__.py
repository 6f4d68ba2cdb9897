"""jgrad: gradients and optimizers for JAX, as pure functions on pytrees.

These are the public names, grouped by purpose. `help(jgrad.adam)` explains one of them.

Gradients

    grad            the gradient of a function
    value_and_grad  the value and the gradient of a function, in one evaluation
    jac             the Jacobian of a function
    value_and_jac   the value and the Jacobian of a function, in one evaluation
    hvp             the product of a function's Hessian with a vector
    stop_gradient   the same values, treated as constants

Optimizers: `init`/`update` pairs, as optax has them

    gradient_descent  gradient descent, with or without momentum
    adam              Adam, and AdamW with weight decay
    adan              Adan, which looks ahead along differences of gradients
    lion              Lion, which steps along the sign of an average gradient
    lars              LARS: momentum with layer-wise learning rates
    lamb              LAMB: Adam with layer-wise learning rates
    adafactor         Adafactor, which factors second moments into rows and columns
    muon              Muon for matrices, AdamW for other leaves
    soap              SOAP for matrices, AdamW for other leaves
    hidden_matrices   chooses the matrices for Muon and SOAP, by names and shapes
    optimizer_of_leaf  makes your own optimizer from a function of one leaf

Parts of optimizers, for `optax.chain`

    scale_by_adam         Adam's direction
    scale_by_adan         Adan's direction
    scale_by_lion         Lion's direction
    scale_by_muon         Muon's direction
    scale_by_trust_ratio  LAMB's scaling of each layer's update
    clip_by_global_norm   scales all gradients down together

Options

    by_path  gives each leaf its own value of an option, by path

Wrappers: what goes around an optimizer

    accumulate           updates once per several mini-batches
    skip_nonfinite       skips non-finite steps, and scales the loss
    skip_spikes          skips steps whose loss is far above recent losses
    master_weights       trains half-precision parameters through float32 copies
    stochastic_rounding  trains bfloat16 parameters without float32 copies
    schedule_free        averages the iterates instead of using a schedule
    average_params       keeps an exponential moving average of the parameters
    hyperball            keeps the norms of matrices, and rotates them by an angle
    offload              keeps the state in host memory between steps
    pack_small           packs small leaves inside each update
    zero                 shards the state over devices, inside `shard_map` or `pmap`
    watch                measures norms and ratios in each step
    report               reads what `watch` measured, and the counters of wrappers

Whole steps

    apply_gradients   applies one step, and returns the new parameters and state
    step_in_backward  updates each layer as soon as its gradient is known
    scan_layers       scans over the layers of a model, for `step_in_backward`
    leaf_programs     tells how a TPU updates each 8-bit leaf, and why

Updates with explicit state

    optimizer_update         moves weights along a direction
    gradient_descent_update  updates weights by one step of gradient descent
    adam_step                computes Adam's direction and new moments
    adam_update              updates weights and moments by one step of Adam
    adan_update              updates weights and moments by one step of Adan
    lion_update              updates weights and the moment by one step of Lion
    lars_update              updates weights by one step of LARS
    lamb_update              updates weights and moments by one step of LAMB

Functions of trees

    orthogonalize  brings the singular values of matrices close to 1
    global_norm    computes the norm of all leaves together

Packed trees: many arrays as one

    pack    packs the leaves of a tree into one buffer per dtype
    unpack  returns the original tree
    Packed  what `pack` returns
    Layout  describes where each leaf is in the buffers

States of optimizers

    state_shardings  returns the shardings of a state, for `jit` and for checkpoints
    carry_over       converts a state to that of another optimizer
    Account          a record of what `carry_over` did with each part of a state

Names kept for Ivy

    execute_with_gradients  a value, and gradients of chosen outputs by chosen inputs
    variable                converts leaves to floating arrays
    is_variable             tells whether something is an array
    variable_data           returns the array behind a variable, which is the same
    inplace_update          returns the new value, in the shapes and dtypes of the old
    inplace_increment       returns the sum, in the dtypes of the old value
    inplace_decrement       returns the difference, in the dtypes of the old value

Types for annotations

    Transformation  what optimizers and wrappers return
    TrainStep       what `step_in_backward` returns
    ByPath          what `by_path` returns
    HiddenMatrices  what `hidden_matrices` returns

Types of states

    OptState, AdanState, AdafactorState, SoapState, SoapFactors, Blocks, Factors, AccumulateState,
    WeightedAccumulateState, SkipState, ClipState, SpikeState, MasterState, StochasticState,
    EmaState, ScheduleFreeState, HyperballState, WatchState
"""

import typing as _typing

from jgrad._backward.scan_layers import scan_layers
from jgrad._backward.step_in_backward import TrainStep, step_in_backward
from jgrad._forms import table as _forms
from jgrad._forms.factors import Factors
from jgrad._gradients.grad import grad, hvp, stop_gradient, value_and_grad
from jgrad._gradients.jac import jac, value_and_jac
from jgrad._inputs.by_path import ByPath, by_path
from jgrad._inputs.transformation import AdafactorState, OptState
from jgrad._ivy.execution import execute_with_gradients
from jgrad._ivy.variables import (
    inplace_decrement,
    inplace_increment,
    inplace_update,
    is_variable,
    variable,
    variable_data,
)
from jgrad._muon.hidden_matrices import HiddenMatrices, hidden_matrices
from jgrad._muon.muon import muon, scale_by_muon
from jgrad._muon.orthogonalize import orthogonalize
from jgrad._optimizers.adafactor import adafactor
from jgrad._optimizers.adam import adam, adam_step, adam_update, scale_by_adam
from jgrad._optimizers.adan import AdanState, adan, adan_update, scale_by_adan
from jgrad._optimizers.gradient_descent import (
    gradient_descent,
    gradient_descent_update,
    optimizer_update,
)
from jgrad._optimizers.lamb import lamb, lamb_update, scale_by_trust_ratio
from jgrad._optimizers.lars import lars, lars_update
from jgrad._optimizers.lion import lion, lion_update, scale_by_lion
from jgrad._optimizers.of_leaf import optimizer_of_leaf
from jgrad._packed.layouts import Layout
from jgrad._packed.packing import Packed, pack, unpack
from jgrad._quantized.blocks import Blocks
from jgrad._soap.factors import SoapFactors, SoapState
from jgrad._soap.soap import soap
from jgrad._states.carry_over import carry_over
from jgrad._states.matching import Account
from jgrad._states.state_shardings import state_shardings
from jgrad._trees.explained import Transformation
from jgrad._trees.known_names import explained_absence as _explained_absence
from jgrad._wrappers.accumulate import AccumulateState, WeightedAccumulateState, accumulate
from jgrad._wrappers.apply_gradients import apply_gradients
from jgrad._wrappers.average_params import EmaState, average_params
from jgrad._wrappers.clip import ClipState, clip_by_global_norm, global_norm
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

_forms.enter()

__version__ = "2.1.0"


if not _typing.TYPE_CHECKING:  # else type checkers accept any name of the module

    def __getattr__(name: str) -> object:
        """An error that says what to use for a name of other libraries, or one that is gone."""
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
    "adan",
    "lion",
    "lars",
    "lamb",
    "adafactor",
    "muon",
    "soap",
    "hidden_matrices",
    "optimizer_of_leaf",
    # Parts of optimizers, for `optax.chain`
    "scale_by_adam",
    "scale_by_adan",
    "scale_by_lion",
    "scale_by_muon",
    "scale_by_trust_ratio",
    "clip_by_global_norm",
    # Options
    "by_path",
    # Wrappers: what goes around an optimizer
    "accumulate",
    "skip_nonfinite",
    "skip_spikes",
    "master_weights",
    "stochastic_rounding",
    "schedule_free",
    "average_params",
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
    "adan_update",
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
    # Names kept for Ivy
    "execute_with_gradients",
    "variable",
    "is_variable",
    "variable_data",
    "inplace_update",
    "inplace_increment",
    "inplace_decrement",
    # Types for annotations
    "Transformation",
    "TrainStep",
    "ByPath",
    "HiddenMatrices",
    # Types of states
    "OptState",
    "AdanState",
    "AdafactorState",
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
]
