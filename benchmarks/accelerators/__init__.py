"""What programs cost on machines that are not there: `python -m benchmarks.accelerators`.

XLA's compilers for TPU and GPU are packages, and compile without a device. Nothing runs: there are
counts of bytes, kernels and collectives, and no times. Needs the extra `accelerators`, which has
`libtpu` and `jax-cuda12-plugin` for Linux on x86-64.

- `targets`: the machines, and whether this one can compile for them;
- `hlo`: what a program moves, read from XLA's text of it;
- `program`: compiles a function, and counts;
- `recipes`: what is compiled, on which models;
- `train_steps`: a model and its train step in two forms, whose peaks
  `python -m benchmarks.accelerators.backward` compiles;
- `flax_decoders`: decoders as users write them, whose peaks
  `python -m benchmarks.accelerators.decoder_peaks` compiles;
- `llama`: a decoder in plain JAX, with the shapes of published models;
- `largest`: which of them one device trains: `python -m benchmarks.accelerators.largest`;
- `decoder`: train steps on many chips: `python -m benchmarks.accelerators.decoder`;
- `limits`: what the steps of `recipes` may cost.

Tests stand beside what they compile, and run by `pytest -m accelerators benchmarks/accelerators`,
in an environment with `pip install ".[test,accelerators]"`. Those of saved text run by default.
"""
