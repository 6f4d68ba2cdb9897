"""A digest of the program of every optimizer, functional update and wrapper, on a tree and packed.

    python -m tests.digests > before.txt        # then change the structure of the code
    python -m tests.digests | diff before.txt -

prints a line for each program. A digest says what is computed and nothing else: it does not depend
on names, on the order of operations, on nested calls of `jit`, or on what is computed and not used.
So a change that only moves code prints the same lines.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core
from jax.sharding import AxisType, PartitionSpec as P

import jgrad
from tests.cases import CASES, MASK, Case, moments_of, params
from tests.support import packed_model as packed
from tests.support.loops import step_of, told, with_loss

RATE_TREE = {"layer": 0.1, "rest": [0.01, jnp.float32(0.2), 0.0]}


def digest(f: Callable[..., Any], *args: Any) -> str:
    """The digest of the jaxpr of a function."""
    closed, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    inputs = [_hash("input", i, v.aval) for i, v in enumerate(closed.jaxpr.invars)]
    outputs = _outputs(closed.jaxpr, closed.consts, inputs)
    return _hash(re.sub(r"0x[0-9a-f]+", "", str(jax.tree.structure(shapes))), *outputs)


def _hash(*parts: Any) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def _value(x: Any) -> str:
    x = np.asarray(x) if not hasattr(x, "dtype") or x.dtype != jax.dtypes.float0 else x
    return _hash(x.dtype, x.shape, np.asarray(x).tobytes())


def _outputs(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[str]) -> list[str]:
    """The digests of the outputs, from those of the inputs."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    known |= dict(zip(jaxpr.constvars, map(_value, consts), strict=True))

    def read(x: Any) -> str:
        return _value(x.val) if isinstance(x, core.Literal) else known[x]

    for equation in jaxpr.eqns:
        found = _equation(equation, [read(x) for x in equation.invars])
        known |= dict(zip(equation.outvars, found, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _equation(equation: Any, inputs: list[str]) -> list[str]:
    name, parameters = equation.primitive.name, equation.params
    if name == "jgrad_leaf_step":
        inner = jax.make_jaxpr(parameters["step"].plain)(*(x.aval for x in equation.invars))
        return _outputs(inner.jaxpr, inner.consts, inputs)
    if name in ("jit", "closed_call"):
        inner = parameters["jaxpr"]
        return _outputs(inner.jaxpr, inner.consts, inputs)
    if name == "custom_jvp_call":
        inner = parameters["call_jaxpr"]
        return _outputs(inner.jaxpr, inner.consts, inputs)
    if name == "cond":
        branches = [_outputs(b.jaxpr, b.consts, inputs[1:]) for b in parameters["branches"]]
        return [_hash("cond", inputs[0], *each) for each in zip(*branches, strict=True)]
    if name == "shard_map":  # constants come in as operands, in any order
        specs = zip(parameters["in_specs"], inputs, strict=True)
        inner = parameters["jaxpr"]
        outputs = _outputs(inner, [], [_hash("shard", spec, x) for spec, x in specs])
        pairs = zip(parameters["out_specs"], outputs, strict=True)
        return [_hash("shard_map", parameters["mesh"], spec, x) for spec, x in pairs]
    described = [f"{key}={_parameter(x)}" for key, x in sorted(parameters.items())]
    return [_hash(name, *described, v.aval, i, *inputs) for i, v in enumerate(equation.outvars)]


def _parameter(x: Any) -> str:
    if isinstance(x, core.ClosedJaxpr):
        return _parameter_jaxpr(x.jaxpr, x.consts)
    if isinstance(x, core.Jaxpr):
        return _parameter_jaxpr(x, [f"const {i}" for i in range(len(x.constvars))])
    if isinstance(x, (tuple, list)):
        return _hash(*map(_parameter, x))
    if callable(x) and not isinstance(x, type):
        return "function"
    return re.sub(r"0x[0-9a-f]+", "", str(x))


def _parameter_jaxpr(jaxpr: Any, consts: Sequence[Any]) -> str:
    inputs = [_hash("input", i, v.aval) for i, v in enumerate(jaxpr.invars)]
    return _hash(*_outputs(jaxpr, consts, inputs))


# ---- what is digested --------------------------------------------------------------------------


def programs() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """(name, function, arguments) of each program."""
    yield from transformations()
    yield from functional_updates()
    yield from on_meshes()
    yield from gradients()


def _training(name: str, tx: Any, w: Any, g: Any, **extra: Any) -> Iterator[Any]:
    yield f"{name} init", tx.init, (w,)
    step = lambda w, state, g: step_of(tx)(w, state, g, **extra)
    yield name, step, (w, jax.eval_shape(tx.init, w), g)


def transformations() -> Iterator[Any]:
    """Each optimizer and wrapper on trees of several dtypes, packed, and with `pack_small`."""
    trees = {d: params(d) for d in ("float32", "bfloat16", "complex64")}
    some = packed.normal(0)
    buffers = jgrad.pack(some)
    large_apart = jgrad.pack(some, max_size=packed.SMALL)
    large = {"w": jnp.ones((64, 80)), "b": jnp.ones((64,)), "v": jnp.ones((4100,))}
    mixed = {**some, "none": None, "count": jnp.arange(3)}
    for case in CASES:
        for dtype, w in trees.items():
            yield from _training(f"{case} {dtype}", case.tx(), w, w)
        yield from _training(f"{case} rate tree", case.tx(RATE_TREE), some, some)
        schedule = case.tx(optax.linear_schedule(0.1, 0.0, 10))
        with jax.numpy_dtype_promotion("standard"):
            yield from _training(f"{case} schedule", schedule, some, some)
        override = {"learning_rate": jnp.float32(0.3)}
        yield from _training(f"{case} override", case.tx(), some, some, **override)
        if case.packs:
            yield from _training(f"{case} packed", case.tx(RATE_TREE), buffers, buffers)
        yield from _training(f"{case} in part packed", case.tx(), large_apart, large_apart)
        small = jgrad.pack_small(case.tx(), max_size=packed.SMALL)
        yield from _training(f"{case} pack_small", small, some, some)
        absent = {**mixed, "count": None}
        yield from _training(f"{case} mixed", case.without_masks().tx(), mixed, absent)
        if case.rounded:
            half = case.tx(moment_dtype=jnp.bfloat16)
            yield from _training(f"{case} bfloat16 moments", half, some, some)
            codes = case.without_masks().tx(moment_dtype="8bit")
            forms = (("tree", large), ("packed", jgrad.pack(large)))
            for form, x in forms if case.packs else forms[:1]:
                yield from _training(f"{case} 8 bits {form}", codes, x, x)
                yield from _training(
                    f"{case} 8 bits {form} skip", jgrad.skip_nonfinite(codes), x, x
                )
        forms = (("tree", some), ("packed", buffers))
        for form, x in forms if case.packs else forms[:1]:
            yield from _training(f"{case} {form} skip", jgrad.skip_nonfinite(case.tx()), x, x)
    # Other wrappers, such as `zero`, refuse an `offload` inside.
    for name, tx in (wrappers() | {"offload": jgrad.offload(jgrad.adam(0.1))}).items():
        yield from _training(f"{name} tree", tx, some, some)
        yield from _training(f"{name} packed", tx, buffers, buffers)
        half = packed.normal(0, jnp.bfloat16)
        yield from _training(f"{name} bfloat16", tx, half, half)
        half = jgrad.pack(half)
        yield from _training(f"{name} bfloat16 packed", tx, half, half)
    accumulate = jgrad.accumulate(jgrad.adam(0.1), 3)
    for emit in (True, False, jnp.asarray(True)):
        yield from _training(f"accumulate emit={emit}", accumulate, some, some, emit=emit)
    yield from _training("accumulate finite", accumulate, some, some, finite=jnp.asarray(True))
    stacked = {"layers": {"w": jnp.ones((3, 20, 30)), "b": jnp.ones((3, 20))}, "head": jnp.ones(64)}
    for name, make in (("lars", jgrad.lars), ("lamb", jgrad.lamb)):
        axes = {"layers": 0, "head": None}
        tx = make(0.1, weight_decay=0.1, layer_axes=axes)
        yield from _training(f"{name} layer_axes", tx, stacked, stacked)
        both = jgrad.pack(stacked, layer_axes=axes)
        yield from _training(f"{name} layer_axes packed", tx, both, both)
    yield "global_norm", jgrad.global_norm, (some,)
    yield "global_norm packed", jgrad.global_norm, (buffers,)
    yield "pack", jgrad.pack, (some,)
    yield "pack stacked", lambda x: jgrad.pack(x, layer_axes=axes, multiple_of=8), (stacked,)
    yield "unpack", jgrad.unpack, (buffers,)
    yield "pack like", lambda x: jgrad.pack(x, like=buffers), (some,)


def wrappers() -> dict[str, Any]:
    """Transformations around others, alone and together."""
    adam = jgrad.adam(0.1, weight_decay=0.1, weight_decay_mask=MASK)
    clipped = jgrad.average_params(
        optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.lamb(0.01)), 0.999
    )
    return {
        "scale_by_adam": jgrad.scale_by_adam(),
        "scale_by_trust_ratio": jgrad.scale_by_trust_ratio(trust_ratio_mask=MASK),
        "clip_by_global_norm": jgrad.clip_by_global_norm(1.0),
        "accumulate": jgrad.accumulate(adam, 4),
        "accumulate unchecked": jgrad.accumulate(adam, 4, check_finite=False),
        "ema": jgrad.average_params(adam, lambda done: jnp.minimum(0.9, done.astype(float) / 10)),
        "master_weights": jgrad.master_weights(adam),
        "stochastic_rounding": jgrad.stochastic_rounding(adam),
        "schedule_free": jgrad.schedule_free(adam),
        "hyperball": jgrad.hyperball(jgrad.adam(0.1), 0.02, leaves=MASK),
        "skip_nonfinite": jgrad.skip_nonfinite(adam),
        "watch": jgrad.watch(optax.chain(jgrad.clip_by_global_norm(1.0), adam)),
        "watch, every": jgrad.watch(jgrad.accumulate(adam, 2), every=3),
        "loss scaling": jgrad.skip_nonfinite(adam, loss_scale=2.0**15, growth_interval=3),
        "skip and accumulate": jgrad.skip_nonfinite(jgrad.accumulate(adam, 4)),
        "skip_spikes": with_loss(jgrad.skip_spikes(adam)),
        "skip_spikes around skip": with_loss(jgrad.skip_spikes(jgrad.skip_nonfinite(adam))),
        "skip_spikes inside skip": with_loss(jgrad.skip_nonfinite(jgrad.skip_spikes(adam))),
        "accumulate weighted": told(jgrad.accumulate(adam, 4, weighted=True), weight=1.0),
        "the whole stack": jgrad.skip_nonfinite(
            jgrad.accumulate(jgrad.master_weights(clipped), 4), loss_scale=2.0**15
        ),
    }


def _twin(case: Case, names: Sequence[str], w: Any, g: Any, rates: Any, *rest: Any) -> Any:
    *moments, t = rest
    w, new = case.step(w, g, rates, dict(zip(names, moments, strict=True)), t)  # type: ignore[misc]
    return w, *new.values()


def functional_updates() -> Iterator[Any]:
    """With trees, with prefixes, packed, and with each option."""
    tree = packed.normal(0)
    buffers = jgrad.pack(tree)
    array, zeros = jnp.linspace(1.0, 2.0, 300), jnp.zeros(300)
    rates = {"layer": 0.1, "rest": [0.1, 0.2, 0.3]}
    coarse = {"early": jnp.ones(300), "late": {"a": jnp.ones(300)}}
    adams: dict[str, Any] = {"adam_update": jgrad.adam_update, "lamb_update": jgrad.lamb_update}
    adam_options: list[dict[str, Any]] = [
        {},
        {"beta1": 0.8, "beta2": {"early": 0.9, "late": 0.8}, "epsilon": 0.1},
        {"bias_correction": "moments"},
        {"bias_correction": None, "stop_gradients": False},
    ]
    lamb_options: list[dict[str, Any]] = [
        {"decay_lambda": 0.1, "min_trust_ratio": 0.01, "max_trust_ratio": None},
        {"decay_lambda": 0.1, "rule": "ivy"},
        {"decay_lambda": rates, "max_trust_ratio": 3.0},
        {"layer_axes": {"layer": {"w": 0, "b": None}, "rest": None}},
    ]
    for name, f in adams.items():
        for i, options in enumerate(adam_options):
            call = lambda *args, f=f, options=options: f(*args, **options)
            yield f"{name} coarse {i}", call, (coarse, array, 0.1, zeros, zeros, 3)
            if i != 1:
                yield f"{name} tree {i}", call, (tree, tree, rates, tree, tree, 3.0)
                yield f"{name} packed {i}", call, (buffers, buffers, rates, buffers, buffers, 3.0)
        missing = {"early": None, "late": {"a": array}}
        yield f"{name} missing", f, (coarse, missing, 0.1, coarse, coarse, {"early": 1, "late": 2})
    for i, options in enumerate(lamb_options):
        call = lambda *args, options=options: jgrad.lamb_update(*args, **options)
        yield f"lamb_update {i}", call, (tree, tree, rates, tree, tree, 3.0)
        if i < 3:
            yield f"lamb_update packed {i}", call, (buffers, buffers, rates, buffers, buffers, 3.0)
    yield "adam_step", jgrad.adam_step, (tree, tree, tree, 1)
    yield "adam_step packed", jgrad.adam_step, (buffers, buffers, buffers, 1)
    yield "adam_step coarse", jgrad.adam_step, (array, zeros, zeros, {"early": 1, "late": 9})
    yield "adam_step scalar", jgrad.adam_step, (2.0, jnp.zeros(1), jnp.zeros(1), 1)
    descents = {
        "optimizer_update": jgrad.optimizer_update,
        "gradient_descent_update": jgrad.gradient_descent_update,
        "lars_update": jgrad.lars_update,
    }
    lars_options: list[dict[str, Any]] = [
        {"decay_lambda": 0.1},
        {"decay_lambda": rates, "rule": "decayed_gradient", "epsilon": 0.1},
        {"decay_lambda": 0.1, "rule": "ivy", "trust_coefficient": 0.1},
    ]
    for i, options in enumerate(lars_options):
        call = lambda *args, options=options: jgrad.lars_update(*args, **options)
        descents[f"lars_update {i}"] = call
    for case in CASES:
        if case.step is not None:
            names = list(moments_of(case.tx().init(tree)))
            call = functools.partial(_twin, case, names)
            for form, x in (("", tree), (" packed", buffers)):
                yield f"{case} update{form}", call, (x, x, rates, *[x] * len(names), 3.0)
    for name, f in descents.items():
        yield f"{name} tree", f, (tree, tree, rates)
        yield f"{name} packed", f, (buffers, buffers, rates)
        if name not in ("lars_update 1",):
            yield f"{name} coarse", f, (coarse, array, 0.1)
            yield f"{name} column", f, (jnp.ones((4, 3)), jnp.ones((4, 3)), jnp.ones((4, 1)))
            half = jnp.ones((4, 3), jnp.bfloat16)
            yield f"{name} bfloat16", f, (half, half, 0.1)


def on_meshes() -> Iterator[Any]:
    """`mesh_axes` and `zero`, inside `shard_map` over one device."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    tree = packed.normal(0)
    inside = lambda f, n: jax.shard_map(
        f, mesh=mesh, in_specs=(P(),) * n, out_specs=P(), check_vma=False
    )
    cut = {
        "lars": jgrad.lars(0.1, weight_decay=0.1, mesh_axes="data"),
        "lamb": jgrad.lamb(0.1, mesh_axes={"layer": {"w": "data", "b": None}, "rest": P("data")}),
        "clip": jgrad.clip_by_global_norm(1.0, mesh_axes="data"),
        "accumulate": jgrad.accumulate(jgrad.adam(0.1), 4, mesh_axes="data"),
        "skip": jgrad.skip_nonfinite(jgrad.adam(0.1), mesh_axes="data"),
    }
    for name, tx in cut.items():
        state = jax.eval_shape(tx.init, tree)
        yield f"{name} mesh_axes", inside(step_of(tx), 3), (tree, state, tree)
    buffers = jgrad.pack(tree, multiple_of=8)
    for case in CASES:
        if not case.packs:
            continue
        tx = jgrad.zero(case.tx(RATE_TREE), "data")
        state = jax.eval_shape(tx.init, buffers)
        yield f"{case} zero", inside(step_of(tx), 3), (buffers, state, buffers)
        yield f"{case} zero init", inside(tx.init, 1), (buffers,)
    for name, tx in wrappers().items():
        tx = jgrad.zero(tx, "data")
        state = jax.eval_shape(tx.init, buffers)
        yield f"{name} zero", inside(step_of(tx), 3), (buffers, state, buffers)


def gradients() -> Iterator[Any]:
    """The wrappers of `jax.grad` and its kin."""
    f = lambda w: jnp.sum(jnp.sin(w["a"]) * w["b"][0])
    w = {"a": jnp.ones(3), "b": [jnp.ones(3), jnp.arange(2)]}
    v = {"a": jnp.ones(3), "b": [jnp.ones(3), None]}
    yield "grad", jgrad.grad(f), (w,)
    yield "value_and_grad", jgrad.value_and_grad(lambda w: (f(w), w["a"]), has_aux=True), (w,)
    yield "grad of grad", jgrad.grad(jgrad.grad(lambda x: jnp.sum(x**3))), (jnp.ones(3),)
    for mode in ("reverse", "forward", None):
        g = lambda w: {"y": jnp.outer(w["a"], w["a"]), "z": w["b"][0]}
        yield f"jac {mode}", jgrad.jac(g, mode=mode), (w,)
    yield "value_and_jac", jgrad.value_and_jac(lambda x: x**2), (jnp.ones(3),)
    yield "hvp", lambda w, v: jgrad.hvp(f, (w,), (v,)), (w, v)
    yield "execute_with_gradients", lambda w: jgrad.execute_with_gradients(f, w), (w,)
    several = lambda w: (f(w), {"more": jnp.sum(w["a"])})
    options = {"xs_grad_idxs": None, "ret_grad_idxs": None, "retain_grads": True}
    call = lambda w: jgrad.execute_with_gradients(several, w, **options)
    yield "execute_with_gradients all", call, (w,)
    yield "stop_gradient", jgrad.stop_gradient, (w,)
    yield "variable", jgrad.variable, (w,)
    for name in ("inplace_update", "inplace_increment", "inplace_decrement"):
        yield name, getattr(jgrad, name), (w, {"a": 1.0, "b": [2.0, 3]})


def main() -> None:
    """Prints a line for each program."""
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    for name, f, args in programs():
        print(f"{digest(f, *args)}  {name}", flush=True)


if __name__ == "__main__":
    main()
