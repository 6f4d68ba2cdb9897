"""Types: aliases, and the `__jgrad_*__` protocols by which objects describe themselves.

Between two wrappers there may be transformations of other libraries, and a state may come from one.
Code therefore never checks the type of an object, but whether its type has one of these attributes:

- `__jgrad_rules__` is a tree of rules for jgrad's options, of what `by_path` returns, which is a
  function to optax.
- `__jgrad_differences__(other, name, other_name)`, of static data of a node such as the layout of
  packed parameters, has phrases for messages of where it differs from another.
- `__jgrad_fields__`, of a state, are its `FieldRoles`.
- `__jgrad_report__()`, of a state, has arrays by name for `report`.
- `__jgrad_unrounded__`, of a state, says that its wrapper wants gradients in float32, before they
  are rounded.
- `__jgrad_rejected__(new, finite)`, of a state whose wrapper leaves out gradients that are not
  finite, and which has a field `total`, the sum of the others, is what stays of this state and the
  new one if the update is rejected as a whole. `finite` says whether the gradients are; None where
  all of the state is this part.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, get_type_hints

# The two words for what has no type: JAX has none for trees, and their leaves are users'.
PyTree = Any
Leaf = Any  # an array or a number, `Blocks`, a shape, None, or whatever else a model has
KeyPath = tuple[Any, ...]  # as JAX's tree functions return it


# What a field of a state holds, for `carry_over`, where an old state does not have it:
# - step: the updates that an optimizer counts; moment: of the gradients
# - weights: a copy or an average of the parameters, which starts as these are
# - sum, count, zero: gradients of a window, an integer, or another number; all start at zero
# - like: what starts as `init` makes it; measured: what the next update measures again
# - inside: the state of what is inside
# - factors: averages of matrices, which start at zero, and their bases, which start as the identity
FieldRole = Literal[
    "step", "moment", "weights", "sum", "count", "zero", "like", "measured", "inside", "factors"
]


class MomentField(NamedTuple):
    """What a moment is, in a field of a state.

    Attributes:
      is_real: whether it is of magnitudes: real where gradients are complex, and at least 0.
      measures: what it holds, in a phrase; "" where other moments beside it tell.
    """

    is_real: bool = False
    measures: str = ""


FIRST, SECOND = MomentField(), MomentField(is_real=True)


class FieldRoles(NamedTuple):
    """What the fields of a state are.

    Attributes:
      kind: of wrapper or optimizer.
      roles: of fields, by their names.
      names: jgrad's names of fields that are called otherwise, as optax's or those of old versions.
      others: the role of fields that are not named.
      moments: the fields with that role, in order.
    """

    kind: str
    roles: Mapping[str, FieldRole]
    names: Mapping[str, str] = {}
    others: FieldRole = "zero"
    moments: Mapping[str, MomentField] = {}


_State = TypeVar("_State")
STATES: list[FieldRoles] = []  # all that are declared, by which `carry_over` reads files


def state_of(kind: str, **roles: FieldRole | MomentField) -> Callable[[type[_State]], type[_State]]:
    """A state type of jgrad, a `NamedTuple`, which says what its fields are.

    Its module becomes the one that users import it from, and that a pickle names.

    Args:
      kind: the name of the wrapper, or "moments".
      roles: of the fields, of a moment what it is. One that is not named counts from zero, and
        `inner` is the state of what is inside.
    """

    def declared(state: type[_State]) -> type[_State]:
        names: tuple[str, ...] = state._fields  # type: ignore[attr-defined]
        others: dict[str, FieldRole] = {x: "inside" if x == "inner" else "count" for x in names}
        moments = {x: role for x, role in roles.items() if isinstance(role, MomentField)}
        named: dict[str, FieldRole] = {
            x: "moment" if isinstance(role, MomentField) else role for x, role in roles.items()
        }
        fields = FieldRoles(kind, others | named, moments=moments)
        if fields not in STATES:
            STATES.append(fields)
        state.__annotations__ = get_type_hints(state)  # which are looked up in the module
        state.__module__ = "jgrad"
        state.__jgrad_fields__ = fields  # type: ignore[attr-defined]
        return state

    return declared
