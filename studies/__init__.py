"""Questions that were asked once, each by `python -m studies.NAME`.

What is timed and quoted again and again is in `benchmarks`. A study may import that, the examples
of `colabs/` and helpers of `tests/`; nothing imports a study but its own tests.
"""

import pathlib
import sys

# Some studies train the examples.
sys.path.append(str(pathlib.Path(__file__).parents[1] / "colabs"))
