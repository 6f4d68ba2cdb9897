"""What `mesh_axes` and `layer_axes` may be, and what is said of what they may not be."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jgrad
from jgrad._layers.layer_axes import Axes, LayerAxes, read_layer_axes
from jgrad._trees.places import partition_spec
from jgrad._trees.shardings import Placement, read_mesh_axes
from tests.support import messages

W = {"a": jnp.ones((4, 3)), "b": [jnp.ones(3), jnp.ones(())]}


def of_all(per_axis=None, anywhere=()):
    """Which types may overrule, and no entry of a tree."""
    return Placement(per_axis, anywhere, is_for_all=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, Placement()),
        ("data", of_all(anywhere=("data",))),
        (("data", "model"), of_all(anywhere=("data", "model"))),
        ((), of_all()),
        (P(), of_all(())),
        (P("data", None), of_all((("data",), ()))),
        (P(None, ("model", "data")), of_all(((), ("model", "data")))),
        ({"a": "data", "b": None}, {"a": Placement(anywhere=("data",)), "b": Placement()}),
        (
            {"a": P("x"), "b": [None, "y"]},
            {"a": Placement((("x",),)), "b": [Placement(), Placement(anywhere=("y",))]},
        ),
    ],
)
def test_names(given, expected):
    assert read_mesh_axes("f", given) == expected


def test_names_of_a_placement():
    """All of them, in an order that does not depend on how they are said; those of one layer."""
    place = Placement((("model", "data"), (), ("pod",)))
    assert place.names == ("data", "model", "pod")
    assert place.within((0,)) == ("pod",)
    assert partition_spec(place.per_axis) == P(("model", "data"), None, "pod")
    assert Placement(anywhere=("model", "data")).within((0,)) == ("model", "data")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, Axes()),
        (0, Axes((0,))),
        ((0, -1), Axes((0, -1))),
        ({"a": (0, 1), "b": [None, ()]}, {"a": Axes((0, 1)), "b": [Axes(), Axes()]}),
    ],
)
def test_indices(given, expected):
    assert read_layer_axes("f", given) == expected


def test_layers():
    layers = LayerAxes((4, 3, 2), stacked=(0, 2))
    assert (layers.num_layers, layers.within, layers.layer_size) == (8, (1,), 3)
    assert layers.to_elements(jnp.arange(8)).shape == (4, 1, 2)
    layers = LayerAxes((4, 3))
    assert (layers.num_layers, layers.within, layers.layer_size) == (1, (0, 1), 12)
    assert layers.to_elements(jnp.arange(1)).shape == ()


def lamb(w, **options):
    tx = jgrad.lamb(0.1, **options)
    return tx.update(w, tx.init(w), w)


def test_axes_of_a_functional_update_are_static():
    """Other axes are another program, of the same arrays."""
    w = jnp.ones((4, 3))
    scaled = w * jnp.expand_dims(1 + jnp.arange(4.0), 1)
    found = [jgrad.lars_update(scaled, w, 0.1, layer_axes=a) for a in (0, None, 0)]
    assert jnp.all(found[0] == found[2])
    assert jnp.any(found[0] != found[1])


@pytest.mark.slow
def test_vmap_names_an_axis_too():
    """A leaf in parts along a mapped axis: the norm of the whole."""
    parts, g = jnp.array([[3.0], [4.0]]), jnp.ones((2, 1))
    norm = jax.vmap(lambda x: jgrad.global_norm(x, mesh_axes="data"), axis_name="data")(parts)
    assert norm.tolist() == [5, 5]
    found = jax.vmap(lambda w, g: jgrad.lars_update(w, g, 1.0, mesh_axes="data"), axis_name="data")(
        parts, g
    )
    assert jnp.allclose(found, parts - 5 / jnp.sqrt(2))


test_messages = messages.test_of("layer_axes", globals())
