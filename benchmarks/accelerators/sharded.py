"""Steps of a model whose leaves are sharded over many devices, under `jit`.

The state is placed by `jgrad.state_shardings`; that of optax like the parameters, by its paths.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

import jgrad
from benchmarks.accelerators.program import Counts, Program, mesh, step
from benchmarks.accelerators.recipes import Known, Recipe
from benchmarks.accelerators.targets import TARGETS

LAYERS, WIDTH, EXPERTS = 8, 2048, 16

TOPOLOGIES = {"v5e:4x4": 16, "v5e:16x16": 256, "v5p:8x8x8": 512}  # chips


class Arrangement(NamedTuple):
    """How a model is sharded.

    Attributes:
      title: what a table calls it.
      axes: of a mesh of so many devices.
      spec: of a leaf, by its name and its number of axes.
      experts: whether the model has them.
    """

    title: str
    axes: Callable[[int], dict[str, int]]
    spec: Callable[[str, int], P]
    experts: bool = False


def _with_experts(name: str, ndim: int) -> P:
    if "expert" in name:
        return P("expert", "data")
    return P("data") if ndim > 1 else P()


ARRANGEMENTS = {
    "fsdp": Arrangement(
        "all leaves over one axis", lambda n: {"data": n}, lambda name, ndim: P("data")
    ),
    "tensor": Arrangement(
        "matrices over two axes, scales of norms over one",
        lambda n: {"data": n // 4, "tensor": 4},
        lambda name, ndim: P("data", "tensor") if ndim > 1 else P("data"),
    ),
    "experts": Arrangement(
        "matrices over one axis, experts over another too",
        lambda n: {"data": n // 4, "expert": 4},
        _with_experts,
        experts=True,
    ),
}


def shapes(arrangement: Arrangement) -> dict[str, tuple[int, ...]]:
    """A transformer of eight layers, with experts in place of its larger matrices or without."""
    found: dict[str, tuple[int, ...]] = {"embedding": (32768, WIDTH), "norm": (WIDTH,)}
    for i in range(LAYERS):
        found |= {f"{i}/qkv": (WIDTH, 3 * WIDTH), f"{i}/out": (WIDTH, WIDTH)}
        if arrangement.experts:
            found |= {f"{i}/expert_up": (EXPERTS, WIDTH, WIDTH // 4)}
            found |= {f"{i}/expert_down": (EXPERTS, WIDTH // 4, WIDTH)}
        else:
            found |= {f"{i}/up": (WIDTH, 4 * WIDTH), f"{i}/down": (4 * WIDTH, WIDTH)}
        found |= {f"{i}/norm_1": (WIDTH,), f"{i}/norm_2": (WIDTH,)}
    return found


class Sharded(NamedTuple):
    """A compiled step, and the parameters of which a device has its part."""

    counts: Counts
    share: int


def counts(recipe: Recipe, arrangement: Arrangement, topology: str, *, form: str) -> Sharded:
    """Of the recipe ("tree"), or of what optax has in its place ("optax")."""
    own = shapes(arrangement)
    made = program(recipe, arrangement, topology, own, form=form)
    params = _params(recipe, arrangement, topology, own).values()
    return Sharded(made.counts, sum(math.prod(x.sharding.shard_shape(x.shape)) for x in params))


def _params(
    recipe: Recipe, arrangement: Arrangement, topology: str, own: dict[str, tuple[int, ...]]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Sharded leaves of these shapes."""
    target = TARGETS[topology.partition(":")[0]]
    chips = mesh(target, topology, **arrangement.axes(TOPOLOGIES[topology]))
    return {
        name: jax.ShapeDtypeStruct(
            shape,
            recipe.dtype,
            sharding=NamedSharding(chips, arrangement.spec(name, len(shape))),
        )
        for name, shape in own.items()
    }


def program(
    recipe: Recipe,
    arrangement: Arrangement,
    topology: str,
    own: dict[str, tuple[int, ...]],
    *,
    form: str = "tree",
    shard_over: str | None = "data",
    state_over: str | None = None,
) -> Program:
    """A step of leaves of these shapes.

    Args:
      recipe: of which the step is.
      arrangement: how the leaves are sharded.
      topology: one of `TOPOLOGIES`.
      own: shapes by name.
      form: "tree", or "optax" for what optax has in the place of the recipe.
      shard_over: what the recipe is told.
      state_over: `shard_over` of `state_shardings`.
    """
    target = TARGETS[topology.partition(":")[0]]
    params = _params(recipe, arrangement, topology, own)
    layers = {name: 0 if "expert" in name else None for name in own}
    specs = {name: x.sharding.spec for name, x in params.items()}
    known = Known(layers if arrangement.experts else None, shard_over, specs)
    optaxs = form == "optax"
    tx = recipe.optaxs() if optaxs and recipe.optaxs else recipe.ours(known)
    options = {"by_optax": True} if optaxs else {"mesh_axes": specs, **recipe.options}
    with jax.sharding.set_mesh(next(iter(params.values())).sharding.mesh):
        where = placed(tx, params, by_paths=optaxs, shard_over=state_over)
        state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            jax.eval_shape(tx.init, params),
            where,
        )
        outputs = (jax.tree.map(lambda x: x.sharding, params), where)
        return Program(
            target,
            step(tx, **options),
            (params, state, params),
            donate=(0, 1),
            out_shardings=outputs,
        )


def placed(
    tx: optax.GradientTransformation,
    params: Any,
    *,
    by_paths: bool,
    shard_over: str | None = None,
) -> Any:
    """A sharding for each array of the state; by paths where the state is of another library."""
    if not by_paths:
        return jgrad.state_shardings(tx, params, shard_over=shard_over)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    replicated = NamedSharding(leaves[0][1].sharding.mesh, P())

    def of(path: Any, x: Any) -> NamedSharding:
        for own, leaf in leaves:
            if path[-len(own) :] == own and x.shape == leaf.shape:
                return leaf.sharding
        return replicated

    return jax.tree_util.tree_map_with_path(of, jax.eval_shape(tx.init, params))
