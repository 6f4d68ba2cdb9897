"""Tests on eight devices; `conftest.py` gives each process eight virtual CPU devices."""
