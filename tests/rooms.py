"""Where is what: each file of jgrad, with the first line of its docstring.

    python -m tests.rooms

prints the folders from the top floor down, as CONTRIBUTING.md has them: a file imports from folders
below its own. Beside a file stand its tests, where a file of tests has its name.
"""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "jgrad"


def floors() -> list[str]:
    """The folders, from the top down: the table of the section "How it is built"."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.partition("\n## How it is built\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`_.*?) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def title(file: pathlib.Path) -> str:
    """What lives in a file: the first line of its docstring."""
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def tests_of(file: pathlib.Path) -> str:
    """The file of tests that has the name of a file, if there is one."""
    tests = ROOT / "tests" / file.parent.name.removeprefix("_") / f"test_{file.name}"
    return f" [{tests.relative_to(ROOT)}]" if tests.exists() else ""


def main() -> None:
    """Prints all folders."""
    for floor in floors():
        folder = PACKAGE / floor
        print(f"\n{floor}: {title(folder / '__init__.py')}")
        for file in sorted(folder.glob("[!_]*.py")):
            print(f"    {file.name}: {title(file)}{tests_of(file)}")


if __name__ == "__main__":
    main()
