"""`hidden_matrices`: what it chooses in models of several libraries, and what it prints."""

import jax
import jax.numpy as jnp
import pytest

import jgrad
from tests.errors import assert_error

MATRIX = jnp.ones((4, 6))
BY_NAME = {
    "flax": (
        {
            "Embed_0": {"embedding": MATRIX},
            "Block_0": {
                "MultiHeadDotProductAttention_0": {
                    "query": {"kernel": jnp.ones((4, 2, 3)), "bias": jnp.ones((2, 3))},
                    "out": {"kernel": jnp.ones((2, 3, 4)), "bias": jnp.ones(4)},
                },
                "LayerNorm_0": {"scale": jnp.ones(4), "bias": jnp.ones(4)},
                "Dense_0": {"kernel": MATRIX, "bias": jnp.ones(6)},
            },
            "lm_head": {"kernel": MATRIX},
        },
        {"query/kernel", "out/kernel", "Dense_0/kernel"},
    ),
    "gpt": (
        {
            "wte": MATRIX,
            "wpe": MATRIX,
            "h": [
                {"attn": {"c_attn": {"w": MATRIX}}, "ln_1": {"g": MATRIX}, "mlp": {"c_fc": MATRIX}}
            ],
            "ln_f": {"b": MATRIX},
        },
        {"c_attn/w", "mlp/c_fc"},
    ),
    "llama": (
        {
            "embed_tokens": MATRIX,
            "layers": {"self_attn": {"q_proj": MATRIX, "q_norm": MATRIX}, "gate_proj": MATRIX},
            "moe": {"router": {"kernel": MATRIX}, "experts": {"w1": jnp.ones((8, 4, 6))}},
            "output": {"classifier_head": MATRIX},
            "token_embedder": MATRIX,
            "LMHead": MATRIX,
            "multi_head": {"w": MATRIX},
            "counts": jnp.arange(6).reshape(2, 3),
            "nothing": None,
        },
        {"self_attn/q_proj", "layers/gate_proj", "experts/w1", "multi_head/w"},
    ),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_models(name):
    params, expected = BY_NAME[name]
    pairs = jax.tree_util.tree_leaves_with_path(jgrad.hidden_matrices()(params))
    text = lambda key: str(getattr(key, "key", getattr(key, "idx", "")))
    assert {"/".join(map(text, path[-2:])) for path, x in pairs if x} == expected


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


def test_describe(capsys):
    params = {
        "embed": MATRIX,
        "dense": {"b": jnp.ones(6), "w": MATRIX},
        "n": jnp.arange(2),
        "x": None,
    }
    text = jgrad.hidden_matrices().describe(params)
    assert text.splitlines() == [
        "Adam  ['dense']['b']  (6,)  one axis",
        "Muon  ['dense']['w']  (4, 6)",
        "Adam  ['embed']       (4, 6)  'embed' in 'embed'",
        "Adam  ['n']           (2,)  of int32",
    ]
    stacked = jgrad.hidden_matrices(layer_axes=0).describe({"b": MATRIX, "s": jnp.ones(3)})
    assert stacked.splitlines() == [
        "Adam  ['b']  (4, 6)  one axis in each layer",
        "Adam  ['s']  (3,)  no axis in each layer",
    ]
    assert (
        jgrad.hidden_matrices().describe(jgrad.pack({"dense": MATRIX})) == "Muon  ['dense']  (4, 6)"
    )
    assert not capsys.readouterr().out


def test_as_matrices_of_muon():
    params = {"embed": MATRIX, "dense": {"b": jnp.ones(6), "w": MATRIX}}
    tx = jgrad.muon(0.1, matrices=jgrad.hidden_matrices(), adam_learning_rate=0.1)
    shapes = jax.tree.map(jnp.shape, tx.init(params).vw)
    assert shapes == {"embed": (4, 6), "dense": {"b": (6,), "w": None}}


def test_messages():
    assert_error(
        TypeError,
        "hidden_matrices: `exclude`: 'head' of type str, expected a sequence of words.",
        lambda: jgrad.hidden_matrices("head"),
    )
    assert_error(
        TypeError,
        "hidden_matrices: `layer_axes`: 0.5 of type float, expected None, an int, or a tuple of ints.",
        lambda: jgrad.hidden_matrices(layer_axes=0.5),
    )
