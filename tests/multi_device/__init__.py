"""Tests that want eight devices; `tests/test_multi_device.py` runs them in processes of their own."""
