"""The manifest of a saved step: a digest of each file, and the dtype and shape of each array."""

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

NAME = "manifest.json"


def write(folder: pathlib.Path, *, about: Mapping[str, Any], arrays: Mapping[str, str]) -> None:
    """Beside the files of arrays in a folder."""
    files = sorted(x for x in folder.rglob("*") if x.is_file())
    digests = {str(x.relative_to(folder)): digest(x) for x in files}
    text = json.dumps({"about": about, "arrays": arrays, "files": digests}, indent=1)
    (folder / NAME).write_text(text)


def digest(file: pathlib.Path) -> str:
    """Of a file's bytes; nothing for one that is not there."""
    if not file.exists():
        return ""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def described(tree: Any) -> dict[str, str]:
    """Dtype and shape of each array, by its path."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): f"{x.dtype} of shape {x.shape}" for path, x in pairs}


def difference(saved: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """What does not fit, by its path; nothing if all does. orbax would cast other dtypes."""
    problems = [
        f"{path}: {saved.get(path, 'nothing')} in the checkpoint, "
        f"expected {wanted.get(path, 'nothing')}"
        for path in sorted({*saved, *wanted})
        if saved.get(path) != wanted.get(path)
    ]
    more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more
