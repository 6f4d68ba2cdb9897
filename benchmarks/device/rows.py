"""What is timed on a device, and how: `measured(ROWS["medium: AdamW, tree"], Settings())`.

`python -m benchmarks.device.rows` measures one row, and prints the numbers. Each row has such a
process of its own, because a device remembers the highest number of bytes since the process began,
and nothing makes it forget. There, the program of the row is compiled before there are arrays,
since compilers for GPUs try kernels out on arrays of their own. It then takes a few steps alone,
and the peak is read. Only then does its peer come, and both take turns with a copy.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks.accelerators import hlo, program, recipes, train_steps
from benchmarks.measure import Ratio, in_turn
from benchmarks.programs import Program

_HOST = jax.memory.Space.Host

_IN_A_ROW = 10  # steps, so that launching one hides behind another
_COPIED = 2**26  # elements of float32: more than caches hold


class Settings(NamedTuple):
    """Of all rows.

    Attributes:
      rounds: times that each takes its turn, at most.
      until: a time of `time.time()` after which no round begins, but for the first three.
      small: whether long axes have a sixteenth of their length, to try it out.
      tokens: of a batch of the train steps.
    """

    rounds: int = 21
    until: float = math.inf
    small: bool = False
    tokens: int = train_steps.TOKENS


class Row(NamedTuple):
    """A program that is timed.

    Attributes:
      work: a name of `WORKS`.
      recipe: of `accelerators.recipes`; of a train step, of `accelerators.train_steps`.
      form: "optax", "tree" or "packed"; of a train step, one of `train_steps.FORMS`.
      peer: recipe and form of what it takes turns with.
      again: bytes per parameter that are read twice, since a norm has to be known first.
    """

    work: str
    recipe: str
    form: str
    peer: tuple[str, str] | None
    again: int = 0

    @property
    def name(self) -> str:
        return f"{self.work}: {self.recipe}, {self.form}"

    @property
    def beside(self) -> str:
        """What the peer has that the row has not."""
        both = zip(self.peer or (), (self.recipe, self.form), strict=False)
        return ", ".join(theirs for theirs, ours in both if theirs != ours) or "-"


TRAIN = "train step"
WORKS = {name: recipes.MODELS[name].title for name in ("medium", "two shapes", "many")}
WORKS[TRAIN] = (
    f"a train step of {train_steps.LAYERS} layers of two matrices of "
    f"{train_steps.WIDTH} x {train_steps.HIDDEN}"
)


def _rows() -> Iterator[Row]:
    for recipe, again in (("AdamW", 0), ("LARS", 8), ("LAMB", 12), ("skip(clip + AdamW)", 4)):
        yield Row("medium", recipe, "tree", (recipe, "optax"), again)
    yield Row("medium", "AdamW", "packed", ("AdamW", "optax"))
    yield Row("medium", "LAMB", "packed", ("LAMB", "optax"), 12)
    for recipe in ("AdamW, 8 bits", "bf16: stochastic(AdamW)", "bf16: stochastic(AdamW, 8 bits)"):
        yield Row("medium", recipe, "tree", ("AdamW", "tree"))
    yield Row("two shapes", "Muon", "tree", ("Muon", "optax"))
    usual, in_backward = train_steps.FORMS
    first = "AdamW of optax", usual
    yield Row(TRAIN, *first, None)
    for recipe in (
        "AdamW",
        "skip(clip + AdamW)",
        "bf16: stochastic(AdamW, 8 bits)",
        "bf16: skip(clip + stochastic(AdamW, 8 bits))",
        "bf16: stochastic(Muon)",
    ):
        yield Row(TRAIN, recipe, usual, first)
        yield Row(TRAIN, recipe, in_backward, (recipe, usual))
    on_device, *on_host = train_steps.ON_HOSTS
    yield Row(TRAIN, on_device, in_backward, first)
    for recipe in on_host:
        yield Row(TRAIN, recipe, in_backward, (on_device, in_backward))
    for form in ("tree", "packed"):
        yield Row("many", "AdamW", form, ("AdamW", "optax"))


ROWS = {row.name: row for row in _rows()}


class Task(NamedTuple):
    """A step to compile, with shapes of what it is given.

    Attributes:
      step: (carry, inputs) -> carry.
      first: makes the first carry of parameters.
      params: shapes.
      inputs: shapes.
    """

    step: Callable[[Any, Any], Any]
    first: Callable[[Any], Any]
    params: Any
    inputs: Any

    @property
    def carry(self) -> Any:
        """Shapes, and which of them are in host memory."""
        jax.clear_caches()  # types are those of the trace, and no cache may have them
        traced, shapes = jax.make_jaxpr(self.first, return_shape=True)(self.params)
        pairs = zip(jax.tree.leaves(shapes), traced.out_avals, strict=True)
        leaves = [_on_host(x) if y.memory_space == _HOST else x for x, y in pairs]
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    def start(self) -> Program:
        """Compiled, and then given arrays."""
        made = Program(self.step, self.carry, self.inputs)
        made.build()
        made.inputs = _numbers(self.inputs)
        made.carry = jax.jit(self.first, donate_argnums=0)(_numbers(self.params))
        return made


def task(work: str, recipe: str, form: str, settings: Settings) -> Task:
    """What a row, or its peer, does."""
    if work == TRAIN:
        return _train_step(recipe, form, settings)
    found, model = recipes.RECIPES[recipe], recipes.MODELS[work]
    shapes = {name: _shorter(shape, settings) for name, shape in model.shapes.items()}
    params = model._replace(shapes=shapes).params(found.dtype, packed=form == "packed")
    tx = found.ours(recipes.Known())
    if form == "optax" and found.optaxs:
        tx = found.optaxs()
    step = program.step(tx, **found.options)
    return Task(lambda carry, g: step(*carry, g), lambda w: (w, tx.init(w)), params, params)


def _train_step(recipe: str, form: str, settings: Settings) -> Task:
    """Its carry has the loss, too."""
    found = (train_steps.RECIPES | train_steps.ON_HOSTS)[recipe]
    step, init = train_steps.step_of(found, form), train_steps.transformation(found).init
    params, batch = (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(_shorter(x.shape, settings), x.dtype), tree)
        for tree in (
            train_steps.shapes("layers", found.dtype),
            jax.ShapeDtypeStruct((settings.tokens, train_steps.WIDTH), found.dtype),
        )
    )
    if found.on_host == train_steps.ALL:
        params["layers"] = jax.tree.map(_on_host, params["layers"])
    return Task(
        lambda carry, inputs: step(*carry[:2], *inputs),
        lambda w: (w, init(w), jnp.zeros(())),
        params,
        (batch, batch),
    )


def _on_host(shape: Any) -> Any:
    """The same in host memory; only with a mesh is that a part of its type."""
    mesh = Mesh(np.array(jax.local_devices()[:1]), ("x",))
    sharding = NamedSharding(mesh, P(), memory_kind="pinned_host")
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _shorter(shape: tuple[int, ...], settings: Settings) -> tuple[int, ...]:
    """Layers and short axes stay as they are."""
    return tuple(n // 16 if settings.small and n >= 256 else n for n in shape)


def _numbers(shapes: Any) -> Any:
    """Small random arrays, made on the host, so that the device never holds another copy."""
    some = 0.02 * np.random.default_rng(0).standard_normal(2**20, np.float32)

    def numbers(x: Any) -> jax.Array:
        found = np.resize(some, x.shape).astype(x.dtype)
        return jax.device_put(found, x.sharding) if x.sharding else jnp.array(found)

    return jax.tree.map(numbers, shapes)


class Measured(NamedTuple):
    """Of a row; bytes are those of a step.

    Attributes:
      size: the number of parameters.
      step: beside the peer; without one, beside itself.
      copy: bytes per second that a copy moved meanwhile.
      share: what a step must move per second, over what the copy moves.
      least: what it must move; of a train step, without what its products read.
      moved: what the compiled program moves.
      kernels: that it launches.
      peak: the most on the device at once, as the device says; None where it keeps no statistics.
      counted: the same, as the compiler says.
    """

    size: int
    step: Ratio
    copy: float
    share: float
    least: int
    moved: int
    kernels: int
    peak: int | None
    counted: int


def measured(row: Row, settings: Settings) -> Measured:
    """In a process that has touched no device before."""
    own = task(row.work, row.recipe, row.form, settings)
    size = sum(x.size for x in jax.tree.leaves(own.params))
    mine = own.start()
    for _ in range(3):
        jax.block_until_ready(mine())
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    elements = _COPIED // 256 if settings.small else _COPIED
    copy = Program(lambda x, _: -x, jnp.ones(elements, jnp.float32), None)
    copy.build()
    contenders = {"row": mine, "copy": copy}
    if row.peer:
        contenders["peer"] = task(row.work, *row.peer, settings).start()
    several = {name: _in_a_row(x) for name, x in contenders.items()}
    times = {
        name: [x / _IN_A_ROW for x in found]
        for name, found in in_turn(several, settings.rounds, until=settings.until).items()
    }
    moved, least = hlo.traffic(mine.text), least_bytes(own, row.again)
    copied = Ratio.of(times["copy"], times["row"])
    return Measured(
        size=size,
        step=Ratio.of(times["row"], times["peer" if row.peer else "row"]),
        copy=8 * elements / copied.ours,
        share=copied.ratio * least / (8 * elements),
        least=least,
        moved=moved.bytes,
        kernels=moved.kernels,
        peak=peak,
        counted=mine.peak_bytes,
    )


def least_bytes(task: Task, again: int) -> int:
    """What a step must move: all arguments are read, the carry is written, and `again` is read."""
    carry, inputs = (
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
        for tree in (task.carry, task.inputs)
    )
    return 2 * carry + inputs + again * sum(x.size for x in jax.tree.leaves(task.params))


def _in_a_row(step: Callable[[], Any]) -> Callable[[], Any]:
    def steps() -> Any:
        for _ in range(_IN_A_ROW - 1):
            step()
        return step()

    return steps


if __name__ == "__main__":
    name, settings = sys.argv[1:]
    print(json.dumps(measured(ROWS[name], Settings(**json.loads(settings)))._asdict()))
