"""`mesh_axes` takes the same values everywhere, which mean the same in `shard_map` and under `jit`.

Expected is what one device finds without the option.
"""

import contextlib
import functools
import inspect
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jgrad
from tests.multi_device.meshes import mesh_of, place
from tests.support import draws
from tests.support.loops import told

RATE, ADAM, MATRIX = 0.1, jgrad.adam(0.1), {"w": True, "b": False}
SPECS, SHAPES = {"w": P("data"), "b": P()}, {"w": (8, 6), "b": (6,)}
# Types say that `b` is on all devices, where one entry is for all leaves.
NAMES = {
    "a name": "data",
    "a tuple of names": ("data",),
    "a tree of names": {"w": "data", "b": None},
    "names by path": jgrad.by_path({"w": "data"}, rest=None),
}
VALUES = NAMES | {
    "a PartitionSpec": P("data"),
    "a tree": SPECS,
    "both in a tree": {"w": P("data", None), "b": ()},
    "by path": jgrad.by_path({"w": P("data")}, rest=P()),
}


def of_updates(make, **options):
    """Two updates of a transformation."""

    def f(w, g, **axes):
        tx = make(**options, **axes)
        _, state = tx.update(g, tx.init(w), w)
        return tx.update(jax.tree.map(jnp.cos, g), state, w)[0]

    return f


def doubled(g):
    return 2 * g


def in_backward(w, g, **axes):
    def loss(w):
        product = jnp.sum(w["w"] * g["w"])
        if w["w"].shape != SHAPES["w"]:
            product = jax.lax.psum(product, "data")
        return product + jgrad.scan_layers(jnp.add, w["b"], jnp.zeros(()))

    return jgrad.step_in_backward(ADAM, loss, gradients=lambda g: g, **axes)(w, ADAM.init(w))[0]


def watched(w, g, **axes):
    tx = jgrad.watch(ADAM, **axes)
    updates, state = tx.update(g, tx.init(w), w)
    return jax.tree.map(lambda u: u * state.report["grad_norm/w"], updates)


of_matrices = partial(of_updates, learning_rate=RATE)
FUNCTIONS = {
    **{name: of_updates(partial(getattr(jgrad, name), RATE))
       for name in ("gradient_descent", "adam", "adan", "lion", "lars", "lamb")},
    **{f"scale_by_{name}": of_updates(getattr(jgrad, f"scale_by_{name}"))
       for name in ("adam", "adan", "lion", "trust_ratio")},
    "optimizer_of_leaf": of_updates(partial(jgrad.optimizer_of_leaf(doubled), RATE)),
    "clip_by_global_norm": of_updates(partial(jgrad.clip_by_global_norm, 0.1)),
    "accumulate": of_updates(partial(jgrad.accumulate, ADAM, 2)),
    "skip_nonfinite": of_updates(partial(jgrad.skip_nonfinite, ADAM)),
    "skip_spikes": of_updates(lambda **axes: told(jgrad.skip_spikes(ADAM, **axes), loss=1.0)),
    "stochastic_rounding": of_updates(partial(jgrad.stochastic_rounding, ADAM)),
    "hyperball": of_updates(partial(jgrad.hyperball, ADAM, RATE), leaves=MATRIX),
    "watch": watched,
    "apply_gradients": lambda w, g, **axes: jgrad.apply_gradients(ADAM, g, ADAM.init(w), w, **axes)[0],
    "step_in_backward": in_backward,
    "lars_update": lambda w, g, **axes: jgrad.lars_update(w, g, RATE, **axes),
    "lamb_update": lambda w, g, **axes: jgrad.lamb_update(w, g, RATE, g, g, 1, **axes)[0],
    "global_norm": lambda w, g, **axes: jax.tree.map(lambda x: x / jgrad.global_norm(g, **axes), w),
}  # fmt: skip
# In `shard_map`, these have to know which axis of a matrix is sharded.
OF_MATRICES = {
    "muon": of_matrices(jgrad.muon, matrices=MATRIX, adam_learning_rate=RATE),
    "scale_by_muon": of_updates(jgrad.scale_by_muon, matrices=MATRIX),
    "soap": of_matrices(jgrad.soap, matrices=MATRIX),
    "adafactor": of_matrices(jgrad.adafactor, min_side=4),
}
EVERY = FUNCTIONS | OF_MATRICES

every_function = pytest.mark.parametrize("name", EVERY)


draw = functools.cache(functools.partial(draws.normal, SHAPES))


def of_values(f, values):
    """What the function finds with each value of the option."""
    return lambda w, g: {k: f(w, g, mesh_axes=axes) for k, axes in values.items()}


def in_shard_map(f, values, **options):
    """The same, where each device has its rows of the matrix."""
    specs = {"in_specs": (SPECS, SPECS), "out_specs": dict.fromkeys(values, SPECS)}
    return jax.jit(jax.shard_map(of_values(f, values), mesh=mesh_of(data=4), **specs, **options))


def assert_like_one_device(f, found):
    expected = jax.jit(f)(draw(0), draw(1))
    assert all(np.any(x) for x in expected.values())
    for value in found.values():
        chex.assert_trees_all_close(jax.device_get(value), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.slow(always=["adam", "lamb", "muon", "clip_by_global_norm"])
@every_function
def test_in_shard_map(name):
    values = {k: x for k, x in VALUES.items() if name in FUNCTIONS or k not in NAMES}
    assert_like_one_device(EVERY[name], in_shard_map(EVERY[name], values)(draw(0), draw(1)))


@pytest.mark.slow(always=["types-adam", "set-lamb", "types-muon", "explicit-skip_nonfinite"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in ("set", "types") for name in EVERY]
    + [("explicit", name) for name in ("adam", "lamb", "muon", "skip_nonfinite")],
)
def test_under_jit(kind, name):
    """Leaves are whole there, whoever says on which mesh."""
    mesh = mesh_of(AxisType.Explicit if kind == "explicit" else AxisType.Auto, data=4)
    values = {k: VALUES[k] for k in ("a name", "a tree")} if kind == "explicit" else VALUES
    w, g = (place(draw(i), mesh, SPECS) for i in range(2))
    with contextlib.nullcontext() if kind == "types" else jax.set_mesh(mesh):
        assert_like_one_device(EVERY[name], jax.jit(of_values(EVERY[name], values))(w, g))


@pytest.mark.parametrize("name", OF_MATRICES)
@pytest.mark.parametrize("value", ["a name", "a tree of names"])
def test_names_say_too_little_of_a_matrix(name, value):
    text = rf"^{name}: `mesh_axes` at \['w'\]: \('data',\) inside `shard_map` .* expected the PartitionSpec of the leaf;"
    with pytest.raises(ValueError, match=text):
        in_shard_map(EVERY[name], {value: NAMES[value]}).trace(draw(0), draw(1))


@pytest.mark.slow(always=["lamb", "lars_update"])
@pytest.mark.parametrize(
    "name", ["lars", "lamb", "scale_by_trust_ratio", "adafactor", "lars_update"]
)
def test_layers_of_their_own_on_each_device(name):
    """Where a PartitionSpec says that devices have layers, and no parts of them."""
    f = partial(EVERY[name], layer_axes={"w": 0, "b": None})
    assert_like_one_device(f, in_shard_map(f, {"a tree": SPECS})(draw(0), draw(1)))


def test_names_are_enough_for_bits_of_each_device():
    """Said in a tree, where nothing else says that a leaf is sharded; one for all may be of copies."""

    def rounded(w, g, mesh_axes):
        tx = jgrad.stochastic_rounding(optax.sgd(1e-3), mesh_axes=mesh_axes)
        w = jax.tree.map(lambda x: jnp.ones((*x.shape, 64), jnp.bfloat16), w)
        return tx.update(jax.tree.map(jnp.ones_like, w), tx.init(w), w)[0]

    values = {"nothing": None} | NAMES
    found = in_shard_map(rounded, values, check_vma=False)(draw(0), draw(1))
    for k, updates in found.items():
        first, *others = np.split(np.asarray(updates["w"], np.float32), 4)
        assert [np.any(first != x) for x in others] == [
            k in ("a tree of names", "names by path")
        ] * 3


def test_one_text():
    """Docstrings say the same everywhere, or who says it."""
    text = ("mesh_axes: how leaves are sharded: a PartitionSpec, the name of a mesh axis, a tuple of names, or None; or a "
            "prefix tree or `by_path` of these.", "mesh_axes: see `", "mesh_axes: as for `", "Source: as `muon`.")  # fmt: skip
    public = {k: x for k in jgrad.__all__ if inspect.isfunction(x := getattr(jgrad, k))}
    takes = {k: x for k, x in public.items() if "mesh_axes" in inspect.signature(x).parameters}
    assert takes.keys() | {"optimizer_of_leaf"} == EVERY.keys() | {"leaf_programs"}
    for name, function in takes.items():
        assert any(x in " ".join(function.__doc__.split()) for x in text), name


@every_function
@pytest.mark.parametrize("value", [3, [3], {"w": 2.5, "b": None}], ids=str)
def test_one_error(name, value):
    name_in_text = "doubled" if name == "optimizer_of_leaf" else name
    text = rf"^{name_in_text}: `mesh_axes`.*, expected None, an axis name, a tuple of names, or a PartitionSpec\.$"
    with pytest.raises(TypeError, match=text):
        EVERY[name](draw(0), draw(1), mesh_axes=value)
