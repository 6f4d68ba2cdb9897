"""What jgrad costs beside optax: `python -m benchmarks`."""
