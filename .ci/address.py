"""Writes the owner of the repository on GitHub into every address that names it.

    python .ci/address.py NAME

replaces `OWNER`, which stands for an address that is not known yet. The files are those below.
Pages that do without an address then have it, too.
"""

import pathlib
import re
import sys

FILES = ("pyproject.toml", "CITATION.cff", ".github/ISSUE_TEMPLATE/config.yml")
# What a page says before, and what then.
PAGES = {
    "README.md": (
        "In a clone of this repository, run `pip install .`; for",
        'Run `pip install "git+ADDRESS"`; for',
    ),
    "CONTRIBUTING.md": (
        "In a clone of this repository:\n\n```sh\n",
        "```sh\ngit clone ADDRESS && cd jgrad\n",
    ),
}
ADDRESS = re.compile(r"(github(?:usercontent)?\.com/)OWNER(?=/jgrad)")


def main(folder: pathlib.Path, owner: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9](-?[A-Za-z0-9])*", owner):
        sys.exit(f"{owner!r} is no name of an account on GitHub.")
    for name in FILES:
        path = folder / name
        text, count = ADDRESS.subn(rf"\g<1>{owner}", path.read_text())
        path.write_text(text)
        print(f"{name}: {count}")
    for name, (before, after) in PAGES.items():
        path = folder / name
        text = path.read_text()
        path.write_text(
            text.replace(before, after.replace("ADDRESS", f"https://github.com/{owner}/jgrad"))
        )
        print(f"{name}: {text.count(before)}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(pathlib.Path(__file__).parents[1], sys.argv[1])
