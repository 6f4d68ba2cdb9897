"""The `init`/`update` pairs: optax-compatible transformations, made of `jgrad.methods`."""
