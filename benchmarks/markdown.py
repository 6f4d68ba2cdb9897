"""Tables in Markdown, and the part of a page that a command writes."""

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A line for each row."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replaced(page: str, name: str, shown: str) -> str:
    """A page with other text between its marks of that name."""
    start, end = f"<!-- {name}: start -->", f"<!-- {name}: end -->"
    before, rest = page.split(start)
    return f"{before}{start}\n\n{shown}\n\n{end}{rest.partition(end)[2]}"
