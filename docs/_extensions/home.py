"""The home page: README, with cards behind its example, and the table of contents of the site."""

import pathlib

from sphinx.application import Sphinx

HOME = pathlib.Path(__file__).parents[1] / "index.md"

PAGE = """\
```{include} ../README.md
:end-before: <!-- The home page
```

::::{grid} 1 2 2 3
:gutter: 3

:::{grid-item-card} Getting started
:link: getting_started
:link-type: doc

The first training, line by line.
:::

:::{grid-item-card} Choose a setup
:link: choose
:link-type: doc

Lines to copy, for each kind of model.
:::

:::{grid-item-card} Gallery
:link: gallery/index
:link-type: doc

The notebooks, with their outputs.
:::

::::

```{include} ../README.md
:start-after: parts here. -->
```

```{toctree}
:hidden:
:caption: Guides

getting_started
choose
hyperparameters
methods
muon
wrappers
runs
memory
four_bytes
packed
devices
from_optax
from_elsewhere
trainers
faq
```

```{toctree}
:hidden:
:caption: Notebooks

gallery/index
```

```{toctree}
:hidden:
:caption: Reference

reference
reference/gradients
reference/optimizers
reference/parts-of-optimizers
reference/options
reference/wrappers
reference/whole-steps
reference/updates-with-explicit-state
reference/functions-of-trees
reference/packed-trees
reference/states-of-optimizers
reference/names-kept-for-ivy
```

```{toctree}
:hidden:
:caption: What is known

benchmarks
correctness
stability
```

```{toctree}
:hidden:
:caption: Measurements

repository/benchmarks/results.md
repository/benchmarks/notes/accelerators.md
repository/benchmarks/notes/eight_bits.md
repository/benchmarks/notes/endurance.md
repository/benchmarks/notes/large_batches.md
repository/benchmarks/notes/lightbench.md
repository/benchmarks/notes/losses.md
repository/benchmarks/notes/muon.md
repository/benchmarks/notes/on_paper.md
repository/benchmarks/notes/soap.md
repository/benchmarks/notes/steps.md
repository/benchmarks/notes/tests_of_others.md
repository/benchmarks/notes/what_wrappers_cost.md
```

```{toctree}
:hidden:
:caption: Project

repository/CONTRIBUTING.md
repository/BUILD_NOTES.md
repository/CHANGELOG.md
```
"""


def write(app: Sphinx) -> None:
    """Writes the page; README is read when it is included."""
    HOME.write_text(PAGE)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}
