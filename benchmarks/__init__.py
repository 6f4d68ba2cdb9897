"""What jgrad costs beside optax and PyTorch: `python -m benchmarks`.

`python -m benchmarks.device` times what the docs claim on a GPU or TPU.

Needs the extra `bench`. PyTorch is timed where it is installed, and is no part of an extra; its
build for the CPU is small:

    pip install torch --index-url https://download.pytorch.org/whl/cpu
"""
