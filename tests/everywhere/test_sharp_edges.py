"""Mistakes that other libraries make: a test for each of the edges E1 to E44, named by its number.

Each runs on every optimizer to which the edge applies. Some edges are tested in other files: E3 in
`test_messages.py`, E5 in `test_low_precision.py`, E8 in `test_meta_gradients.py`, E18, E20,
E22 and E29 in `test_matrix.py`, E19 in `test_surroundings.py`, E9, E13 and E27 in `optimizers/`, E12, E25 and E26 in
`multi_device/`, E7, E11, E16, E17 and E24 in `wrappers/`, E30 to E44, moments in 8 bits, in
`test_eight_bits.py` and `quantized/`. `pytest --all -k e13` runs E13.
"""

import dataclasses
import math
import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.cases import CASES, CORE, FEW, RATE, every_case, gradients, params
from tests.support.loops import step_of, train


def with_ratio(core=CORE):
    return every_case(core, lambda case: case.make in (jgrad.lars, jgrad.lamb))


def message(f, *args, **kwargs):
    with pytest.raises((ValueError, TypeError)) as caught:
        f(*args, **kwargs)
    return str(caught.value)


def test_every_edge_has_a_test():
    """Each number from E1 to E51 is in the name of a test."""
    text = "".join(f.read_text() for f in pathlib.Path(__file__).parents[1].rglob("test_*.py"))
    found = {
        int(n)
        for name in re.findall(r"def test_((?:e\d\d_)+)", text)
        for n in re.findall(r"\d\d", name)
    }
    assert found == set(range(1, 52))


# ---- what is wrong with the arguments ----------------------------------------------------------


@every_case()
@pytest.mark.parametrize("shape", [(3, 1), (1,), (4,), ()])
def test_e01_e02_a_gradient_of_another_shape(case, shape):
    """Whether it would broadcast or not: an error before any arithmetic, naming leaf and shapes."""
    tx = case.without_masks().tx()
    w, g = {"layer_3": {"b": jnp.ones(3)}}, {"layer_3": {"b": jnp.ones(shape)}}
    name = case.make.__name__
    expected = (
        f"{name}: `updates` does not match `params` at ['layer_3']['b']: shape {shape}, "
        "expected (3,)."
    )
    assert message(tx.update, g, tx.init(w), w) == expected
    if case.step:
        text = message(case.step, w, g, RATE, dict.fromkeys(case.state, w), 1)
        assert text.endswith(expected.split("params` ")[1])
        assert text.startswith(f"{name}_update: ")


@every_case()
def test_e04_the_state_of_another_transformation(case):
    """Says what came and who made what it expects."""
    tx, w, (g,) = case.tx(), params(), gradients(1)
    name = case.make.__name__
    for foreign in (optax.adam(0.1).init(w)[0], optax.trace(0.9).init(w), (), None):
        text = message(tx.update, g, foreign, w)
        kind = type(foreign).__name__
        expected = f"expected the {case.kind.__name__} that this `{name}`"
        assert text.startswith(f"{name}: `state`: {kind}, {expected}")
    other = {(): ("mw",), ("mw",): ()}.get(case.state, ("mw",))
    foreign = next(c for c in CASES if c.state == other).tx().init(w)
    expected = "from another method or other options"
    if case.kind is not jgrad.OptState:
        expected = f"OptState, expected the {case.kind.__name__}"
    assert expected in message(tx.update, g, foreign, w)


@every_case()
@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, "0.1"])
def test_e21_numbers_out_of_range(case, bad):
    """At construction, each by its name."""
    numbers = {"learning_rate": RATE, "weight_decay": 0.1}
    numbers |= {k: v for k, v in case.options.items() if isinstance(v, float)}
    for name in numbers:
        text = message(lambda name=name: case.make(**(case.options | numbers | {name: bad})))
        assert text.startswith(f"{case.make.__name__}: `{name}`: ")
    if "vw" in case.state:
        betas = ("beta2_cap",) if case.make is jgrad.adafactor else ("beta1", "beta2")
        for name in map(case.of_adam, betas):
            for beta in (1.0, 1.5):
                text = message(lambda name=name, beta=beta: case.tx(**{name: beta}))
                assert text.endswith(f"`{name}`: {beta}, expected a number in [0, 1).")


# ---- low precision -----------------------------------------------------------------------------


@pytest.mark.slow(always=["bfloat16-adamw"])
@every_case(where=lambda case: case.state and case.make is not jgrad.adafactor)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_e06_moments_follow_double_precision_for_ten_thousand_steps(case, dtype):
    """Gradients of 1, then of 0.01: the moments of half-precision weights rise and fall.

    Of Adafactor, whose average of squares forgets less and less, `test_adafactor.py` has it.
    """
    tx = case.without_masks().tx(0.0, weight_decay=0.0)
    is_adan = case.make is jgrad.adan
    beta1, beta2 = (
        case.number_of_adam(x) if "vw" in case.state else 0.9
        for x in ("beta1", "beta3" if is_adan else "beta2")
    )
    ahead, old = case.number("beta2") if is_adan else 0.0, 1.0
    w = {"w": jnp.ones(4, dtype)}
    scales = np.where(np.arange(10_000) < 5_000, 1.0, 0.01)

    def body(state, scale):
        g = jax.tree.map(lambda p: jnp.full_like(p, scale), w)
        _, state = tx.update(g, state, w)
        return state, state

    _, states = jax.jit(lambda s: jax.lax.scan(body, tx.init(w), s))(jnp.asarray(scales, dtype))
    expected = {"mw": [0.0], "vw": [0.0]}
    for g in np.asarray(jnp.asarray(scales, dtype), np.float64):
        expected["mw"].append(beta1 * expected["mw"][-1] + (1 - beta1) * g)
        square, old = (g + ahead * (g - old)) ** 2, g
        expected["vw"].append(beta2 * expected["vw"][-1] + (1 - beta2) * square)
    if "vw" in case.state:
        # Half a unit in the last place at each of 5000 steps comes to 1.5e-4, at each of 10 to 1e-6.
        np.testing.assert_allclose(states.vw["w"][:, 0], expected["vw"][1:], rtol=1.5e-4)
        rtol = 3e-7 / (1 - beta1)
        np.testing.assert_allclose(states.mw["w"][:, 0], expected["mw"][1:], rtol=rtol)
    else:
        moments = np.asarray(states.mw["w"][:, 0], np.float64)
        assert np.all(np.isfinite(moments))
        assert states.mw["w"].dtype == jnp.float32


# ---- state -------------------------------------------------------------------------------------


@every_case()
def test_e10_the_state_does_not_depend_on_options(case):
    """A checkpoint fits after a change of the rate, the decay, the masks and the rule."""
    w = params()
    plain = jax.tree.structure(case.tx().init(w))
    options = [
        {"learning_rate": optax.cosine_decay_schedule(0.1, 10)},
        {"learning_rate": {"layer": 0.1, "rest": 0.2}},
        {"learning_rate": jnp.float32(0.1)},
        {"weight_decay": 0.3, "weight_decay_mask": lambda p: jax.tree.map(lambda x: x.ndim > 1, p)},
    ]
    if case.make in (jgrad.lars, jgrad.lamb):
        options += [
            {"trust_ratio_mask": False},
            {"layer_axes": {"layer": 0, "rest": None}},
            {"rule": "paper"},
        ]
    if case.make in (jgrad.adam, jgrad.lamb):
        options += [{"bias_correction": x} for x in ("step_size", "moments", None)]
    for tx in (case.without_masks().tx(), *(case.tx(**option) for option in options)):
        assert jax.tree.structure(jax.eval_shape(tx.init, w)) == plain


@pytest.mark.slow
@every_case(("lars_masked",))
def test_e22_weak_types(case):
    """Weakly typed weights and moments; rates through `learning_rate=` are in `test_matrix.py`."""
    weak = {"w": jnp.full((3,), 0.5)}
    tx = case.without_masks().tx()
    assert weak["w"].weak_type
    state = tx.init(weak)
    assert not any(x.weak_type for x in jax.tree.leaves(state))
    _, new = tx.update(weak, state, weak)
    assert not any(x.weak_type for x in jax.tree.leaves(new))
    w = jgrad.variable(weak)  # the remedy: strong from the start
    step = jax.jit(chex.assert_max_traces(step_of(tx), n=1))
    for _ in range(3):
        w, state = step(w, state, weak)


@pytest.mark.slow(always=["lamb_decayed"])
@every_case(
    ("momentum", "adam_moments", "lamb_decayed"),
    # Adafactor's decay depends on the step for ever, and so do the steps with new bases of SOAP.
    lambda case: case.make not in (jgrad.adafactor, jgrad.soap),
)
def test_e23_the_counter_at_its_end(case):
    """It stays at the largest int32, and the step there is that of a very late one."""
    tx, w, grads = case.tx(), params(), gradients(3)
    state = tx.init(w)
    late = state._replace(step=jnp.asarray(2**31 - 2, jnp.int32))
    step = jax.jit(step_of(tx))
    end = late._replace(step=jnp.asarray(10**9, jnp.int32))
    a, b = (w, late), (w, end)
    for g in grads:
        a, b = step(*a, g), step(*b, g)
        chex.assert_tree_all_finite(a)
        chex.assert_trees_all_equal(a[0], b[0])
    assert int(a[1].step) == 2**31 - 1


# ---- trust ratios ------------------------------------------------------------------------------


@pytest.mark.slow
@with_ratio(("lamb_decayed",))
@pytest.mark.parametrize("axes", [0, -1, (0, 2), 1, (0, 1, 2), ()])
def test_e14_layers_stacked_for_scan(case, axes):
    """Each index of `layer_axes` is a layer, with the numbers that it has by itself."""
    rng = np.random.default_rng(0)
    scale = 10.0 ** rng.uniform(-3, 3, size=(4, 3, 2))
    w = {"s": jnp.asarray(scale * rng.normal(size=(4, 3, 2)), jnp.float32), "b": jnp.ones(5)}
    grads = [
        {"s": jnp.asarray(rng.normal(size=(4, 3, 2)), jnp.float32), "b": jnp.full(5, 0.1 * t)}
        for t in (1, 2, 3)
    ]
    case = case.without_masks()
    found, _ = train(case.tx(layer_axes={"s": axes, "b": None}), w, grads)
    chosen = {axis % 3 for axis in ((axes,) if isinstance(axes, int) else axes)}

    def layers(tree):
        counts = [n if axis in chosen else 1 for axis, n in enumerate((4, 3, 2))]
        cuts = {"b": tree["b"]}
        for index in np.ndindex(*counts):
            key = tuple(i if a in chosen else slice(None) for a, i in enumerate(index))
            cuts[str(index)] = tree["s"][key]
        return cuts

    expected, _ = train(case.tx(), layers(w), [layers(g) for g in grads])
    chex.assert_trees_all_close(layers(found), expected, rtol=2e-6, atol=1e-7)
    if case.step:
        zeros = dict.fromkeys(case.state, jax.tree.map(jnp.zeros_like, w))
        whole = dataclasses.replace(
            case, update=case.update | {"layer_axes": {"s": axes, "b": None}}
        )
        once = whole.step(w, grads[0], RATE, zeros, 1)[0]
        zeros = {name: layers(x) for name, x in zeros.items()}
        each = case.step(*map(layers, (w, grads[0])), RATE, zeros, 1)[0]
        chex.assert_trees_all_close(layers(once), each, rtol=2e-6)


@pytest.mark.slow
@with_ratio()
def test_e15_leaves_that_start_at_zero(case):
    """They move: their ratio is 1 while they are zero, and with a mask for good (not by Ivy's rule)."""
    case = case.without_masks()
    w = {"w": jnp.ones(4), "b": jnp.zeros(4)}
    g = jax.tree.map(lambda p: jnp.full_like(p, 0.3), w)
    found, _ = train(case.tx(), w, [g])
    if case.options.get("rule") == "ivy":
        np.testing.assert_array_equal(found["b"], 0)
        return
    plain, _ = train(case.tx(trust_ratio_mask=False), w, [g])
    np.testing.assert_allclose(found["b"], plain["b"], rtol=1e-6)
    assert np.all(found["b"] != 0)
    masked, _ = train(case.tx(trust_ratio_mask={"w": True, "b": False}), w, [g] * 5)
    plain, _ = train(case.tx(trust_ratio_mask=False), w, [g] * 5)
    np.testing.assert_allclose(masked["b"], plain["b"], rtol=1e-6)


# ---- leaves of other kinds ---------------------------------------------------------------------


@pytest.mark.slow
@every_case(FEW)
def test_e28_complex_parameters(case):
    """The conjugate of what `jax.grad` returns leads downhill; numbers are in `test_matrix.py`."""
    case = case.without_masks()
    tx = case.tx(0.01)
    target = jnp.asarray([1 + 2j, -3 + 0.5j], jnp.complex64)
    w = {"z": jnp.asarray([2 - 1j, 1 + 1j], jnp.complex64)}
    loss = lambda w: jnp.sum(jnp.abs(w["z"] - target) ** 2)
    step, state, found = jax.jit(step_of(tx)), tx.init(w), w
    for _ in range(50):
        found, state = step(found, state, jax.tree.map(jnp.conj, jax.grad(loss)(found)))
    assert loss(found) < loss(w)
