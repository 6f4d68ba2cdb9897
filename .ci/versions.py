"""Prints the versions with which an environment runs, and what differs from a record of them.

    python .ci/versions.py
    python .ci/versions.py .ci/newest.txt          # what is newer or older than the record says
    python .ci/versions.py .ci/newest.txt --write  # what is here becomes the record

README says with which versions jgrad was tested, from `oldest.txt` to `newest.txt`; a test compares
them. So a release of JAX makes no run red by itself: where all has passed, write the record.
"""

import importlib.metadata
import pathlib
import re
import sys

NAMES = ("jax", "jaxlib", "numpy", "optax", "chex", "flax", "equinox", "orbax-checkpoint")
ENTRY = re.compile(r"^([\w-]+)==(\S+)$", re.MULTILINE)


def here() -> dict[str, str]:
    """The versions of Python and of what is installed."""
    found = {"python": "{}.{}".format(*sys.version_info)}
    for name in NAMES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def recorded(path: pathlib.Path) -> dict[str, str]:
    """The versions of a record."""
    return dict(ENTRY.findall(path.read_text()))


def minor(versions: dict[str, str]) -> int:
    """That of Python; 0 where it is not recorded."""
    return int(versions.get("python", "3.0").split(".")[1])


def main(record: str = "", *options: str) -> None:
    """Prints, and writes if asked to."""
    found = here()
    print(", ".join(f"{name} {version}" for name, version in found.items()))
    if not record:
        return
    path = pathlib.Path(record)
    known = recorded(path)
    differences = [
        f"{name} {known[name]} there, {found[name]} here"
        for name in found
        if known.get(name, found[name]) != found[name]
    ]
    if options == ("--write",):
        path.write_text(ENTRY.sub(lambda entry: f"{entry[1]}=={found[entry[1]]}", path.read_text()))
    elif minor(found) < minor(known):
        print(f"NOT TESTED HERE: {path} is of Python {known['python']}.")
    elif differences:
        print(f"{path} differs: {'; '.join(differences)}.")
        print(f"If the tests pass: `python .ci/versions.py {path} --write`, and README's range.")


if __name__ == "__main__":
    main(*sys.argv[1:])
