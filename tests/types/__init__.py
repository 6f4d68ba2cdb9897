"""Programs as users write them, for type checkers; `tests/test_types.py` runs these on them."""
