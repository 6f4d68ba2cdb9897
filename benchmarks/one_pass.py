"""An update in one pass over memory, under the XLA flag that lets loops have several results.

XLA reads its flags once, so a process of its own has the flag. All contenders are timed in it: it
changes optax, too.
"""

import os
import pickle
import subprocess
import sys

from benchmarks import updates
from benchmarks.results import Result
from benchmarks.workloads import WORKLOADS

FLAG = "--xla_backend_extra_options=xla_cpu_use_multi_output_fusion"
METHODS = ("momentum", "Adam")
# Not the leaf of 2^25 elements: arrays that start at multiples of a power of two share cache sets.
_MODEL = "BERT-base, vocabulary 4096: 197 leaves, 88 M"
WORK = f"with several results per loop: {_MODEL}"


def compare(method: str, *, rounds: int, builds: int) -> list[Result]:
    """The forms of one method, in a process with the flag."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.one_pass", method, str(rounds), str(builds)],
        env=os.environ | {"XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        check=True,
    )
    return list(pickle.loads(done.stdout))


def _in_this_process(method: str, rounds: int, builds: int) -> list[Result]:
    work = WORKLOADS[_MODEL]
    forms = [form for form in work.forms(method) if form != "small packed"]
    return updates.compare(WORK, method, work.shapes, forms, rounds=rounds, builds=builds)


if __name__ == "__main__":
    name, *numbers = sys.argv[1:]
    sys.stdout.buffer.write(pickle.dumps(_in_this_process(name, *map(int, numbers))))
