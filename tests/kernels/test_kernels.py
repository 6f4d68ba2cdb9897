"""What a kernel reads and writes, where there is one, and where there is none."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import export
from jax.interpreters import partial_eval

import jgrad
from jgrad._kernels import platforms, tpu
from jgrad._trees.places import WHOLE
from tests.support.compilations import compilations
from tests.support.kernels import ADAM, MOMENTUM, normal, plain, steps, with_update
from tests.support.loops import assert_equal, stack
from tests.support.private import inner_equations

LEAF_STEP = "jgrad_leaf_step"
SHAPES = {"w": (24, 512), "odd": (50, 100)}


def model(dtype=jnp.float32):
    return normal(SHAPES, 0, dtype)


def kernels(tx, w, step=jgrad.apply_gradients):
    """The kernel of each leaf: its equation, as a program for a TPU has it."""
    traced = jax.make_jaxpr(functools.partial(step, tx))(w, tx.init(w), w)
    jaxpr, _ = partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.out_avals))
    equations = inner_equations(jaxpr.eqns)
    leaves = [x for x in equations if x.primitive.name == LEAF_STEP]
    found = []
    for leaf in leaves:
        run = functools.partial(tpu.run, leaf.params["step"], place=WHOLE, interpret=True)
        inner = jax.make_jaxpr(lambda *xs, run=run: run(xs))(*(x.aval for x in leaf.invars))
        found += [x for x in inner.jaxpr.eqns if x.primitive.name == "pallas_call"]
    return found


def test_new_codes_are_made_of_old_ones(monkeypatch):
    """Or XLA for a GPU does not write them in their place: those of Adan's gradients, too."""
    tx, w = jgrad.adan(0.1, moment_dtype="8bit"), {"w": jnp.ones((16, 256))}
    traced = jax.make_jaxpr(tx.update)(w, tx.init(w), w)
    (leaf,) = (x for x in inner_equations(traced.jaxpr.eqns) if x.primitive.name == LEAF_STEP)
    step = leaf.params["step"]
    monkeypatch.setattr(platforms, "barrier", lambda tree: tree)  # of which all needs all
    run = lambda *xs: platforms.in_two_passes(step, xs)
    inner = jax.make_jaxpr(run)(*(x.aval for x in leaf.invars)).jaxpr
    assert len(step.codes) == 4
    for old, new in zip(
        step.codes, range(len(inner.outvars) - 8, len(inner.outvars), 2), strict=True
    ):
        used = [i == new for i in range(len(inner.outvars))]
        assert partial_eval.dce_jaxpr(inner, used)[1][old]


def update(tx, g, state, w):
    """Without the weights that come of it."""
    return tx.update(g, state, w)


def dtypes(values, shape=(1, 24, 512)):
    """Of the arrays that have the shape of the leaf."""
    return sorted(str(x.aval.dtype) for x in values if x.aval.shape == shape)


def clipped(tx):
    return optax.chain(jgrad.clip_by_global_norm(1.0), tx)


# ---- what a kernel has -------------------------------------------------------------------------

FLOATS = ["float32", "float32"]
STOCHASTIC = lambda: jgrad.stochastic_rounding(ADAM())
SKIP = lambda: jgrad.skip_nonfinite(clipped(ADAM()))
HALF = ("stochastic", "stochastic momentum", "master", "scaled loss")  # of bfloat16 parameters
# What is read and written of the shape of a leaf: gradient, weight, codes; codes and weight.
WHOLE_STEPS = {
    "adam": (ADAM, [*FLOATS, "int8", "uint8"], ["float32", "int8", "uint8"]),
    "momentum": (MOMENTUM, [*FLOATS, "int8"], ["float32", "int8"]),
    "stochastic": (STOCHASTIC, ["bfloat16", "bfloat16", "int8", "uint8"], ["bfloat16", "int8", "uint8"]),
    "stochastic momentum": (  # whose decay reads the weight in float32
        lambda: jgrad.stochastic_rounding(MOMENTUM()),
        ["bfloat16", "bfloat16", "int8"],
        ["bfloat16", "int8"],
    ),
    "master": (lambda: jgrad.master_weights(ADAM()), ["bfloat16", "bfloat16", "float32", "int8", "uint8"],
     ["bfloat16", "float32", "int8", "uint8"]),
    "scaled loss": (lambda: jgrad.skip_nonfinite(jgrad.stochastic_rounding(clipped(ADAM())), loss_scale=4.0),
     ["bfloat16", "bfloat16", "int8", "uint8"], ["bfloat16", "int8", "uint8"]),
    "skip(clip(adam))": (SKIP, [*FLOATS, "int8", "uint8"], ["float32", "int8", "uint8"]),
}  # fmt: skip


@pytest.mark.slow(one_in=3, always=["stochastic", "scaled loss"])
@pytest.mark.parametrize("name", WHOLE_STEPS)
def test_each_array_is_read_and_written_once(name):
    make, read, written = WHOLE_STEPS[name]
    w = model(jnp.bfloat16 if name in HALF else jnp.float32)
    (kernel,) = kernels(make(), w)
    assert dtypes(kernel.invars) == read
    assert dtypes(kernel.outvars) == written
    scales = (1, 2, 24)  # of which nothing is transposed in memory
    assert dtypes(kernel.invars, scales) == dtypes(kernel.outvars, scales)
    assert len(kernel.outvars) == len(written) + len(dtypes(kernel.outvars, scales))
    assert not [x for x in kernel.invars if x.aval.shape == (1, 1, 24)]  # but in packed trees


def test_no_weight_is_added_to_after_a_kernel():
    """A wrapper that changes weights tells the one around it what the kernel made of its update."""
    tx, w = STOCHASTIC(), model(jnp.bfloat16)
    program = jax.make_jaxpr(functools.partial(jgrad.apply_gradients, tx))(w, tx.init(w), w).jaxpr
    made_by = {out: x.primitive.name for x in program.eqns for out in x.outvars}
    odd, kernel = program.outvars[:2]
    assert (made_by[odd], made_by[kernel]) == ("add", "jit")


@pytest.mark.parametrize("make", [functools.partial(jgrad.adam, 0.1, moment_dtype="8bit"), ADAM])
def test_updates_alone(make):
    """A direction is written, and no weight is read: what is cheap after it is XLA's to fuse."""
    (kernel,) = kernels(make(), model(), update)
    assert dtypes(kernel.invars) == ["float32", "int8", "uint8"]
    assert dtypes(kernel.outvars) == ["float32", "int8", "uint8"]


def test_packed_rows_have_numbers_of_their_own():
    """Keys, and the rates of leaves: one for each row, of one kernel."""
    w = jgrad.pack(model())
    (rows, _), *_ = (x.shape for x in jax.tree.leaves(w))
    (tree,) = kernels(jgrad.adam(0.1, moment_dtype="8bit"), model())
    (kernel,) = kernels(jgrad.adam({"w": 0.1, "odd": 0.2}, moment_dtype="8bit"), w)
    columns = [x for x in kernel.invars if x.aval.shape == (1, 1, rows)]
    scales = 2
    assert len(columns) == scales + 2 + 1  # two keys, and the rate
    assert len(kernel.invars) == len(tree.invars)


def test_what_comes_after_a_sum_is_in_no_kernel():
    """LAMB scales its direction by norms of it: the kernel writes that, and no moment in float32."""
    (kernel,) = kernels(jgrad.lamb(0.1, weight_decay=0.1, moment_dtype="8bit"), model())
    assert dtypes(kernel.invars) == ["float32", "float32", "int8", "uint8"]
    assert dtypes(kernel.outvars) == ["float32", "int8", "uint8"]


def test_a_branch_has_kernels_of_its_own():
    """`accumulate` updates in a conditional, in one branch of which there is a kernel."""
    assert len(kernels(jgrad.accumulate(ADAM(), 2), model())) == 1


def test_a_transformation_of_others_between_ours():
    """Its updates are written and read again: 8 bytes for each parameter, as without kernels."""
    halved = optax.stateless(lambda g, _: jax.tree.map(lambda x: x / 2, g))
    (kernel,) = kernels(optax.chain(ADAM(), halved), model())
    assert dtypes(kernel.outvars) == ["float32", "int8", "uint8"]
    (kernel,) = kernels(optax.chain(halved, ADAM()), model())
    assert dtypes(kernel.invars) == [*FLOATS, "int8", "uint8"]
    direction = optax.chain(jgrad.scale_by_adam(moment_dtype="8bit"), halved)
    (kernel,) = kernels(direction, model())  # which reads no weight
    assert dtypes(kernel.invars) == ["float32", "int8", "uint8"]


@pytest.mark.parametrize("wrap", [lambda tx: tx, jgrad.master_weights], ids=["plain", "master"])
def test_float16_stays_outside(wrap):
    """A kernel has no arrays of it: it reads the gradient in float32, and writes a direction."""
    (kernel,) = kernels(wrap(ADAM()), model(jnp.float16))
    assert "float16" not in {str(x.aval.dtype) for x in (*kernel.invars, *kernel.outvars)}
    assert {"int8", "uint8"} <= set(dtypes(kernel.outvars))


def test_an_average_of_the_weights_that_a_kernel_wrote():
    """`average_params` reads new weights: of old ones, which are written over, there would be a copy."""
    (kernel,) = kernels(jgrad.average_params(ADAM(), 0.9), model())
    assert dtypes(kernel.outvars) == ["float32", "int8", "uint8"]


def test_the_gradient_of_lars_is_scaled_in_the_kernel():
    (kernel,) = kernels(jgrad.lars(0.1, weight_decay=0.1, moment_dtype="8bit"), model())
    assert dtypes(kernel.invars) == [*FLOATS, "int8"]
    assert dtypes(kernel.outvars) == ["float32", "int8"]


# ---- the program -------------------------------------------------------------------------------


def pallas_calls(text):
    return text.count("tpu_custom_call")


def for_tpu(f, *args, platforms=("tpu",)):
    return export.export(jax.jit(f), platforms=list(platforms))(*args)


@pytest.mark.parametrize("packed", [False, True], ids=["tree", "packed"])
@pytest.mark.parametrize("step", [jgrad.apply_gradients, update], ids=["step", "update"])
def test_codes_and_weights_are_written_in_their_place(step, packed):
    """The kernel says which results alias which arguments."""
    tx, w = ADAM(), jgrad.pack(model()) if packed else model()
    (kernel,) = kernels(tx, w, step)
    aliased = []
    for i, o in kernel.params["input_output_aliases"]:
        old, new = kernel.invars[i].aval, kernel.outvars[o].aval
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
        aliased.append(str(old.dtype))
    of_moments = ["float32", "float32", "int8", "uint8"]  # scales and codes
    weights = ["float32"] if step is jgrad.apply_gradients else []
    assert sorted(aliased) == sorted(of_moments + weights)


@pytest.mark.slow
def test_one_program_for_all_platforms():
    """That of the CPU runs, and is the plain one."""
    tx, w = SKIP(), model()
    step = functools.partial(jgrad.apply_gradients, tx)
    exported = for_tpu(step, w, tx.init(w), w, platforms=("cpu", "cuda", "tpu"))
    assert pallas_calls(exported.mlir_module()) == 1
    assert exported.platforms == ("cpu", "cuda", "tpu")
    expected = plain(tx, w, [w])
    assert_equal(tuple(exported.call(w, tx.init(w), w)), (expected.w, expected.state))


@pytest.mark.parametrize("name", ["x64", "accumulate", "scan"])
def test_programs_for_a_tpu_have_kernels(name, request):
    if name == "x64":
        request.getfixturevalue("x64")
    tx, w = jgrad.accumulate(ADAM(), 2) if name == "accumulate" else ADAM(), model()
    step = functools.partial(jgrad.apply_gradients, tx)
    if name == "scan":
        one, loop = step, jax.lax.fori_loop
        step = lambda g, state, w: loop(0, 3, lambda _, old: one(g, *old[::-1]), (w, state))
    assert pallas_calls(for_tpu(step, w, tx.init(w), w).mlir_module()) == 1


# ---- surroundings ------------------------------------------------------------------------------


def test_leaves_of_one_shape_share_a_function():
    tx, w = ADAM(), [jnp.ones((16, 256)) for _ in range(5)]
    text = jax.jit(tx.update).lower(w, tx.init(w), w).as_text()
    assert text.count("shift_right_arithmetic") == 2  # one for each moment


@pytest.mark.slow
def test_one_trace_for_many_steps():
    tx, w = jgrad.skip_nonfinite(ADAM()), model()
    traces = []

    @jax.jit
    def step(g, state, w):
        traces.append(None)
        return jgrad.apply_gradients(tx, g, state, w)

    state = tx.init(w)
    w, state = step(w, state, w)

    def again(g):
        nonlocal w, state
        w, state = step(g, state, w)

    assert compilations(again, model(), model(), model()) == 0
    assert len(traces) == 1


@pytest.mark.slow
def test_vmap_over_gradients_alone():
    tx, w = MOMENTUM(), model()
    grads = [normal(SHAPES, i) for i in range(2)]
    found = jax.jit(jax.vmap(lambda g: jgrad.apply_gradients(tx, g, tx.init(w), w)))(stack(grads))
    assert_equal(found[0], stack([plain(tx, w, [g]).w for g in grads]))


def test_no_derivative():
    """The error of codes is as clear as it is without kernels."""
    tx, w = MOMENTUM(), model()

    def loss(g):
        updates, _ = tx.update(g, tx.init(w), w)
        _, state = tx.update(g, tx.update(g, tx.init(w), w)[1], w)
        return jnp.sum(updates["w"]) + jnp.sum(state.mw["w"].scale)

    with pytest.raises(TypeError, match="no derivative goes through moments stored in 8 bits"):
        jax.jit(jax.grad(loss))(w)


def test_a_derivative_by_the_rate():
    """Codes do not depend on it, and weights do."""
    w, form = model(), {"moment_dtype": "8bit"}
    state = jgrad.adam(0.1, **form).init(w)

    def total(rate, step):
        new, _ = step(jgrad.adam(rate, **form), w, state, w)
        return jnp.sum(new["w"])

    found, expected = (
        jax.jit(jax.grad(functools.partial(total, step=step)))(0.1)
        for step in (jgrad.apply_gradients, with_update)
    )
    assert found == expected != 0


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize("around", [jgrad.stochastic_rounding, jgrad.master_weights])
@pytest.mark.parametrize("through", [jax.jit, jax.vmap])
def test_what_follows_an_update_goes_through_transformations_of_jax(around, through):
    """There arrays have other identities, and the wrapper computes it afterwards."""
    w, tx = model(jnp.bfloat16), ADAM()
    state, g = around(tx).init(w), model(jnp.bfloat16)
    expected = jax.jit(functools.partial(jgrad.apply_gradients, around(tx)))(g, state, w)
    if through is jax.vmap:
        one = lambda x: jax.tree.map(lambda a: a[None], x)
        step = functools.partial(jgrad.apply_gradients, around(tx))
        found = jax.tree.map(lambda a: a[0], jax.jit(jax.vmap(step))(one(g), one(state), one(w)))
    else:
        inner = optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))
        found = jax.jit(functools.partial(jgrad.apply_gradients, around(inner)))(g, state, w)
    assert_equal(found, expected)


@pytest.mark.slow
def test_without_jit():
    tx, w = MOMENTUM(), model()
    with jax.disable_jit():
        found = jgrad.apply_gradients(tx, w, tx.init(w), w)
    expected = plain(tx, w, [w])
    assert_equal(tuple(found), (expected.w, expected.state))


@pytest.mark.slow
def test_a_rate_along_the_last_axis_of_a_square_matrix():
    """It is no number for each row."""
    w = normal({"w": (256, 256)})
    tx = jgrad.adam({"w": jnp.linspace(0.0, 1.0, 256)}, **(ADAM.keywords))
    found = steps(tx, w, [w], "kernel")
    expected = plain(tx, w, [w])
    assert_equal((found.w, found.state), (expected.w, expected.state))
    assert found.leaves == 1


@pytest.mark.slow
def test_eager_steps():
    """No program: what each operation returns."""
    tx, w = MOMENTUM(), model()
    with platforms.forced("kernel"):
        found = jgrad.apply_gradients(tx, w, tx.init(w), w)
    expected = plain(tx, w, [w])
    assert_equal(tuple(found), (expected.w, expected.state))


def test_no_codes_no_call():
    """Transformations in float32 are traced as they were."""
    tx, w = jgrad.adam(0.1), model()
    traced = str(jax.make_jaxpr(functools.partial(jgrad.apply_gradients, tx))(w, tx.init(w), w))
    assert "jgrad_leaf_step" not in traced


# ---- answers -----------------------------------------------------------------------------------

ONE = "one kernel"
ODD = "XLA: its last axis, 100, is not a multiple of 256"


@pytest.mark.parametrize("wrap", [lambda tx: tx, clipped, lambda tx: jgrad.accumulate(tx, 2)])
def test_answers(wrap):
    found = jgrad.leaf_programs(wrap(MOMENTUM()), model())
    assert [(path.rpartition(".")[2], x) for path, x in found.items()] == [
        ("mw['odd']", ODD),
        ("mw['w']", ONE),
    ]


def test_answers_of_shapes():
    shapes = jax.eval_shape(model)
    assert jgrad.leaf_programs(ADAM(), shapes) == jgrad.leaf_programs(ADAM(), model())


def test_answers_without_8_bits():
    assert jgrad.leaf_programs(jgrad.adam(0.1), model()) == {}


def test_answers_of_other_blocks():
    """A vector, whose rows are no multiple, and layers that are stacked over the last axis."""
    w = {"long": jnp.ones(5120), "cut": jnp.ones((32, 256)), "ragged": jnp.ones(5000)}
    tx = jgrad.lamb(0.1, layer_axes={"long": None, "cut": -1, "ragged": None}, moment_dtype="8bit")
    found = jgrad.leaf_programs(tx, w)
    assert found[".mw['cut']"] == "XLA: it is stored in other blocks than along its last axis"
    assert found[".mw['long']"] == found[".mw['ragged']"] == "XLA: it has no rows"


def test_answers_of_what_is_not_updated():
    """A transformation of a user that keeps a moment, and never updates it."""
    idle = optax.GradientTransformation(MOMENTUM().init, lambda g, state, w=None: (g, state))
    assert jgrad.leaf_programs(idle, model())[".mw['w']"] == (
        "XLA: it is not updated element by element"
    )


def test_answers_refuse_what_is_no_transformation():
    with pytest.raises(TypeError, match="leaf_programs"):
        jgrad.leaf_programs(lambda g: g, model())
