"""jgrad in libraries that take an optax optimizer, each as its documentation uses one.

`pytest -m clients tests/pages/clients`, in an environment with `pip install ".[test,clients]"`.
"""
