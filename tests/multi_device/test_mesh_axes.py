"""`mesh_axes` takes the same values everywhere, which say the same thing in `shard_map` and in `jit`.

Expected is what one device finds without the option.
"""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jgrad
from tests.multi_device.meshes import mesh_of, place
from tests.support.errors import assert_error
from tests.support.loops import told

RATE = 0.1
SPECS = {"w": P("data"), "b": P()}
SHAPES = {"w": (8, 6), "b": (6,)}
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
MATRIX = {"w": True, "b": False}
ADAM = jgrad.adam(RATE)


def direction(g):
    return 2 * g


def of_updates(make, **options):
    """Two updates of a transformation."""

    def f(w, g, **axes):
        tx = make(**options, **axes)
        _, state = tx.update(g, tx.init(w), w)
        return tx.update(jax.tree.map(jnp.cos, g), state, w)[0]

    return f


def around(wrapper, *args, **options):
    return of_updates(functools.partial(wrapper, ADAM, *args), **options)


def applied(w, g, **axes):
    return jgrad.apply_gradients(ADAM, g, ADAM.init(w), w, **axes)[0]


def in_backward(w, g, **axes):
    def loss(w):
        shards = jnp.sum(w["w"] * g["w"])
        if shards.size and w["w"].shape != SHAPES["w"]:
            shards = jax.lax.psum(shards, "data")
        return shards + jnp.sum(w["b"] * g["b"])

    step = jgrad.step_in_backward(ADAM, loss, gradients=lambda g: g, **axes)
    return step(w, ADAM.init(w))[0]


def skip_spikes(**axes):
    return told(jgrad.skip_spikes(ADAM, **axes), loss=1.0)


def watched(w, g, **axes):
    tx = jgrad.watch(ADAM, **axes)
    updates, state = tx.update(g, tx.init(w), w)
    return jax.tree.map(lambda u: u * state.report["updates_norm"], updates)


def measured(w, g, **axes):
    return jax.tree.map(lambda x: x / jgrad.global_norm(g, **axes), w)


FUNCTIONS = {
    **{
        name: of_updates(functools.partial(getattr(jgrad, name), RATE))
        for name in ("gradient_descent", "adam", "adan", "lion", "lars", "lamb")
    },
    **{
        name: of_updates(getattr(jgrad, name))
        for name in ("scale_by_adam", "scale_by_adan", "scale_by_lion", "scale_by_trust_ratio")
    },
    "optimizer_of_leaf": of_updates(functools.partial(jgrad.optimizer_of_leaf(direction), RATE)),
    "clip_by_global_norm": of_updates(functools.partial(jgrad.clip_by_global_norm, 0.1)),
    "accumulate": around(jgrad.accumulate, 2),
    "skip_nonfinite": around(jgrad.skip_nonfinite),
    "skip_spikes": of_updates(skip_spikes),
    "stochastic_rounding": around(jgrad.stochastic_rounding),
    "hyperball": around(jgrad.hyperball, RATE, leaves=MATRIX),
    "watch": watched,
    "apply_gradients": applied,
    "step_in_backward": in_backward,
    "lars_update": lambda w, g, **axes: jgrad.lars_update(w, g, RATE, **axes),
    "lamb_update": lambda w, g, **axes: jgrad.lamb_update(w, g, RATE, g, g, 1, **axes)[0],
    "global_norm": measured,
}
# In `shard_map`, these have to know which axis of a matrix is sharded.
OF_MATRICES = {
    "muon": of_updates(jgrad.muon, learning_rate=RATE, matrices=MATRIX, adam_learning_rate=RATE),
    "scale_by_muon": of_updates(jgrad.scale_by_muon, matrices=MATRIX),
    "soap": of_updates(jgrad.soap, learning_rate=RATE, matrices=MATRIX),
    "adafactor": of_updates(jgrad.adafactor, learning_rate=RATE, min_side=4),
}
EVERY = FUNCTIONS | OF_MATRICES
OF_ANSWERS = {"leaf_programs"}  # has a test of its own

every_function = pytest.mark.parametrize("name", EVERY)


def draw(seed):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=n), jnp.float32) for k, n in SHAPES.items()}


def of_values(name, values):
    """What the function finds with each value of the option."""
    f = EVERY[name]
    return lambda w, g: {k: f(w, g, mesh_axes=axes) for k, axes in values.items()}


def in_shard_map(f, out_specs):
    return jax.shard_map(f, mesh=mesh_of(data=4), in_specs=(SPECS, SPECS), out_specs=out_specs)


def assert_like_one_device(name, found):
    expected = jax.jit(EVERY[name])(draw(0), draw(1))
    assert all(np.any(x) for x in expected.values())
    for value in found.values():
        chex.assert_trees_all_close(jax.device_get(value), expected, rtol=2e-5, atol=2e-6)


def test_every_function_is_here():
    public = {name: getattr(jgrad, name) for name in jgrad.__all__}
    takes = {
        name
        for name, x in public.items()
        if inspect.isfunction(x) and "mesh_axes" in inspect.signature(x).parameters
    }
    assert takes | {"optimizer_of_leaf"} == EVERY.keys() | OF_ANSWERS


@pytest.mark.slow(always=["adam", "lamb", "muon", "clip_by_global_norm"])
@every_function
def test_in_shard_map(name):
    values = {k: x for k, x in VALUES.items() if name in FUNCTIONS or k not in NAMES}
    run = in_shard_map(of_values(name, values), dict.fromkeys(values, SPECS))
    assert_like_one_device(name, jax.jit(run)(draw(0), draw(1)))


@pytest.mark.slow(always=["False-adam", "True-lamb", "True-muon", "False-clip_by_global_norm"])
@every_function
@pytest.mark.parametrize("is_set", [True, False])
def test_under_jit(name, is_set):
    """Leaves are whole there, whether `jax.set_mesh` or their types say which mesh it is."""
    mesh = mesh_of(data=4)
    w, g = (place(draw(i), mesh, SPECS) for i in range(2))
    run = jax.jit(of_values(name, VALUES))
    if is_set:
        with jax.set_mesh(mesh):
            found = run(w, g)
    else:
        found = run(w, g)
    assert_like_one_device(name, found)


@pytest.mark.parametrize("name", ["lamb", "muon", "adam", "skip_nonfinite"])
def test_on_explicit_axes(name):
    """Types say everything, and what users say beside them is no error."""
    mesh = mesh_of(AxisType.Explicit, data=4)
    w, g = (place(draw(i), mesh, SPECS) for i in range(2))
    with jax.set_mesh(mesh):
        found = jax.jit(of_values(name, {k: VALUES[k] for k in ("a name", "a tree")}))(w, g)
    assert_like_one_device(name, found)


@pytest.mark.parametrize("name", OF_MATRICES)
@pytest.mark.parametrize("value", ["a name", "a tree of names"])
def test_names_say_too_little_of_a_matrix(name, value):
    run = in_shard_map(functools.partial(EVERY[name], mesh_axes=NAMES[value]), SPECS)
    text = (
        f"{name}: `mesh_axes` at ['w']: ('data',) inside `shard_map` or `pmap`, where a device may have a part of a "
        "matrix along 'data', expected the PartitionSpec of the leaf; where each device has whole matrices, "
        "`mesh_axes=PartitionSpec()`."
    )
    assert_error(ValueError, text, lambda: jax.eval_shape(run, draw(0), draw(1)))


# ---- layers along a sharded axis ----------------------------------------------------------------


def stacked(make):
    """Of layers along the first axis, which the mesh divides."""
    return of_updates(make, layer_axes={"w": 0, "b": None})


OF_LAYERS = {
    "lars": stacked(functools.partial(jgrad.lars, RATE)),
    "lamb": stacked(functools.partial(jgrad.lamb, RATE)),
    "scale_by_trust_ratio": stacked(jgrad.scale_by_trust_ratio),
    "adafactor": stacked(functools.partial(jgrad.adafactor, RATE)),
    "lars_update": lambda w, g, **axes: jgrad.lars_update(
        w, g, RATE, layer_axes={"w": 0, "b": None}, **axes
    ),
}


@pytest.mark.slow(always=["lamb", "lars_update"])
@pytest.mark.parametrize("name", OF_LAYERS)
def test_layers_of_their_own_on_each_device(name):
    """A PartitionSpec says that layers are sharded over devices, and none of them; names do not."""
    f = OF_LAYERS[name]
    run = in_shard_map(functools.partial(f, mesh_axes=SPECS), SPECS)
    found, expected = jax.jit(run)(draw(0), draw(1)), jax.jit(f)(draw(0), draw(1))
    chex.assert_trees_all_close(jax.device_get(found), expected, rtol=2e-5, atol=2e-6)


# ---- random bits and kernels -------------------------------------------------------------------


def test_names_are_enough_for_bits_of_each_device():
    """Said in a tree, where nothing else says that a leaf is sharded; one for all may be of copies."""
    w = {"w": jnp.ones((8, 64), jnp.bfloat16), "b": jnp.ones(6, jnp.bfloat16)}

    def rounded(axes):
        tx = jgrad.stochastic_rounding(optax.sgd(1e-3), mesh_axes=axes)
        run = jax.shard_map(
            lambda w: tx.update(jax.tree.map(jnp.ones_like, w), tx.init(w), w)[0],
            mesh=mesh_of(data=4), in_specs=(SPECS,), out_specs=SPECS, check_vma=False,
        )  # fmt: skip
        return np.split(np.asarray(jax.jit(run)(w)["w"], np.float32), 4)

    shards = rounded({"w": "data", "b": None})
    assert all(np.any(shards[0] != shard) for shard in shards[1:])
    for axes in (None, "data"):
        assert all(
            np.array_equal(shards[0], shard) for shards in [rounded(axes)] for shard in shards
        )


def test_answers_of_leaf_programs():
    mesh, tx = mesh_of(data=4), jgrad.lion(RATE, moment_dtype="8bit")
    w = place({"w": jnp.ones((64, 256)), "b": jnp.ones(6)}, mesh, SPECS)
    with jax.set_mesh(mesh):
        answers = {
            k: jgrad.leaf_programs(tx, w, mesh_axes=x)[".mw['w']"] for k, x in VALUES.items()
        }
    unknown = "XLA: nothing says how it is sharded; a PartitionSpec as `mesh_axes` does"
    assert answers == {k: unknown if k in NAMES else "one kernel" for k in VALUES}


# ---- what the option says of itself ------------------------------------------------------------

TEXT = (
    "mesh_axes: how leaves are sharded: a PartitionSpec, the name of a mesh axis, a tuple of names, or None; or a "
    "prefix tree or `by_path` of these."
)


@pytest.mark.parametrize("name", sorted(EVERY.keys() | OF_ANSWERS))
def test_one_text(name):
    """Docstrings say the same everywhere, or who says it."""
    words = " ".join(inspect.getdoc(getattr(jgrad, name)).split())
    elsewhere = (
        "mesh_axes: see `",
        "mesh_axes: as for `",
        "`full_precision` as in `lion`",
        "Source: as `muon`",
    )
    assert any(text in words for text in (TEXT, *elsewhere))


WRONG = {"3": 3, "a list of numbers": [3], "a number in a tree": {"w": 2.5, "b": None}}


@every_function
def test_one_error(name):
    begin = "direction" if name == "optimizer_of_leaf" else name
    for value in WRONG.values():
        with pytest.raises(TypeError, match=rf"^{begin}: `mesh_axes`.* expected None, an axis name, a tuple of "
                           r"names, or a PartitionSpec\.$") as caught:  # fmt: skip
            EVERY[name](draw(0), draw(1), mesh_axes=value)
        assert len(str(caught.value)) < 200
