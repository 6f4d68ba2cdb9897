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
- A folder has one writer, and nothing in it is removed that was not saved here.

Every process of a run calls every method, on a folder that all of them see; what one of them finds
wrong is raised by all.
"""

import fcntl
import hashlib
import json
import os
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import jgrad

Tree = Any

_UNFINISHED = ".unfinished"  # marks a step while it is saved or removed


class CheckpointError(Exception):
    """A checkpoint that cannot be saved or restored, and why."""


class Checkpoints:
    """The steps saved in a folder.

    A step N is a folder N of orbax and a manifest N.json. There is N.unfinished before there is
    anything else of it, and until all of it is there or gone; whatever a kill leaves behind is
    known by that, and removed by the next save.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, keep: int = 3, read_only: bool = False
    ) -> None:
        """Opens a folder, or makes it.

        Args:
          folder: seen by all processes.
          keep: how many of the last steps stay, at least 1.
          read_only: whether steps are restored only; any number of readers may be beside a writer.

        Raises:
          CheckpointError: another writer has the folder, or it has steps that were not saved here.
          ValueError: `keep` below 1.
        """
        if keep < 1:
            raise ValueError(f"keep: {keep}, expected at least 1.")
        self._folder, self._keep, self._lock = pathlib.Path(folder).absolute(), keep, None
        problem = ""
        if jax.process_index() == 0 and not read_only:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self._folder / "lock").open("a")
            if problem := self._problem():
                self._lock.close()
        # What the first process finds, all raise: none waits for one that is gone.
        if problem := _of_first(problem):
            raise CheckpointError(problem)
        options = ocp.CheckpointManagerOptions(create=False, enable_async_checkpointing=False)
        if read_only and not self._folder.exists():
            raise CheckpointError(f"{self._folder}: no such folder.")
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def save(self, step: int, tree: Tree, *, about: dict[str, Any] | None = None) -> None:
        """Writes a tree of arrays, and then its manifest.

        Returns when all of it is on disk: arrays may be donated afterwards.

        Args:
          step: after the last one.
          tree: arrays of JAX; packed trees are saved as trees.
          about: what `about` will return, of JSON's types.

        Raises:
          CheckpointError: a step that is not after the last one.
          TypeError: something in the tree that is no array of JAX.
        """
        last = self.latest()
        if last is not None and step <= last:
            remedy = f"remove {self._folder / str(last)} and {last}.json, or save in another folder"
            raise CheckpointError(
                f"{self._folder}: step {step} is not after step {last}; {remedy}."
            )
        saved = _without_empty(_unpacked(tree))
        if jax.process_index() == 0:
            self._remove_unfinished()
            self._mark(step)
        multihost_utils.sync_global_devices(f"saving {step}")
        self._manager.reload()
        if not self._manager.save(step, args=ocp.args.StandardSave(saved), force=True):
            raise CheckpointError(f"{self._folder}: orbax did not save step {step}.")
        self._manager.wait_until_finished()
        if jax.process_index() == 0:
            manifest = {"about": about or {}, "arrays": _described(saved)}
            manifest["files"] = self._digests(step)
            _write(self._manifest(step), json.dumps(manifest, indent=1))
            self._mark(step).unlink()
            for old in whole_steps(self._folder)[: -self._keep]:
                self._mark(old)
                self._manifest(old).unlink()
            self._remove_unfinished()
        multihost_utils.sync_global_devices(f"saved {step}")

    def latest(self) -> int | None:
        """The last whole step; None if there is none."""
        found = [-1, *whole_steps(self._folder)]
        # One for all: a file system may show a new file to some processes first.
        step = multihost_utils.broadcast_one_to_all(np.int32(found[-1]))
        return int(step) if step >= 0 else None

    def about(self, step: int) -> dict[str, Any]:
        """What was given to `save` beside the tree.

        Raises:
          CheckpointError: no such step, or its manifest was altered.
        """
        return dict(self._read(step)["about"])

    def restore(self, like: Tree, step: int | None = None) -> Tree:
        """The tree of a step, in the form, on the devices and in the shardings of `like`.

        Args:
          like: arrays, or `jax.ShapeDtypeStruct`s with shardings; with `Packed`s in it, or not.
          step: None for the last whole one.

        Returns:
          A tree of the structure of `like`.

        Raises:
          CheckpointError: no such step, a file that was altered, or arrays that do not fit.
          TypeError: something in `like` without a sharding, such as an array of NumPy.
        """
        step = self.latest() if step is None else step
        if step is None:
            raise CheckpointError(f"{self._folder}: no whole checkpoint.")
        manifest = self._read(step)
        self._check_files(step, manifest["files"])
        shapes = jax.eval_shape(jgrad.unpack, like)
        self._check_arrays(step, manifest["arrays"], _described(_without_empty(shapes)))
        target = _without_empty(_spread(shapes, like))
        self._manager.reload()
        restored = self._manager.restore(step, args=ocp.args.StandardRestore(target))
        leaves = iter(jax.tree.leaves(restored))
        whole = jax.tree.map(
            lambda x: next(leaves) if x.size else jnp.zeros(x.shape, x.dtype), shapes
        )
        again = jax.jit(lambda tree: jgrad.pack(tree, like=like), out_shardings=_shardings(like))
        return again(whole)

    def close(self) -> None:
        """Ends orbax's threads, and lets another writer in."""
        self._manager.close()
        if self._lock:
            self._lock.close()

    # ---- the folder ------------------------------------------------------------------------------

    def _problem(self) -> str:
        """Why this process should not write here; nothing if it may."""
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return f"{self._folder}: another run saves its checkpoints here."
        known = {x.stem for x in self._folder.iterdir() if x.suffix in (".json", _UNFINISHED)}
        steps = [x.name for x in self._folder.iterdir() if x.is_dir() and x.name.isdigit()]
        if others := sorted(set(steps) - known, key=int):
            return f"{self._folder}: step {others[0]} was not saved here; give another folder."
        return ""

    def _manifest(self, step: int) -> pathlib.Path:
        return self._folder / f"{step}.json"

    def _mark(self, step: int) -> pathlib.Path:
        """Marks a step as unfinished."""
        mark = self._folder / f"{step}{_UNFINISHED}"
        mark.touch()
        return mark

    def _remove_unfinished(self) -> None:
        """What is left of steps that have no manifest."""
        for mark in self._folder.glob(f"*{_UNFINISHED}"):
            if not self._manifest(int(mark.stem)).exists():
                for rest in self._folder.glob(f"{mark.stem}.*tmp*"):
                    shutil.rmtree(rest) if rest.is_dir() else rest.unlink()
                if (self._folder / mark.stem).exists():
                    shutil.rmtree(self._folder / mark.stem)
            mark.unlink()

    # ---- manifests -------------------------------------------------------------------------------

    def _read(self, step: int) -> dict[str, Any]:
        """The manifest of a step, as the first process sees it."""
        file = self._manifest(step)
        # Bytes that cannot be read as text are read as what no manifest has.
        own = file.read_text(errors="replace") if file.exists() else ""
        if not (text := _of_first(own)):
            raise CheckpointError(f"{self._folder}: no whole checkpoint of step {step}.")
        try:
            found = json.loads(text)
            return {name: dict(found[name]) for name in ("about", "arrays", "files")}
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file}: altered since it was written.") from error

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
            older = [x for x in whole_steps(self._folder) if x < step]
            remedy = f"remove {self._folder / str(step)} and {step}.json to go on after step"
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


def whole_steps(folder: str | os.PathLike[str]) -> list[int]:
    """The steps in a folder that have a manifest, in order."""
    found = pathlib.Path(folder).glob("*.json")
    return sorted(int(x.stem) for x in found if x.stem.isdigit())


def check_settings(
    own: dict[str, Any], saved: dict[str, Any], step: int, *, folder: str = "--folder"
) -> None:
    """What decides the numbers of a run is what it was when a step was saved.

    Args:
      own: values by the names of flags.
      saved: the same from `about`.
      step: which was saved.
      folder: the flag by which another folder is given.

    Raises:
      CheckpointError: a value is another one.
    """
    for name, value in own.items():
        if saved.get(name) != value:
            remedy = f"expected {saved.get(name)}, as until step {step}, or another {folder}"
            raise CheckpointError(f"--{name}: {value}, {remedy}.")


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


# ---- files, and processes ------------------------------------------------------------------------


def _digest(file: pathlib.Path) -> str:
    if not file.exists():
        return "missing"
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _write(file: pathlib.Path, text: str) -> None:
    """Whole or not at all, whenever the machine stops."""
    part = file.with_suffix(".json.tmp")
    with part.open("w") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    part.replace(file)


def _of_first(text: str) -> str:
    """The text of the first process."""
    own = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(own.size)))
    own = np.resize(own, size) if own.size else np.zeros(size, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(own), np.uint8).tobytes().decode()
