"""What the docs claim, timed on a GPU or TPU: `python -m benchmarks.device`.

- `rows`: what is timed, and how, each row in a process of its own;
- `processes`: all rows, within a time for all;
- `table`: what was measured.
"""
