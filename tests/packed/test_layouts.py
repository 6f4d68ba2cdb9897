"""Where leaves lie: sizes, order, equality, and what is printed."""

import copy
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from jgrad._packed import layouts
from jgrad._packed.layouts import layout_of
from tests.support import messages


def tree():
    return {
        "a": jnp.ones((30, 20)),
        "b": [jnp.ones(7, jnp.bfloat16), None, jnp.ones((30, 20))],
        "c": jnp.ones(()),
        "d": jnp.ones((4, 3, 100)),
    }


def of(tree, *args, **options):
    return layout_of("pack", tree, *args, **options)[0]


def test_sizes():
    """Each layer takes whole rows; no two overlap, and leaves of one shape are neighbours."""
    layout = of(tree(), {"a": None, "b": None, "c": None, "d": 0})
    of_path = {span.path: span for span in layout.spans if span is not None}
    assert of_path["['a']"].num_rows == 3  # 600 of 768
    assert of_path["['c']"].num_rows == 1
    of_stack = of_path["['d']"]
    assert (of_stack.rows_per_layer, of_stack.num_rows) == (2, 8)  # four layers of 300
    spans = [span for _, span in layout.within("float32")]
    ends = [span.start + span.num_rows for span in spans]
    assert [span.start for span in spans] == [0, *ends[:-1]]
    shapes = [span.layers.shape for span in spans]
    assert shapes == sorted(shapes)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {"bfloat16": (1, 256), "float32": (12, 256)}),
        (({"a": None, "b": None, "c": None, "d": 0},), {"bfloat16": (1, 256), "float32": (15, 256)}),
        ((None, 8), {"bfloat16": (8, 256), "float32": (16, 256)}),
        # Larger leaves stay unpacked, named by their index.
        ((None, 1, 600), {"leaf 5": (4, 3, 100), "bfloat16": (1, 256), "float32": (7, 256)}),
    ],
)  # fmt: skip
def test_shapes(options, expected):
    assert dict(of(tree(), *options).shapes) == expected


def test_small_leaves_apart():
    """Below 4096 elements, as in `Moments in 8 bits`; in buffers of their own, one for each dtype."""
    leaves = {
        "a": jnp.ones(4095),
        "b": jnp.ones(4096),
        "c": jnp.ones(()),
        "d": jnp.ones((64, 64), jnp.bfloat16),
        "e": jnp.ones(7, jnp.bfloat16),
        "f": jnp.ones((0, 3)),
        "g": jnp.ones(9000),
    }
    options = {"multiple_of": 2, "max_size": 8000, "small_apart": True}
    apart = jgrad.pack(leaves, **options).layout
    assert {name: [i for i, _ in apart.within(name)] for name, _ in apart.shapes} == {
        "bfloat16": [3],
        "bfloat16 small": [4],
        "float32": [1],
        "float32 small": [2, 5, 0],
        "leaf 6": [6],
    }
    assert dict(apart.shapes)["float32 small"] == (18, 256)
    assert apart != of(leaves, None, 2, 8000)
    assert of({"c": leaves["c"]}, small_apart=True).shapes == (("float32 small", (1, 256)),)
    assert pickle.loads(pickle.dumps(apart)) == apart


def test_equality_and_hash():
    """By what they say, not by who made them."""
    a, b = of(tree()), of(jax.tree.map(lambda x: 2 * x, tree()))
    assert a == b
    assert hash(a) == hash(b)
    for other in (
        of(tree(), {"a": None, "b": None, "c": None, "d": 0}),
        of(tree(), None, 8),
        of(tree(), None, 1, 600),
        of({"w": jnp.ones(3)}),
        "a string",
    ):
        assert a != other


class Pair:
    """A node that is not JAX's own, both of whose children have one path."""

    def __init__(self, a, b):
        self.a, self.b = a, b


jax.tree_util.register_pytree_with_keys(
    Pair,
    lambda p: (((jax.tree_util.GetAttrKey("x"), p.a), (jax.tree_util.GetAttrKey("x"), p.b)), None),
    lambda _, children: Pair(*children),
)


def test_two_leaves_of_one_path():
    """Both stay, packed or unpacked."""
    for max_size in (None, 2):
        packed = jgrad.pack(Pair(jnp.zeros(5), jnp.ones(5)), max_size=max_size)
        found = jgrad.unpack(packed)
        assert (found.a[0], found.b[0]) == (0, 1)


STACK = {"a": np.ones((2, 3), np.float32)}
COPIED = {"tree": (tree(), None), "node": (Pair(jnp.ones(3), None), None), "stack": (STACK, 0)}


@pytest.mark.slow(always=["stack"])
@pytest.mark.parametrize(("tree", "axes"), COPIED.values(), ids=COPIED)
def test_copies(tree, axes):
    """Equal to the layout, axes of stacks included, and of use."""
    packed = jgrad.pack(tree, layer_axes=axes)
    assert axes is None or packed.layout != jgrad.pack(tree).layout
    hash(packed.layout)
    for again in (
        copy.copy(packed),
        copy.deepcopy(packed),
        pickle.loads(pickle.dumps(packed)),
        jax.device_put(packed),
    ):
        assert again.layout == packed.layout
        assert hash(again.layout) == hash(packed.layout)
        for a, b in zip(jax.tree.leaves(jgrad.unpack(again)), jax.tree.leaves(tree), strict=True):
            assert jnp.array_equal(a, b)


def of_rows(width):
    """A layout, read again with rows of this width."""
    rebuild, (*first, _) = jgrad.pack({"a": jnp.ones((30, 200))}).layout.__reduce__()
    return rebuild(*first, width)


def test_a_row_is_what_shares_a_scale_in_8_bits():
    """One number says how wide both are, and a file of another width is refused."""
    packed = jgrad.pack({"a": jnp.ones((30, 200))})
    state = jgrad.gradient_descent(0.1, momentum=0.9, moment_dtype="8bit").init(packed)
    (moment,) = state.mw.buffers.values()
    assert packed.layout.width == moment.codes.shape[1]
    assert moment.scale.shape == (moment.codes.shape[0], 1)
    assert of_rows(packed.layout.width) == of_rows(256)


# A stack, a hole and a matrix, as jgrad 1.1 wrote them.
OF_1_1 = (
    {"b": 0, "none": 1, "w": 2},
    [
        ("['b']", np.dtype("float32"), ((3, 2), (0,), ()), "float32", 0, 1),
        None,
        ("['w']", np.dtype("float32"), ((16, 16), (), ()), "float32", 3, 1),
    ],
    (("float32", (4, 256)),),
    None,
    256,
)


def test_a_pickle_of_1_1():
    """It names `Layout._rebuilt` of this module, and has plain data and no names of fields."""
    tree = {"w": jnp.ones((16, 16)), "b": jnp.ones((3, 2)), "none": None}
    made = jgrad.pack(tree, layer_axes={"w": None, "b": 0, "none": None}).layout
    assert layouts.Layout._rebuilt(*OF_1_1, []) == made
    rebuild, _ = made.__reduce__()
    assert (rebuild.__module__, rebuild.__qualname__) == (
        "jgrad._packed.layouts",
        "Layout._rebuilt",
    )


def test_what_is_public():
    """The first three are for users; the library asks for the others."""
    assert {name for name in dir(jgrad.pack(jnp.ones(3)).layout) if not name.startswith("_")} == {
        *("shapes", "tree", "width"),
        *("structure", "spans", "shard", "within", "unpacked_leaf", "is_part_of"),
    }


@pytest.mark.slow
def test_pickles_of_another_process():
    """Where strings have other hashes."""
    program = (
        "import pickle, sys, jax.numpy as jnp, jgrad;"
        "packed = jgrad.pack({'a': jnp.ones(3)}); hash(packed.layout);"
        "sys.stdout.buffer.write(pickle.dumps(packed))"
    )
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        text = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, check=True
        ).stdout
        assert pickle.loads(text).layout == jgrad.pack({"a": jnp.ones(3)}).layout


def test_text():
    """Leaves, sizes and padding, and no numbers of the leaves."""
    many = {f"w{i:02}": jnp.ones(256) for i in range(12)}
    axes = {**dict.fromkeys(many), "z": 0}
    packed = jgrad.pack({**many, "z": jnp.ones((2, 500))}, layer_axes=axes)
    assert repr(packed) == (
        "Packed: 13 leaves, 4,072 elements, 0.6% padding\n"
        "  float32 (16, 256)\n"
        + "    [0:4] ['z'] (2, 500), 2 layers\n"
        + "".join(f"    [{4 + i}:{5 + i}] ['w{i:02}'] (256,)\n" for i in range(9))
        + "    and 3 more"
    )
    assert repr(jgrad.pack(jnp.ones((3, 100)), max_size=10)) == (
        "Packed: 1 leaf, 300 elements, 0.0% padding\n  unpacked\n    the leaf (3, 100)"
    )


DIFFERENCES = {
    "structure": ({"a": jnp.ones(3)}, {"b": jnp.ones(3)}, {}, ["only A has ['a'] packed", "only B has ['b'] packed"]),
    "shape": ({"a": jnp.ones(3)}, {"a": jnp.ones(4)}, {}, ["A has packed float32 of shape (3,) at ['a'] where B has packed float32 of shape (4,)"]),
    "dtype": ({"a": jnp.ones(3, jnp.bfloat16)}, {"a": jnp.ones(3)}, {}, ["A has packed bfloat16 of shape (3,) at ['a'] where B has packed float32 of shape (3,)"]),
    "none": ({"a": None}, {"a": jnp.ones(3)}, {}, ["A has None at ['a'] where B has packed float32 of shape (3,)"]),
    "layers": ({"a": jnp.ones((2, 3))}, {"a": jnp.ones((2, 3))}, {"layer_axes": 0}, ["A has packed float32 of shape (2, 3) at ['a'] where B has packed float32 of shape (2, 3) stacked over axes (0,)"]),
    "size": ({"a": jnp.ones(3)}, {"a": jnp.ones(3)}, {"max_size": 2}, ["A has packed float32 of shape (3,) at ['a'] where B has unpacked float32 of shape (3,)"]),
    "multiple": ({"a": jnp.ones(3)}, {"a": jnp.ones(3)}, {"multiple_of": 4}, ["A has buffers {'float32': (1, 256)}, B {'float32': (4, 256)}"]),
}  # fmt: skip


@pytest.mark.parametrize(("a", "b", "options", "phrases"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_differences(a, b, options, phrases):
    """The leaf is named."""
    assert list(of(a).__jgrad_differences__(of(b, **options), "A", "B")) == phrases


test_what_cannot_be_packed = messages.test_of("pack", globals())
