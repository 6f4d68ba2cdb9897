"""Checkpoints of each version, kept in `tests/data/`, for all later ones to read.

    python -m tests.golden

writes the file of this version, once, before it is released; it is never written again. A file
holds, for each transformation of `TRANSFORMATIONS`, weights and state after two steps, a gradient,
and weights and state after one step more, each array under its path. Those of the methods come from
their rows in `cases.py`: a method is in the file of the first version that has it. Files of 1.x whose
names end with `_more` were written later, by the code of that version: rules of Muon, packed trees,
and wrappers that the first ones lack.
"""

import functools
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgrad
from tests.cases import CASES, ONE_EACH, Case
from tests.support.public import VERSION

_KEY = re.compile(r"\.(\w+)|\['(.*?)'\]|\[(\d+)\]")  # of a path: a field, a key, a position
DATA = pathlib.Path(__file__).parent / "data"
BFLOAT16 = ":bfloat16"  # NumPy's own files do not know it: stored as float32, which is exact

MATRICES = {"layer": {"w": True, "b": False}, "half": False, "count": False}

# Their defaults up to 0.6.
IVY: dict[str, Any] = {"epsilon": 1e-7, "bias_correction": "step_size"}

# In the files of some version, with other options than those of the rows. A row whose options
# change after a release goes on here, as it was.
_WRITTEN = {
    "gradient_descent": lambda: jgrad.gradient_descent(0.1),
    "momentum": lambda: jgrad.gradient_descent(0.1, momentum=0.9),
    "adam": lambda: jgrad.adam(0.1, weight_decay=0.01, **IVY),
    "scale_by_adam": lambda: jgrad.scale_by_adam(**IVY),
    "lars": lambda: jgrad.lars(0.1, weight_decay=0.01),
    "lamb": lambda: jgrad.lamb(0.1, weight_decay=0.01, **IVY),
    "clip_then_lamb": lambda: optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.lamb(0.1, **IVY)),
    "accumulate": lambda: jgrad.accumulate(jgrad.adam(0.1, **IVY), 3),
    "skip_nonfinite": lambda: jgrad.skip_nonfinite(jgrad.adam(0.1, **IVY), loss_scale=2.0**10),
    "master_weights": lambda: jgrad.master_weights(jgrad.lamb(0.1, **IVY)),
    "ema": lambda: jgrad.average_params(jgrad.adam(0.1, **IVY), 0.9),
    "adam_8bit": lambda: jgrad.adam(0.1, weight_decay=0.01, moment_dtype="8bit", **IVY),
    "adam_bfloat16": lambda: jgrad.adam(0.1, moment_dtype=jnp.bfloat16, **IVY),
    "muon": lambda: jgrad.muon(0.1, matrices=MATRICES, adam_learning_rate=0.01),
    "schedule_free": lambda: jgrad.schedule_free(jgrad.gradient_descent(0.1)),
    "hyperball": lambda: jgrad.hyperball(jgrad.adam(0.1), 0.1, leaves=MATRICES),
    "skip_spikes": lambda: jgrad.skip_spikes(jgrad.adam(0.1), window=4),
    "accumulate_weighted": lambda: jgrad.accumulate(jgrad.adam(0.1), 3, weighted=True),
    "watch": lambda: jgrad.watch(jgrad.adam(0.1)),
    "stochastic_rounding": lambda: jgrad.stochastic_rounding(jgrad.adam(0.1, weight_decay=0.01, **IVY)),
    "clip_of_previous": lambda: optax.chain(jgrad.clip_by_global_norm(1.0, of="previous"), jgrad.adam(0.1)),
    "offload": lambda: jgrad.offload(jgrad.adam(0.1)),
}  # fmt: skip

# What `update` of some needs beside.
EXTRA: dict[str, Any] = {"skip_spikes": {"loss": 1.0}, "accumulate_weighted": {"weight": 2.0}}

FORMS: dict[str, dict[str, Any]] = {
    "": {},
    "_8bit": {"moment_dtype": "8bit"},
    "_bfloat16": {"moment_dtype": jnp.bfloat16},
}


# In each form of moments, as those of the rows.
_IN_FORMS: dict[str, Callable[..., Any]] = {
    "muon_fraction": lambda **form: _muon(fraction=0.5, **form),
    "normuon": lambda **form: _muon(rule="normuon", **form),
    "packed_adam": functools.partial(jgrad.adam, 0.1),
    "pack_small": lambda **form: jgrad.pack_small(jgrad.adam(0.1, **form)),
}


def _muon(**options: Any) -> Any:
    is_matrix = lambda shapes: jax.tree.map(lambda x: x.ndim == 2, shapes)
    return jgrad.muon(0.1, matrices=is_matrix, adam_learning_rate=0.01, **options)


def _of_rows() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each method with each choice of moments, in each form of them."""
    for case in CASES:
        if case.name in ONE_EACH:
            for form, options in FORMS.items():
                if case.rounded or not options:
                    yield case.name + form, functools.partial(_row, case, options)
    for name, make in _IN_FORMS.items():
        for form, options in FORMS.items():
            yield name + form, functools.partial(make, **options)


def _row(case: Case, options: dict[str, Any]) -> Any:
    return case.without_masks().tx(0.1, **options)


TRANSFORMATIONS = dict(_of_rows()) | _WRITTEN

STATES = ("state", "next_state")

# Rounded stochastically: on another CPU, which joins a product and a sum, a number may be rounded
# the other way. So far apart are two neighbours.
GAPS = {"8bit": 2.0**-3, "bfloat16": 2.0**-7, "rounding": 2.0**-7}


def gap(name: str) -> float:
    """By how much a number may differ from that of the file, relative to it."""
    return GAPS.get(name.rpartition("_")[2], 1e-5)


def weights(name: str = "") -> Any:
    """A tree with leaves of several kinds; with one that is large enough for 8 bits."""
    tree = {
        "layer": {"w": jnp.asarray([[1.0, -2.0], [0.5, 4.0]]), "b": jnp.zeros(2)},
        "half": jnp.asarray([1.0, 2.0, 3.0], jnp.bfloat16),
        "count": jnp.asarray([1, 2]),
    }
    if name.endswith("_8bit"):
        large = jnp.linspace(-1.0, 1.0, 4100)
        is_matrix = name.startswith(("muon_fraction", "normuon"))
        tree["large"] = large.reshape(50, 82) if is_matrix else large
    if name.startswith("packed_"):
        return jgrad.pack(tree | {"count": None})  # integers are not packed
    return tree


def gradient(t: int, name: str = "") -> Any:
    """That of step t."""
    grow = lambda p: jnp.sin(t + jnp.arange(p.size, dtype=float)).reshape(p.shape).astype(p.dtype)
    tree = jgrad.unpack(weights(name))
    grads = {k: None if k == "count" else jax.tree.map(grow, v) for k, v in tree.items()}
    return jgrad.pack(grads) if name.startswith("packed_") else grads


def step(
    tx: optax.GradientTransformation, w: Any, state: Any, g: Any, name: str = ""
) -> tuple[Any, Any]:
    """One step of training."""
    updates, state = jax.jit(tx.update)(g, state, w, **EXTRA.get(name, {}))
    return optax.apply_updates(w, updates), state


def flat(name: str, tree: Any) -> dict[str, np.ndarray]:
    """Arrays under their paths."""
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        half = x.dtype == jnp.bfloat16
        key = name + jax.tree_util.keystr(path) + (BFLOAT16 if half else "")
        found[key] = np.asarray(x.astype(jnp.float32) if half else x)
    return found


def like(name: str, tree: Any, arrays: dict[str, np.ndarray]) -> Any:
    """The arrays of a file in the structure of a tree, which must name each of them."""
    own = flat(name, tree)
    wanted = {key for key in arrays if key.removeprefix(name)[:1] in tuple(".[")}
    wanted = {key for key in wanted if key.startswith(name)}
    assert set(own) == wanted, set(own) ^ wanted
    leaves = [
        jnp.asarray(arrays[key], x.dtype) for key, x in zip(own, jax.tree.leaves(tree), strict=True)
    ]
    for key, x, leaf in zip(own, jax.tree.leaves(tree), leaves, strict=True):
        assert arrays[key].dtype == own[key].dtype, key
        assert leaf.shape == x.shape, key
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def without_target(name: str, arrays: dict[str, np.ndarray]) -> Any:
    """What orbax restores of a file if it is given no tree: dictionaries and lists."""
    tree: dict[str, Any] = {}
    for key, array in arrays.items():
        if key.startswith(f"{name}/state"):
            path = _KEY.findall(key.removeprefix(f"{name}/state").removesuffix(BFLOAT16))
            *outer, last = ("".join(groups) for groups in path)
            node = tree
            for part in outer:
                node = node.setdefault(part, {})
            node[last] = jnp.asarray(array, jnp.bfloat16 if key.endswith(BFLOAT16) else None)
    return tree


def as_in_11(name: str, state: Any, arrays: dict[str, np.ndarray]) -> Any:
    """A state as a file of 1.1 or before has it: the average was the last part of a chain."""
    if f"{name}/state[1].average['half']" not in arrays:
        return state
    return state.inner, state._replace(inner=None)


def main() -> None:
    """Writes the file of this version."""
    arrays: dict[str, np.ndarray] = {}
    for name, make in TRANSFORMATIONS.items():
        tx, w = make(), weights(name)
        state = tx.init(w)
        for t in range(2):
            w, state = step(tx, w, state, gradient(t, name), name)
        arrays |= flat(f"{name}/weights", w) | flat(f"{name}/state", state)
        w, state = step(tx, w, state, gradient(2, name), name)
        arrays |= flat(f"{name}/next_weights", w) | flat(f"{name}/next_state", state)
    path = DATA / f"states_{VERSION}.npz"
    assert not path.exists(), f"{path} is there already"
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    main()
