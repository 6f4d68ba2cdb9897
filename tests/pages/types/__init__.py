"""Programs as users write them, for type checkers; `tests/pages/test_types.py` runs these on them."""
