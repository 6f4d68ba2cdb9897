"""Which methods, in which forms, solve problems that were made to break optimizers.

`problems.py` has 20 of LightBench's 51 problems in JAX, `search.py` the columns of the table and a
fixed random search, `table.py` the page that `python -m studies.lightbench` writes.
"""
