"""Writes the owner of the repository on GitHub into every address that names it.

    python .ci/address.py NAME

replaces `OWNER`, which stands for an address that is not known yet. The files are those below.
"""

import pathlib
import re
import sys

FILES = ("pyproject.toml", "CITATION.cff", ".github/ISSUE_TEMPLATE/config.yml")
ADDRESS = re.compile(r"(github(?:usercontent)?\.com/)OWNER(?=/jgrad)")


def main(folder: pathlib.Path, owner: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9](-?[A-Za-z0-9])*", owner):
        sys.exit(f"{owner!r} is no name of an account on GitHub.")
    for name in FILES:
        path = folder / name
        text, count = ADDRESS.subn(rf"\g<1>{owner}", path.read_text())
        path.write_text(text)
        print(f"{name}: {count}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(pathlib.Path(__file__).parents[1], sys.argv[1])
