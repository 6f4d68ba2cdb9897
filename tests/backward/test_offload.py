"""State in host memory: of a stack, one layer at a time is on the device."""

import jax
import jax.numpy as jnp
import pytest

import jgrad
from jgrad._arithmetic.elementwise import inner_equations
from tests.backward import models
from tests.backward.recipes import BF16, FIRST, RECIPES, Recipe, adam, clipped
from tests.support.errors import assert_error

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="The CPU of JAX 0.8 moves nothing to its host's memory."
)

OF_8_BITS = {"8 bits", "stochastic", "all"}
CASES = {name: recipe for name, recipe in RECIPES.items() if name not in OF_8_BITS} | {
    "all": Recipe(lambda: jgrad.skip_nonfinite(clipped(jgrad.stochastic_rounding(adam()))), FIRST, BF16),
}  # fmt: skip
QUICK = ["master", "adafactor", "all"]


def kinds(tree):
    """Where the arrays of a tree lie."""
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.size}


def steps(tx, **options):
    """The step with its state on the device, and with it in host memory."""
    of_tx = jgrad.step_in_backward(tx, models.loss, **options)
    return of_tx, jgrad.step_in_backward(jgrad.offload(tx), models.loss, **options)


@pytest.mark.slow(always=QUICK)
@pytest.mark.parametrize("name", CASES)
def test_the_same_results(name):
    """Bit for bit, of a state that stays where it lies."""
    make, options, dtype, sizes, *_ = CASES[name]
    params, tx = models.params(dtype, **sizes), make()
    batches = [models.batch(i, dtype) for i in range(3)]
    of_tx, of_offload = steps(tx, **options)
    expected = models.run(of_tx, params, tx.init(params), batches)
    found = models.run(of_offload, params, jgrad.offload(tx).init(params), batches)
    models.assert_equal(found, expected)
    assert kinds(found[1]) <= {"pinned_host"}
    assert kinds((found[0], found[2])) == {"device"}


def moves(tx):
    """What a step moves to the host and back: in its loops, and outside, with what made it."""
    step = jgrad.step_in_backward(jgrad.offload(tx), models.loss)
    given = models.params(), jgrad.offload(tx).init(models.params()), models.batch()
    program = jax.make_jaxpr(step)(*given).jaxpr

    def of(equations):
        made = {x: eqn.primitive.name for eqn in equations for x in eqn.outvars}
        for eqn in equations:
            if eqn.primitive.name == "device_put":
                for x, to in zip(eqn.invars, eqn.params["devices"], strict=True):
                    if x.aval.shape:
                        yield x.aval.shape, to == jax.memory.Space.Host, made.get(x)

    loops = [x for x in inner_equations(program.eqns) if x.primitive.name in ("scan", "while")]
    return [*of([*inner_equations(loops)])], [*of(program.eqns)]


def test_one_layer_at_a_time_is_on_the_device():
    """Both moments of both matrices, there and back."""
    in_loops = [(shape, up) for shape, up, _ in moves(adam())[0]]
    shapes = [(1, models.WIDTH, models.HIDDEN), (1, models.HIDDEN, models.WIDTH)]
    assert sorted(in_loops) == sorted((shape, up) for shape in 2 * shapes for up in (False, True))


def test_the_state_of_other_leaves_is_fetched_behind_their_gradients():
    """Else XLA fetches it before the layers, and it is on the device while they are updated."""
    fetched = [made for _, up, made in moves(adam())[1] if not up]
    assert fetched.count("optimization_barrier") == 4  # moments of the first and the last matrix


def test_states_that_are_refused():
    """Of moments in 8 bits, but not of other integers; and in host memory without an `offload`."""
    params, tx = models.params(width=32, hidden=256), jgrad.offload(adam(moment_dtype="8bit"))
    came = "an `offload` with 8-bit moments at .mw['layers']['down']"
    message = f"step_in_backward: `tx`: {came}, expected them in float32 or bfloat16."
    step = jgrad.step_in_backward(tx, models.loss)
    assert_error(ValueError, message, lambda: step(params, tx.init(params), models.batch()))
    tx = jgrad.offload(jgrad.average_params(adam(), 0.9))
    params = models.params() | {"ids": jnp.arange(3, dtype=jnp.int8)}
    jax.eval_shape(jgrad.step_in_backward(tx, models.loss), params, tx.init(params), models.batch())
    step = jgrad.step_in_backward(adam(), models.loss)
    expected = "expected `offload` around all of `tx`, or device memory"
    message = f"step_in_backward: `state` at .step: in host memory, {expected}."
    state = jgrad.offload(adam()).init(models.params())
    assert_error(ValueError, message, lambda: step(models.params(), state, models.batch()))


def test_an_offload_that_jax_rebuilt():
    """`equinox.filter_jit` does so with its arguments, and attributes of a tuple are lost."""
    tx, params = jax.tree.map(lambda f: f, jgrad.offload(adam())), models.params()
    program = jax.make_jaxpr(jgrad.step_in_backward(tx, models.loss))
    program(params, tx.init(params), models.batch())
