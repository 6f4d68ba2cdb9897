"""A JAX without a name that it does not promise: what does not need the name works, and the rest says it."""

import ast
import subprocess
import sys
import types

import pytest

from jgrad._kernels import platforms
from jgrad._trees import unpromised
from tests.support.public import PACKAGE as ROOT

# In a process of its own, since JAX is changed for it.
PROGRAM = """
import importlib, sys
import chex, jax, optax
import jax.extend.core, jax.interpreters.ad, jax.interpreters.batching
import jax.interpreters.mlir, jax.interpreters.partial_eval

for text in sys.argv[1:]:
    home, name = text.rsplit(".", 1)
    module = importlib.import_module(home)
    if name in vars(module):
        delattr(module, name)
    if (deprecated := getattr(module, "__getattr__", None)) is not None:
        def refuse(x, name=name, deprecated=deprecated):
            if x == name:
                raise AttributeError(x)
            return deprecated(x)
        module.__getattr__ = refuse

import jax.numpy as jnp
import jgrad

w, adam = {"w": jnp.ones((16, 256))}, jgrad.adam(1e-3)
updates, state = jax.jit(adam.update)(w, adam.init(w), w)
print(float(updates["w"][0, 0]))
tx = jgrad.skip_nonfinite(optax.chain(jgrad.clip_by_global_norm(1.0), adam))
jax.eval_shape(lambda *args: jgrad.apply_gradients(tx, *args), w, tx.init(w), w)

def loss(w):
    return jnp.sum(jgrad.scan_layers(lambda x, y: x + y, w["w"], jnp.ones(256)))

eight_bits = jgrad.adam(1e-3, moment_dtype="8bit")
for need in (
    lambda: jax.jit(eight_bits.update).lower(w, eight_bits.init(w), w),
    lambda: jax.eval_shape(jgrad.step_in_backward(adam, loss), w, state),
    lambda: jgrad.optimizer_of_leaf(lambda g: jnp.sign(2.0 * g)),
    lambda: jgrad.leaf_programs(eight_bits, w),
):
    try:
        need()
        print("works")
    except ImportError as error:
        print(error)
"""
NAMES = [f"{home}.{name}" for name, homes in unpromised._HOMES.items() for home in homes]
FEATURES = ["moments in 8 bits", "`step_in_backward`", "functions of one leaf", "moments in 8 bits"]


def without(*names):
    """What each feature says, after a step in float32."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names], capture_output=True, text=True, cwd=ROOT.parent
    )
    assert done.returncode == 0, done.stderr[-2000:]
    update, *said = done.stdout.splitlines()
    assert abs(float(update) + 1e-3) < 1e-6
    return said


def test_none_of_them():
    """A step in float32, clipped and guarded, needs none; every feature names what it misses first."""
    said = without(*(x for x in NAMES if not x.endswith("enable_x64")))
    for feature, text in zip(FEATURES, said, strict=True):
        assert text.startswith(f"{feature}: JAX "), text
        assert text.endswith("expected a version that jgrad was tested with, see its README.")
    assert "has no `jax.extend.core.Primitive`, which it does not promise" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_one_of_them(name):
    home = unpromised._HOMES[name.rpartition(".")[2]][0]
    for text in without(name):
        assert text == "works" or f"has no `{home}." in text, text


def test_where_they_are_taken_from():
    """From that module alone, and from another only where Pallas is, which is imported on a TPU."""
    taken = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            private = ("jax.extend", "jax.interpreters", "jax.experimental", "jax._src")
            if any(name.startswith(private) for name in names):
                taken.add(path.name)
    assert taken == {"tpu.py"}


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ({"num_devices": 1}, True),
        ({"num_devices": 4}, False),
        ({"device_count": 4}, False),
        ({"manual_axes": {"a"}, "mesh": types.SimpleNamespace(shape={"a": 4, "b": 1})}, True),
        ({"manual_axes": {"a"}, "mesh": types.SimpleNamespace(shape={"a": 4, "b": 2})}, False),
        ({"manual_axes": {"a"}, "devices": 8}, False),
        ({"axis_env": None}, True),  # `pmap`, in JAX 0.8
        ({"axis_env": None, "num_devices": 4}, False),  # `jit`, in JAX 0.8
    ],
)
def test_whether_a_leaf_is_whole(context, expected):
    """Where JAX calls it otherwise, no: a kernel would take a shard for the leaf."""
    assert platforms._is_on_one_device(types.SimpleNamespace(**context)) is expected
