"""What users pass and get: aliases and type variables, whose names `help` shows.

Trees are spelled out where an option accepts them, so that type checkers reject strings. What is in
a tree they cannot check: to mypy, one of numbers and schedules is a `dict[str, object]`.
"""

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVarTuple,
)

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jgrad._trees.protocols import PyTree

if TYPE_CHECKING:
    from typing_extensions import TypeVar
else:

    def TypeVar(name, *, default=None, **options):
        """A type variable; those of `typing` have defaults from Python 3.13."""
        return typing.TypeVar(name, **options)


# ---- options -----------------------------------------------------------------------------------


class Dataclass(Protocol):
    """A tree of a class of one's own, as an equinox module is."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class Rules(Protocol):
    """What `by_path` returns."""

    __jgrad_rules__: Any


# The parameters' structure, or a prefix of it.
Prefix: TypeAlias = Mapping[Any, Any] | list[Any] | tuple[Any, ...] | Dataclass | Rules

# One real number, or an array of one element, traced or not.
Scalar: TypeAlias = float | jax.Array | np.ndarray | np.floating | np.integer
Count: TypeAlias = int | np.integer
# Of the number of completed updates.
Schedule: TypeAlias = Callable[[jax.Array], PyTree]
# A number, an array, or a schedule; or a prefix tree or `by_path` of these.
LearningRate: TypeAlias = Scalar | Schedule | Prefix
Number: TypeAlias = LearningRate  # but not an array of several elements
# A prefix tree of bools, or a function that returns one from the parameters' shapes and dtypes.
Mask: TypeAlias = bool | Prefix | Callable[[PyTree], PyTree]
# Axes of arrays, or sizes along them: an int, a tuple of ints, None, or a prefix tree of these.
ArrayAxes: TypeAlias = int | Prefix | None
# How leaves are sharded, or only over which axes of a mesh.
MeshAxes: TypeAlias = str | PartitionSpec | Prefix | None

# How weight decay is applied; "coupled" if it may be part of the momentum.
DecayRule: TypeAlias = Literal["decoupled", "cautious", "independent"]
CoupledDecayRule: TypeAlias = Literal["coupled", "decoupled", "cautious", "independent"]
# A dtype, 8 bits in blocks, or None for the parameter's dtype, but at least float32.
MomentDType: TypeAlias = (
    type[object] | np.dtype | Literal["8bit", "bfloat16", "float32", "float64"] | None
)
ComputeDType: TypeAlias = (
    type[object] | np.dtype | Literal["bfloat16", "float16", "float32", "float64"] | None
)
Triples: TypeAlias = Sequence[Sequence[float]] | np.ndarray
Polynomials: TypeAlias = Literal["jordan", "you", "polar_express", "deepseek_v4"] | Triples


# ---- functions ---------------------------------------------------------------------------------

First = TypeVar("First", bound=Any)  # so that a lambda may do anything with it
Rest = ParamSpec("Rest")
Others = TypeVarTuple("Others")
Value = TypeVar("Value")
Aux = TypeVar("Aux")
ValueAndAux = TypeVar("ValueAndAux", bound=tuple[Any, Any])
_Argument = TypeVar("_Argument", contravariant=True)
_Result = TypeVar("_Result", covariant=True)


class WithArguments(Protocol[_Argument, Rest, _Result]):
    """A function with the arguments of another; a lambda's, too, which checkers know nothing of."""

    def __call__(self, first: _Argument, /, *args: Rest.args, **kwargs: Rest.kwargs) -> _Result: ...


# ---- updates with explicit state ---------------------------------------------------------------

Weights = TypeVar("Weights")
Gradient = TypeVar("Gradient")
Mw = TypeVar("Mw")  # the first moment
Vw = TypeVar("Vw")  # the second one


# ---- transformations ---------------------------------------------------------------------------

Tree = TypeVar("Tree")
Params = TypeVar("Params")
State = TypeVar("State", covariant=True, default=Any)
SomeState = TypeVar("SomeState")  # that is passed and returned
Inner = TypeVar("Inner", default=Any)  # the state of what is inside


class Init(Protocol[State]):
    """The `init` of a transformation."""

    def __call__(self, params: PyTree) -> State: ...


class Update(Protocol[State]):
    """The `update` of a transformation."""

    def __call__(
        self, updates: Tree, state: PyTree, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[Tree, State]: ...


class Pair(Protocol[State]):
    """A transformation of this library, of optax, or of another one."""

    @property
    def init(self) -> Init[State]: ...

    @property
    def update(self) -> Callable[..., tuple[PyTree, State]]: ...


class TypedPair(NamedTuple):
    """What optax calls a `GradientTransformation`, for mypy, to which optax has no types."""

    init: PyTree
    update: PyTree
