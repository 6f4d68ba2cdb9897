"""Moments in 8 bits, their form: shapes, dtypes, transformations of JAX, slopes and errors."""

import functools
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from jgrad._inputs import moments as forms
from tests.support.eight_bits import (
    EACH,
    FEW,
    MAKES,
    RATE,
    assert_same_moments,
    gradients,
    in_float32,
    model,
    moments,
    mostly,
    normal,
    optimizers,
    packed_or_not,
    slow,
    unpacked,
)
from tests.support.errors import assert_error
from tests.support.loops import assert_equal, step_of, train

# ---- shapes, dtypes and forms ------------------------------------------------------------------

SIZES = (1, 255, 256, 257, 4095, 4096, 4097, 0)


@pytest.mark.slow
@mostly("tree")
@optimizers(EACH, FEW)
def test_e38_leaves_of_every_size(make, packed):
    """From 4096 elements on in 8 bits, of size 0 and 0-d as ever; the weights near float32's."""
    w = {f"n{n}": normal((n,), n) for n in SIZES} | {"scalar": jnp.float32(2.0)}
    grads = [{name: normal(x.shape, t, spread=0.1) for name, x in w.items()} for t in (1, 2)]
    state = make().init(w)
    assert {name for name, x in state.mw.items() if isinstance(x, jgrad.Blocks)} == {
        "n4096",
        "n4097",
    }
    if packed:
        assert all(
            isinstance(x, jgrad.Blocks)
            for x in jax.tree.leaves(
                make().init(jgrad.pack(w)).mw, is_leaf=lambda x: isinstance(x, jgrad.Blocks)
            )
        )
    forms = (jgrad.pack(w), [jgrad.pack(g) for g in grads]) if packed else (w, grads)
    found, _ = train(make(), *forms)
    expected, _ = train(in_float32(make)(), w, grads)
    for name, x in jgrad.unpack(found).items():
        own = name in ("n4096", "n4097") or packed
        moved = np.linalg.norm(np.ravel(expected[name] - w[name]))
        off = np.linalg.norm(np.ravel(x - expected[name]))
        assert off <= (0.1 if own else 1e-5) * moved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "packed"),
    [(1, False), *(pytest.param(*x, marks=slow) for x in ((0, False), (0, True), (1, True)))],
)
def test_e38_layers_share_no_block(axis, packed):
    """A gradient of 1e10 in one layer changes no code of another; 1000 elements are 4 blocks each."""
    make = functools.partial(jgrad.lamb, RATE, layer_axes=axis, moment_dtype="8bit")
    shape = (5, 1000) if axis == 0 else (1000, 5)
    w, g = {"s": jnp.ones(shape)}, {"s": normal(shape)}
    large = {"s": g["s"].at[(2, 999) if axis == 0 else (999, 2)].set(1e10)}
    if packed:
        pack = functools.partial(jgrad.pack, layer_axes={"s": axis})
        w, g, large = pack(w), pack(g), pack(large)
    (_, usual), (_, state) = (train(make(), w, [g, x, g]) for x in (g, large))
    other = np.arange(5) != 2
    for x, y in ((usual.mw, state.mw), (usual.vw, state.vw)):
        for part in ("codes", "scale"):
            a, b = (np.moveaxis(unpacked(t, part)["s"], axis, 0) for t in (x, y))
            np.testing.assert_array_equal(a[other], b[other])
            assert not np.array_equal(a[2], b[2])


@pytest.mark.slow
def test_e39_leaves_that_have_no_8_bits():
    """Integers and frozen leaves have no moments, None and keys pass; complex ones keep full precision."""
    w = {"n": jnp.arange(5000), "none": None, "k": jax.random.key(0), "w": jnp.ones(5000)}
    w |= {"z": jnp.ones(5000, jnp.complex64), "frozen": jnp.ones(5000)}
    g = jax.tree.map(lambda x: x, w) | {"n": None, "k": None, "frozen": None}
    tx = jgrad.adam(RATE, moment_dtype="8bit")
    state = tx.init(w)
    updates, new = jax.jit(tx.update)(g, state, w)
    assert isinstance(state.mw["w"], jgrad.Blocks)
    assert state.mw["n"] is None
    assert (state.mw["z"].dtype, state.vw["z"].dtype) == (jnp.complex64, jnp.float32)
    assert_equal((new.mw["frozen"], new.vw["frozen"]), (state.mw["frozen"], state.vw["frozen"]))
    assert not np.any(updates["frozen"])
    exact = jgrad.adam(RATE)
    expected, _ = jax.jit(exact.update)(g, exact.init(w), w)
    np.testing.assert_allclose(updates["z"], expected["z"], rtol=1e-6)


# NorMuon's second moments are no blocks, and of matrices that are rounded elsewhere when packed.
@pytest.mark.slow
@optimizers([name for name in MAKES if name != "normuon"], ("lamb", "momentum"))
def test_e40_tree_and_packed(make):
    """Codes and scales bit for bit where no norm enters a moment; updates to rounding."""
    w, grads = model(), gradients(4)
    found, state = train(make(), jgrad.pack(w), [jgrad.pack(g) for g in grads])
    expected, other = train(make(), w, grads)
    chex.assert_trees_all_close(jgrad.unpack(found), expected, rtol=2e-6, atol=2e-6)
    if make.func is not jgrad.lars:  # a sum of squares of a buffer is in another order
        assert_same_moments(state, other)
        return
    codes = [unpacked(x, "codes") for x in (state.mw, other.mw)]
    for a, b in zip(*map(jax.tree.leaves, codes), strict=True):
        assert np.mean(np.asarray(a) != np.asarray(b)) < 1e-3


@pytest.mark.slow
@optimizers(EACH, FEW)
def test_e40_pack_small_and_resumed(make):
    """Large leaves beside packed small ones; a state that was saved goes on bit for bit."""
    w = model() | {f"s{i}": normal((10,), i) for i in range(4)}
    grads = [
        g | {f"s{i}": normal((10,), 7 * i + t) for i in range(4)}
        for t, g in enumerate(gradients(4))
    ]
    expected, state = train(make(), w, grads)
    found, inner = train(jgrad.pack_small(make()), w, grads)
    chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=1e-7)
    inner = getattr(inner, "inner", inner)
    half, middle = train(make(), w, grads[:2])
    restored = jax.tree.map(jnp.asarray, pickle.loads(pickle.dumps(jax.device_get(middle))))
    for g in grads[2:]:
        half, restored = jax.jit(step_of(make()))(half, restored, g)
    assert_equal((half, restored), (expected, state))


@optimizers(EACH, ("adam",))
def test_e40_small_leaves_beside_large_ones(make):
    """On a tree they stay float32, and packed where they share no buffer with a large one."""
    small = {"b": normal((90,), 3), "e": normal((4095,), 4)}
    w = model() | small
    grads = [
        g | jax.tree.map(lambda x, t=t: x / (t + 1), small) for t, g in enumerate(gradients(2))
    ]
    expected, tree = train(make(), w, grads)
    for options in ({"small_apart": True}, {"max_size": 4095}, {}):
        pack = functools.partial(jgrad.pack, **options)
        found, state = map(jgrad.unpack, train(make(), pack(w), [pack(g) for g in grads]))
        moved = {n: np.abs(found[n] - w[n]).max() for n in small}
        is_rounded = not options
        for n in small:
            assert state.mw[n].dtype == jnp.float32
            off = [np.abs(a - b).max() / np.abs(b).max() for a, b in ((state.mw[n], tree.mw[n]),)]
            off.append(np.abs(found[n] - expected[n]).max() / moved[n])
            assert all(x > 1e-3 if is_rounded else x < 1e-5 for x in off)


@pytest.mark.slow(one_in=3)
@optimizers(EACH, ("adam", "lamb", "momentum"))
def test_e41_what_was_chosen_is_visible(make):
    """`full_precision` as a tree or a function; the state says which leaves are in 8 bits."""
    w = model()
    choices = ({"a": True, "c": False}, lambda p: {n: n == "a" for n in p})
    for choice in choices:
        state = make(full_precision=choice).init(w)
        assert {n: x.dtype for n, x in state.mw.items()} == {
            "a": "float32",
            "c": "int8",
        }
        assert "Blocks(codes" in str(state)
    _, state = train(make(full_precision=choices[0]), w, gradients(2))
    _, exact = train(in_float32(make)(), w, gradients(2))
    np.testing.assert_allclose(state.mw["a"], exact.mw["a"], rtol=1e-6, atol=1e-7)
    full = make(full_precision=True).init(w)
    assert not moments(full)
    assert not moments(make(full_precision=True).init(jgrad.pack(w)))


# ---- under transformations of JAX and of optax ---------------------------------------------------


@pytest.mark.slow
@optimizers(EACH, FEW)
def test_e42_vmap(make):
    """Three models at once: each has the codes that it has alone."""
    large = lambda tree: {"c": tree["c"]}
    models = [large(model(t)) for t in range(3)]
    grads = [[large(g) for g in gradients(2, 10 + t)] for t in range(3)]
    tx = make()
    alone = [train(tx, w, g) for w, g in zip(models, grads, strict=True)]
    stack = lambda *xs: jax.tree.map(lambda *x: jnp.stack(x), *xs)
    w = stack(*models)
    state = jax.vmap(tx.init)(w)
    step = jax.jit(jax.vmap(step_of(tx)))
    for t in range(2):
        w, state = step(w, state, stack(*(g[t] for g in grads)))
    for i, (own, expected) in enumerate(alone):
        got, found = jax.tree.map(lambda x, i=i: x[i], (w, state))
        chex.assert_trees_all_close(got, own, rtol=1e-6, atol=1e-6)
        assert_same_moments(found, expected)


@pytest.mark.slow
@optimizers(EACH, FEW)
def test_e42_scan(make):
    """As a loop of steps; the form of the state does not change."""
    w, grads, tx = model(), gradients(4), make()
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)
    body = lambda carry, g: (step_of(tx)(*carry, g), None)
    (found, state), _ = jax.jit(lambda: jax.lax.scan(body, (w, tx.init(w)), stacked))()
    expected, other = train(tx, w, grads)
    chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=1e-6)
    assert_same_moments(state, other)


@pytest.mark.slow(one_in=2)
@packed_or_not
@optimizers()
def test_e42_donation(make, packed):
    """The memory of codes and scales is used again: donated arrays are gone, with no warning."""
    w, (g,) = model(), gradients(1)
    w, g = (jgrad.pack(w), jgrad.pack(g)) if packed else (w, g)
    tx = make()
    state = tx.init(w)
    lowered = jax.jit(tx.update, donate_argnums=1).lower(g, state, w)
    compiled = lowered.compile()
    held = sum(x.nbytes for x in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes == held
    _, new = compiled(g, state, w)
    jax.block_until_ready(new)
    assert all(x.is_deleted() for pair in moments(state) for x in pair)


@pytest.mark.slow
@optimizers(EACH, FEW)
def test_e42_accumulate(make):
    """Mini-steps with `emit=False` leave codes alone; the window is a step with the mean."""
    w, grads = model(), gradients(2)
    tx = jgrad.accumulate(make(), 2)
    state = tx.init(w)
    _, state = jax.jit(lambda g, s: tx.update(g, s, w, emit=False))(grads[0], state)
    assert_equal(state.inner, make().init(w))
    updates, state = jax.jit(lambda g, s: tx.update(g, s, w, emit=True))(grads[1], state)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *grads)
    expected, inner = jax.jit(make().update)(mean, make().init(w), w)
    chex.assert_trees_all_close(updates, expected, rtol=1e-5, atol=1e-6)
    for x, y in zip(moments(state.inner), moments(inner), strict=True):
        np.testing.assert_array_equal(x.scale, y.scale)
        assert np.mean(np.asarray(x.codes) != np.asarray(y.codes)) < 1e-3


def test_e42_inject_hyperparams():
    """optax's wrapper gives the rate as an array."""
    w, grads = model(), gradients(3)
    make = functools.partial(jgrad.adam, moment_dtype="8bit")
    others = ("moment_dtype", "beta1", "beta2", "epsilon", "weight_decay")
    wrapped = optax.inject_hyperparams(make, static_args=others)(learning_rate=RATE)
    found, state = train(wrapped, w, grads)
    expected, inner = train(make(RATE), w, grads)
    chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=1e-7)
    assert_same_moments(state.inner_state, inner)


@mostly("packed")
@optimizers()
def test_e42_strict_promotion(make, packed):
    """The suite's own setting, and each of JAX's: the same bits."""
    w, grads = model(), gradients(2)
    w, grads = (jgrad.pack(w), [jgrad.pack(g) for g in grads]) if packed else (w, grads)
    assert jax.config.jax_numpy_dtype_promotion == "strict"
    assert jax.config.jax_numpy_rank_promotion == "raise"
    strict = train(make(), w, grads)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        chex.assert_trees_all_equal(train(make(), w, grads), strict)


# ---- slopes ------------------------------------------------------------------------------------


@pytest.mark.slow
@mostly("tree")
@optimizers()
def test_e43_no_slope_through_8_bits(make, packed):
    """`jax.grad` through two steps is an error, and through one that only reads the state is not."""
    w, (g, h) = model(), gradients(2)
    w, g, h = map(jgrad.pack, (w, g, h)) if packed else (w, g, h)
    tx = make()

    def loss(scale):
        own = jax.tree.map(lambda x: scale * x, g)
        _, state = tx.update(own, tx.init(w), w)
        updates, _ = tx.update(h, state, w)
        return sum(jnp.sum(x) for x in jax.tree.leaves(updates))

    message = (
        "jgrad: no derivative goes through moments stored in 8 bits; differentiate a recipe "
        "without `moment_dtype='8bit'`, or apply `jax.lax.stop_gradient` to what is stored."
    )
    assert_error(TypeError, message, lambda: jax.grad(loss)(1.0))


@pytest.mark.slow
@optimizers(FEW, FEW)  # whose steps are smooth in the gradient, and not proportional to it
def test_e43_slopes_through_bfloat16_are_those_of_float32(make):
    """As if nothing were rounded: within some units in the last place of bfloat16."""
    w, (g, h) = {"w": normal((300,))}, [{"w": normal((300,), t)} for t in (1, 2)]

    def slope(tx):
        def loss(scale):
            _, state = tx.update({"w": scale * g["w"]}, tx.init(w), w)
            updates, _ = tx.update(h, state, w)
            return jnp.sum(updates["w"] * w["w"])

        return float(jax.grad(loss)(jnp.float32(1.0)))

    exact = in_float32(make)()
    rounded = functools.partial(in_float32(make), moment_dtype=jnp.bfloat16)()
    expected = slope(exact)
    assert abs(expected) > 1e-4
    np.testing.assert_allclose(slope(rounded), expected, rtol=0.05)


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["4bit", jnp.int8, "uint8", jnp.float16, 8])
@pytest.mark.parametrize("name", EACH)
def test_e41_other_forms(name, given):
    function = MAKES[name].func.__name__
    assert_error(
        TypeError,
        f"{function}: `moment_dtype`: {given!r}, expected a real floating dtype with the range of "
        "float32, or '8bit'.",
        lambda: MAKES[name](moment_dtype=given),
    )


def adam8(**options):
    return jgrad.adam(RATE, moment_dtype="8bit", **options)


W = {"layer": {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}}


def changed(state, field, **parts):
    """A state with other codes or scales of `w`."""
    moment = getattr(state, field)["layer"]
    blocks = moment["w"]._replace(**parts)
    return state._replace(**{field: {"layer": moment | {"w": blocks}}})


def test_e41_full_precision_without_8_bits():
    assert_error(
        ValueError,
        "adam: `full_precision`: True of type bool, expected None without `moment_dtype='8bit'`.",
        lambda: jgrad.adam(RATE, full_precision=True),
    )


def test_e41_full_precision_on_a_part_of_a_buffer():
    assert_error(
        ValueError,
        "adam: `full_precision` at ['layer']['b']: True, expected the same for all leaves of its "
        "buffer, since they share an array; leave it unpacked.",
        lambda: adam8(full_precision={"layer": {"w": False, "b": True}}).init(jgrad.pack(W)),
    )


@packed_or_not
def test_e39_float64(x64, packed):
    """An error that names the largest leaf of a buffer; kept by `full_precision`, in float64."""
    w = {"layer": {"w": jnp.ones((64, 64), jnp.float64), "b": jnp.ones(3, jnp.float64)}}
    form = jgrad.pack(w) if packed else w
    assert_error(
        TypeError,
        "adam: `params` at ['layer']['w']: dtype float64, expected at most float32 "
        "beside 8 bits; keep it by `full_precision`.",
        lambda: adam8().init(form),
    )
    state = adam8(full_precision=True).init(form)
    assert {x.dtype for x in jax.tree.leaves((state.mw, state.vw))} == {jnp.dtype("float64")}


def test_e41_states_of_another_recipe():
    """Of float32 in one of 8 bits, and the reverse."""
    tx, plain = adam8(), jgrad.adam(RATE)
    assert_error(
        TypeError,
        "adam: `state.mw` at ['layer']['w']: an array of float32 and shape (64, 64), expected Blocks, "
        "8 bits; make it by `carry_over(state, like=jax.eval_shape(tx.init, params))`.",
        lambda: tx.update(W, plain.init(W), W),
    )
    assert_error(
        TypeError,
        "adam: `state.mw` at ['layer']['w']: Blocks of shape (64, 64), expected an array; make it by "
        "`carry_over(state, like=jax.eval_shape(tx.init, params))`.",
        lambda: plain.update(W, tx.init(W), W),
    )
    full = adam8(full_precision={"layer": {"w": True, "b": False}})
    for a, b in ((tx, full), (full, tx)):
        with pytest.raises(TypeError, match=r"`state.mw` at \['layer'\]\['w'\]"):
            a.update(W, b.init(W), W)


@pytest.mark.parametrize(
    ("field", "dtype", "expected"),
    [
        ("mw", "uint8", "int8"),
        ("vw", "int8", "uint8"),
        ("mw", "float32", "int8"),
        ("vw", "float32", "uint8"),
    ],
)
def test_e41_codes_of_another_dtype(field, dtype, expected):
    state = adam8().init(W)
    codes = getattr(state, field)["layer"]["w"].codes.astype(dtype)
    assert_error(
        TypeError,
        f"adam: `state.{field}` at ['layer']['w']: an array of {dtype} and shape (64, 64) as `codes`, "
        f"expected {expected}.",
        lambda: adam8().update(W, changed(state, field, codes=codes), W),
    )


@pytest.mark.parametrize("shape", [(32,), (64, 1), (1,), ()])
def test_e41_scales_of_another_block(shape):
    """128 elements to a block, or 2048, or one scale for each row of 64."""
    state = changed(adam8().init(W), "vw", scale=jnp.zeros(shape))
    assert_error(
        ValueError,
        f"adam: `state.vw` at ['layer']['w']: `scale` of shape {shape}, expected a number for each "
        "block of 256 elements of `codes`, of shape (64, 64).",
        lambda: adam8().update(W, state, W),
    )


# ---- models without a large leaf ---------------------------------------------------------------


def test_no_large_leaf_is_said_once(caplog, monkeypatch):
    """In the log, where nothing is an error; not for a user who keeps every leaf in float32."""
    monkeypatch.setattr(forms, "_said", [])
    small, large = {"w": jnp.ones((32, 64)), "n": jnp.arange(9000), "x": None}, jnp.ones((64, 64))
    for tx, w in (
        (jgrad.adam(0.1), small),
        (jgrad.adam(0.1, moment_dtype="8bit"), small | {"v": large}),
        (jgrad.adam(0.1, moment_dtype="8bit"), {"n": small["n"]}),
        (jgrad.adam(0.1, moment_dtype="8bit", full_precision=True), small),
        (jgrad.adam(0.1, moment_dtype="8bit"), jgrad.pack({"w": small["w"], "v": large})),
    ):
        tx.init(w)
    assert not caplog.records
    tx = jgrad.accumulate(jgrad.lamb(0.1, moment_dtype="8bit"), 2)
    for init in (jax.jit(tx.init), tx.init):
        init(small)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("jgrad", "WARNING")
    assert record.getMessage() == (
        "lamb: `moment_dtype='8bit'` has no effect on these leaves: moments are in 8 bits from "
        "4096 elements of a leaf on, and the largest of these has 2048. Said once."
    )
    monkeypatch.setattr(forms.MomentOptions, "_say_if_small", None)  # nobody looks again
    tx.init(small)
