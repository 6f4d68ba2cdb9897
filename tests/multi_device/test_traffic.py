"""Train steps compiled for 2, 4 and 8 devices move and keep what `studies/traffic.py` says."""

import re
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jgrad
from benchmarks import collectives
from benchmarks.collectives import Collective
from benchmarks.methods import METHODS
from studies import traffic
from studies.traffic import WAYS, Machine, Part
from tests.multi_device.meshes import mesh_of

# Leaves that 8 devices can share, and that fill their blocks; and others, which packing pads.
EVEN = {"w": [(64, 512), (512, 128)], "b": []}
ODD = {"w": [(60, 300), (300, 260)], "b": [(300,), (260,)]}

every_number = pytest.mark.parametrize("n", [2, 4, 8])


def model(shapes, dtype=jnp.float32):
    """Weights of a dtype, and biases in float32."""
    rng = np.random.default_rng(0)
    draw = lambda shape, dtype: jnp.asarray(0.1 * rng.normal(size=shape), dtype)
    return {
        "w": [draw(shape, dtype) for shape in shapes["w"]],
        "b": [draw(shape, jnp.float32) for shape in shapes["b"]],
    }


def loss(w, x):
    for weights in w["w"]:
        x = jnp.tanh(x @ weights.astype(x.dtype))
    return jnp.mean(x**2) + sum(jnp.sum(bias**2) for bias in w["b"])


class Trained(NamedTuple):
    """A step: of which parameters, as traced, what it moves, and the state that it returned."""

    parts: list[Part]
    jaxpr: str
    moved: list[Collective]
    state: object


def train(name, n, w, packed):
    """By Adam on the first n devices."""
    mesh = mesh_of(data=n)
    whole, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    x = jax.device_put(jnp.ones((16, w["w"][0].shape[0])), cut)
    w = jax.device_put(jgrad.pack(w, multiple_of=n) if packed else w, whole)
    by_jit = name.startswith("jit")
    tx = jgrad.zero(jgrad.adam(0.1), "data") if name == "zero" else jgrad.adam(0.1)

    def step(w, state, x):
        value, grads = jax.value_and_grad(lambda w: loss(jgrad.unpack(w), x))(w)
        if name == "replicated":
            grads = jax.lax.pmean(grads, "data")
        updates, state = tx.update(grads, state, w)
        value = value if by_jit else jax.lax.pmean(value, "data")
        return optax.apply_updates(w, updates), state, value

    shardings = jgrad.state_shardings(tx, w, cut if WAYS[name].cut else whole)
    if not by_jit:
        own = jax.tree.map(lambda x: x.spec, shardings)
        step = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), own, P("data")),
            out_specs=(P(), own, P()),
            check_vma=False,
        )
    state = jax.device_put(tx.init(w), shardings)
    traced = jax.jit(step, out_shardings=(whole, shardings, whole)).trace(w, state, x)
    compiled = traced.lower().compile()
    _, state, _ = jax.block_until_ready(compiled(w, state, x))
    sizes = Counter()
    for leaf in jax.tree.leaves(w):
        sizes[leaf.dtype] += leaf.size
    parts = [Part(size, dtype.itemsize) for dtype, size in sizes.items()]
    return Trained(parts, str(traced.jaxpr), collectives.of(compiled.as_text(), n), state)


def bytes_here(state):
    """On one of the devices."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))


CASES = {
    "replicated": ("replicated", EVEN, False),
    "replicated, packed": ("replicated", ODD, True),
    "jit": ("jit", EVEN, False),
    "jit, packed": ("jit, packed", EVEN, True),
    "zero": ("zero", ODD, True),
}


@pytest.mark.slow
@every_number
@pytest.mark.parametrize(("name", "shapes", "packed"), CASES.values(), ids=CASES)
def test_bytes(name, shapes, packed, n):
    """To the byte, where XLA for CPUs finds no reduce-scatter."""
    found = train(name, n, model(shapes), packed)
    expected = traffic.moved(WAYS[name], found.parts, finds_scatter=False)
    assert collectives.total(found.moved) == collectives.total(expected)
    assert bytes_here(found.state) == traffic.state_bytes(WAYS[name], found.parts, n)


@pytest.mark.slow
@every_number
def test_zero_in_two_dtypes(n):
    """One reduce-scatter and one all-gather for each, in it; XLA for CPUs widens what is moved."""
    way, found = WAYS["zero"], train("zero", n, model(ODD, jnp.bfloat16), packed=True)
    assert [x.itemsize for x in found.parts] == [2, 4]
    asked = re.findall(r"(\w+)\[[^=\n]* = (reduce_scatter|all_gather)", found.jaxpr)
    kinds = ("reduce_scatter", "all_gather")
    assert sorted(asked) == sorted((t, kind) for t in ("bf16", "f32") for kind in kinds)
    widened = [x._replace(itemsize=4) for x in found.parts]
    assert sorted(found.moved) == sorted(traffic.moved(way, widened))
    assert bytes_here(found.state) == traffic.state_bytes(way, found.parts, n)


def test_by_hand():
    """Rings and their links; of a parameter on 8 devices, memory and what the update touches."""
    rings = {"all-reduce": 140, "reduce-scatter": 70, "all-gather": 70}
    assert {kind: traffic.sent([Collective(kind, 80)], 8) for kind in rings} == rings
    assert traffic.by_link(160, 8, Machine()) == (160, 0)
    assert traffic.by_link(160, 16, Machine()) == (140, 20)
    part, ways = [Part(8)], [WAYS[name] for name in traffic.COMPARED]
    memory = [traffic.memory_bytes(way, part, 8) - traffic.COUNTER for way in ways]
    assert memory == [8 * 16, 8 * 9, 8 * 13]
    assert [traffic.update_bytes(way, part, 8) for way in ways] == [8 * 28, 28, 24 + 8 * 28]
    assert METHODS["Adam"].floor == 28


def test_table():
    """No times where memory is too small."""
    small, large = Machine(), Machine(memory=2e12)
    assert [" - " in row for row in traffic.table(small).splitlines()[2:]] == [False] * 3 + [
        True
    ] * 6
    assert " - " not in traffic.table(large)


def test_forms_of_a_program():
    """Tuples, and the halves of asynchronous operations, as XLA for GPUs writes them."""
    text = """
  %a = f32[16,4]{1,0} parameter(0)
  %b = bf16[8]{0} parameter(1)
  %c = f32[] constant(0)
  %rs = ((f32[16,4]{1,0}, bf16[8]{0}), (f32[2,4]{1,0}, bf16[1]{0})) reduce-scatter-start(%a, %b), channel_id=1, to_apply=%add
  %rsd = (f32[2,4]{1,0}, bf16[1]{0}) reduce-scatter-done(%rs)
  %g = f32[2,4]{1,0} get-tuple-element(%rsd), index=0
  %ag = (f32[2,4]{1,0}, f32[16,4]{1,0}) all-gather-start(%g), dimensions={0}
  %agd = f32[16,4]{1,0} all-gather-done(%ag)
  ROOT %ar = (f32[16,4]{1,0}, /*index=1*/f32[]) all-reduce(%agd, %c), to_apply=%add
"""
    expected = [
        Collective("reduce-scatter", 256 + 16),
        Collective("all-gather", 256),
        Collective("all-reduce", 256 + 4),
    ]
    assert collectives.of(text, 8) == expected
