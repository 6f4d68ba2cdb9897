"""Programs compiled for TPU and GPU, and the instrument that counts them.

`pytest -m accelerators tests/accelerators`, in an environment with `pip install
".[test,accelerators]"`. The tests of `hlo` read saved text, and run by default.
"""
