"""Scripts for models with scanned layers train as the ordinary ones, from which their diffs lead."""

import contextlib
import functools
import io
import re
import textwrap

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jgrad
from tests.backward import models
from tests.multi_device.meshes import mesh_of
from tests.support.pages import blocks, blocks_of, page, section
from tests.support.private import forced

SCANNED_LAYERS = "docs/scanned_layers.md"
PAGES = (SCANNED_LAYERS,)
LINEN, NNX, EQUINOX, HAIKU = SECTIONS = "flax linen", "flax nnx", "Equinox", "Haiku"
TRAINED = "model", "optimizer", "params", "state", "value"
needs_as_pure = pytest.mark.skipif(not hasattr(nnx, "as_pure"), reason="flax is older")


def whole(title):
    """The file to which its section links."""
    return page(*re.findall(r"\(\.\./(colabs/\w+\.py)\)", section(SCANNED_LAYERS, title)))


def script(title):
    """Without its docstring."""
    return whole(title).partition('"""\n\n')[2]


def variants(title):
    """The code in its docstring."""
    text = whole(title).partition('"""\n\n')[0]
    return [textwrap.dedent(x) for x in re.findall(r"(?m)(?:^    .*\n+)+", text)]


def ordinary(title):
    """The script from which the diff of a section leads to its own."""
    text = script(title)
    (diff,) = blocks_of(section(SCANNED_LAYERS, title), "diff")
    for lines in (hunk.split("\n") for hunk in diff.strip("\n").split("\n\n")):
        after, before = ("\n".join(x[1:] for x in lines if x[0] != gone) for gone in "-+")
        assert text.count(after) == 1
        text = text.replace(after, before)
    return text


def trained(text):
    """The arrays of model, state and value after three steps."""
    names = {}
    with jax.numpy_rank_promotion("allow"), contextlib.redirect_stdout(io.StringIO()):
        exec(compile(text.replace("100", "3"), SCANNED_LAYERS, "exec"), names)
    leaves = jax.tree.leaves([names.get(name) for name in TRAINED])
    arrays = [x for x in leaves if isinstance(x, jax.Array) and not x.is_deleted()]
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [jax.random.key_data(x) if is_key(x) else x for x in arrays]


def assert_trains_as_ordinary(title):
    expected = trained(ordinary(title))
    with forced():
        models.assert_equal(trained(script(title)), expected, roundings=32)


@pytest.mark.parametrize("title", SECTIONS)
def test_diff(title):
    """It leads from a script without a step in the backward pass."""
    text, old = script(title), ordinary(title)
    assert text.count("100") == 1
    for name in ("scan_layers", "in_backward"):
        assert name in text
        assert name not in old


@pytest.mark.parametrize("title", [LINEN, pytest.param(NNX, marks=needs_as_pure), EQUINOX])
def test_script(title, standard_promotion):
    assert_trains_as_ordinary(title)


# ---- variants ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_intermediates_in_linen(standard_promotion):
    """A block that returns them beside `x` trains as without, and they are stacked."""
    text = script(LINEN)
    for old, new in {
        "nn.Dense(16)(hidden), None": "nn.Dense(16)(hidden), jnp.max(hidden)",
        "x, None)[0]": "x, None)",
        "x = jgrad.scan_layers(": "x, largest = jgrad.scan_layers(",
        '["layers"], x)': '["layers"], x, has_ys=True)\n            assert largest.shape == (3,)',
    }.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    with forced():
        models.assert_equal(trained(f"import jax.numpy as jnp\n{text}"), trained(script(LINEN)), 32)


def test_boxes_on_a_mesh(standard_promotion):
    """On a mesh, flax looks at the axes that they name."""
    old, new = 'self.variables["params"]["layers"]', variants(LINEN)[1].strip()
    names = {}
    exec(script(LINEN).replace(old, new).partition("step = jax.jit")[0], names)

    def train(key, tokens):
        params = names["Decoder"]().init(key, tokens)
        state = names["TrainState"].create(apply_fn=None, params=params, tx=jgrad.adam(1e-2))
        return names["step"](state, tokens)[1]

    given = jax.random.key(0), jnp.zeros((2, 9), int)
    with jax.set_mesh(mesh_of(model=2)), jax.numpy_rank_promotion("allow"), forced():
        assert jax.eval_shape(train, *given).shape == ()


class Block(nn.Module):
    rate: float

    @nn.compact
    def __call__(self, x, _):
        y = nn.BatchNorm(use_running_average=False)(nn.Dense(4, use_bias=False)(x))
        return x + nn.Dropout(self.rate, deterministic=False)(nn.tanh(y)), None


class Linen(nn.Module):
    rate: float = 0.0
    is_ordinary: bool = False

    @nn.compact
    def __call__(self, x):
        axes, rngs = {"params": 0, "batch_stats": 0}, {"params": True, "dropout": True}
        make = nn.scan(Block, length=3, variable_axes=axes, split_rngs=rngs)
        layers = make(self.rate, name="layers")
        if self.is_ordinary or self.is_initializing():
            return layers(x, None)[0]
        names = {"jax": jax, "jgrad": jgrad, "Block": functools.partial(Block, self.rate)}
        exec(variants(LINEN)[0], names := names | {"self": self, "x": x})
        return names["x"]


def assert_as_ordinary(loss, old, params, x, has_aux=False):
    tx = jgrad.adam(1e-2)
    step = models.ordinary(tx, old, has_aux)
    expected = models.run(step, params, tx.init(params), [x])
    with forced():
        step = jgrad.step_in_backward(tx, loss, has_aux=has_aux)
        models.assert_equal(models.run(step, params, tx.init(params), [x]), expected, 32)


def test_dropout_and_batch_statistics_in_linen(standard_promotion):
    """Those of `nn.scan`, but for its keys."""
    x, keys = models.batch()[:, :4], {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.jit(Linen().init)(keys, x)

    def loss_of(model):
        def loss(params, x):
            given = variables | {"params": params}
            y, new = model.apply(given, x, rngs=keys, mutable=["batch_stats"])
            return jnp.mean(y**2), new

        return loss

    params, losses = variables["params"], (Linen(), Linen(is_ordinary=True), Linen(0.5))
    loss, old, dropped = map(loss_of, losses)
    with jax.numpy_rank_promotion("allow"):
        assert_as_ordinary(loss, old, params, x, has_aux=True)
        assert dropped(params, x)[0] != loss(params, x)[0]


def test_an_nnx_module_as_layers():
    (run,) = re.findall(r"`(jgrad\.scan_layers\(.*)`", section(SCANNED_LAYERS, NNX))
    make = nnx.vmap(lambda rngs: nnx.Linear(16, 16, use_bias=False, rngs=rngs))
    graphdef, params = nnx.split(nnx.Dict(layers=nnx.split_rngs(splits=3)(make)(nnx.Rngs(0))))

    def loss(params, x):
        return jnp.mean(
            eval(run, {"jgrad": jgrad, "self": nnx.merge(graphdef, params), "x": x}) ** 2
        )

    def old(params, x):
        run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return jnp.mean(run(x, nnx.merge(graphdef, params).layers) ** 2)

    assert_as_ordinary(loss, old, params, models.batch())


def test_micro_batches():
    """A step of a large batch is that of `accumulate` with its parts."""
    names, tx = {"jax": jax, "block": models.block}, jgrad.adam(1e-2)
    exec(*blocks(SCANNED_LAYERS), names)

    def loss(params, x):
        x = jnp.tanh(x @ params["first"])
        x = jgrad.scan_layers(names["in_micro_batches"], params["layers"], x)
        return jnp.mean(jnp.square(x @ params["last"]))

    params, parts = models.params(), [models.batch(seed) for seed in range(4)]
    accumulated = jgrad.accumulate(tx, 4)
    step = models.ordinary(accumulated, models.loss)
    old, state, _ = models.run(step, params, accumulated.init(params), parts)
    with forced():
        step = jgrad.step_in_backward(tx, loss)
        found = models.run(step, params, tx.init(params), [jnp.concatenate(parts)])
    models.assert_equal(found[:2], (old, state.inner), 32)

    def memory(loss):
        shapes = jax.eval_shape(
            lambda: (models.params(hidden=1024), jnp.ones((1024, models.WIDTH)))
        )
        return jax.jit(jax.grad(loss)).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert memory(loss) < 0.5 * memory(models.loss)
