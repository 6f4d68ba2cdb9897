"""One model on several devices, written as each way of running it wants, and its steps.

Layers have arrays that are not updated (`xs`) and return what the loss adds up (`has_ys`). The
truth is the ordinary step on one device, with the whole batch. Products are in float64, also of
float32 weights, so that gradients hardly depend on the order of sums.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jgrad
from tests.backward import models
from tests.backward.models import AXES
from tests.backward.recipes import FIRST, NONE, adam, clipped, muon
from tests.multi_device.meshes import mesh_of, place, specs_of
from tests.support.memory import on_host

DEVICES = 2  # along each axis
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
LAYERS, ROWS, WIDTH, HIDDEN = 2, 4, 16, 512  # each device has whole blocks of 256 elements


def specs(layers, first):
    return {"first": first, "layers": {"up": layers, "down": layers}, "last": P()}


PLACES = {
    "data": specs(P(), P()),
    "FSDP": specs(P(None, "d"), P("d")),
    "layers": specs(P("d"), P()),
    "tensor": specs(P(None, None, "m"), P()),
    "both": specs(P(None, "d", "m"), P("d")),
}
# Types do not let a loop cut a stack along a sharded axis; `pmap` has one axis.
CASES = {
    "Auto": ("data", "FSDP", "layers", "tensor", "both"),
    "Explicit": ("data", "FSDP", "tensor", "both"),
    "checked": ("data", "FSDP", "tensor"),
    "unchecked": ("data", "FSDP", "tensor"),
    "pmap": ("data", "FSDP"),
}


# ---- the model ---------------------------------------------------------------------------------


def parameters(dtype):
    rng = np.random.default_rng(0)
    first, last = (models.array(rng, WIDTH, WIDTH, dtype=dtype) for _ in range(2))
    up, down = (models.array(rng, LAYERS, WIDTH, HIDDEN, dtype=dtype) for _ in range(2))
    return {"first": first, "layers": {"up": up, "down": down}, "last": last}


def batches(*, has_inf=False):
    """Of gradients that are clipped and of some that are not; one may be not finite."""
    x = np.random.default_rng(0).normal(size=(4, ROWS, WIDTH))
    x *= np.array([3, 0.1, 1, 0.2])[:, None, None]
    x[2, 0, 0] = np.inf if has_inf else 0
    return jnp.asarray(x)


def gates():
    """For each layer, of its hidden channels."""
    return jnp.asarray(np.random.default_rng(1).uniform(0.5, 1.5, size=(LAYERS, HIDDEN)))


def unchanged(x):
    return x


def loss(params, x, gates, whole=unchanged, enter=unchanged, product=jnp.matmul):
    """As it is on one device, and what is otherwise elsewhere.

    Args:
      params: see above.
      x: a batch.
      gates: of each layer.
      whole: what a layer makes of its weights first.
      enter: what is done with activations in front of `up`.
      product: of activations and `down`.
    """

    def wide(tree):
        return jax.tree.map(lambda w: w.astype(x.dtype), whole(tree))

    def block(layer, x, gate):
        layer = wide(layer)
        hidden = jnp.tanh(enter(x) @ layer["up"]) * gate[None]
        return x + product(hidden, layer["down"].T), jnp.mean(jnp.square(x))

    ends = wide({"first": params["first"], "last": params["last"]})
    h = jnp.tanh(x @ ends["first"])
    h, ys = jgrad.scan_layers(block, params["layers"], h, xs=gates, has_ys=True)
    return jnp.mean(jnp.square(h @ ends["last"])) + 0.1 * jnp.sum(ys)


def automatic_loss(params, x, gates, *, mesh):
    """Activations stay with the devices of their rows."""

    def product(x, w):
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("d")))

    return loss(params, x, gates, product=product)


def explicit_loss(params, x, gates, *, of):
    """A layer is gathered along "d" and stays sharded along "m"."""
    own = P(None, "m") if "m" in of["layers"]["up"] else P()

    def whole(tree):
        to = {"first": P(), "last": P(), "up": own, "down": own}
        return {name: jax.sharding.reshard(w, to[name]) for name, w in tree.items()}

    product = functools.partial(jnp.matmul, out_sharding=P("d", None))
    return loss(params, x, gates, whole, product=product)


@jax.custom_vjp
def entered(x):
    """Whose cotangents are parts of a sum, as Megatron has it."""
    return x


@jax.custom_vjp
def added(x):
    """A sum whose cotangents are those of each part."""
    return jax.lax.psum(x, "m")


entered.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.psum(g, "m"),))
added.defvjp(lambda x: (added(x), None), lambda _, g: (g,))


def own_loss(params, x, gates, *, of, is_checked):
    """Of the part of a device, as it is written in `shard_map` and `pmap`."""
    of = {"first": of["first"], "last": of["last"], **of["layers"]}

    def whole(tree):
        return {
            name: jax.lax.all_gather(w, "d", axis=0, tiled=True) if "d" in of[name] else w
            for name, w in tree.items()
        }

    options = {}
    if "m" in of["up"]:
        add = (lambda x: jax.lax.psum(x, "m")) if is_checked else added
        options["product"] = lambda x, w: add(x @ w)
        options["enter"] = unchanged if is_checked else entered
    value = loss(params, x, gates, whole, **options)
    return jax.lax.pmean(value, "d") if is_checked else value


def means(of, g):
    """Of the gradients of all devices; gathers have added those of what they gathered."""

    def mean(spec, x):
        if x is None:
            return None
        return x / DEVICES if "d" in spec else jax.lax.pmean(x, "d")

    return jax.tree.map(mean, of, g, is_leaf=lambda x: isinstance(x, P))


# ---- transformations ---------------------------------------------------------------------------


class Method(NamedTuple):
    """A transformation.

    Attributes:
      make: makes it, of the specs of leaves, or of None.
      options: of the step.
      dtype: of the weights.
      has_norms: whether it has some of layers.
      on_host: whether weights and state lie in the memory of the hosts.
    """

    make: Any
    options: Any = NONE
    dtype: Any = jnp.float64
    has_norms: bool = False
    on_host: bool = False


def skip(axes):
    return jgrad.skip_nonfinite(clipped(adam(), max_norm=1.0, mesh_axes=axes), mesh_axes=axes)


METHODS = {
    "skip(clip)": Method(skip, FIRST, has_norms=True),
    "on hosts": Method(lambda axes: adam(), on_host=True),
    "8 bits": Method(lambda axes: adam(moment_dtype="8bit", mesh_axes=axes), dtype=jnp.float32),
    "muon": Method(lambda axes: muon(mesh_axes=axes), has_norms=True),
    "lamb": Method(lambda axes: jgrad.lamb(1e-2, layer_axes=AXES, mesh_axes=axes), has_norms=True),
    "watch": Method(
        lambda axes: jgrad.watch(adam(), layer_axes=AXES, mesh_axes=axes), has_norms=True
    ),
}


# ---- steps -------------------------------------------------------------------------------------


class Ran(NamedTuple):
    """What some steps made, and their program."""

    params: Any
    state: Any
    text: str


def _run(method, step, params, state, args, of_batch=unchanged):
    """One program: it takes what it returns, so shardings stay, or it would be an error."""
    xs = [of_batch(x) for x in batches(has_inf=bool(method.options))]
    program = step.lower(params, state, xs[0], *args).compile(QUICKLY)
    for x in xs:
        params, state, _ = program(params, state, x, *args)
    return Ran(params, state, program.as_text())


@functools.cache
def on_one_device(name):
    method = METHODS[name]
    tx, params = method.make(None), parameters(method.dtype)
    step = jax.jit(models.ordinary(tx, loss))
    return _run(method, step, params, tx.init(params), [gates()])


@functools.cache
def ran(way, where, name, *, is_ordinary=False):
    """Some steps in the backward pass, or the ordinary ones of the same program."""
    run = {"Auto": _under_jit, "Explicit": _under_jit, "pmap": _in_pmap}.get(way, _in_shard_map)
    return run(way, PLACES[where], METHODS[name], _ordinary if is_ordinary else _backward)


def _backward(method, tx, loss, **options):
    return jgrad.step_in_backward(tx, loss, **options, **method.options)


def _ordinary(_, tx, loss, *, gradients=unchanged, mesh_axes=None):
    def step(params, state, *args):
        value, grads = jax.value_and_grad(loss)(params, *args)
        params, state = jgrad.apply_gradients(
            tx, gradients(grads), state, params, mesh_axes=mesh_axes
        )
        return params, state, value

    return step


def _under_jit(way, of, method, make):
    mesh, tx = mesh_of(getattr(AxisType, way), d=DEVICES, m=DEVICES), method.make(None)
    of_xs = P(None, "m") if "m" in of["layers"]["up"] else P()
    with jax.set_mesh(mesh):
        if way == "Auto":
            step = make(method, tx, functools.partial(automatic_loss, mesh=mesh), mesh_axes=of)
        else:
            step = make(method, tx, functools.partial(explicit_loss, of=of))
        params = place(parameters(method.dtype), mesh, of)
        state = jax.jit(tx.init, out_shardings=jgrad.state_shardings(tx, params))(params)
        if method.on_host and make is _backward:
            params, state = on_host((params, state))
        args = [place(gates(), mesh, of_xs)]
        of_batch = functools.partial(place, mesh=mesh, specs=P("d"))
        return _run(method, jax.jit(step), params, state, args, of_batch)


def _of_device(of, method, make, *, is_checked=False):
    """A transformation and a step, for `shard_map` or `pmap`."""
    tx = method.make(of)
    loss = functools.partial(own_loss, of=of, is_checked=is_checked)
    options = {} if is_checked else {"gradients": functools.partial(means, of)}
    return tx, make(method, tx, loss, **options)


def _in_shard_map(way, of, method, make):
    mesh, is_checked = mesh_of(d=DEVICES, m=DEVICES), way == "checked"
    tx, step = _of_device(of, method, make, is_checked=is_checked)
    params = place(parameters(method.dtype), mesh, of)
    places = jgrad.state_shardings(tx, params)
    state = jax.jit(tx.init, out_shardings=places)(params)
    if method.on_host and make is _backward:
        params, state = on_host((params, state))
    of_xs = P(None, "m") if "m" in of["layers"]["up"] else P()
    own = of, specs_of(places)
    mapped = jax.shard_map(
        lambda *args: (*step(*args)[:2], None),
        mesh=mesh,
        in_specs=(*own, P("d"), of_xs),
        out_specs=(*own, None),
        check_vma=is_checked,
    )
    args = [place(gates(), mesh, of_xs)]
    of_batch = functools.partial(place, mesh=mesh, specs=P("d"))
    return _run(method, jax.jit(mapped), params, state, args, of_batch)


def _in_pmap(_, of, method, make):
    """The parts of devices are stacked, and taken apart in the end."""
    tx, step = _of_device(of, method, make)
    run = functools.partial(jax.pmap, axis_name="d", devices=jax.devices()[:DEVICES])

    def parts(x, spec):
        axis = [*spec].index("d") if "d" in spec else None
        return jnp.stack([x] * DEVICES if axis is None else jnp.split(x, DEVICES, axis))

    def whole(x, spec):
        x = np.asarray(x)
        if "d" in spec:
            return np.concatenate(x, [*spec].index("d"))
        np.testing.assert_array_equal(x[0], x[1])
        return x[0]

    params = jax.tree.map(parts, parameters(method.dtype), of)
    state = run(tx.init)(params)
    of_batch = lambda x: x.reshape(DEVICES, -1, x.shape[-1])
    ran = _run(method, run(step), params, state, [jnp.stack([gates()] * DEVICES)], of_batch)
    return ran._replace(params=jax.tree.map(whole, ran.params, of))
