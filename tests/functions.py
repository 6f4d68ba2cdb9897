"""How many functions of jgrad run in a traced `init` and `update`, and in how many files.

    python -m tests.functions

prints a table. Two leaves are traced, with nothing in JAX's caches. Counted are functions that a
reader would open: `def` and `lambda`, each once. Comprehensions and generator expressions belong to
the function that they stand in; the third column counts them, too, as far as Python calls them.
"""

import collections
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jgrad
from tests.support import public

PACKAGE = str(public.PACKAGE)
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class Counts(NamedTuple):
    """What runs of jgrad.

    Attributes:
      functions: those with a name, and lambdas.
      files: in which they are.
      with_comprehensions: functions, and comprehensions that Python calls as such.
      calls: of all of them.
    """

    functions: int
    files: int
    with_comprehensions: int
    calls: int


def compares(frame: FrameType | None) -> bool:
    """Whether a dictionary compares keys: how often it does depends on where they lie in memory."""
    while frame is not None:
        code, frame = frame.f_code, frame.f_back
        if code.co_name in ("__eq__", "__hash__") and code.co_filename.startswith(PACKAGE):
            return True
    return False


def counted(program: Callable[[], Any]) -> Counts:
    """What runs in a call of `program`."""
    calls: dict[tuple[str, str, int], int] = collections.Counter()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not compares(frame):
            calls[code.co_filename, code.co_name, code.co_firstlineno] += 1

    jax.clear_caches()
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        program()
    finally:
        sys.setprofile(before)
    named = [key for key in calls if key[1] not in COMPREHENSIONS]
    files = {file for file, *_ in named}
    return Counts(len(named), len(files), len(calls), sum(calls.values()))


def params(rows: int = 3, columns: int = 2) -> dict[str, jax.Array]:
    """Two leaves."""
    return {"w": jnp.ones((rows, columns)), "b": jnp.zeros(columns)}


def traced(tx: optax.GradientTransformation, w: Any) -> Callable[[], Any]:
    """`init` and `update`, as `jax.jit` traces them."""

    def program() -> None:
        state = jax.eval_shape(tx.init, w)
        jax.eval_shape(tx.update, w, state, w)

    return program


def programs() -> dict[str, Callable[[], Any]]:
    """Each row of the table."""
    w, large = params(), params(64, 128)
    matrices = {"w": True, "b": False}
    adam = jgrad.adam(1e-3, weight_decay=0.1)
    in_8_bits = jgrad.adam(1e-3, weight_decay=0.1, moment_dtype="8bit")
    muon = jgrad.muon(1e-3, matrices=matrices, adam_learning_rate=1e-3, weight_decay=0.1)
    step = jgrad.skip_nonfinite(optax.chain(jgrad.clip_by_global_norm(1.0), adam))
    window = optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.adam(1e-3))
    return {
        "adam, decay": traced(adam, w),
        "adam, decay, 8 bits of small leaves": traced(in_8_bits, w),
        "adam, decay, 8 bits": traced(in_8_bits, large),
        "lamb, decay": traced(jgrad.lamb(1e-3, weight_decay=0.1), w),
        "muon, decay": traced(muon, w),
        "adam_update": lambda: jax.eval_shape(lambda: jgrad.adam_update(w, w, 1e-3, w, w, 1)),
        "skip(clip, adam, decay)": traced(step, w),
        "skip(accumulate(clip, adam))": traced(
            jgrad.skip_nonfinite(jgrad.accumulate(window, 4)), w
        ),
        "adam, decay, packed": traced(adam, jgrad.pack(w)),
        "carry_over, adam to skip(clip, adam)": lambda: jax.eval_shape(
            lambda: jgrad.carry_over(adam.init(w), like=jax.eval_shape(step.init, w))
        ),
    }


def main() -> None:
    """Prints the table."""
    print("| program | functions | files | with comprehensions | calls |")
    print("| --- | --- | --- | --- | --- |")
    for name, program in programs().items():
        print(f"| {name} |", " | ".join(map(str, counted(program))), "|")


if __name__ == "__main__":
    main()
