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
from tests.support import messages
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


# ---- losses --------------------------------------------------------------------------------------


def add(layer, x):
    return x + jnp.sum(layer["up"])


def scan(params, x=0.0, block=add):
    return jgrad.scan_layers(block, params["layers"], x)


def of_layers(change):
    return lambda p, x: scan({"layers": jax.tree.map(change, p["layers"])})


def penalised(p, x):
    return scan(p) + jnp.sum(jnp.square(p["layers"]["up"]))


def differentiated(p, x):
    return jax.grad(lambda x: scan(p, x))(0.0)


# ---- transformations -----------------------------------------------------------------------------


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


# ---- parameters and states -----------------------------------------------------------------------

PACKED = "a packed tree, expected the tree itself, since a buffer mixes all layers"


OF_INIT = (
    "pass `tx.init(params)`, or what a step made of it; in flax nnx, `nnx.as_pure` of "
    "`nnx.state(model, nnx.Param)` and `optimizer.opt_state`."
)
ONE = jnp.ones((3, 2))


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


test_options = messages.test_of("step_in_backward", globals())


test_losses = messages.test_of("losses", globals())


test_transformations = messages.test_of("of_tx", globals())


test_faults = messages.test_of("faults", globals())
