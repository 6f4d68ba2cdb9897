"""Whether steps lower for accelerators that are not at hand: `python -m studies.export`.

Prints how many operations a step has before XLA compiles it, on the leaves of BERT-base.
"""

import re

import jax
import jax.numpy as jnp
import rich
from absl import app, logging
from jax import export
from rich.table import Table

from benchmarks.updates import update
from benchmarks.workloads import bert_base

PLATFORMS = ("cuda", "tpu")
_METHODS = ("Adam", "LAMB")
_FORMS = ("tree", "packed")


def exported(platform: str, method: str, form: str) -> export.Exported:
    """A step for a platform, from shapes alone."""
    step, start = update(method, form)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in bert_base().items()}
    carry, grads = jax.eval_shape(start, params, params)
    return export.export(jax.jit(step, donate_argnums=0), platforms=(platform,))(carry, grads)


def operations(text: str) -> int:
    """How many operations of StableHLO `main` has, with the functions that it calls inlined."""
    _, *functions = re.split(r"func\.func \w+ @", text)
    bodies = {name: body for name, _, body in (x.partition("(") for x in functions)}

    def within(name: str) -> int:
        own = len(re.findall(r"= \"?stablehlo\.", bodies[name]))
        return own + sum(within(other) for other in re.findall(r" call @([\w.]+)", bodies[name]))

    return within("main")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # JAX tells of each accelerator that is not there
    table = Table("platform", "method", "form", "operations", title="Lowered")
    for platform in PLATFORMS:
        for method in _METHODS:
            for form in _FORMS:
                text = exported(platform, method, form).mlir_module()
                table.add_row(platform, method, form, str(operations(text)))
    rich.print(table)


if __name__ == "__main__":
    app.run(main)
