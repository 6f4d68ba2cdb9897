"""Checkpoints that can be trusted: whole steps, read again on any number of devices, never altered.

orbax writes and reads the arrays. What is added here:

- On disk is the tree, not the packed layout: `pack(multiple_of=8)` restores as `multiple_of=4`, or
  as a tree.
- A manifest beside each step, written last, has a digest of every file, and the dtype and shape of
  every array. A step without one was not finished, and does not count. One flipped bit is found
  before training goes on.
- What does not fit is said by the array's path; orbax alone casts dtypes without a word.
- Arrays without elements, which stand where there is no state, and which orbax refuses, are made
  anew.

Every process of a run calls every method, on a folder that all of them see.
"""

import hashlib
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import jgrad

Tree = Any


class CheckpointError(Exception):
    """A checkpoint that cannot be restored, and why."""


class Checkpoints:
    """The steps saved in a folder."""

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 3) -> None:
        """Opens a folder, or makes it; what an interrupted save left behind is removed.

        Args:
          folder: seen by all processes.
          keep: how many of the last steps stay.
        """
        self._folder = pathlib.Path(folder).absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=True, enable_async_checkpointing=False
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)
        for step in self._manager.all_steps():
            if not self._manifest(step).exists():
                self._manager.delete(step)

    def save(self, step: int, tree: Tree) -> None:
        """Writes a tree of arrays, and then its manifest.

        Returns when all of it is on disk: arrays may be donated afterwards.
        """
        saved = _without_empty(_unpacked(tree))
        self._manager.save(step, args=ocp.args.StandardSave(saved))
        self._manager.wait_until_finished()
        if jax.process_index() == 0:
            manifest = {"arrays": _described(saved), "files": self._digests(step)}
            _write(self._manifest(step), json.dumps(manifest, indent=1))
            for old in self._folder.glob("*.json"):
                if not (self._folder / old.stem).exists():
                    old.unlink()
        multihost_utils.sync_global_devices(f"saved {step}")

    def latest(self) -> int | None:
        """The last whole step; None if there is none."""
        found = last_whole_step(self._folder)
        # One for all: a file system may show a new file to some processes first.
        step = multihost_utils.broadcast_one_to_all(np.int32(-1 if found is None else found))
        return int(step) if step >= 0 else None

    def restore(self, like: Tree, step: int | None = None) -> Tree:
        """The tree of a step, in the form, on the devices and in the shardings of `like`.

        Args:
          like: arrays, or `jax.ShapeDtypeStruct`s with shardings; with `Packed`s in it, or not.
          step: None for the last whole one.

        Raises:
          CheckpointError: no such step, a file that was altered, or arrays that do not fit.
          TypeError: something in `like` without a sharding, such as an array of NumPy.
        """
        step = self.latest() if step is None else step
        if step is None or not self._manifest(step).exists():
            raise CheckpointError(f"{self._folder}: no whole checkpoint{_of(step)}.")
        files, arrays = self._read(self._manifest(step))
        self._check_files(step, files)
        shapes = jax.eval_shape(jgrad.unpack, like)
        self._check_arrays(step, arrays, _described(_without_empty(shapes)))
        target = _without_empty(_spread(shapes, like))
        restored = self._manager.restore(step, args=ocp.args.StandardRestore(target))
        leaves = iter(jax.tree.leaves(restored))
        whole = jax.tree.map(
            lambda x: next(leaves) if x.size else jnp.zeros(x.shape, x.dtype), shapes
        )
        again = jax.jit(lambda tree: jgrad.pack(tree, like=like), out_shardings=_shardings(like))
        return again(whole)

    def close(self) -> None:
        """Ends orbax's threads."""
        self._manager.close()

    def _manifest(self, step: int) -> pathlib.Path:
        return self._folder / f"{step}.json"

    def _read(self, manifest: pathlib.Path) -> tuple[dict[str, str], dict[str, list[Any]]]:
        try:
            found = json.loads(manifest.read_text())
            return dict(found["files"]), dict(found["arrays"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{manifest}: altered since it was written.") from error

    def _digests(self, step: int) -> dict[str, str]:
        """The digest of each file of a step, by its path in the folder."""
        files = sorted(x for x in (self._folder / str(step)).rglob("*") if x.is_file())
        return {str(x.relative_to(self._folder)): _digest(x) for x in files}

    def _check_files(self, step: int, expected: dict[str, str]) -> None:
        """Each process reads its part of the files, and all hear of what one finds."""
        names = sorted(expected)
        own = names[jax.process_index() :: jax.process_count()]
        bad = [x for x in own if _digest(self._folder / x) != expected[x]]
        first = np.int32(names.index(bad[0]) if bad else len(names))
        first = int(np.min(multihost_utils.process_allgather(first)))
        if first < len(names):
            older = [x for x in self._manager.all_steps() if x < step]
            remedy = f"delete {self._folder / str(step)} and its .json, to go on after step"
            raise CheckpointError(
                f"{self._folder / names[first]}: altered or missing since step {step} was saved; "
                f"{f'{remedy} {max(older)}' if older else 'there is no older step'}."
            )

    def _check_arrays(
        self, step: int, saved: dict[str, list[Any]], wanted: dict[str, list[Any]]
    ) -> None:
        """Every array is there, in its dtype and shape, and none beside."""
        problems = [
            f"{path}: {_phrase(saved.get(path))} in the checkpoint, expected "
            f"{_phrase(wanted.get(path))}"
            for path in sorted({*saved, *wanted})
            if saved.get(path) != wanted.get(path)
        ]
        if problems:
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            raise CheckpointError(
                f"{self._folder}: step {step} does not fit: {'; '.join(problems[:3])}{more}."
            )


def last_whole_step(folder: str | os.PathLike[str]) -> int | None:
    """The last step in a folder that has a manifest; None if there is none."""
    found = pathlib.Path(folder).glob("*.json")
    return max((int(x.stem) for x in found if x.stem.isdigit()), default=None)


# ---- trees ---------------------------------------------------------------------------------------


def _unpacked(tree: Tree) -> Tree:
    """Trees for packed trees, cut over devices where they can be: none needs room for all."""
    shapes = _spread(jax.eval_shape(jgrad.unpack, tree), tree)
    return jax.jit(jgrad.unpack, out_shardings=_shardings(shapes))(tree)


def _shardings(tree: Tree) -> Tree:
    """Where each array is, or belongs."""

    def of(path: Any, x: Any) -> jax.sharding.Sharding:
        if getattr(x, "sharding", None) is None:
            came = f"{jax.tree_util.keystr(path)}: {type(x).__name__}"
            expected = "an array of JAX, or a `jax.ShapeDtypeStruct` with a sharding"
            raise TypeError(f"{came}, expected {expected}.")
        return x.sharding

    return jax.tree_util.tree_map_with_path(of, tree)


def _spread(shapes: Tree, like: Tree) -> Tree:
    """Shapes with shardings: the first axis that can be is cut over the mesh of `like`."""
    given = jax.tree.leaves(_shardings(like))
    meshes = [x.mesh for x in given if isinstance(x, NamedSharding)]

    def spread(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not meshes:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=given[0])
        mesh = meshes[0]
        axis = next((i for i, n in enumerate(x.shape) if n and n % mesh.size == 0), None)
        spec = () if axis is None else (None,) * axis + (mesh.axis_names,)
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(spread, shapes)


def _without_empty(tree: Tree) -> Tree:
    """None for arrays without elements."""
    return jax.tree.map(lambda x: x if x.size else None, tree)


def _described(tree: Tree) -> dict[str, list[Any]]:
    """Dtype and shape of each array, by its path."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): [str(x.dtype), list(x.shape)] for path, x in pairs}


def _phrase(described: list[Any] | None) -> str:
    return "nothing" if described is None else f"{described[0]} of shape {tuple(described[1])}"


def _of(step: int | None) -> str:
    return "" if step is None else f" of step {step}"


# ---- files ---------------------------------------------------------------------------------------


def _digest(file: pathlib.Path) -> str:
    if not file.exists():
        return "missing"
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _write(file: pathlib.Path, text: str) -> None:
    """Whole or not at all, whenever the machine stops."""
    part = file.with_suffix(".tmp")
    with part.open("w") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    part.replace(file)
