"""What a step in the backward pass says of transformations, losses and states that do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgrad
from tests.backward import models
from tests.backward.recipes import adam, eight_bits
from tests.support.errors import assert_error
from tests.support.private import forced

PARAMS, X = models.params(), models.batch()
FLAT = {"up": jnp.ones((3, 2)), "last": jnp.ones((3, 2))}
CLIP = jgrad.clip_by_global_norm(1.0)


def call(tx=None, loss=models.loss, params=PARAMS, state=None, **options):
    """A step, traced."""
    tx = adam() if tx is None else tx
    step = jgrad.step_in_backward(tx, loss, **options)
    state = jax.eval_shape(tx.init, params) if state is None else state
    return lambda: jax.eval_shape(step, params, state, X)


OF_FACTORY = {
    "tx": ({"tx": 3}, TypeError, "`tx`: 3 of type int, expected a transformation with `init` and `update`."),
    "loss": ({"loss": 3}, TypeError, "`loss`: 3 of type int, expected a function."),
    "gradients": ({"gradients": 3}, TypeError, "`gradients`: 3 of type int, expected a function of gradients."),
    "mesh_axes": ({"mesh_axes": 3}, TypeError,
     "`mesh_axes`: 3 of type int, expected None, an axis name, a tuple of names, or a PartitionSpec."),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_FACTORY)
def test_options(name):
    options, error, message = OF_FACTORY[name]
    arguments = {"tx": adam(), "loss": models.loss} | options
    assert_error(error, f"step_in_backward: {message}", lambda: jgrad.step_in_backward(**arguments))


# ---- losses --------------------------------------------------------------------------------------

HERE = (
    "scan_layers: called inside `grad`, `shard_map`, a branch, a loop or a custom "
    "derivative, expected it outside of these; loop and differentiate inside of its block."
)


def add(layer, x):
    return x + jnp.sum(layer["up"])


def scan(params, x=0.0, block=add):
    return jgrad.scan_layers(block, params["layers"], x)


PENALTY = (
    "compute a penalty in its block, by `has_ys=True`, and move what layers share out of the stack, "
    "where `block` may read it"
)
CALLS = (
    "call it once, on a concatenated batch; a model that applies its layers several times needs the "
    "ordinary step"
)


def twice(name, remedy=PENALTY):
    return (
        f"step_in_backward: `params` at ['layers']['{name}']: read twice, expected that only one call of "
        f"`scan_layers` reads it: {remedy}."
    )


def changed(came, remedy):
    return (
        f"scan_layers: `layers`: {came}, expected a leaf, which may be cast, transposed or grouped "
        f"as a whole; {remedy}."
    )


INSIDE = "store it as it is scanned, a stack for each call, or change it inside of `block`"
NO_CALL = (
    "step_in_backward: `loss`: no call of `scan_layers`, expected one, which says where the layers "
    "are."
)


def of_layers(change):
    return lambda p, x: scan({"layers": jax.tree.map(change, p["layers"])})


def penalised(p, x):
    return scan(p) + jnp.sum(jnp.square(p["layers"]["up"]))


def differentiated(p, x):
    return jax.grad(lambda x: scan(p, x))(0.0)


LOSSES = {
    "without a call": (lambda p, x: jnp.sum(p["first"]), ValueError, NO_CALL),
    "a vector": (lambda p, x: scan(p, jnp.zeros(2)), TypeError,
     "step_in_backward: `loss` returns float32[2], expected a real floating scalar."),
    "a pair": (lambda p, x: (scan(p), 1.0), TypeError,
     "step_in_backward: `loss` returns tuple, expected a real floating scalar; use `has_aux=True` for a pair."),
    "two calls": (lambda p, x: scan(p) + scan(p), ValueError, twice("down", CALLS)),
    "a model that applies its layers again": (lambda p, x: scan(p, scan(p)), ValueError, twice("down", CALLS)),
    "a leaf twice in a call": (lambda p, x: scan({"layers": [{"up": p["layers"]["up"]}] * 2},
     block=lambda layer, x: add(layer[0], x)), ValueError, twice("up")),
    "a block that reads its own stack": (lambda p, x: scan(p, block=lambda layer, x: x + jnp.sum(p["layers"]["up"])),
     ValueError, twice("up")),
    "a stack in the carry": (lambda p, x: jnp.sum(scan(p, p["layers"]["down"], lambda layer, x: 2 * x)), ValueError,
     twice("down")),
    "a penalty": (penalised, ValueError, twice("up")),
    "mixed layers": (of_layers(lambda w: w[::-1]), ValueError,
     changed("computed from `params` at ['layers']['down']", INSIDE)),
    "halves": (of_layers(lambda w: w[:2]), ValueError, changed("computed from `params` at ['layers']['down']", INSIDE)),
    "one layer of all": (of_layers(lambda w: w.reshape(-1, 1)), ValueError,
     changed("computed from `params` at ['layers']['down']", INSIDE)),
    "elements of all layers": (lambda p, x: scan({"layers": {"up": p["layers"]["up"].reshape(16, -1)}}), ValueError,
     changed("computed from `params` at ['layers']['up']", INSIDE)),
    "layers of no model": (lambda p, x: scan({"layers": {"up": jnp.ones((3, 2))}}, jnp.sum(p["last"])), ValueError,
     changed("float32[3, 2] outside of `params`", "pass what is not updated as `xs`")),
    "models side by side": (lambda p, x: jnp.sum(jax.vmap(scan)(jax.tree.map(lambda w: jnp.stack([w, w]), p))),
     ValueError, changed("computed from `params` at ['layers']['down']", INSIDE)),
    "grad": (differentiated, ValueError, HERE),
    "jit of grad": (lambda p, x: jax.jit(differentiated)(p, x), ValueError, HERE),
    "grad of jit": (lambda p, x: jax.grad(lambda x: jax.jit(scan)(p, x))(0.0), ValueError, HERE),
    "a loop": (lambda p, x: jnp.sum(jax.lax.map(lambda x: scan(p, x), jnp.zeros(3))), ValueError, HERE),
    "a branch": (lambda p, x: jax.lax.cond(x[0, 0] > 0, scan, lambda p: 0.0, p), ValueError, HERE),
    "a call inside a block": (lambda p, x: scan(p, block=lambda layer, x: scan(p, x)), ValueError, twice("down")),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    loss, error, message = LOSSES[name]
    assert_error(error, message, call(loss=loss))


# ---- transformations -----------------------------------------------------------------------------


def first(name):
    return (
        f"step_in_backward: `first_pass`: False; `{name}` needs a number from all gradients "
        "before any layer is updated; expected `first_pass=True`, which computes it in a separate "
        "backward pass."
    )


def other(name):
    return (
        f"step_in_backward: `tx`: {name} of another library computes updates. It sees one layer at "
        "a time: pass `elementwise=True` if it computes each element by itself, or use the ordinary "
        "step."
    )


def at_once(name, remedy):
    came = f"`{name}`, which needs the gradients of all layers at once"
    return f"step_in_backward: `tx`: {came}; {remedy}."


BRANCH = (
    "step_in_backward: `tx`: `{}` computes a number from all gradients inside a branch, expected it "
    "outside: `branch=False` in `skip_nonfinite`, `every=1` in `watch`."
)
LARGER = "a larger batch, as micro-batches by `jax.lax.map` of a `jax.checkpoint` in the block"
INSIDE = (
    "step_in_backward: `tx`: `adam` is called inside a branch of another library, or `jax.jit`; "
    "wrap the whole step in `jax.jit`, use `jgrad.skip_nonfinite` for `optax.apply_if_finite`, and "
    f"for `optax.MultiSteps` {LARGER}, or use the ordinary step."
)


def norm_of_updates():
    """Hands them on untouched."""

    def update(updates, state, params=None):
        return updates, optax.tree.norm(updates)

    return optax.GradientTransformation(lambda _: jnp.zeros(()), update)


def rate_of_updates():
    """Hands them on untouched, with a learning rate that is made of them."""

    def update(updates, state, params=None):
        return jgrad.gradient_descent(1 / optax.tree.norm(updates)).update(updates, state, params)

    return optax.GradientTransformation(jgrad.gradient_descent(1.0).init, update)


def number_of_many_leaves():
    init = lambda params: jnp.zeros(()) if len(jax.tree.leaves(params)) == 4 else ()
    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


FIRST = {"first": True, "layers": False, "last": False}
LEAVES = {"first": False, "layers": True, "last": False}
MATRICES = jgrad.hidden_matrices(exclude=("first", "last"))
OF_TX = {
    "clip": (lambda: optax.chain(CLIP, adam()), {}, first("clip_by_global_norm")),
    "skip": (lambda: jgrad.skip_nonfinite(adam()), {}, first("skip_nonfinite")),
    "a clip in a branch": (lambda: jgrad.skip_nonfinite(optax.chain(CLIP, adam()), branch=True),
     {"first_pass": True}, BRANCH.format("clip_by_global_norm")),
    "numbers of some steps": (lambda: jgrad.watch(adam(), every=2, layer_axes=models.AXES), {},
     BRANCH.format("watch")),
    "accumulate": (lambda: jgrad.accumulate(adam(), 2), {},
     at_once("accumulate", f"use {LARGER}, or the ordinary step")),
    "pack_small": (lambda: jgrad.pack_small(adam()), {}, at_once("pack_small", "leave it out")),
    "another library's before": (lambda: optax.chain(optax.scale(2.0), adam()), {}, other("`scale`")),
    "another library's, of leaves in no stack": (lambda: optax.chain(optax.masked(optax.scale(2.0), FIRST), adam()),
     {}, other("`scale`")),
    "another library's behind": (lambda: optax.chain(adam(), optax.scale(2.0)), {}, other("`scale`")),
    "another library's inside": (lambda: jgrad.master_weights(optax.sgd(0.1)), {}, other("`scale`")),
    "another library's in a branch": (lambda: jgrad.skip_nonfinite(optax.chain(adam(), optax.scale(2.0)), branch=True),
     {"first_pass": True}, other("`scale`")),
    "another library's alone": (lambda: optax.trace(0.9), {}, other("`trace`")),
    "frozen leaves": (lambda: optax.partition({"adam": adam(), "frozen": optax.set_to_zero()},
     {"first": "frozen", "layers": "adam", "last": "adam"}), {}, other("`set_to_zero`")),
    "nobody's": (lambda: optax.GradientTransformation(lambda params: (), lambda g, s, p=None: (jax.tree.map(jnp.sign, g), s)),
     {}, other("a transformation")),
    "under jit": (lambda: optax.GradientTransformationExtraArgs(adam().init, jax.jit(adam().update)),
     {"elementwise": True}, INSIDE),
    "MultiSteps": (lambda: optax.MultiSteps(adam(), 2), {"elementwise": True}, INSIDE),
    "a number of all leaves": (lambda: optax.chain(adam(), number_of_many_leaves()), {},
     "step_in_backward: `state` at [1]: an array that `tx.init` makes of no layer, nor of all "
     "leaves in no stack; expected one of all leaves at once to be left out."),
    "a number of one layer": (lambda: optax.chain(adam(), norm_of_updates()), {},
     "step_in_backward: `state` at [1]: an array that no layer owns, computed from the "
     "gradients of a few layers; expected transformations that compute each element by itself."),
    "a rate of one layer": (rate_of_updates, {},
     "step_in_backward: `tx`: `rate_of_updates` of another library computes `reduce_sum`, which "
     "mixes elements. It sees one layer at a time: use the ordinary step."),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_TX)
def test_transformations(name):
    make, options, message = OF_TX[name]
    assert_error(ValueError, message, call(make(), **options))


# ---- parameters and states -----------------------------------------------------------------------

PACKED = "a packed tree, expected the tree itself, since a buffer mixes all layers"


def test_packed_trees():
    packed = jgrad.pack(PARAMS)
    message = f"step_in_backward: `{{}}`: {PACKED}: call `unpack`."
    assert_error(ValueError, message.format("params"), call(params=packed))
    assert_error(ValueError, message.format("state"), call(state=adam().init(packed)))


OF_INIT = (
    "pass `tx.init(params)`, or what a step made of it; in flax nnx, `nnx.as_pure` of "
    "`nnx.state(model, nnx.Param)` and `optimizer.opt_state`."
)
ONE = jnp.ones((3, 2))
FAULTS = {
    "no other results": (TypeError, "step_in_backward: `loss` returns an array, expected `(value, aux)`, as "
     "`has_aux=True` says.", lambda: call(has_aux=True)),
    "no layers": (ValueError, "scan_layers: `layers`: no layers, expected at least one.",
     lambda: call(loss=lambda p, x: scan(p), params={"layers": {"up": jnp.ones((0, 3))}})),
    "zero": (ValueError, at_once("zero", "shard the leaves under `jax.jit`, or use the ordinary step"),
     lambda: call(jgrad.zero(adam(), "d"), state=adam().init(PARAMS))),
    "another model": (ValueError, "step_in_backward: `state` at .mw['first']: shape (2, 16), expected shape (16, 16), "
     "as `tx.init(params)` has it.", lambda: call(state=adam().init({**PARAMS, "first": jnp.ones((2, 16))}))),
    "another method": (ValueError, "step_in_backward: `state` does not have the structure of `tx.init(params)`: "
     "`state` has a leaf at .mw where `tx.init(params)` has a dict; `state` has a leaf at .vw where `tx.init(params)` "
     f"has a dict; {OF_INIT}",
     lambda: call(state=jgrad.gradient_descent(0.1).init(PARAMS))),
    "a model with more than arrays": (TypeError, "step_in_backward: `params` at ['act']: 'tanh' of type str, expected an array, as in "
     "`eqx.filter(model, eqx.is_inexact_array)`.",
     lambda: lambda: jgrad.step_in_backward(adam(), models.loss)({**PARAMS, "act": "tanh"}, ())),
    # Nothing would be left in no stack, which to a transformation are no parameters at all.
    "a bare array": (ValueError, "step_in_backward: `params`: an array of float32 and shape (3, 2), expected a tree of "
     "arrays: put it in one, as in `{'layers': params}`.",
     lambda: call(loss=lambda w, x: jnp.sum(w), params=ONE, state=())),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name):
    error, message, make = FAULTS[name]
    assert_error(error, message, make())


def test_a_state_of_an_nnx_optimizer():
    """It holds variables in the place of arrays."""
    model = nnx.Dict({name: nnx.Param(x) for name, x in FLAT.items()})
    state = nnx.Optimizer(model, adam(), wrt=nnx.Param).opt_state
    params, loss = nnx.state(model), lambda p, x: scan({"layers": p})
    assert_error(
        ValueError,
        "step_in_backward: `state` does not have the structure of `tx.init(params)`: `state` has an "
        "OptArray at .step where `tx.init(params)` has a leaf; `state` has an OptVariable at "
        ".mw['last'] where `tx.init(params)` has a Param; `state` has an OptVariable at .mw['up'] "
        f"where `tx.init(params)` has a Param (and 2 more); {OF_INIT}",
        call(loss=loss, params=params, state=state),
    )
    if hasattr(nnx, "as_pure"):  # the remedy
        call(loss=loss, params=nnx.as_pure(params), state=nnx.as_pure(state))()


# ---- keywords ------------------------------------------------------------------------------------


def of_loss(name):
    return f"`{name}`: an argument of `loss`, expected by position, since keywords are for `tx.update`."


def unread(name):
    expected = "expected one that it reads; arguments of `loss` are given by position"
    return f"`{name}`: a keyword that `tx` does not read, {expected}."


def scaled(updates, state, params=None, *, factor=1.0, **extra):
    return jax.tree.map(lambda x: factor * x, updates), state


SCALED = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), scaled)
KEYWORDS = {
    "of the loss": ({"scale": 2.0}, of_loss("scale")),
    "of the loss, without a name for the position": ({"x": X}, of_loss("x")),
    "misspelt": ({"skale": 2.0}, unread("skale")),
    "of a flag": ({"train": True}, unread("train")),
    "of a word": ({"mode": "fast"},
     "`mode`: 'fast' of type str, expected numbers or arrays, since a program shows whether `tx` reads it."),
    "of another method": ({"momentum": 0.5}, unread("momentum")),
    "beside one that is read": ({"learning_rate": 0.1, "shape": X}, unread("shape")),
}  # fmt: skip


@pytest.mark.parametrize("is_forced", [True, False], ids=["backward", "ordinary"])
@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords_that_nobody_reads(name, is_forced):
    keywords, message = KEYWORDS[name]

    def loss(params, x, scale=1.0):
        return scale * models.loss(params, x)

    step = jgrad.step_in_backward(adam(), loss)
    args = (PARAMS, adam().init(PARAMS))
    args = args if "x" in keywords else (*args, X)
    with forced(is_forced):
        assert_error(
            TypeError,
            f"step_in_backward: {message}",
            lambda: jax.eval_shape(lambda: step(*args, **keywords)),
        )


def test_keywords_that_a_part_of_a_chain_reads():
    """Another library's, whose names nobody knows; and `loss`, which each call is given."""
    tx = optax.chain(adam(), SCALED)
    step = jgrad.step_in_backward(tx, models.loss, elementwise=True)
    given = PARAMS, tx.init(PARAMS), X
    keywords = {"factor": 0.0, "learning_rate": {"first": 0.1, "layers": 0.2, "last": 0.3}}
    new = jax.jit(lambda *args: step(*args, **keywords, weight_decay=None, loss=1.0))(*given)[0]
    jax.tree.map(np.testing.assert_array_equal, new, PARAMS)


def by_python(updates, state, params=None, *, is_last=False, phase=0, **extra):
    factor = (0.0, 1.0)[phase] if is_last else 2.0
    return jax.tree.map(lambda x: factor * x, updates), state


def test_keywords_at_which_python_looks():
    """No program can have them as arrays; one that nobody reads beside them is still found."""
    tx = optax.chain(
        adam(), optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), by_python)
    )
    step = jgrad.step_in_backward(tx, models.loss, elementwise=True)
    given = PARAMS, tx.init(PARAMS), X
    new = jax.jit(lambda *args: step(*args, is_last=True, phase=0)[0])(*given)
    jax.tree.map(np.testing.assert_array_equal, new, PARAMS)
    with pytest.raises(TypeError, match="`fase`: a keyword that `tx` does not read"):
        jax.eval_shape(lambda: step(*given, is_last=True, fase=0))


def test_a_keyword_of_tx_whose_name_the_loss_has_too():
    """The loss was given its own by position."""

    def loss(params, x, learning_rate):
        return learning_rate * models.loss(params, x)

    step = jgrad.step_in_backward(adam(), loss)
    given = PARAMS, adam().init(PARAMS), X, 2.0
    new = jax.jit(lambda *args: step(*args, learning_rate=0.0)[0])(*given)
    jax.tree.map(np.testing.assert_array_equal, new, PARAMS)


@pytest.mark.parametrize("sizes", [{"width": 20, "hidden": 80}, {"width": 16, "hidden": 120}])
def test_blocks_of_two_layers(sizes):
    """1600 elements are six blocks and a quarter, 1920 seven and a half."""
    params = models.params(**sizes)
    scale = -(-3 * sizes["width"] * sizes["hidden"] // 256)
    assert_error(
        ValueError,
        f"step_in_backward: `state` at .mw['layers']['down'].scale: shape ({scale},) of 3 layers, "
        "expected the same for each layer, and no 8-bit block with elements of two layers: make "
        "each layer a multiple of 256 elements, or use `layer_axes=0` where the method has it, or "
        "`full_precision` for this leaf.",
        call(eight_bits(), params=params),
    )
    call(adam(moment_dtype="8bit", full_precision=True), params=params)()
