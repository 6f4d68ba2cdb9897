"""SOAP: its numbers beside the reference and beside what it promises, whole and in pieces."""

import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st
from jax.extend import core
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jgrad
from benchmarks.accelerators import hlo
from jgrad._soap import bases
from tests.multi_device.meshes import mesh_of
from tests.reference import optimizers as reference
from tests.support import messages
from tests.support.loops import assert_equal, run, step_of, train
from tests.support.precision import in_64_bits
from tests.support.private import forced

RATE = 0.05
soap = functools.partial(jgrad.soap, RATE, matrices=True)


def normal(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def some(count, *shape, dtype=np.float64):
    return [normal(*shape, seed=t + 1, dtype=dtype) for t in range(count)]


def by_reference(w, grads, **options):
    optimizer = reference.soap([w], RATE, matrices=[True], **options)
    return [x[0] for x in reference.trajectory(optimizer, [[g] for g in grads])]


def close(found, expected, rtol=1e-11):
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol * np.max(np.abs(expected)))


# ---- beside the reference ----------------------------------------------------------------------


@pytest.mark.slow(
    always=[
        "(4, 3, 2)-{'layer_axes': 2, 'output_axes': 1, 'every': 2, 'first_step': 'adam'}",
        "(4, 3)-{'output_axes': 0, 'max_side': 3, 'every': 1}",
    ]
)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((5, 5), {}),
        ((2, 4, 3), {"layer_axes": 0, "every": 2}),
        ((4, 3, 2), {"layer_axes": 2, "output_axes": 1, "every": 2, "first_step": "adam"}),
        ((4, 3), {"output_axes": 0, "max_side": 3, "every": 1}),
        ((2, 3, 2), {"output_axes": (0, 2), "every": 1}),
    ],
    ids=str,
)
def test_layers_and_outputs(shape, options, x64):
    w, grads = normal(*shape), some(25, *shape)
    found, _ = run(soap(**options), jnp.asarray(w), list(map(jnp.asarray, grads)))
    for a, b in zip(found, by_reference(w, grads, **options), strict=True):
        close(a, b)


@pytest.mark.slow
def test_packed_beside_matrices(x64):
    """Leaves of a buffer stand before, between and behind matrices, which keep their factors."""
    w = {
        "a": normal(3),
        "b": normal(4, 5, seed=1),
        "c": normal(2, seed=2),
        "d": normal(3, 2, seed=3),
    }
    w = {name: jnp.asarray(x) for name, x in w.items()}
    tx = jgrad.soap(RATE, matrices={name: x.ndim > 1 for name, x in w.items()}, every=1)
    grads = [jax.tree.map(lambda x, t=t: jnp.cos(3 * x + t), w) for t in range(4)]
    pack = functools.partial(jgrad.pack, max_size=5)
    found, packed = train(tx, pack(w), list(map(pack, grads)))
    expected, state = train(tx, w, grads)
    chex.assert_trees_all_close(jgrad.unpack(found), expected, rtol=1e-9)
    chex.assert_trees_all_close(packed.factors, state.factors, rtol=1e-9, atol=1e-9)


def test_none_in_a_packed_tree():
    """As in the tree: a matrix behind it keeps its factors, and nothing is an error."""
    w = {"a": jnp.ones(3), "b": None, "c": jnp.ones((4, 5))}
    tx = jgrad.soap(RATE, matrices={"a": False, "b": False, "c": True}, every=1)

    def step(w):
        updates, state = tx.update(w, tx.init(w), w)
        return jgrad.unpack(updates), state.factors

    shapes = [jax.eval_shape(step, tree) for tree in (w, jgrad.pack(w, max_size=5))]
    assert shapes[0] == shapes[1]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [2, (3, 2, 2)], ids=str)
def test_split(sizes, x64):
    """Blocks are matrices of their own, in runs of one size; weights move as if they were apart."""
    width = 6 if sizes == 2 else 7
    w, grads = normal(3, width), some(7, 3, width)  # null spaces have one direction at most
    tx = soap(split=sizes, every=2)
    found, state = run(tx, jnp.asarray(w), list(map(jnp.asarray, grads)))
    lengths = [2, 2, 2] if sizes == 2 else sizes
    ends = np.cumsum([0, *lengths])
    for first, end in itertools.pairwise(ends):
        expected = by_reference(w[:, first:end], [g[:, first:end] for g in grads], every=2)
        close(found[-1][:, first:end], expected[-1])
    runs = state.factors if isinstance(state.factors[0], tuple) else (state.factors,)
    shapes = [run.right.shape for run in runs]
    assert shapes == ([(3, 2, 2)] if sizes == 2 else [(3, 3), (2, 2, 2)])


@pytest.mark.slow(always=["20"])
@pytest.mark.parametrize("updates", [2, 10, 20, 40])
def test_second_moments_are_averages_of_every_update(updates, x64):
    """Of one gradient; the first update is in none. A copy that is known keeps one in ten."""
    g = jnp.asarray(normal(4, 4))
    _, state = train(soap(), jnp.zeros((4, 4)), [g] * updates)
    bases = state.factors
    turned = bases.left_basis.T @ g @ bases.right_basis
    close(np.diag(state.vw / turned**2), np.full(4, 1 - 0.95 ** (updates - 1)), 1e-9)


undecayed = soap(every=2, epsilon=0.0)  # one program for all examples


@given(st.sampled_from([2, 4]), st.integers(0, 2**32 - 1), st.booleans())
def test_turned_gradients_turn_updates(size, seed, is_complex):
    """For orthogonal U and V the update of U G V^T is U (update of G) V^T."""
    with in_64_bits():
        rng = np.random.default_rng(seed)

        def draw():
            x = rng.normal(size=(size, size))
            return x + 1j * rng.normal(size=x.shape) if is_complex else x

        (u, _), (v, _) = (np.linalg.qr(draw()) for _ in range(2))
        grads, zero = [draw() for _ in range(4)], np.zeros((size, size), draw().dtype)
        tx = undecayed
        straight = run(tx, jnp.asarray(zero), list(map(jnp.asarray, grads)))[0]
        turned = run(tx, jnp.asarray(zero), [jnp.asarray(u @ g @ v.conj().T) for g in grads])[0]
        for a, b in zip(straight, turned, strict=True):
            close(b, u @ np.asarray(a) @ v.conj().T, 1e-6)


# ---- bases -------------------------------------------------------------------------------------


def test_bases_are_orthogonal_and_keep_their_signs():
    """In float32, of a gradient of low rank, through many power steps."""
    w, grads = jnp.zeros((64, 24)), [jnp.asarray(x) for x in some(12, 64, 24, dtype=np.float32)]
    tx, state = soap(every=1), soap(every=1).init(w)
    update, before = jax.jit(tx.update), None
    for g in grads:
        state = update(g, state, w)[1]
        for basis in (state.factors.left_basis, state.factors.right_basis):
            gram = np.asarray(basis.T @ basis, np.float64)
            assert np.max(np.abs(gram - np.eye(len(gram)))) < 4e-6
        if before is not None:
            assert np.all(np.sum(before * state.factors.right_basis, axis=0) > 0)
        before = state.factors.right_basis


@pytest.mark.slow
def test_what_was_never_seen_keeps_its_place(x64):
    """Directions of a null space do not depend on the last bit, and are not turned by noise."""
    g = jnp.asarray(normal(32, 2))
    near = g * jnp.asarray(1 + 2.0**-52 * (normal(32, 2, seed=1) > 0))
    w = jnp.zeros_like(g)
    tx = soap(every=1)
    update = jax.jit(tx.update)
    (_, first), (_, other) = (update(x, tx.init(w), w) for x in (g, near))
    close(other.factors.left_basis, first.factors.left_basis, 1e-12)
    _, second = update(near, first, w)
    close(second.factors.left_basis, first.factors.left_basis, 1e-12)


def test_averages_of_a_low_rank(x64):
    """Nor do directions that an average has not seen yet, wherever they are among the columns.

    After three gradients with two columns each, two directions of eight are still missing. Two
    columns keep out of what was seen, and the others have all of it.
    """
    tx, w = soap(every=2), jnp.zeros((8, 2))
    update, ends = jax.jit(tx.update), []
    for seed in range(12):
        grads = normal(4, 8, 2, seed=seed)
        rounded = grads * (1 + 2.0**-52 * (normal(4, 8, 2, seed=seed + 100) > 0))
        for sequence in (grads, rounded):
            state = tx.init(w)
            for t, g in enumerate(sequence):
                updates, state = update(jnp.asarray(g), state, w)
                basis = state.factors.left_basis
                if t == 2:
                    seen = np.linalg.norm(state.factors.left @ basis, axis=0)
                    assert np.sum(seen < 1e-10 * np.max(seen)) == 2
            np.testing.assert_allclose(basis.T @ basis, np.eye(8), atol=1e-14)
            ends.append((updates, basis))
    for before, after in zip(ends[::2], ends[1::2], strict=True):
        for a, b in zip(before, after, strict=True):
            close(a, b, 1e-8)


@functools.cache
def trained_by(every, shape):
    """The update of an undecayed SOAP in one program, with the number of updates as its length."""
    tx = soap(every=every)

    def trained(w, grads, state=None):
        def body(carry, g):
            return step_of(tx)(*carry, g), None

        return jax.lax.scan(body, (w, tx.init(w) if state is None else state), grads)[0]

    return jax.jit(trained)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("shape", "every"), [((6, 6), 10), ((12, 4), 1)], ids=str)
def test_what_has_no_gradient_does_not_move(shape, every, dtype, x64):
    """As the pixels of a dark border: unit vectors stay, of every other input, to the last bit."""
    w, grads = normal(*shape, dtype=dtype), np.stack(some(12, *shape, dtype=dtype))
    grads[:, [1, 4]] = grads[:, :, 2] = 0
    found, state = trained_by(every, shape)(jnp.asarray(w), jnp.asarray(grads))
    moved = np.asarray(found != w)
    assert not moved[[1, 4]].any()
    assert not moved[:, 2].any()
    assert moved.sum() == (shape[0] - 2) * (shape[1] - 1)
    left, right = map(np.asarray, (state.factors.left_basis, state.factors.right_basis))
    for rows in (left[[1, 4]], right[[2]]):
        assert np.all((rows == 0) | (rows == 1))
        assert np.all(rows.sum(axis=1) == 1)
    for basis in (left, right):
        np.testing.assert_allclose(basis.T @ basis, np.eye(len(basis)), atol=2e-6)


def test_a_basis_in_which_dead_rows_are_mixed(x64):
    """As 1.1 made it: a power step gives them directions of their own."""
    g = normal(12, 4)
    g[[2, 5]] = 0
    tx, w = soap(every=1), jnp.zeros((12, 4))
    update = jax.jit(tx.update)
    _, state = update(jnp.asarray(g), tx.init(w), w)
    mixed = state.factors._replace(left_basis=jnp.asarray(np.linalg.svd(g)[0]))
    _, state = update(jnp.asarray(g), state._replace(factors=mixed), w)
    rows = np.asarray(state.factors.left_basis)[[2, 5]]
    np.testing.assert_array_equal(np.sort(rows), [[0.0] * 11 + [1.0]] * 2)


def test_units_that_die_come_to_rest(x64):
    """Their moments decay as Adam's do; rounding would move them by a tenth of a step for ever."""
    grads = np.stack(some(600, 8, 8, dtype=np.float32))
    grads[20:, [1, 4, 5]] = 0
    w = jnp.zeros((8, 8), jnp.float32)
    train = trained_by(10, (8, 8))  # of one length, so that it is one program
    state = soap().init(w)
    for i in range(0, 600, 100):
        before, (w, state) = w, train(w, jnp.asarray(grads[i : i + 100]), state)
    after = w
    moved = np.abs(np.asarray(after) - np.asarray(before))
    # In 100 updates, of which the first has 0.95^240 of a step of Adam, at most.
    assert np.max(moved[[1, 4, 5]]) < 100 * RATE * 1e-5
    assert np.max(moved[[0, 2, 3, 6, 7]]) > RATE


@pytest.mark.slow(always=["8bit", "bfloat16"])
@pytest.mark.parametrize("form", [None, jnp.bfloat16, "8bit"])
def test_rounding_is_no_direction(form):
    """Of one gradient of rank 2, steps are its singular vectors; m and v of other pairs are noise."""
    g = (normal(64, 2) @ normal(2, 64, seed=1)).astype(np.float32)
    u, _, v = np.linalg.svd(np.asarray(g, np.float64))
    tx = jgrad.soap(1.0, matrices=True, moment_dtype=form)
    state, update = tx.init(jnp.asarray(g)), jax.jit(tx.update)
    for t in range(6):
        updates, state = update(jnp.asarray(g), state, jnp.asarray(g))
        off = updates + (u[:, :2] @ v[:2] if t else 0)
        # They may be off by less than a step of Adam. Divided by its root, noise is off by thousands.
        assert np.sqrt(np.mean(np.square(off))) < 1
        assert np.max(np.abs(off)) < 8


@pytest.mark.slow
def test_a_clip_by_root_mean_squares_bounds_steps(x64):
    """It is no less than that of ordinary steps, as docs/methods.md promises of this remedy."""
    tx, w = jgrad.soap(1.0, matrices=True, every=1), jnp.zeros((6, 6))
    update = jax.jit(
        lambda grads: jax.lax.scan(lambda s, g: tx.update(g, s, w)[::-1], tx.init(w), grads)[1]
    )
    grads = np.stack(some(40, 6, 6))
    exponents = np.random.default_rng(1).uniform(-8, 8, grads.shape)
    ordinary, wide = (np.asarray(update(g)) for g in (grads, grads * 10**exponents))
    sizes = [np.max(np.sqrt(np.mean(x**2, axis=(1, 2)))) for x in (ordinary, wide)]
    assert sizes[0] < 1 + 1e-9
    assert sizes[1] > 4


@pytest.mark.slow
def test_slopes_take_bases_for_constants(x64):
    """They are those of finite differences where no basis depends on what is differentiated."""
    g0, g1, g2 = (jnp.asarray(x) for x in some(3, 3, 3))
    tx, w = soap(every=1), jnp.zeros((3, 3))

    def last(scale):
        state = tx.init(w)
        for g in (g0, g1, scale * g2):
            updates, state = tx.update(g, state, w)
        return jnp.sum(updates * g0)

    h = 1e-6
    expected = (last(1 + h) - last(1 - h)) / (2 * h)
    np.testing.assert_allclose(jax.grad(last)(1.0), expected, rtol=1e-6)


def decompositions(f, *args):
    """The shapes of what is decomposed on accelerators, by the names of the operations."""
    found = {}

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            if equation.params.get("branches_platforms"):  # the last is not that of CPUs
                visit(equation.params["branches"][-1].jaxpr)
                continue
            name = equation.primitive.name
            if name in ("eigh", "qr", "geqrf", "cond"):
                found.setdefault(name, []).append(equation.invars[-1].aval.shape)
            for x in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
                if is_jaxpr(x):
                    visit(getattr(x, "jaxpr", x))

    is_jaxpr = lambda x: isinstance(x, (core.Jaxpr, core.ClosedJaxpr))
    visit(jax.make_jaxpr(f)(*args).jaxpr)
    return found


def test_bases_of_a_size_are_decomposed_together():
    """24 matrices, whose sides have two sizes: two conditionals, in place of 48.

    In each is another one, for averages of a low rank.
    """
    w = {f"up{i}": jnp.ones((8, 16)) for i in range(12)} | {"down": jnp.ones((12, 16, 8))}
    tx = soap(layer_axes={k: 0 if k == "down" else None for k in w})
    found = decompositions(tx.update, w, tx.init(w), w)
    assert len(found["cond"]) == 4
    assert sorted(found["eigh"]) == [(24, 8, 8), (24, 16, 16)]
    assert {(24, 8, 8), (24, 16, 16)} == set(found.get("geqrf", found.get("qr")))


def test_a_cpu_decomposes_one_matrix_after_another():
    """JAX divides a stack among threads of XLA, of which each device may hold one that waits."""
    w = jnp.ones((3, 8, 8))
    tx = soap(layer_axes=0)
    text = jax.jit(tx.update).lower(w, tx.init(w), w).as_text()
    operands = re.findall(r"custom_call @lapack.*: \((.*)\) ->", text)
    assert len(operands) == 3  # of an eigh, and of both parts of a QR
    assert {x.partition(",")[0] for x in operands} == {"tensor<8x8xf32>"}


def test_stacks_of_other_platforms(monkeypatch, x64):
    """They are decomposed at once, into the same."""
    w, grads = normal(3, 5, 4), some(4, 3, 5, 4)
    w, grads = jnp.asarray(w), list(map(jnp.asarray, grads))
    make = functools.partial(soap, layer_axes=0, every=2)
    expected = train(make(), w, grads)
    default = lambda *args, cpu, default: default(*args)
    monkeypatch.setattr(jax.lax, "platform_dependent", default)
    monkeypatch.setattr(bases, "_refreshed_alike", bases._refreshed_alike.__wrapped__)
    jax.tree.map(close, train(make(), w, grads), expected)


# ---- the state ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "bytes_"), [(None, 24), (jnp.bfloat16, 20), ("8bit", 18.03)])
def test_bytes_of_the_state(form, bytes_):
    """As docs/memory.md has them, of square matrices in float32."""
    state = jax.eval_shape(soap(moment_dtype=form).init, jnp.ones((256, 256)))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    np.testing.assert_allclose(size / 256**2, bytes_, rtol=1e-3)
    assert all(x.dtype == jnp.float32 for x in state.factors)


def test_a_program_has_no_identity_in_it():
    """Bases begin as one, of which each would be as large in the program as in memory."""
    assert not jax.make_jaxpr(soap().init)(jnp.ones((8, 6))).consts


def test_large_sides_have_no_factors():
    state = soap(max_side=3).init(jnp.ones((4, 3)))
    assert state.factors.left is state.factors.left_basis is None
    assert state.factors.right.shape == (3, 3)


@pytest.mark.slow
def test_a_skipped_step_changes_no_factor():
    w, bad = jnp.ones((4, 3)), jnp.full((4, 3), jnp.inf)
    tx = jgrad.skip_nonfinite(soap(every=1))
    g1, g2 = (jnp.asarray(x) for x in some(2, 4, 3, dtype=np.float32))
    w, state = train(tx, w, [g1, g2])
    updates, new = jax.jit(tx.update)(bad, state, w)
    assert_equal(new.inner, state.inner)
    assert_equal(updates, jnp.zeros_like(w))
    assert new.skipped == 1


def test_gradients_at_every_scale():
    """Finite ones make nothing that is not, and one of 1e38 still turns the bases."""
    tx, start = soap(every=1), jnp.ones((6, 5))
    step = jax.jit(step_of(tx))
    for scale in (1e-38, 1e-20, 1e18, 1e38):
        w, state = start, tx.init(start)
        for x in some(4, 6, 5, dtype=np.float32):
            w, state = step(w, state, jnp.asarray(np.float32(scale) * np.clip(x, -1, 1)))
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((w, state)))
        if scale > 1:
            assert np.max(np.abs(np.asarray(state.factors.left_basis) - np.eye(6))) > 0.1


@pytest.mark.slow
def test_carried_over_from_adam(x64):
    """With the identity for bases, moments of Adam are right, and the next step is AdamW's."""
    w = {"w": jnp.asarray(normal(4, 3)), "b": jnp.ones(3)}
    grads = [
        jax.tree.map(lambda x, t=t: jnp.asarray(normal(*x.shape, seed=t), x.dtype), w)
        for t in range(3)
    ]
    adam = jgrad.adam(RATE, beta1=0.95, beta2=0.95)
    tx = jgrad.soap(RATE, matrices={"w": True, "b": False})
    w, old = train(adam, w, grads[:2])
    state, account = jgrad.carry_over(old, like=jax.eval_shape(tx.init, w))
    assert account.kept == ("step", "mw/b", "mw/w", "vw/b", "vw/w")
    assert account.from_like == ("factors/w/left_basis", "factors/w/right_basis")
    assert account.zero == ("factors/w/left", "factors/w/right")
    updates, new = tx.update(grads[2], state, w)
    # Corrections count the updates after the first: 2 where Adam's count 3.
    expected = jgrad.adam_update(
        w,
        grads[2],
        RATE,
        old.mw,
        old.vw,
        {"w": 2, "b": 3},
        beta1=0.95,
        beta2=0.95,
        epsilon=1e-8,
        bias_correction="moments",
    )[0]
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-10),
        optax.apply_updates(w, updates),
        expected,
    )
    assert_equal(new.factors["w"].left_basis, jnp.eye(4))
    like = jax.eval_shape(adam.init, w)
    with pytest.raises(ValueError, match=r"vw/w, a second moment that `old` lacks; .* `reset=`"):
        jgrad.carry_over(new, like=like)  # what it has is of another basis
    _, account = jgrad.carry_over(new, like=like, reset={"w": True, "b": False})
    assert account.kept == ("step", "mw/b", "vw/b")


# ---- layers in the backward pass, and devices --------------------------------------------------


@pytest.mark.slow
def test_step_in_backward(x64):
    params = {"layers": {"w": jnp.asarray(normal(3, 4, 4))}, "head": jnp.ones((4, 2))}

    def loss(params, x):
        x = jgrad.scan_layers(lambda layer, x: jnp.tanh(x @ layer["w"]), params["layers"], x)
        return jnp.mean((x @ params["head"] - 1) ** 2)

    axes = {"layers": 0, "head": None}
    tx = jgrad.soap(RATE, matrices={"layers": True, "head": False}, layer_axes=axes, every=1)
    x = jnp.asarray(normal(5, 4))
    found = []
    for is_forced in (True, False):
        with forced(is_forced):
            step = jax.jit(jgrad.step_in_backward(tx, loss))
            w, state = params, tx.init(params)
            for _ in range(3):
                w, state, _ = step(w, state, x)
            found.append((w, state))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-10), *found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_dealt_out_over_devices(kind, x64):
    """The numbers stay, and each of four devices decomposes a quarter of the bases of a size."""
    mesh = mesh_of(kind, d=4, m=2)
    specs = {"a": P("d", "m"), "b": P(None, "d"), "c": P()}
    w = {name: jnp.asarray(normal(8, 8, seed=i)) for i, name in enumerate(specs)}
    grads = [
        {k: jnp.asarray(normal(8, 8, seed=9 * t + i)) for i, k in enumerate(w)} for t in range(4)
    ]
    expected = train(soap(every=1), w, grads)
    shardings = {k: NamedSharding(mesh, spec) for k, spec in specs.items()}
    with jax.set_mesh(mesh):
        tx = soap(every=1, shard_over="d")
        state_shardings = jgrad.state_shardings(tx, w, shardings)
        start = jax.device_put(w, shardings)
        state = jax.device_put(tx.init(w), state_shardings)
        step = jax.jit(
            step_of(tx), donate_argnums=(0, 1), out_shardings=(shardings, state_shardings)
        )
        assert set(decompositions(step_of(tx), start, state, start)["eigh"]) == {(2, 8, 8)}
        for g in grads:
            start, state = step(start, state, jax.device_put(g, shardings))
    found = jax.device_get((start, state))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-8), found[0], expected[0]
    )


@pytest.mark.slow(always=["None-d-expected1"])
@pytest.mark.parametrize(
    ("shard_over", "state_over", "expected"),
    [
        (None, None, {"all-gather": 1}),
        (None, "d", {"all-gather": 1}),
        ("d", "d", {"all-to-all": 2}),
    ],
)
def test_collectives_of_new_bases(shard_over, state_over, expected):
    """Averages are gathered or dealt out, and so are bases: nothing is moved for a decomposition."""
    mesh = mesh_of(d=8)
    sharding = NamedSharding(mesh, P("d"))
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    w = {name: place(jnp.ones((8, 8)), sharding) for name in "abc"}
    with jax.set_mesh(mesh):
        tx = soap(shard_over=shard_over)
        shardings = jgrad.state_shardings(tx, w, shard_over=state_over)
        state = jax.tree.map(place, jax.eval_shape(tx.init, w), shardings)
        step = jax.jit(step_of(tx), out_shardings=(dict.fromkeys(w, sharding), shardings))
        text = step.lower(w, state, w).compile().as_text()
    branches = hlo.collectives_by_place(text).branches
    assert len(branches) == 2
    for own in branches:
        assert own == expected


def test_shardings_of_factors():
    """Layers are sharded as those of the parameter, and matrices with `shard_over`."""
    mesh = mesh_of(d=4, m=2)
    w = {"stack": jnp.ones((4, 8, 6)), "w": jnp.ones((8, 6))}
    placed = {"stack": NamedSharding(mesh, P("d")), "w": NamedSharding(mesh, P(None, "m"))}
    tx = soap(layer_axes={"stack": 0, "w": None})
    found = jax.tree.map(lambda x: x.spec, jgrad.state_shardings(tx, w, placed)).factors
    assert found["stack"] == (P("d"),) * 4
    assert found["w"] == (P(),) * 4
    further = jgrad.state_shardings(tx, w, placed, shard_over="d").factors["w"].left_basis
    assert further.spec == P("d")


# ---- what is refused ---------------------------------------------------------------------------

W = {"w": np.ones((4, 3), np.float32), "b": np.ones(3, np.float32)}
BOTH = {"w": True, "b": False}


def updated(tx, state, w=W):
    return tx.update(w, state, w)


def of_choice():
    return jgrad.soap(0.1, matrices=BOTH)


test_messages = messages.test_of("soap", globals())
