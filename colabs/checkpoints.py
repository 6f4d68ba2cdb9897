"""Checkpoints that can be trusted: whole steps, read again on any number of devices, never altered.

orbax writes steps, commits each as a whole, removes old ones, and reads them. What is added: the
tree is saved and not the packed layout, so that `pack(multiple_of=8)` restores as `multiple_of=4`,
or as a tree; and a manifest is committed with each step (`manifest.py`), by which a flipped bit is
found before training goes on, and what does not fit is named by its path.

Every process of a run calls every method, on a folder that all of them see; one run at a time saves
in a folder.
"""

import json
import os
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import jgrad
import manifest

Tree = Any

_ITEM = "default"  # orbax's name of a step's only tree


class CheckpointError(Exception):
    """A checkpoint that cannot be saved or restored, and why."""


class _Handler(ocp.StandardCheckpointHandler):
    """orbax's; the first process writes a manifest before it commits a step."""

    contents: dict[str, Any]

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        manifest.write(pathlib.Path(directory), **self.contents)


class Checkpoints:
    """The last steps saved in a folder, which is made where there is none; `keep` of them stay."""

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep: {keep}, expected at least 1.")
        self._folder = pathlib.Path(folder).absolute()
        # orbax would remove what others have saved.
        if (steps := whole_steps(folder)) and not self._manifest(steps[-1]).exists():
            problem = f"step {steps[-1]} has no manifest, and was not saved here"
            raise CheckpointError(f"{self._folder}: {problem}; give another folder.")
        self._handler, registry = _Handler(), ocp.handlers.DefaultCheckpointHandlerRegistry()
        registry.add(_ITEM, ocp.args.StandardSave, self._handler)
        registry.add(_ITEM, ocp.args.StandardRestore, self._handler)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, cleanup_tmp_directories=True, enable_async_checkpointing=False
        )
        self._manager = ocp.CheckpointManager(
            self._folder, options=options, handler_registry=registry
        )

    def save(self, step: int, tree: Tree, *, about: dict[str, Any] | None = None) -> None:
        """Writes arrays of JAX, packed trees as trees, and what `about` will return, as JSON.

        Returns when all of it is on disk: arrays may be donated afterwards.
        """
        last = self.latest()
        if last is not None and step <= last:
            problem = f"{self._folder}: step {step} is not after step {last}"
            remedy = f"remove {self._folder / str(last)}, or save in another folder"
            raise CheckpointError(f"{problem}; {remedy}.")
        shapes = _unpacked(tree)
        saved = jax.jit(jgrad.unpack, out_shardings=_shardings(shapes))(tree)
        self._handler.contents = {"about": about or {}, "arrays": manifest.described(shapes)}
        self._manager.save(step, args=ocp.args.StandardSave(saved), force=True)

    def latest(self) -> int | None:
        """The last step; None before the first one."""
        return self._manager.latest_step()

    def about(self, step: int) -> dict[str, Any]:
        """What was given to `save` beside the tree."""
        return self._read(step)["about"]

    def restore(self, like: Tree, step: int | None = None) -> Tree:
        """The tree of a step, or of the last one, in the form and in the shardings of `like`.

        `like` has arrays of JAX, or `jax.ShapeDtypeStruct`s with shardings. A step that is not
        there, was altered, or has other arrays is a CheckpointError.
        """
        step = self.latest() if step is None else step
        if step is None:
            raise CheckpointError(f"{self._folder}: no whole checkpoint.")
        found, shapes = self._read(step), _unpacked(like)
        self._check_files(step, found["files"])
        if problems := manifest.difference(found["arrays"], manifest.described(shapes)):
            raise CheckpointError(f"{self._folder}: step {step} does not fit: {problems}.")
        tree = self._manager.restore(step, args=ocp.args.StandardRestore(shapes))
        again = jax.jit(lambda tree: jgrad.pack(tree, like=like), out_shardings=_shardings(like))
        return again(tree)

    def close(self) -> None:
        """Ends orbax's threads."""
        self._manager.close()

    def _manifest(self, step: int) -> pathlib.Path:
        return self._folder / str(step) / _ITEM / manifest.NAME

    def _read(self, step: int) -> dict[str, dict[str, Any]]:
        file = self._manifest(step)
        if not file.exists():
            raise CheckpointError(f"{self._folder}: no whole checkpoint of step {step}.")
        try:
            found = json.loads(file.read_text(errors="replace"))
            return {name: dict(found[name]) for name in ("about", "arrays", "files")}
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file}: altered since it was written.") from error

    def _check_files(self, step: int, digests: dict[str, str]) -> None:
        """Each process reads its part of the files, and all raise what one of them finds."""
        names, folder = sorted(digests), self._manifest(step).parent
        own = range(jax.process_index(), len(names), jax.process_count())
        bad = (i for i in own if manifest.digest(folder / names[i]) != digests[names[i]])
        first = multihost_utils.process_allgather(np.int32(next(bad, len(names)))).min()
        if first < len(names):
            older = [x for x in whole_steps(self._folder) if x < step]
            remedy = f"remove {self._folder / str(step)} to go on after step"
            raise CheckpointError(
                f"{folder / names[first]}: altered or missing since step {step} was saved; "
                f"{f'{remedy} {older[-1]}' if older else 'there is no older step'}."
            )


def whole_steps(folder: str | os.PathLike[str]) -> list[int]:
    """The steps in a folder that orbax has committed: until then, their names are longer."""
    return sorted(int(x.name) for x in pathlib.Path(folder).glob("*") if x.name.isdigit())


def check_settings(
    own: dict[str, Any], saved: dict[str, Any], step: int, *, folder: str = "--folder"
) -> None:
    """Raises CheckpointError where a flag has another value than when a step was saved.

    `own` and `saved` are values by the names of flags, and `folder` is the flag for another folder.
    """
    for name, value in own.items():
        if saved.get(name) != value:
            remedy = f"expected {saved.get(name)}, as until step {step}, or another {folder}"
            raise CheckpointError(f"--{name}: {value}, {remedy}.")


def _shardings(tree: Tree) -> Tree:
    """Where each array is, or belongs."""

    def of(path: Any, x: Any) -> jax.sharding.Sharding:
        if getattr(x, "sharding", None) is None:
            came = f"{jax.tree_util.keystr(path)}: {type(x).__name__}"
            expected = "an array of JAX, or a `jax.ShapeDtypeStruct` with a sharding"
            raise TypeError(f"{came}, expected {expected}.")
        return x.sharding

    return jax.tree_util.tree_map_with_path(of, tree)


def _unpacked(like: Tree) -> Tree:
    """Shapes of trees for packed trees, the first axis that can be cut over the devices.

    So no device needs room for all of a state, neither while it is saved nor while it is restored.
    """
    given = jax.tree.leaves(_shardings(like))
    mesh = next((x.mesh for x in given if isinstance(x, NamedSharding)), None)

    def cut(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = given[0]
        if mesh is not None:
            axis = next((i for i, n in enumerate(x.shape) if n and n % mesh.size == 0), None)
            spec = () if axis is None else (None,) * axis + (mesh.axis_names,)
            sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(cut, jax.eval_shape(jgrad.unpack, like))
