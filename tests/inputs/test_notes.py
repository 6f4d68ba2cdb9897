"""What transformations note: learning rates, factors, ratios and residuals, beside NumPy's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from jgrad._inputs.notes import Notes
from tests.cases import gradients, params

RATES = {"layer": 0.1, "rest": [0.01, 0.2, 0.3]}
AXES = {"layer": None, "rest": [0, None, None]}


def noted(tx, w, g, packed=False, **extra):
    """What `watch` knows beside its norms."""
    if packed:
        w, g = jgrad.pack(w), jgrad.pack(g)
    tx = jgrad.watch(tx)
    _, state = jax.jit(tx.update)(g, tx.init(w), w, **extra)
    own = ("calls", "measured", "nonfinite", "grad", "update", "param")
    found = jax.device_get(jgrad.report(state))
    return {key: x for key, x in found.items() if not key.startswith(own)}


def size_of(x):
    return np.linalg.norm(np.asarray(x, np.float64))


def close(found, truth, rtol=1e-5):
    assert found.keys() == truth.keys()
    for key, x in truth.items():
        np.testing.assert_allclose(found[key], x, rtol=rtol, err_msg=key)


forms = pytest.mark.parametrize("packed", [False, True], ids=["tree", "packed"])


@pytest.mark.slow(always=["packed"])
@forms
def test_a_rate_for_each_leaf(packed):
    (g,) = gradients(1)
    truth = {"layer/w": 0.1, "layer/b": 0.1, "rest/0": 0.01, "rest/1": 0.2, "rest/2": 0.3}
    truth = {f"learning_rate/{path}": x for path, x in truth.items()}
    close(noted(jgrad.adam(RATES), params(), g, packed), truth)
    # One number in one call: the form stays.
    same = dict.fromkeys(truth, 0.5)
    close(noted(jgrad.adam(RATES), params(), g, packed, learning_rate=0.5), same)


def test_rates_of_leaves_where_there_was_one():
    """In one call: no number is that of all leaves."""
    (g,) = gradients(1)
    close(noted(jgrad.adam(0.1), params(), g, learning_rate=RATES), {"learning_rate": np.nan})


def test_rates_of_elements():
    """Their mean."""
    w, rate = {"w": jnp.ones((2, 3))}, jnp.asarray([[1.0, 2.0, 6.0]])
    close(noted(jgrad.adam(rate), w, w), {"learning_rate": 3.0})
    close(noted(jgrad.adam({"w": rate}), w, w), {"learning_rate/w": 3.0})


def test_names_are_those_of_options():
    """Not of the leaves that a method has: its rate has a name where there is none, too."""
    w = {"a": jnp.ones(3), "b": jnp.ones(2)}
    labels = {"none": jgrad.adam(0.1), "some": jgrad.adam(0.2)}
    found = noted(optax.partition(labels, {"a": "some", "b": "some"}), w, w)
    close(found, {"learning_rate": 0.1, "learning_rate#1": 0.2})
    same = jgrad.by_path({"a": 0.1}, rest=0.1)
    close(noted(jgrad.adam(same), w, w), {"learning_rate/a": 0.1, "learning_rate/b": 0.1})


def test_rates_of_two_groups():
    """The second of a name has a number."""
    w, (g,) = params(), gradients(1)
    labels = {"layer": "a", "rest": "b"}
    tx = optax.partition({"a": jgrad.adam(0.1), "b": jgrad.adam(0.2)}, labels)
    close(noted(tx, w, g), {"learning_rate": 0.1, "learning_rate#1": 0.2})


@pytest.mark.slow(one_in=4)
@forms
@pytest.mark.parametrize("largest", [1e-3, 1e6])
def test_clipping(packed, largest):
    (g,) = gradients(1)
    norm = size_of(np.concatenate([np.ravel(x) for x in jax.tree.leaves(g)]))
    found = noted(jgrad.clip_by_global_norm(largest), params(), g, packed)
    close(found, {"clip_factor": min(1, largest / norm)})


@pytest.mark.slow(one_in=6)
@forms
@pytest.mark.parametrize("method", ["lars", "lamb", "alone"])
def test_trust_ratios(method, packed):
    """One for each layer, of those that have one."""
    w, (g,) = params(), gradients(1)
    w["rest"][0], g["rest"][0] = (
        jnp.stack([x, 10 * x, 0 * x]) for x in (w["rest"][0], g["rest"][0])
    )
    mask = {"layer": {"w": True, "b": False}, "rest": True}
    options = {"trust_ratio_mask": mask, "layer_axes": AXES}
    tx = {
        "lars": lambda: jgrad.lars(0.1, weight_decay=0.2, **options),
        "lamb": lambda: jgrad.lamb(0.1, weight_decay=0.2, max_trust_ratio=None, **options),
        "alone": lambda: jgrad.scale_by_trust_ratio(max_trust_ratio=None, **options),
    }[method]()

    def ratio(w, g):
        w, g = np.asarray(w, np.float64), np.asarray(g, np.float64)
        if method == "lars":
            norm = size_of(g) and (size_of(g) + 0.2 * size_of(w)) / 0.001
        else:
            norm = size_of(g if method == "alone" else g / (np.abs(g) + 1e-6) + 0.2 * w)
        return size_of(w) / norm if size_of(w) and norm else 1.0

    truth = {
        "trust_ratio/layer/w": ratio(w["layer"]["w"], g["layer"]["w"]),
        "trust_ratio/rest/0": list(map(ratio, w["rest"][0], g["rest"][0])),
        "trust_ratio/rest/1": ratio(w["rest"][1], g["rest"][1]),
        "trust_ratio/rest/2": ratio(w["rest"][2], g["rest"][2]),
    }
    if method != "alone":
        truth["learning_rate"] = 0.1
    if packed:
        w, g = (jgrad.pack(x, layer_axes=AXES) for x in (w, g))
    close(noted(tx, w, g), truth, 2e-5)


@pytest.mark.slow(always=["muon"])
@pytest.mark.parametrize("rule", ["muon", "normuon"])
def test_residuals(rule):
    """The largest of the matrices of each layer, from the updates, which are s X."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    w = {"b": draw(4), "tall": draw(40, 6), "wide": [draw(6, 40), draw(3, 5, 7)]}
    g = {"b": draw(4), "tall": draw(40, 6), "wide": [draw(6, 40), draw(3, 5, 7)]}
    axes = {"b": None, "tall": None, "wide": [None, 0]}
    matrices = {"b": False, "tall": True, "wide": True}
    options = {"matrices": matrices, "layer_axes": axes, "scale": None}
    direction, _ = jgrad.scale_by_muon(**options).update(
        g, jgrad.scale_by_muon(**options).init(w), w
    )

    def residual(x):
        x = np.asarray(x, np.float64)
        x = x if x.shape[0] <= x.shape[1] else x.T
        return size_of(x @ x.T - np.eye(len(x))) / np.sqrt(len(x))

    truth = {
        "tall": residual(direction["tall"]),
        "wide/0": residual(direction["wide"][0]),
        "wide/1": list(map(residual, direction["wide"][1])),
    }
    found = noted(jgrad.scale_by_muon(rule=rule, **options), w, g)
    close(found, {f"muon_residual/{path}": x for path, x in truth.items()}, 1e-4)


@pytest.mark.parametrize(("outputs", "split"), [(2, (4, 4, 6)), (1, (6, 6))])
def test_residuals_of_blocks(outputs, split):
    """The largest of a layer, wherever its axis is: in front of the outputs, or behind them."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 12, 14)), jnp.float32)
    if outputs == 1:
        x = jnp.moveaxis(x, 0, 2)  # inputs, outputs... layers: (12, 14, 3)
        x, layers, outputs = jnp.swapaxes(x, 1, 2)[:, :, :5], 1, 0
    else:
        layers = 0
    options = {"layer_axes": layers, "output_axes": outputs, "split": split}
    tx = jgrad.scale_by_muon(matrices=True, scale=None, **options)
    whole = noted(tx, {"w": x}, {"w": x})["muon_residual/w"]
    each = [
        noted(
            jgrad.scale_by_muon(matrices=True, scale=None, **options | {"layer_axes": layers}),
            {"w": y},
            {"w": y},
        )["muon_residual/w"]
        for y in jnp.split(x, x.shape[layers], layers)
    ]
    np.testing.assert_allclose(whole, np.concatenate(each), rtol=1e-5)


def test_a_note_of_another_trace():
    """From inside a branch or a loop it would leave the trace in which it is an array."""
    notes = Notes({})

    def inside(x):
        notes.add("of a branch", x)
        return x

    def f(x):
        outside = Notes({})
        jax.lax.cond(x > 0, lambda: outside.add("no", x) or x, lambda: x)
        outside.add("own", x)
        return outside.new

    assert jax.jit(f)(jnp.ones(())).keys() == {"own"}
    jax.jit(inside)(jnp.ones(()))
    assert not notes.new


@pytest.mark.parametrize("swapped", [False, True])
def test_two_methods_in_a_chain(swapped):
    """One has rates by path, the other one rate: neither takes the names of the other."""
    w = {"a": jnp.ones(3), "b": jnp.ones(2)}
    pair = [jgrad.adam(jgrad.by_path({"a": 0.1}, rest=0.2)), jgrad.gradient_descent(0.5)]
    tx = jgrad.watch(optax.chain(*(reversed(pair) if swapped else pair)))
    state = tx.init(w)
    for _ in range(2):
        _, state = tx.update(w, state, w)
    numbers = jgrad.report(state)
    found = {name: float(x) for name, x in numbers.items() if name.startswith("learning_rate")}
    rates = {"learning_rate": 0.5, "learning_rate/a": 0.1, "learning_rate/b": 0.2}
    assert found == pytest.approx(rates)


@pytest.mark.parametrize(
    "inner",
    [jgrad.accumulate(jgrad.adam(0.1), 1), jgrad.skip_nonfinite(jgrad.adam(0.1), branch=True)],
)
def test_a_branch_of_another_library_around_a_branch_of_ours(inner):
    """No traced value leaves it."""
    w = {"a": jnp.ones(3)}
    tx = jgrad.watch(optax.apply_if_finite(inner, 3))
    state = tx.init(w)
    for _ in range(2):
        _, state = jax.jit(tx.update)(w, state, w)
    assert float(jgrad.report(state)["update_norm"]) > 0
