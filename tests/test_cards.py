"""The method cards of docs/methods.md: their figures are counted, and their defaults train."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

import jgrad
from benchmarks.accelerators.recipes import RECIPES
from benchmarks.recipes import program
from tests.accelerators.limits import COLLECTIVES, NOT_REACHED, limit
from tests.multi_device.test_collectives import model, moved
from tests.test_docs import blocks, page, rows, run_example, section

PAGE = "docs/methods.md"
RATE = optax.cosine_decay_schedule(1e-3, 1000)
SIDE = 1024  # of the matrix whose state is counted
pytestmark = pytest.mark.usefixtures("standard_promotion")  # schedules of optax promote
EXTRA = 0.005  # counters, and digits that the table leaves out


class Row(NamedTuple):
    """What a row of the table is about.

    Attributes:
      make: the transformation, of its options.
      compiled: its name among the recipes that are compiled for accelerators; None for blanks.
      dtype: of the parameters.
      options: more options of `make`, in all columns.
    """

    make: Callable[..., Any]
    compiled: str | None = None
    dtype: Any = jnp.float32
    options: dict[str, Any] = {}  # noqa: RUF012


def momentum(**options):
    return jgrad.gradient_descent(RATE, momentum=0.9, **options)


def adamw(**options):
    return jgrad.adam(RATE, weight_decay=0.1, **options)


def cautious(**options):
    return adamw(weight_decay_rule="cautious", **options)


def stochastic(**options):
    return jgrad.stochastic_rounding(adamw(**options))


def lars(**options):
    return jgrad.lars(RATE, weight_decay=1e-4, **options)


def lamb(**options):
    return jgrad.lamb(RATE, weight_decay=0.1, **options)


def muon(**options):
    return jgrad.muon(RATE, matrices=True, adam_learning_rate=RATE, **options)


def normuon(**options):
    return muon(rule="normuon", **options)


def adamh(**options):
    return jgrad.hyperball(jgrad.adam(RATE, **options), RATE, leaves=True)


def muonh(**options):
    return jgrad.hyperball(muon(**options), RATE, leaves=True)


def schedule_free(**options):
    return jgrad.schedule_free(jgrad.adam(1e-3, beta1=0.0, **options))


ROWS = {
    "`gradient_descent`, momentum": Row(momentum, "momentum"),
    "`adam`": Row(adamw, "AdamW"),
    "`adam`, cautious decay": Row(cautious, "AdamW, cautious"),
    "`adam`, 8 bits": Row(adamw, "AdamW, 8 bits", options={"moment_dtype": "8bit"}),
    "`adam`, bfloat16, `stochastic_rounding`": Row(
        stochastic, "bf16: stochastic(AdamW)", jnp.bfloat16
    ),
    "`lars`": Row(lars, "LARS"),
    "`lamb`": Row(lamb, "LAMB"),
    "`muon`": Row(muon, "Muon"),
    '`muon`, "normuon"': Row(normuon, "NorMuon"),
    "`hyperball`, `adam`": Row(adamh, "hyperball(Adam)"),
    "`hyperball`, `muon`": Row(muonh, "hyperball(Muon)"),
    "`schedule_free`, `adam`": Row(schedule_free, "schedule_free(Adam)"),
}
TABLE = {row[0]: row[1:] for row in rows(section(PAGE, "All at once"))}


def cells(name, column):
    """The figures of a cell: of a tree, and packed; or in float32, and in 8 bits."""
    return [float(x) for x in re.findall(r"\d+(?:\.\d+)?", TABLE[name][column])]


def named(rows):
    return pytest.mark.parametrize(("name", "row"), rows.items(), ids=rows)


def test_the_rows_are_those_of_here():
    assert list(TABLE) == list(ROWS)


@named(ROWS)
def test_state(name, row):
    """Bytes per parameter of a matrix, from the shapes of its state."""
    shape = jax.ShapeDtypeStruct((SIDE, SIDE), row.dtype)
    forms = [{}, {"moment_dtype": "8bit"}]
    figures = cells(name, 0)
    for figure, form in zip(figures, forms[-len(figures) :], strict=True):
        state = jax.eval_shape(row.make(**row.options | form).init, {"w": shape})
        found = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / SIDE**2
        assert found == pytest.approx(figure, abs=EXTRA)


ON_CPU = {name: row for name, row in ROWS.items() if cells(name, 2)}


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="The XLA of older versions writes sums' terms out."
)
@named(ON_CPU)
def test_bytes_on_a_cpu(name, row):
    """As XLA counts them: on the tree, and packed where the table has a second figure."""
    tree = {f"w{i}": jnp.ones((512, 512), row.dtype) for i in range(3)}
    size = sum(x.size for x in tree.values())
    figures = cells(name, 2)
    for form, figure in zip((tree, jgrad.pack(tree)), figures * (3 - len(figures)), strict=True):
        step = program(row.make(**row.options), form, form, {})
        step.build()
        assert step.counted_bytes / size == pytest.approx(figure, rel=0.01)


@pytest.mark.parametrize(("column", "target"), [(3, "h100"), (4, "v5e")])
@named(ROWS)
def test_bytes_on_accelerators(name, row, column, target):
    """Within what the tests of compiled programs allow, and near it; blank where nothing was."""
    figures = cells(name, column)
    assert bool(figures) == (row.compiled is not None)
    for form, figure in zip(("tree", "packed"), figures * (3 - len(figures)), strict=False):
        most = max(
            NOT_REACHED.get(
                (row.compiled, target, model, form),
                limit(row.compiled, target, packed=form == "packed"),
            ).bytes
            for model in RECIPES[row.compiled].models
        )
        assert 0.7 * most <= figure <= most + 0.5  # the table has whole bytes above a hundred


@named({name: row for name, row in ROWS.items() if row.compiled})
def test_collectives(name, row):
    """As many as the tests of programs for 16 chips allow."""
    found = TABLE[name][1]
    allowed = COLLECTIVES[row.compiled]
    assert found == (", ".join(f"{n} {kind}" for kind, n in allowed.items()) or "0")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["`adam`, cautious decay", "`schedule_free`, `adam`"])
def test_no_collective(name):
    """What is elementwise, compiled here for eight devices."""
    assert TABLE[name][1] == "0"
    assert not moved(ROWS[name].make(), model("rows"))


# ---- defaults ----------------------------------------------------------------------------------

DEFAULTS = ["gradient_descent", "adam", "lars", "lamb", "muon", "hyperball", "schedule_free"]


def test_each_method_has_a_default():
    titles = re.findall(r"^## (\w+)$", page(PAGE), re.MULTILINE)
    assert titles == DEFAULTS
    assert len(blocks(PAGE)) == 1 + len(DEFAULTS)


def weights(seed):
    shapes = {"embed": (50, 8), "block": {"w": (8, 16), "b": (16,)}, "head": (16, 10)}
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    found = [jax.random.normal(k, s) for k, s in zip(keys, leaves, strict=True)]
    return structure.unflatten([0.02 * x / jnp.sqrt(jnp.mean(x**2)) for x in found])


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFAULTS)
def test_a_default_trains(name):
    """Most of a quadratic loss is gone after its steps; targets have the norms of the weights."""
    names = run_example(PAGE, 0, {})
    tx = run_example(PAGE, 1 + DEFAULTS.index(name), names)["tx"]
    w, target = weights(0), weights(1)

    def loss(w):
        return optax.tree.norm(jax.tree.map(jnp.subtract, w, target), squared=True) / 2

    def body(carry, _):
        w, state = carry
        updates, state = tx.update(jax.grad(loss)(w), state, w)
        return (optax.apply_updates(w, updates), state), None

    train = jax.jit(lambda carry: jax.lax.scan(body, carry, length=names["steps"])[0])
    found, state = train((w, tx.init(w)))
    found = optax.tree.get(state, "average", found)
    assert float(loss(found)) < 0.1 * float(loss(w))
