"""LightBench's problems in JAX, and which methods solve them."""
