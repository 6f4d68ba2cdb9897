"""`by_path`: which leaf has which value, and every option that takes it."""

import collections

import chex
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec as P

import jgrad
from tests.support import messages
from tests.support.loops import assert_equal, run

Pair = collections.namedtuple("Pair", "kernel bias")

# ---- which rule is whose -----------------------------------------------------------------------

MODEL = {
    "embed": {"table": jnp.ones((9, 3))},
    "layers": [{"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)} for _ in range(2)],
    "norm.scale": jnp.ones(3),
}
PATHS = [
    "embed/table",
    *("layers/0/bias", "layers/0/kernel", "layers/1/bias", "layers/1/kernel"),
    "norm.scale",
]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("embed/table", PATHS[:1]),
        ("layers/*/bias", [PATHS[1], PATHS[3]]),
        ("**/bias", [PATHS[1], PATHS[3]]),
        ("layers/1/**", PATHS[3:5]),
        ("layers/**/1/bias", [PATHS[3]]),  # no key at all is any number of keys
        ("**", PATHS),
        ("*/table", PATHS[:1]),
        ("*", [PATHS[5]]),
        ("*.scale", [PATHS[5]]),
        ("norm*", [PATHS[5]]),
        ("**/*a*", [PATHS[0], *PATHS[1:2], *PATHS[3:4], PATHS[5]]),
        ("**/k*l", [PATHS[2], PATHS[4]]),
    ],
)
def test_patterns(pattern, expected):
    chosen = jgrad.by_path({pattern: True}, rest=False)(MODEL)
    found = [path for path, x in zip(PATHS, jax.tree.leaves(chosen), strict=True) if x]
    assert found == expected


@pytest.mark.parametrize(
    "pattern", ["bias", "table", "layers", "layers/*", "norm?scale", "b[ia]*s"]
)
def test_a_pattern_is_of_a_whole_path(pattern):
    """A substring matched too much in published runs; other signs than `*` stand for themselves."""
    with pytest.raises(ValueError, match="no leaf matches it"):
        jgrad.by_path({pattern: True}, rest=False)(MODEL)


class Module(eqx.Module):
    layers: list
    name: str = "x"


class Graph(nnx.Module):
    def __init__(self):
        self.layers = getattr(nnx, "List", list)([nnx.Linear(3, 2, rngs=nnx.Rngs(0))])


NESTED = {"layers": [{"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}]}


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(NESTED, id="lists"),
        pytest.param({"layers": {"0": NESTED["layers"][0]}}, id="dicts"),
        pytest.param({"layers": (Pair(jnp.ones((3, 2)), jnp.zeros(2)),)}, id="named tuples"),
        pytest.param({"layers/0": NESTED["layers"][0]}, id="haiku"),
        pytest.param(flatten_dict({"layers": {"0": NESTED["layers"][0]}}), id="flat tuples"),
        pytest.param(flatten_dict({"layers": {"0": NESTED["layers"][0]}}, sep="/"), id="flat text"),
        pytest.param(Module([Pair(jnp.ones((3, 2)), jnp.zeros(2))]), id="equinox"),
        pytest.param(nnx.state(Graph(), nnx.Param), id="nnx"),
    ],
)
def test_keys_of_any_kind_read_alike(model):
    rules = jgrad.by_path({"layers/0/kernel": 2, "layers/*/bias": 1})
    chosen = {x for x in jax.tree.leaves(rules(model)) if isinstance(x, int)}
    assert chosen == {1, 2}
    tx = jgrad.gradient_descent(rules)
    grads = jax.tree.map(lambda x: jnp.ones_like(x) if eqx.is_array(x) else None, model)
    updates = jax.tree.leaves(tx.update(grads, tx.init(model), model)[0])
    assert {(x.ndim, float(x.min()), float(x.max())) for x in updates} == {(1, -1, -1), (2, -2, -2)}


def test_the_first_match_wins():
    rules = jgrad.by_path({"layers/0/bias": 1, "**/bias": 2, "layers/**": 3}, rest=4)
    assert jax.tree.leaves(rules(MODEL)) == [4, 1, 3, 2, 3, 4]


def test_shapes_packed_trees_and_missing_leaves():
    """From shapes, of what is packed, and with None for None; values are whatever they are."""
    rules = jgrad.by_path({"a": (0, 1)}, rest=P("x"))
    params = {"a": jnp.ones(2), "b": jnp.ones(3), "c": None}
    expected = {"a": (0, 1), "b": P("x"), "c": None}
    assert rules(params) == expected
    assert rules(jax.eval_shape(lambda: params)) == expected
    assert jgrad.by_path({"d/a": 1}, rest=2)({"d": jgrad.pack(params)}) == {
        "d": {"a": 1, "b": 2, "c": None}
    }


def falling(done):
    return 0.1 * 0.5 ** done.astype(float)


def test_describe():
    rules = jgrad.by_path({"**/bias": 0.0, "embed/*": falling}, rest="matrix")
    assert rules.describe(MODEL | {"n": None}).splitlines() == [
        "embed/table      (9, 3)  embed/*  falling",
        "layers/0/bias    (2,)    **/bias  0.0",
        "layers/0/kernel  (3, 2)  rest     'matrix'",
        "layers/1/bias    (2,)    **/bias  0.0",
        "layers/1/kernel  (3, 2)  rest     'matrix'",
        "norm.scale       (3,)    rest     'matrix'",
    ]
    assert repr(jgrad.by_path({"a": 1}, rest=2)) == "by_path({'a': 1}, rest=2)"


# ---- as an option ------------------------------------------------------------------------------

W = {
    "embed": jnp.sin(jnp.arange(27.0)).reshape(9, 3),
    "layers": [
        {"w": jnp.cos(jnp.arange(12.0) + i).reshape(3, 4), "b": jnp.arange(4.0) - i}
        for i in range(2)
    ],
}
GRADS = [jax.tree.map(lambda x, t=t: jnp.sin((t + 1) * x + t), W) for t in range(5)]
FALLING = optax.linear_schedule(1e-2, 1e-3, 4)


def by_group(embed, bias, rest):
    return jgrad.by_path({"embed": embed, "**/b": bias}, rest=rest)


def of_groups(make):
    """`optax.partition` of what is made for each group."""
    return optax.partition({x: make(x) for x in "ebr"}, by_group("e", "b", "r"))


def assert_near(found, expected, bound=2e-5):
    """Relative to the largest element of a leaf."""
    chex.assert_trees_all_equal_structs(found, expected)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.max(np.abs(np.asarray(a) - b)) <= bound * np.max(np.abs(b))


RATE = {"e": FALLING, "b": 3e-3, "r": 1e-3}
DECAY = {"e": 0.0, "b": 0.0, "r": 0.1}
BETA1 = {"e": 0.9, "b": 0.8, "r": 0.95}
BETA2 = {"e": 0.99, "b": 0.999, "r": 0.95}
EPSILON = {"e": 1e-8, "b": 1e-6, "r": 1e-8}


def adams(group):
    with jax.numpy_dtype_promotion("standard"):
        return optax.adamw(
            RATE[group],
            b1=BETA1[group],
            b2=BETA2[group],
            eps=EPSILON[group],
            weight_decay=DECAY[group],
        )


def sgds(group):
    rate = RATE[group]
    decayed = optax.add_decayed_weights(DECAY[group])
    return optax.chain(decayed, optax.sgd(rate, momentum=BETA1[group]))


def grouped(table):
    return by_group(table["e"], table["b"], table["r"])


ROWS = [
    pytest.param(jgrad.adam(grouped(RATE), beta1=grouped(BETA1), beta2=grouped(BETA2), epsilon=grouped(EPSILON),
     weight_decay=grouped(DECAY)), adams, id="adam"),
    pytest.param(jgrad.gradient_descent(grouped(RATE), momentum=grouped(BETA1), weight_decay=grouped(DECAY)), sgds,
     id="momentum"),
]  # fmt: skip


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("form", ["tree", "packed"])
@pytest.mark.parametrize(("tx", "make"), ROWS)
def test_as_partition_of_optax(tx, make, form):
    """Four options by path are three optimizers of optax, one of them with a schedule."""
    with jax.numpy_dtype_promotion("standard"):
        expected = run(of_groups(make), W, GRADS)[0]
    if form == "tree":
        found, state = run(tx, W, GRADS)
    else:
        found, state = run(tx, jgrad.pack(W), list(map(jgrad.pack, GRADS)))
        found = list(map(jgrad.unpack, found))
    assert isinstance(state, jgrad.OptState)
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b)


def test_layers_places_and_masks():
    """Axes, masks, the leaves in full precision and the choice of Muon."""
    stacked = {"embed": jnp.ones((9, 3)), "layers": {"w": jnp.arange(24.0).reshape(2, 3, 4)}}
    axes = jgrad.by_path({"layers/**": 0}, rest=None)
    use = jgrad.by_path({"embed": False}, rest=True)
    for make, options in [
        (
            jgrad.lamb,
            {
                "layer_axes": axes,
                "trust_ratio_mask": use,
                "weight_decay_mask": use,
                "weight_decay": 0.1,
            },
        ),
        (jgrad.lars, {"layer_axes": axes}),
        (jgrad.muon, {"layer_axes": axes, "matrices": use, "adam_learning_rate": 0.1}),
    ]:
        trees = {
            name: {"embed": rules(stacked)["embed"], "layers": {"w": rules(stacked)["layers"]["w"]}}
            for name, rules in options.items()
            if not isinstance(rules, float)
        }
        program = lambda tx: str(jax.make_jaxpr(tx.update)(stacked, tx.init(stacked), stacked))
        assert program(make(0.1, **options)) == program(make(0.1, **(options | trees)))
    large = {"a": jnp.ones((64, 96)), "b": jnp.ones((64, 96))}
    tx = jgrad.adam(0.1, moment_dtype="8bit", full_precision=jgrad.by_path({"a": True}, rest=False))
    state = tx.init(large)
    assert isinstance(state.mw["b"], jgrad.Blocks)
    assert not isinstance(state.mw["a"], jgrad.Blocks)
    packed = [jgrad.pack(stacked, layer_axes=x) for x in (axes, axes(stacked))]
    assert_equal(*packed)


class Block(nn.Module):
    """With biases of two axes, of three in a stack, and a norm."""

    @nn.compact
    def __call__(self, x, _):
        y = nn.LayerNorm()(x)
        return x + nn.MultiHeadDotProductAttention(num_heads=2)(y, y), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + self.param("pos_embedding", nn.initializers.normal(), x.shape)
        split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(Block, **split, length=3)()(x, None)[0]


KERNELS = jgrad.by_path({"**/kernel": True}, rest=False)
DECAYED = {"weight_decay": 0.1, "weight_decay_mask": KERNELS}
RATIOS = DECAYED | {"trust_ratio_mask": KERNELS}


@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(jgrad.adam(0.1, **DECAYED), id="adam"),
        pytest.param(jgrad.lamb(0.1, **RATIOS), id="lamb", marks=pytest.mark.slow),
        pytest.param(jgrad.lars(0.1, **RATIOS), id="lars"),
        pytest.param(
            optax.adamw(0.1, weight_decay=0.1, mask=KERNELS), id="optax", marks=pytest.mark.slow
        ),
    ],
)
def test_kernels_of_flax_by_name(tx, standard_promotion):
    """The mask of the guides: only kernels decay, or have a trust ratio; the others step by 0.1."""
    shapes = jax.eval_shape(Stack().init, jax.random.key(0), jnp.ones((1, 4, 8)))
    params, grads = (jax.tree.map(lambda x, n=n: jnp.full(x.shape, n), shapes) for n in (2.0, 1.0))
    updates = jax.tree.leaves_with_path(tx.update(grads, tx.init(params), params)[0])
    others = {path[-1].key for path, x in updates if not np.allclose(x, -0.1, rtol=1e-5)}
    assert others == {"kernel"}


def test_masks_and_labels_of_optax():
    """`optax.masked` and `optax.partition` call the rules."""
    use = jgrad.by_path({"**/b": False}, rest=True)
    tx = optax.chain(optax.masked(optax.scale(3.0), use), optax.masked(optax.set_to_zero(), use))
    updates = tx.update(W, tx.init(W))[0]
    assert_equal(updates["layers"][0]["b"], W["layers"][0]["b"])
    assert float(jnp.abs(updates["embed"]).max()) == 0


def test_leaves_with_one_rule_share_a_number():
    """The program for one rule is that for one number; a schedule is called once."""
    tree = {str(i): jnp.ones(i + 1) for i in range(12)}

    def program(**options):
        tx = jgrad.adam(**options)
        return str(jax.make_jaxpr(tx.update)(tree, tx.init(tree), tree))

    one = program(learning_rate=0.1, weight_decay=0.1, beta1=0.9, epsilon=1e-8)
    rules = [jgrad.by_path({"**": x}) for x in (0.1, 0.1, 0.9, 1e-8)]
    assert (
        program(
            **dict(zip(("learning_rate", "weight_decay", "beta1", "epsilon"), rules, strict=True))
        )
        == one
    )
    calls = []

    def schedule(done):
        calls.append(done)
        return 0.1 * 0.5 ** done.astype(float)

    program(learning_rate=jgrad.by_path({"1*": schedule}, rest=schedule))
    assert len(calls) == 1


# ---- bad input ---------------------------------------------------------------------------------


def update(tx, **numbers):
    return tx.update(W, tx.init(W), W, **numbers)


EACH = jgrad.by_path({"embed": 0.5, "layers/*/b": 0.25, "**/w": 0.125})
LABELS = jgrad.by_path({"**/b": "y"}, rest="x")
masked = optax.masked


def test_injected():
    """`optax.inject_hyperparams` calls it with a count."""
    with pytest.raises(TypeError, match="by_path: `params`: an array of int32"):
        optax.inject_hyperparams(jgrad.adam)(jgrad.by_path({"embed": 2.0}, rest=1.0)).init(W)


test_message = messages.test_of("by_path", globals())
