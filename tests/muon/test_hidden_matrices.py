"""`hidden_matrices`: what it chooses in models of several libraries, and what it prints."""

import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import unflatten_dict

import jgrad
from tests.support import messages

MATRIX = jnp.ones((4, 6))


def nested(paths):
    """Dictionaries, of paths with slashes."""
    return unflatten_dict(dict.fromkeys(paths, MATRIX), sep="/")


def flat(paths):
    return dict.fromkeys(paths, MATRIX)


def of_tuples(paths):
    return dict.fromkeys([tuple(path.split("/")) for path in paths], MATRIX)


BUILD = {"nested": nested, "flat": flat, "of_tuples": of_tuples}
MODELS = (messages.DATA.parent / "models.txt").read_text().strip().split("\n\n")[1:]


@pytest.mark.parametrize("model", MODELS, ids=lambda text: text.partition(":")[0])
def test_models(model):
    first, *rows = model.splitlines()
    build = BUILD[first.partition(": ")[2]]
    hidden, others = (
        [x for row in rows if row.split()[0] == sign for x in row.split()[1:]] for sign in "+-"
    )
    assert hidden
    assert others
    chosen = jgrad.hidden_matrices()(build(hidden + others))
    expected = build(hidden + others)
    is_hidden = jax.tree.leaves(build(hidden))
    assert sum(jax.tree.leaves(chosen)) == len(is_hidden)
    for path, x in jax.tree_util.tree_leaves_with_path(chosen):
        keys = [getattr(key, "key", key) for key in path]
        keys = keys[0] if isinstance(keys[0], tuple) else keys
        assert x == ("/".join(keys) in hidden), path
    assert jax.tree.structure(chosen) == jax.tree.structure(expected)


def test_other_leaves():
    """By dtype or number of axes, whatever their name; of any number of axes otherwise."""
    params = {
        "query": {"kernel": jnp.ones((4, 2, 3)), "bias": jnp.ones((2, 3))},
        "up": {"kernel": MATRIX, "bias": jnp.ones(6)},
        "counts": jnp.arange(6).reshape(2, 3),
        "nothing": None,
        "of a module": (jnp.tanh, "name", 0.5),
    }
    assert jgrad.hidden_matrices()(params) == {
        "query": {"kernel": True, "bias": False},
        "up": {"kernel": True, "bias": False},
        "counts": False,
        "nothing": None,
        "of a module": (False, False, False),
    }


def test_layers_are_not_counted():
    """A stack of biases is no matrix; a stack of kernels is many."""
    params = {"blocks": {"kernel": jnp.ones((3, 4, 6)), "b": jnp.ones((3, 6))}, "w": MATRIX}
    chosen = jgrad.hidden_matrices(layer_axes={"blocks": 0, "w": None})(params)
    assert chosen == {"blocks": {"kernel": True, "b": False}, "w": True}
    # Without the axes it is a matrix, and Muon would mix layers.
    assert jgrad.hidden_matrices()(params)["blocks"]["b"]


def test_other_words():
    params = {"encoder": MATRIX, "head": MATRIX}
    assert jgrad.hidden_matrices(exclude=("encoder",))(params) == {"encoder": False, "head": True}


def test_describe():
    """Each line says whether a name decided, a dtype, or the shape alone."""
    params = {
        "embed": MATRIX,
        "dense": {"b": jnp.ones(6), "w": MATRIX},
        "n": jnp.arange(2),
        "x": None,
    }
    text = jgrad.hidden_matrices().describe(params)
    assert text.splitlines() == [
        "Adam  dense/b  (6,)    by shape: one axis",
        "Muon  dense/w  (4, 6)  by shape alone; outputs: axis 1",
        "Adam  embed    (4, 6)  by name: 'embed' in 'embed'",
        "Adam  n        (2,)    by dtype: int32",
    ]
    flat = jgrad.hidden_matrices().describe({"model.lm_head.weight": MATRIX})
    assert flat == "Adam  model.lm_head.weight  (4, 6)  by name: 'head' in 'lm_head'"
    stacked = jgrad.hidden_matrices(layer_axes=0).describe({"b": MATRIX, "s": jnp.ones(3)})
    assert stacked.splitlines() == [
        "Adam  b  (4, 6)  by shape: one axis in each layer",
        "Adam  s  (3,)    by shape: no axis in each layer",
    ]
    packed = jgrad.hidden_matrices().describe(jgrad.pack({"dense": MATRIX}))
    assert packed == "Muon  dense  (4, 6)  by shape alone; outputs: axis 1"


def test_vectors_of_stacked_layers():
    """Two axes of a leaf may be a vector of each layer: its name says it, or raises the question."""
    params = {"layers": {"b1": MATRIX, "gain": MATRIX, "w1": jnp.ones((4, 6, 6))}, "g": MATRIX}
    question = "if a vector of each layer: `hidden_matrices(layer_axes=...)`"
    assert jgrad.hidden_matrices().describe(params).splitlines() == [
        f"Muon  g            (4, 6)     by shape alone; outputs: axis 1; {question}",
        f"Muon  layers/b1    (4, 6)     by shape alone; outputs: axis 1; {question}",
        "Adam  layers/gain  (4, 6)     by name: 'gain' in 'gain'",
        "Muon  layers/w1    (4, 6, 6)  by shape alone; outputs: axis 2",
    ]
    layers = {"layers": 0, "g": None}
    chosen = jgrad.hidden_matrices(layer_axes=layers)(params)
    assert chosen == {"layers": {"b1": False, "gain": False, "w1": True}, "g": True}


def test_describe_says_where_outputs_are():
    """A name that PyTorch and equinox have for kernels of (out, in) is said, unless axes are given."""
    matrices = jgrad.hidden_matrices()
    params = {"fc.weight": MATRIX, "q": {"w": jnp.ones((2, 3, 4))}, "up": {"weight": MATRIX}}
    turned = "if of PyTorch or equinox, (out, in): `output_axes=0`"
    assert matrices.describe(params).splitlines() == [
        f"Muon  fc.weight  (4, 6)     by shape alone; outputs: axis 1; {turned}",
        "Muon  q/w        (2, 3, 4)  by shape alone; outputs: axis 2",
        f"Muon  up/weight  (4, 6)     by shape alone; outputs: axis 1; {turned}",
    ]
    axes = {"fc.weight": 0, "q": (-2, -1), "up": -1}
    assert matrices.describe(params, output_axes=axes).splitlines() == [
        "Muon  fc.weight  (4, 6)     by shape alone; outputs: axis 0",
        "Muon  q/w        (2, 3, 4)  by shape alone; outputs: axes 1, 2",
        "Muon  up/weight  (4, 6)     by shape alone; outputs: axis 1",
    ]
    rules = jgrad.by_path({"**/w": (1, 2)}, rest=0)
    assert "axes 1, 2" in matrices.describe(params, output_axes=rules)


def test_a_model_that_is_a_matrix():
    assert jgrad.hidden_matrices()(MATRIX) is True


# Of a bias and an embedding, `output_axes` may be any.
DENSE = {"b": jnp.ones(6), "dense": MATRIX, "embed": MATRIX}


def hidden(**options):
    return jgrad.muon(0.1, matrices=jgrad.hidden_matrices(), adam_learning_rate=0.1, **options)


test_messages = messages.test_of("hidden_matrices", globals())
