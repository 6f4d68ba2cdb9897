"""`nnx.Optimizer` of flax: it gives `init` a tree of variables, and `update` one of their arrays.

The truth is what the same recipe does to the same parameters as a dict of arrays.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import jgrad
from jgrad._trees import variables
from tests.multi_device.meshes import mesh_of
from tests.support.errors import assert_error
from tests.support.states import assert_same_bits, filled

pytestmark = pytest.mark.usefixtures("standard_promotion")  # `MultiSteps` of optax promotes a count

X = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
RATE, STEPS = 1e-2, 3


class Model(nnx.Module):
    """Leaves above and below the 4096 elements from which on moments are in 8 bits."""

    def __init__(self, dtype=jnp.float32, names=None, width=128):
        init = nnx.initializers.lecun_normal()
        sharded = init if names is None else nnx.with_partitioning(init, names)
        layer = functools.partial(nnx.Linear, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=dtype)
        self.a, self.b = layer(64, width, kernel_init=sharded), layer(width, 8)

    def __call__(self, x):
        return self.b(jnp.tanh(self.a(x)))


def loss_of(outputs):
    return jnp.mean(jnp.square(outputs.astype(jnp.float32) - jnp.sin(X[:, :8])))


@nnx.jit
def step(model, optimizer):
    """The loss."""

    def loss(model):
        return loss_of(model(jnp.asarray(X, model.a.kernel.dtype)))

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads, loss=value)
    return value


def steps(model, optimizer, count=STEPS):
    """The losses."""
    return [step(model, optimizer) for _ in range(count)]


def start(tx, **options):
    model = Model(**options)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def arrays(tree):
    """A dict of arrays, of a tree of variables."""
    return nnx.to_pure_dict(nnx.state(tree))


def plain(tx, dtype=jnp.float32, w=None, s=None):
    """Losses, parameters and state of the same steps, of a dict of arrays."""
    model = Model(dtype)
    graph, state = nnx.split(model)

    def loss(w):
        nnx.replace_by_pure_dict(state, w)
        return loss_of(nnx.merge(graph, state)(jnp.asarray(X, dtype)))

    @jax.jit
    def step(w, s):
        value, grads = jax.value_and_grad(loss)(w)
        updates, s = tx.update(grads, s, w, loss=value)
        return optax.apply_updates(w, updates), s, value

    w, values = arrays(model) if w is None else w, []
    s = jax.jit(tx.init)(w) if s is None else s
    for _ in range(STEPS):
        w, s, value = step(w, s)
        values.append(value)
    return values, w, s


def eight_bits(rate=RATE, **options):
    return jgrad.adam(rate, moment_dtype="8bit", **options)


def muon(**options):
    return jgrad.muon(2e-2, matrices=jgrad.hidden_matrices(), adam_learning_rate=RATE, **options)


def six_bytes():
    """README's."""
    return jgrad.skip_nonfinite(jgrad.stochastic_rounding(eight_bits()))


def has_two_axes(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


KERNELS = jgrad.by_path({"**/kernel": 0.1}, rest=0.0)
RATES = jgrad.by_path({"a/*": RATE}, rest=1e-3)
OF_B = jgrad.by_path({"b/*": True}, rest=False)
RECIPES = {
    "decays by path": lambda: jgrad.adam(RATE, weight_decay=KERNELS, moment_dtype=jnp.bfloat16),
    "momentum": lambda: jgrad.gradient_descent(RATE, momentum=0.9),
    "8 bits": eight_bits,
    "watch": lambda: jgrad.watch(eight_bits(RATES)),
    "muon": lambda: jgrad.watch(muon(moment_dtype="8bit")),
    "normuon": lambda: muon(rule="normuon"),
    "soap": lambda: jgrad.soap(RATE, matrices=jgrad.hidden_matrices(), moment_dtype="8bit"),
    "lamb": lambda: jgrad.watch(jgrad.lamb(RATE)),
    "lars": lambda: jgrad.lars(0.1, moment_dtype="8bit"),
    "skip_nonfinite": lambda: jgrad.skip_nonfinite(eight_bits(), loss_scale=1.0),
    "accumulate": lambda: jgrad.accumulate(eight_bits(), 2),
    "MultiSteps": lambda: optax.MultiSteps(eight_bits(), 2),
    "master_weights": lambda: jgrad.master_weights(eight_bits()),
    "six bytes": six_bytes,
    "ema": lambda: jgrad.skip_spikes(jgrad.average_params(eight_bits(), 0.9)),
    "schedule_free": lambda: jgrad.schedule_free(eight_bits(beta1=0.0)),
    "hyperball": lambda: jgrad.hyperball(eight_bits(), RATE, leaves=jgrad.hidden_matrices()),
    "offload": lambda: jgrad.offload(eight_bits()),
    "pack_small": lambda: jgrad.pack_small(eight_bits()),
    "masks": lambda: eight_bits(
        full_precision=OF_B, weight_decay=0.1, weight_decay_mask=has_two_axes
    ),
}
IN_BFLOAT16 = ("master_weights", "six bytes")
NOT_IN_8_BITS = ("decays by path", "momentum", "normuon", "lamb")


def has_8_bits(tree):
    return jnp.int8 in [x.dtype for x in jax.tree.leaves(tree)]


@pytest.mark.slow(always=["8 bits"])
@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name):
    dtype = jnp.bfloat16 if name in IN_BFLOAT16 else jnp.float32
    tx = RECIPES[name]()
    model, optimizer = start(tx, dtype=dtype)
    before = jax.tree.structure(nnx.state(optimizer))
    losses = steps(model, optimizer)
    expected, w, _ = plain(tx, dtype)
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    for x, y in zip(*map(jax.tree.leaves, (arrays(model), w)), strict=True):
        np.testing.assert_allclose(*(np.asarray(z, np.float32) for z in (x, y)), atol=1e-6)
    assert jax.tree.structure(nnx.state(optimizer)) == before
    expected = has_8_bits(jax.eval_shape(tx.init, w))
    assert has_8_bits(nnx.state(optimizer)) == expected == (name not in NOT_IN_8_BITS)


# ---- names -------------------------------------------------------------------------------------


def test_names():
    """Without a last `value`, in both forms; and what is named is there in each update."""
    model, optimizer = start(jgrad.watch(jgrad.adam(RATES)))
    step(model, optimizer)
    numbers = jgrad.report(optimizer.opt_state)
    leaves = {"a/bias", "a/kernel", "b/bias", "b/kernel"}
    kinds = ("grad_norm", "update_norm", "update_ratio")
    assert {f"{kind}/{leaf}" for kind in kinds for leaf in leaves} <= numbers.keys()
    assert not [name for name in numbers if name.endswith("value")]
    assert all(numbers[f"grad_norm/{leaf}"][...] > 0 for leaf in leaves)
    params = nnx.state(model, nnx.Param)
    for described in (RATES.describe, jgrad.hidden_matrices().describe):
        assert described(params) == described(nnx.to_pure_dict(params))
    state = jgrad.hyperball(jgrad.adam(RATE), RATE, leaves=jgrad.hidden_matrices()).init(params)
    assert state.describe().split()[:2] == ["a/kernel", "1"]


def test_rules_are_named_alike():
    """A path in a message is one that fits variables and arrays."""
    tx = jgrad.adam(jgrad.by_path({"a/kernal": RATE}, rest=1e-3))
    problem = "rule 'a/kernal': no leaf matches it; the nearest paths are 'a/kernel', 'b/kernel', 'a/bias'."
    model, optimizer = start(tx)
    message = f"adam: `learning_rate`: {problem}"
    assert_error(ValueError, message, lambda: step(model, optimizer))
    params = nnx.state(model, nnx.Param)
    assert_error(ValueError, message, lambda: tx.update(params, tx.init(params), params))


def test_words_of_hidden_matrices():
    """`value` is no part of the name of a parameter that a variable holds."""
    chosen = jgrad.hidden_matrices(exclude=("value",))(nnx.state(Model(), nnx.Param))
    assert jax.tree.leaves(chosen) == [False, True, False, True]


# ---- variables outside of `nnx.Optimizer` ------------------------------------------------------


def test_states_of_1_0():
    """There a variable held `Blocks`, and numbers of `watch` had a last `value`."""
    tx = jgrad.watch(eight_bits())
    params = nnx.state(Model(), nnx.Param)
    grads = jax.tree.map(jnp.ones_like, params)
    state = tx.init(params)
    leaves = {"a/bias", "a/kernel", "b/bias", "b/kernel"}
    name = lambda key: f"{key}/value" if key.partition("/")[2] in leaves else key
    old = state._replace(
        report={name(key): x for key, x in state.report.items()},
        inner=variables.variables_of_blocks(state.inner),
    )
    assert isinstance(old.inner.mw["a"]["kernel"], nnx.Param)
    updates, new = tx.update(grads, old, params)
    expected, now = tx.update(grads, state, params)
    assert jax.tree.structure(new) == jax.tree.structure(old)
    assert jax.tree.structure(now) == jax.tree.structure(state)
    found = {name(key): x for key, x in now.report.items()}
    for x, y in zip(
        *map(jax.tree.leaves, ((updates, new), (expected, now._replace(report=found)))), strict=True
    ):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(nnx, "var_defaults"), reason="flax 0.12.1 has no such defaults")
def test_hijax_variables():
    """They are no nodes of JAX's trees: moments are arrays, and so are both parts of those in 8 bits."""
    expected = plain(eight_bits())[0]
    with nnx.var_defaults(hijax=True):
        model, optimizer = start(eight_bits())

        def step():  # not under `jit`, where flax 0.12.12 updates none
            graph, params, rest = nnx.split(model, nnx.Param, ...)
            loss = lambda params, g=graph, rest=rest: loss_of(nnx.merge(g, params, rest)(X))
            value, grads = jax.value_and_grad(loss)(nnx.with_vars(params, hijax=False))
            optimizer.update(params, grads)
            return value

        losses = [step() for _ in range(STEPS)]
    np.testing.assert_allclose(losses, expected, rtol=2e-6)


# ---- many steps, many devices, files -----------------------------------------------------------


@pytest.mark.slow
def test_scan():
    model, optimizer = start(jgrad.watch(eight_bits()))

    @nnx.jit
    @functools.partial(nnx.scan, length=STEPS, in_axes=(nnx.Carry,), out_axes=(nnx.Carry, 0))
    def run(carry):
        return carry, step(*carry)

    _, losses = run((model, optimizer))
    np.testing.assert_allclose(losses, plain(eight_bits())[0], rtol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("names", [(None, "model"), ("model", None)])
def test_names_of_mesh_axes(names):
    """Codes are sharded as the parameter is, and scales along the axes without blocks."""
    mesh = mesh_of(data=2, model=4)
    with jax.set_mesh(mesh):
        model, optimizer = start(eight_bits(), names=names, width=256)
        codes, scale = optimizer.opt_state.mw["a"]["kernel"]
        specs = nnx.get_partition_spec(nnx.state(optimizer.opt_state.mw["a"]))["kernel"]
        assert jax.tree.leaves(specs, is_leaf=is_spec) == [P(*names), P(names[0], None)]
        for node in model, optimizer:  # since 0.12 flax has done so
            state = nnx.state(node)
            put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
            nnx.update(node, jax.tree.map(put, state, nnx.get_partition_spec(state)))
        losses = steps(model, optimizer)
        assert scale[...].shape == (64, 1)
        for x, own in (codes, names), (scale, (names[0], None)):
            assert x[...].sharding.is_equivalent_to(NamedSharding(mesh, P(*own)), 2)
    model, optimizer = start(eight_bits(), width=256)
    np.testing.assert_allclose(losses, steps(model, optimizer), rtol=2e-6)


def is_spec(x):
    return isinstance(x, P)


@pytest.mark.parametrize("form", ["variables", "arrays"])
def test_orbax(tmp_path, form):
    """A file has each number, whatever it is restored into."""
    _, optimizer = start(jgrad.watch(eight_bits()))
    nnx.update(optimizer, filled(nnx.state(optimizer), 0))
    state = nnx.state(optimizer)
    in_file = state if form == "variables" else nnx.to_pure_dict(state)
    with ocp.StandardCheckpointer() as files:
        files.save(tmp_path / "state", in_file)
        files.wait_until_finished()
        restored, plain = (
            files.restore(tmp_path / "state", in_file),
            files.restore(tmp_path / "state"),
        )
    assert_same_bits(restored, in_file)
    if form == "variables":  # for flax they are dictionaries now
        like = start(jgrad.watch(eight_bits()))[1].opt_state
        moments, account = jgrad.carry_over(plain["opt_state"], like=like, strict=True)
        assert not account.converted
        nnx.update(like, nnx.state(moments))
        for name in "mw", "vw":
            found, expected = (
                nnx.state(getattr(x.inner, name)) for x in (like, optimizer.opt_state)
            )
            assert_same_bits(found, expected)
    else:
        assert_same_bits(plain, in_file)
