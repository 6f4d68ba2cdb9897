"""Gradients, Jacobians and Hessian-vector products, over `jax.vjp` and `jax.jvp`.

May import from `_arithmetic` and `_trees`.
"""
