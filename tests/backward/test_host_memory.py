"""State and weights in host memory: of a stack, one layer at a time is on the device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jgrad
from tests.backward import models
from tests.backward.recipes import (
    BF16,
    FIRST,
    RECIPES,
    WIDE,
    Recipe,
    adam,
    clipped,
    eight_bits,
    muon,
)
from tests.multi_device.meshes import mesh_of
from tests.support import messages
from tests.support.choice import mostly_slow
from tests.support.eight_bits import moments
from tests.support.errors import assert_error
from tests.support.memory import kinds, on_device, on_host
from tests.support.private import forced, host_memory, inner_equations

pytestmark = pytest.mark.not_in_jax_0_8("host memory")

CASES = RECIPES | {
    "clipped and rounded": Recipe(
        lambda: jgrad.skip_nonfinite(clipped(jgrad.stochastic_rounding(adam()))), FIRST, BF16
    ),
}
QUICK = ["in the backward pass-all-clipped and rounded", "ordinary-all-master"]
# By what lies on the host: of (parameters, state).
PLACES = {
    "state": lambda params, state: (params, on_host(state)),
    "layers": lambda params, state: (
        params | {"layers": on_host(params["layers"])},
        on_host(state),
    ),
    "weights": lambda params, state: (on_host(params), state),
    "all": lambda params, state: (on_host(params), on_host(state)),
}
FORMS = {"in the backward pass": forced, "ordinary": functools.partial(forced, False)}


@pytest.mark.slow(always=QUICK)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", FORMS)
def test_the_same_results(form, place, name):
    """Bit for bit those of the same step with all on the device; each array stays where it lay."""
    make, options, dtype, sizes, *_ = CASES[name]
    params, tx = models.params(dtype, **sizes), make()
    step = jgrad.step_in_backward(tx, models.loss, **options)
    batches = [models.batch(i, dtype) for i in range(3)]
    state = tx.init(params)
    given = PLACES[place](params, state)
    with FORMS[form]():
        expected = models.run(step, params, state, batches, exact=True)
        found = models.run(step, *given, batches, exact=True)
    assert kinds(found[:2]) == kinds(given)
    assert set(kinds(found[2])) == {"device"}
    models.assert_equal(on_device(found), expected)


# ---- moments in 8 bits, four codes in a word -----------------------------------------------------


IN_8_BITS = {name: RECIPES[name] for name in ("8 bits", "stochastic", "all")} | {
    "adan": Recipe(lambda: jgrad.adan(1e-2, moment_dtype="8bit"), sizes=WIDE),
    "lion": Recipe(lambda: jgrad.lion(1e-3, moment_dtype="8bit"), sizes=WIDE),
    "momentum": Recipe(
        lambda: jgrad.gradient_descent(1e-2, momentum=0.9, moment_dtype="8bit"), sizes=WIDE
    ),
    "muon": Recipe(lambda: muon(moment_dtype="8bit"), sizes=WIDE, roundings=4),
    "lamb": Recipe(
        lambda: jgrad.lamb(1e-2, layer_axes=models.AXES, moment_dtype="8bit"), sizes=WIDE
    ),
    "average": Recipe(lambda: jgrad.average_params(eight_bits(), 0.9), sizes=WIDE),
}


@pytest.fixture
def small_words(monkeypatch):
    """What is large enough for host memory in the models of these tests."""
    monkeypatch.setattr(host_memory, "_SMALLEST", 1024)
    monkeypatch.setattr(host_memory, "ROWS", 8)


@pytest.mark.slow(always=["in the backward pass-stochastic"])
@pytest.mark.parametrize("name", IN_8_BITS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("small_words")
def test_the_same_results_in_8_bits(form, name):
    """Those with codes on the device: of words in host memory, and of a state that was restored."""
    make, options, dtype, sizes, roundings, few = IN_8_BITS[name]
    params, tx = models.params(dtype, **sizes), make()
    of_tx, of_offload = (
        jgrad.step_in_backward(x, models.loss, **options) for x in (tx, jgrad.offload(tx))
    )
    batches = [models.batch(i, dtype) for i in range(3)]
    state = jgrad.offload(tx).init(params)
    assert jnp.int32 in [x.codes.dtype for x in moments(state)]
    with FORMS[form]():
        expected = models.run(of_tx, params, tx.init(params), batches)
        for given in (state, on_host(jgrad.unpack(state))):
            found = models.run(of_offload, on_host(params), given, batches)
            assert kinds(found[1]) == kinds(given)
            assert [x.dtype for x in jax.tree.leaves(found[1])] == [
                x.dtype for x in jax.tree.leaves(given)
            ]
            # Beside the conversion XLA may join products and sums otherwise.
            found = on_device(jgrad.unpack(found))
            models.assert_equal(found, expected, roundings=roundings, few=max(few, 1e-3))


def of_the_second_axis(params, x):
    block = lambda layer, x: x + jnp.tanh(x @ layer["w"])
    return jnp.mean(jgrad.scan_layers(block, params, x, axis=1) ** 2)


@pytest.mark.usefixtures("small_words")
def test_words_of_layers_along_the_second_axis():
    """Four rows are in a word, which is of one layer; of more layers than rows, four layers would be."""
    params = {"w": models.array(np.random.default_rng(0), 256, 4, 256)}
    tx, batches = jgrad.lion(1e-2, moment_dtype="8bit"), [jnp.ones((2, 256))] * 2
    state = jgrad.offload(tx).init(params)
    assert state.mw["w"].codes.shape == (64, 4, 256)
    of_tx, of_offload = (
        jgrad.step_in_backward(x, of_the_second_axis) for x in (tx, jgrad.offload(tx))
    )
    expected = models.run(of_tx, params, tx.init(params), batches)
    found = models.run(of_offload, params, state, batches)
    models.assert_equal(on_device(jgrad.unpack(found)), expected, few=1e-3)
    params = {"w": jnp.ones((256, 8, 256))}
    came = "codes of several layers in a word, as `offload` has them in host memory"
    expected = "expected layers along the first axis, or codes as `unpack` makes them"
    message = f"step_in_backward: `state` at .mw['w'].codes: {came}, {expected}."
    assert_error(
        ValueError, message, lambda: of_offload(params, jgrad.offload(tx).init(params), batches[0])
    )


# ---- leaves in no stack, in slices of rows -------------------------------------------------------

VOCABULARY, WIDTH = 512, 64
# Zero with all passes of XLA; without its optimizations, products and sums of a slice may be joined
# otherwise than those of a leaf. Four differ at most, where gradients are nearly zero.
ROUNDINGS = 16


def decoder_params(dtype=jnp.float32, width=WIDTH):
    rng = np.random.default_rng(0)
    return {
        "embedding": models.array(rng, VOCABULARY, width, dtype=dtype),
        "head": models.array(rng, VOCABULARY, width, dtype=dtype),
        "layers": models.stack(rng, 3, width, 2 * width, dtype),
        "norm": jnp.ones(width, dtype),
    }


def decoder_loss(params, tokens):
    x = params["embedding"][tokens]
    x = jgrad.scan_layers(models.block, params["layers"], x) * params["norm"][None, None]
    logits = (x @ params["head"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def tokens(seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, VOCABULARY, size=(2, 5)), jnp.int32)


@pytest.fixture
def four_slices(monkeypatch):
    """Of the embedding and of the head."""
    monkeypatch.setattr(host_memory, "_SMALLEST", 1024)
    monkeypatch.setattr(host_memory, "SLICE", VOCABULARY * WIDTH // 4)


def loops(step, *args):
    """How many there are: one forward, one backward, and one for each leaf in slices."""
    program = jax.make_jaxpr(step)(*args).jaxpr
    return sum(x.primitive.name in ("scan", "while") for x in inner_equations(program.eqns))


def rates_of_rows():
    rates = jnp.linspace(1e-3, 1e-2, VOCABULARY)[:, None]
    return adam({"embedding": rates, "head": 1e-2, "layers": 1e-2, "norm": 1e-2})


AXES = {"embedding": None, "head": None, "layers": 0, "norm": None}


def of_layers(name):
    return getattr(jgrad, name)(1e-2, layer_axes=AXES)


# A transformation, and how many of two leaves it updates in slices.
SLICED = {
    "adam": (adam, 2),
    "lion": (lambda: jgrad.lion(1e-3), 2),
    "momentum": (lambda: jgrad.gradient_descent(1e-2, momentum=0.9), 2),
    "average": (lambda: jgrad.average_params(adam(), 0.9), 2),
    "rounded": (lambda: jgrad.stochastic_rounding(adam()), 2),
    "clipped": (lambda: jgrad.skip_nonfinite(clipped(adam())), 2),
    "masked": (lambda: jgrad.adam(jgrad.by_path({"head": 1e-2}, rest=1e-3)), 2),
    "a learning rate for each row": (rates_of_rows, 1),
    "a ratio of norms": (lambda: of_layers("lamb"), 0),
    "factors": (lambda: of_layers("adafactor"), 0),
    "a norm that is kept": (lambda: clipped(adam(), of="previous"), 2),
    "a norm of the state": (lambda: jgrad.watch(adam(), layer_axes=AXES), 0),
}
SLICED_IN_8_BITS = {
    "8 bits": (eight_bits, 2),
    "rounded": (lambda: jgrad.stochastic_rounding(eight_bits()), 2),
    "clipped": (lambda: clipped(jgrad.lion(1e-2, moment_dtype="8bit"), of="previous"), 2),
    "a ratio of norms": (lambda: jgrad.lamb(1e-2, layer_axes=AXES, moment_dtype="8bit"), 0),
}


@pytest.mark.slow(always=["a norm that is kept", "a learning rate for each row", "factors"])
@pytest.mark.parametrize("name", SLICED)
@pytest.mark.usefixtures("four_slices")
def test_embedding_and_head_in_slices(name):
    """Where the method is elementwise, bit for bit the update of the whole leaf; else as it was."""
    make, count = SLICED[name]
    dtype = BF16 if name == "rounded" else jnp.float32
    params, tx = decoder_params(dtype), make()
    step = jgrad.step_in_backward(tx, decoder_loss, first_pass=name == "clipped")
    state, batches = tx.init(params), [tokens(i) for i in range(3)]
    given = on_host((params, state))
    assert loops(step, *given, tokens()) - loops(step, params, state, tokens()) == count
    found = models.run(step, *given, batches)
    assert kinds(found[:2]) == kinds(given)
    expected = models.run(step, params, state, batches)
    models.assert_equal(on_device(found), expected, roundings=ROUNDINGS)


@pytest.mark.slow(always=["rounded"])
@pytest.mark.parametrize("name", SLICED_IN_8_BITS)
@pytest.mark.usefixtures("four_slices", "small_words")
def test_slices_of_words(name):
    """Of weights and moments, whose random bits are those of the whole leaf."""
    make, count = SLICED_IN_8_BITS[name]
    params, tx = decoder_params(BF16 if name == "rounded" else jnp.float32, 256), make()
    of_tx, step = (jgrad.step_in_backward(x, decoder_loss) for x in (tx, jgrad.offload(tx)))
    state, batches = tx.init(params), [tokens(i) for i in range(3)]
    given = on_host(params), jgrad.offload(tx).init(params)
    assert loops(step, *given, tokens()) - loops(of_tx, params, state, tokens()) == count
    found = models.run(step, *given, batches)
    assert kinds(found[:2]) == kinds(given)
    expected = models.run(of_tx, params, state, batches)
    models.assert_equal(on_device(jgrad.unpack(found)), expected, roundings=ROUNDINGS, few=1e-3)


@pytest.mark.parametrize(
    ("cut", "count"), [(P("d"), 0), (P(None, "d"), 1)], ids=["rows", "columns"]
)
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.usefixtures("four_slices")
def test_slices_of_a_sharded_embedding(axes, cut, count):
    """Rows that are sharded stay whole, by types or by `mesh_axes`; then slices would be gathered."""
    mesh, tx = mesh_of(axes, d=2), adam()
    specs = jax.tree.map(lambda x: P(), decoder_params()) | {"embedding": cut}
    with jax.set_mesh(mesh):
        params = jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), decoder_params(), specs
        )
        state = jax.jit(tx.init, out_shardings=jgrad.state_shardings(tx, params))(params)

        def loss(params, tokens):
            if axes == AxisType.Explicit:
                params = params | {"embedding": jax.sharding.reshard(params["embedding"], P())}
            return decoder_loss(params, tokens)

        step = jgrad.step_in_backward(tx, loss, mesh_axes=specs if axes == AxisType.Auto else None)
        given = params | {"embedding": on_host(params["embedding"])}, state
        assert loops(step, *given, tokens()) - loops(step, params, state, tokens()) == count


@pytest.mark.usefixtures("four_slices")
def test_slices_are_fetched_in_their_loop():
    """Nothing of the size of the embedding's moments is ever moved."""
    params, tx = decoder_params(), adam()
    given = params, on_host(tx.init(params)), tokens()
    program = jax.make_jaxpr(jgrad.step_in_backward(tx, decoder_loss))(*given).jaxpr
    moved = [
        x.aval.shape
        for eqn in inner_equations(program.eqns)
        if eqn.primitive.name == "device_put"
        for x in eqn.invars
    ]
    assert moved.count((VOCABULARY // 4, WIDTH)) == 2 * 4  # two leaves, two moments, there and back
    assert (VOCABULARY, WIDTH) not in moved


def test_rows_that_do_not_divide_are_not_cut():
    """A TPU slices a multiple of 32 rows; and a small leaf is whole."""
    size = host_memory.SLICE
    assert host_memory.slices((2**18, 256)) == 2**26 // size
    assert host_memory.slices((50257, 1024)) is None
    assert host_memory.slices((size // 256, 256)) is None
    assert host_memory.slices((2 * size,)) is None


# ---- what is where -------------------------------------------------------------------------------


def moves(step, *args):
    """(shape, whether to the host) of what a step moves in its loops."""
    program = jax.make_jaxpr(step)(*args).jaxpr
    found = [x for x in inner_equations(program.eqns) if x.primitive.name in ("scan", "while")]
    return [
        (x.aval.shape, to == jax.memory.Space.Host)
        for eqn in inner_equations(found)
        if eqn.primitive.name == "device_put"
        for x, to in zip(eqn.invars, eqn.params["devices"], strict=True)
        if x.aval.shape
    ]


def test_one_layer_at_a_time_is_on_the_device():
    """Weights for the forward pass; weights and moments in the backward pass, there and back."""
    params, tx = models.params(), adam()
    layers = params | {"layers": on_host(params["layers"])}
    found = moves(
        jgrad.step_in_backward(tx, models.loss), layers, on_host(tx.init(params)), models.batch()
    )
    shapes = [(1, models.WIDTH, models.HIDDEN), (1, models.HIDDEN, models.WIDTH)]
    expected = [(shape, False) for shape in 4 * shapes] + [(shape, True) for shape in 3 * shapes]
    assert sorted(found) == sorted(expected)


def test_states_of_offload_and_without():
    """What lies on the host is fetched, whoever put it there; `offload` may be in a chain."""
    params, batches = models.params(), [models.batch()]
    for tx in (adam(), jgrad.offload(adam()), optax.chain(jgrad.offload(adam()))):
        step = jgrad.step_in_backward(tx, models.loss)
        expected = models.run(step, params, tx.init(params), batches)
        found = models.run(step, params, on_host(tx.init(params)), batches)
        models.assert_equal(on_device(found), expected)


def test_an_offload_that_jax_rebuilt():
    """`equinox.filter_jit` does so with its arguments, and attributes of a tuple are lost."""
    tx, params = jax.tree.map(lambda f: f, jgrad.offload(adam())), models.params()
    program = jax.make_jaxpr(jgrad.step_in_backward(tx, models.loss))
    program(params, tx.init(params), models.batch())


# ---- scan_layers by itself ---------------------------------------------------------------------


def grad_of(params, x, remat=True):
    loss = functools.partial(models.loss, remat=remat)
    return jax.jit(jax.value_and_grad(loss))(params, x)


@pytest.mark.parametrize("remat", [True, False, "policy"])
def test_layers_on_the_host_in_an_ordinary_loss(remat):
    """A value and gradients as with layers on the device; gradients lie where the layers do."""
    policy = jax.checkpoint_policies.dots_saveable if remat == "policy" else remat
    params, x = models.params(), models.batch()
    given = params | {"layers": on_host(params["layers"])}
    found, expected = (grad_of(p, x, policy) for p in (given, params))
    assert kinds(found[1]) == kinds(given)
    models.assert_equal(on_device(found), expected)


def test_generation_with_layers_on_the_host():
    """A forward pass alone, with xs there, too: one layer of each is fetched in a turn."""
    params, x = models.params(), models.batch()
    scales = jnp.outer(jnp.linspace(0.5, 1.5, models.LAYERS), jnp.ones(models.WIDTH))

    def forward(layers, x, scales):
        block = lambda layer, x, scale: models.block(layer, x) * scale[None]
        return jgrad.scan_layers(block, layers, x, xs=scales)

    given = on_host(params["layers"]), x, on_host(scales)
    found = jax.jit(forward)(*given)
    np.testing.assert_array_equal(found, jax.jit(forward)(params["layers"], x, scales))
    shapes = [(models.WIDTH, models.HIDDEN), (models.HIDDEN, models.WIDTH), (models.WIDTH,)]
    assert sorted(moves(forward, *given)) == sorted((shape, False) for shape in shapes)


# ---- the inputs of layers ------------------------------------------------------------------------

OFFLOADED = {
    "inputs": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["input"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "products": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


def named_loss(params, x, *, remat):
    def block(layer, x):
        return models.block(layer, checkpoint_name(x, "input"))

    x = jgrad.scan_layers(block, params["layers"], jnp.tanh(x @ params["first"]), remat=remat)
    return jnp.mean(jnp.square((x @ params["last"]).astype(jnp.float32)))


@pytest.mark.slow(always=[f"{form}-all-inputs" for form in FORMS])
@pytest.mark.parametrize("policy", OFFLOADED)
@pytest.mark.parametrize("place", ["none", "all"])
@pytest.mark.parametrize("form", FORMS)
def test_stored_on_the_host(form, place, policy):
    """What a policy of JAX offloads changes no bit of a step, wherever weights and state lie."""
    params, tx, batches = models.params(), adam(), [models.batch(i) for i in range(2)]
    state, found = tx.init(params), []
    given = PLACES["all"](params, state) if place == "all" else (params, state)
    for remat, start in ((OFFLOADED[policy], given), (True, (params, state))):
        loss = functools.partial(named_loss, remat=remat)
        with FORMS[form]():
            step = jgrad.step_in_backward(tx, loss, first_pass=True)
            found.append(models.run(step, *start, batches))
    models.assert_equal(on_device(found[0]), found[1])


def test_stored_on_the_host_by_a_gradient():
    """The same outside of a step, with layers there or not."""
    params, x = models.params(), models.batch()
    grad = jax.jit(jax.value_and_grad(named_loss), static_argnames="remat")
    expected = grad(params, x, remat=True)
    for given in (params, params | {"layers": on_host(params["layers"])}):
        found = grad(given, x, remat=OFFLOADED["inputs"])
        models.assert_equal(on_device(found), expected)


@pytest.mark.parametrize("policy", OFFLOADED)
@pytest.mark.parametrize("form", ["a gradient", "in the backward pass"])
def test_what_is_stored_on_the_host_is_nowhere_else(form, policy):
    """No carry is stored beside the inputs; it is beside products, which are computed from it."""
    params, tx = models.params(), adam()
    loss = functools.partial(named_loss, remat=OFFLOADED[policy])
    step, given = jax.grad(loss), (params, models.batch())
    if form != "a gradient":
        step, given = jgrad.step_in_backward(tx, loss), (params, tx.init(params), models.batch())
    with forced():
        program = jax.make_jaxpr(step)(*given).jaxpr
    stacks = {
        (x.aval.shape[2], x.aval.memory_space == jax.memory.Space.Host)
        for eqn in inner_equations(program.eqns)
        for x in eqn.outvars
        if x.aval.shape[:2] == (models.LAYERS, models.ROWS)
    }
    of_products = {(models.WIDTH, False), (models.HIDDEN, True)}
    assert stacks == ({(models.WIDTH, True)} if policy == "inputs" else of_products)


# ---- models --------------------------------------------------------------------------------------


def frozen_base(adapters, base, x):
    """Adapters of low rank beside weights that nothing updates."""

    def block(adapter, x, frozen):
        return x + jnp.tanh(x @ frozen["up"] + x @ adapter["a"] @ adapter["b"]) @ frozen["down"]

    x = jgrad.scan_layers(block, adapters["layers"], x, xs=base)
    return jnp.mean(jnp.square(x))


def test_adapters_beside_a_base_on_the_host():
    """The base is `xs`: an argument of the loss, of which one layer at a time is fetched."""
    rng = np.random.default_rng(1)
    base, x, tx = models.params()["layers"], models.batch(), adam()
    a = models.array(rng, models.LAYERS, models.WIDTH, 2)
    adapters = {"layers": {"a": a, "b": jnp.zeros((models.LAYERS, 2, models.HIDDEN))}}
    step, results = jax.jit(jgrad.step_in_backward(tx, frozen_base)), []
    for given in (base, on_host(base)):
        params, state = adapters, tx.init(adapters)
        for _ in range(3):
            params, state, value = step(params, state, given, x)
        results.append((params, state, value))
    models.assert_equal(results[1], results[0])
    found = moves(jgrad.step_in_backward(tx, frozen_base), adapters, tx.init(adapters), given, x)
    assert {shape[-2:] for shape, _ in found} == {
        (models.WIDTH, models.HIDDEN),
        (models.HIDDEN, models.WIDTH),
    }


def along_axis_one(params, x):
    axes = {"up": 1, "down": 1}
    return jnp.mean(jgrad.scan_layers(models.block, params["layers"], x, axis=axes) ** 2)


def with_keys(params, x):
    """Dropout by keys, an auxiliary loss by ys, and one more stack."""

    def block(layer, x, key):
        kept = jax.random.bernoulli(key, 0.9, x.shape)
        return models.block(layer, jnp.where(kept, x, 0.0)), jnp.mean(x**2)

    keys = jax.random.split(jax.random.key(0), models.LAYERS)
    x, ys = jgrad.scan_layers(block, params["layers"], x, xs=keys, has_ys=True)
    x = jgrad.scan_layers(models.block, params["more"], x @ params["between"], axis=0)
    return jnp.mean(x**2) + 1e-3 * jnp.sum(ys)


def of_axis_one():
    layers = models.params()["layers"]
    return {"layers": jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), layers)}


def of_two_stacks():
    rng, params = np.random.default_rng(2), models.params()
    more = models.stack(rng, 2, models.WIDTH, models.HIDDEN, jnp.float32)
    return {"layers": params["layers"], "more": more, "between": params["last"]}


@pytest.mark.slow(always=["in the backward pass-axis", "in the backward pass-xs, ys"])
@pytest.mark.parametrize(
    ("loss", "make"),
    [(along_axis_one, of_axis_one), (with_keys, of_two_stacks)],
    ids=["axis", "xs, ys"],
)
@pytest.mark.parametrize("form", FORMS)
def test_other_stacks(loss, make, form):
    """Along another axis, with xs and ys, and several stacks."""
    params, tx = make(), adam()
    step, state = jgrad.step_in_backward(tx, loss), tx.init(params)
    with FORMS[form]():
        expected = models.run(step, params, state, [models.batch(i) for i in range(2)])
        found = models.run(step, *on_host((params, state)), [models.batch(i) for i in range(2)])
    models.assert_equal(on_device(found), expected)
    assert set(kinds(found[0])) == {"pinned_host"}


def scaled_loss(params, x, scale):
    x = jgrad.scan_layers(models.block, params["layers"], x)
    return scale * jnp.mean((x * params["norm"][None]) ** 2)


ORDERS = {
    "value last": lambda params, state, value: (params, state, value),
    "value first": lambda params, state, value: (value, params, state),
    "value first, and the scale": lambda params, state, value: (value, state.loss_scale, params, state),
}  # fmt: skip


@pytest.mark.parametrize("order", mostly_slow(ORDERS, "value first, and the scale"))
def test_donation(order):
    """Small arrays are on the device, so no scalar of a result is paired with one on the host."""
    rng = np.random.default_rng(0)
    params = {"layers": models.stack(rng, 3, 256, 256, jnp.float32), "norm": jnp.ones(256)}
    tx = jgrad.offload(jgrad.skip_nonfinite(adam(), loss_scale=8.0))
    inner = jgrad.step_in_backward(tx, scaled_loss, first_pass=True)

    def step(params, state, x):
        results = inner(params, state, x, state.loss_scale)
        return ORDERS[order](*results)

    state = tx.init(params)
    assert set(kinds(state.inner.mw["layers"])) == {"pinned_host"}
    assert set(kinds((state.loss_scale, state.inner.mw["norm"]))) == {"device"}
    step = jax.jit(step, donate_argnums=(0, 1))
    for _ in range(2):
        old, results = state, step(params, state, jnp.ones((2, 256)))
        params, state = (x for x in results if not isinstance(x, jax.Array))
        assert all(x.is_deleted() for x in jax.tree.leaves(old))
    assert set(kinds(state.inner.mw["layers"])) == {"pinned_host"}


# ---- bad input ---------------------------------------------------------------------------------

test_arrays_that_nothing_fetches = messages.test_of("host_memory", globals())


def test_what_is_not_fetched_in_a_block():
    """Such as what it closes over."""
    params, x = models.params(), models.batch()
    other = on_host(params["last"])
    closes = lambda layer, x: models.block(layer, x) @ other
    with pytest.raises(ValueError, match="memory_space") as caught:
        jgrad.scan_layers(closes, params["layers"], x)
    remedy = "`block` may not close over one: pass it as `xs`, or move it to the device"
    assert f"scan_layers: an array in host memory; {remedy}." in caught.value.__notes__


@pytest.mark.parametrize("form", FORMS)
def test_an_ensemble_on_the_host(form):
    """JAX cannot batch slices of host memory."""
    tx = adam()
    params = jax.tree.map(lambda x: jnp.stack([x, x]), models.params())
    state = jax.vmap(tx.init)(params)
    step = jax.vmap(jgrad.step_in_backward(tx, models.loss), (0, 0, None))
    given = params, on_host(state)
    with FORMS[form](), pytest.raises(ValueError, match="memory_space") as caught:
        jax.jit(step)(*given, models.batch())
    remedy = "`jax.vmap` cannot slice that: keep an ensemble in device memory"
    note = f"step_in_backward: `state` at .step in host memory; {remedy}."
    assert note in caught.value.__notes__
