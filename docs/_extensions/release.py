"""The release: its date and addresses below each page, how to cite it, and what it changed.

Each stands in one file of the repository: CITATION.cff, pyproject.toml and CHANGELOG.md. As long as
no public address is known, no link leads there.
"""

import datetime
import pathlib
import re
import tomllib
import urllib.parse
from typing import Any

import repository
from sphinx.application import Sphinx

ROOT = pathlib.Path(__file__).parents[2]
CITATION = dict(
    re.findall(r'^[ -]*([\w-]+): "?(.*?)"?$', (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
)
DATE = f"{datetime.date.fromisoformat(CITATION['date-released']):%-d %B %Y}"

CITE = """\
# Cite jgrad, get help

## How to cite

Version {version} was released on {date}. If you use jgrad in your work, please cite it as

```bibtex
@software{{jgrad,
  author = {{{{{name}}}}},
  title = {{{title}}},
  version = {{{version}}},
  year = {{{year}}},{url}
}}
```

`CITATION.cff` in the repository says the same. Please cite the paper of the method that you use,
too: its entry in the [reference](/reference.md) names it under "Source".

## How to get help

- [Questions and answers](/faq.md) covers what people ask most often: a loss that differs from
  optax's, a step that is NaN, 8 bits that change nothing.
- If a run diverges, [watch it](/runs.md): a report shows which leaf moves too far.
- {help}
"""
ASK = """\
For everything else, ask in the [discussions]({address}/discussions). If something is wrong,
  [report it]({address}/issues/new/choose), with the shortest code that shows it."""
NO_ADDRESS = """\
[How to change jgrad](/repository/CONTRIBUTING.md#report-a-bug-propose-a-change) says how to report
  a bug."""
UPGRADE = """\
# From {old} to {new}

This table lists what you have to change in code that was written for {old}.
[The changelog](/repository/CHANGELOG.md) says what else is new, and has the tables of earlier
versions.

{table}
"""


def address() -> str:
    """Of the repository; empty as long as its owner is not known."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    return "" if "/OWNER/" in urls["Homepage"] else urls["Homepage"]


def cite(address: str) -> str:
    """A page that says how to cite jgrad, and where to ask."""
    found = {
        "date": DATE,
        "year": CITATION["date-released"][:4],
        "url": f"\n  url = {{{address}}}," if address else "",
        "help": ASK.format(address=address) if address else NO_ADDRESS,
    }
    return CITE.format_map(CITATION | found)


def upgrade() -> str:
    """A page with the newest table of the changelog that says what users have to change."""
    file = ROOT / "CHANGELOG.md"
    table = r", from ([\d.]+) to ([\d.]+):\n\n((?:\|.*\n)+)"
    (old, new, rows), *_ = re.findall(table, file.read_text())
    return UPGRADE.format(old=old, new=new, table=repository.relink(file, rows))


def links(page: str, address: str) -> dict[str, str]:
    """Where a page is edited, if it is a file, and where a mistake on it is reported."""
    sources = {repository.page(x).rpartition(".")[0]: x for x in repository.files()}
    sources |= {"index": repository.README, "contents/upgrade": ROOT / "CHANGELOG.md"}
    source = sources.get("reference" if page.startswith("reference/") else page)
    if not address:
        return {}
    title = urllib.parse.quote(f"Documentation, {page}: ", safe="")
    found = {"report": f"{address}/issues/new?title={title}"}
    if source:
        found["edit"] = f"{address}/edit/main/{source.relative_to(ROOT)}"
    return found


def write(app: Sphinx) -> None:
    """Writes the pages."""
    folder = ROOT / "docs" / "contents"
    folder.mkdir(exist_ok=True)
    (folder / "cite.md").write_text(cite(app.config.repository_address))
    (folder / "upgrade.md").write_text(upgrade())


def add(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """What release.html shows below a page."""
    context |= {"released": app.config.released, **links(page, app.config.repository_address)}


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("repository_address", address(), "html")  # if one changes, all pages do
    app.add_config_value("released", DATE, "html")
    app.connect("builder-inited", write)
    app.connect("html-page-context", add)
    return {"parallel_read_safe": True}
