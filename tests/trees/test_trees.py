"""Trees side by side, prefixes, and where two trees differ."""

import collections

import jax
import pytest

from jgrad._trees import trees

Point = collections.namedtuple("Point", ["x", "y"])


@pytest.mark.parametrize(
    ("prefix", "tree", "expected"),
    [
        (1, {"a": 2, "b": [3, 4]}, True),
        ({"a": 1, "b": 2}, {"a": 2, "b": [3, 4]}, True),
        ({"a": 1, "b": [2, 2]}, {"a": 2, "b": [3, 4]}, True),
        ({"a": 1, "b": None}, {"a": 2, "b": [3, 4]}, True),
        ({"a": 1}, {"a": 2, "b": [3, 4]}, False),
        ([1, 2], (1, 2), False),
        (Point(1, 2), (1, 2), False),
        ({"a": [1]}, {"a": 1}, False),
    ],
)
def test_is_prefix(prefix, tree, expected):
    assert trees.is_prefix(prefix, tree) is expected


def test_broadcast_counts_none_as_a_leaf():
    assert trees.broadcast({"a": 1, "b": 2}, {"a": [0, None], "b": 0}) == [1, 1, 2]


def test_align_takes_the_finest():
    aligned = trees.align(1, {"a": 2, "b": 3}, {"a": [4, 5], "b": {"c": 6}})
    assert aligned.counts == [[3], [2, 1], [1, 1, 1]]
    assert trees.repeat([2, 3], aligned.counts[1]) == [2, 2, 3]
    assert aligned.finest == 2
    assert aligned.structure.unflatten("xyz") == {"a": ["x", "y"], "b": {"c": "z"}}


def test_align_needs_one_that_is_finest():
    """Each of these is finer than the other at one place."""
    assert trees.align({"a": [1], "b": 2}, {"a": 1, "b": [2]}) is None


def test_a_model_that_is_callable_is_no_function_beside_itself():
    """Such as equinox's; beside other parameters it is one."""

    @jax.tree_util.register_pytree_node_class
    class Model:
        def __call__(self, x):
            return x

        def tree_flatten(self):
            return (1.0,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls()

    assert not trees.is_function(Model(), Model())
    assert trees.is_function(Model(), {"w": 1.0})
    assert trees.is_function(lambda x: x, Model())
    assert trees.is_function(jax.tree_util.Partial(lambda x: x), Model())


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({"x": 1}, {"x": 1, "y": 2}, ["only B has ['y']"]),
        ({"x": 1, "z": 1}, {"x": [1]}, ["only A has ['z']", "A has a leaf at ['x'] where B has a list"]),
        ([1, (2,)], [1, [2]], ["A has a tuple at [1] where B has a list"]),
        (Point(1, [2]), Point(1, 2), ["A has a list at .y where B has a leaf"]),
        (None, {}, ["A has a leaf where B has a dict"]),
    ],
)  # fmt: skip
def test_differences_name_paths(a, b, expected):
    assert list(trees.differences(a, b, "A", "B")) == expected


def test_paths_are_as_python_indexes():
    assert trees.paths({"layer": [1, Point(2, None)]}) == [
        "['layer'][0]",
        "['layer'][1].x",
        "['layer'][1].y",
    ]
    assert trees.paths(3) == [""]
