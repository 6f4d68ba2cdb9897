"""Which methods, in which forms, solve problems that were made to break optimizers.

`problems.py` has 20 of LightBench's 51 problems in JAX, `search.py` the columns of the table and a
fixed random search, `__main__.py` the table: `python -m studies.lightbench`.
"""
