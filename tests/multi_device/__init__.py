"""Tests on eight devices; `tests/conftest.py` gives each process eight virtual CPU devices."""
