"""What README, the notes and docs/ say is so: examples run, and tables name what there is."""

import functools
import inspect
import itertools
import pathlib
import re

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from studies import traffic
from tests.everywhere.test_recipes import LIMITS, OPERATIONS
from tests.support.eight_bits import unquantized
from tests.support.loops import assert_equal

ROOT = next(x for x in pathlib.Path(__file__).parents if (x / "pyproject.toml").exists())
PUBLIC = [
    name for name, x in vars(jgrad).items() if not (name.startswith("_") or inspect.ismodule(x))
]
# `docs/index.md` is written when the site is built: README, and the table of contents.
GUIDES = sorted(f"docs/{x.name}" for x in (ROOT / "docs").glob("*.md") if x.stem != "index")
NOTES = sorted(f"benchmarks/notes/{file.name}" for file in (ROOT / "benchmarks/notes").glob("*.md"))
PAGES = [
    name
    for name in ("README.md", "CONTRIBUTING.md", "BUILD_NOTES.md", "CHANGELOG.md", *GUIDES, *NOTES)
    if (ROOT / name).exists()
]
LONGEST = {"README.md": 115, "BUILD_NOTES.md": 330}

# Pages with examples: how many, each run by a test below.
EXAMPLES = {
    "README.md": 1,
    "docs/wrappers.md": 1,
    "docs/packed.md": 2,
    "docs/muon.md": 2,
    "docs/devices.md": 4,
    "docs/memory.md": 8,
    "docs/from_optax.md": 1,
    # These by test_guides.py, test_from_pytorch.py, test_choose.py and test_cards.py.
    "benchmarks/notes/accelerators.md": 1,
    "docs/getting_started.md": 5,
    "docs/runs.md": 4,
    "docs/from_elsewhere.md": 2,
    "docs/methods.md": 8,
    "docs/choose.md": 13,
}


@functools.cache
def page(name):
    return (ROOT / name).read_text()


def blocks(name, language="python"):
    return re.findall(rf"^```{language}\n(.*?)^```$", page(name), re.DOTALL | re.MULTILINE)


def run_example(name, index, names):
    """Runs an example of a page as a reader would, in the given names."""
    exec(compile(blocks(name)[index], name, "exec"), names)
    return names


def section(name, title):
    """What stands under a heading, up to the next of its kind."""
    found = re.search(
        rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page(name), re.DOTALL | re.MULTILINE
    )
    return found[1]


def rows(text):
    """The cells of each line of the tables, without headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    heads = {i for i, row in enumerate(cells) if i + 1 < len(cells) and cells[i + 1][0] == "---"}
    return [row for i, row in enumerate(cells) if i not in heads and row[0] != "---"]


def names_of_tests(pattern):
    """The functions of all files of tests whose names fit."""
    text = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    return set(re.findall(rf"^def ({pattern})\(", text, re.MULTILINE))


# ---- examples ----------------------------------------------------------------------------------


def test_every_example_is_run():
    """A new one needs a test here."""
    found = {name: len(blocks(name)) for name in ("README.md", *GUIDES, *NOTES) if blocks(name)}
    assert found == EXAMPLES


def test_readme(capsys, standard_promotion):
    """It runs as a reader would run it, and learns; optax's schedules rely on promotion."""
    run_example("README.md", 0, {})
    found = re.fullmatch(r"loss (\S+) after 300 steps\n", capsys.readouterr().out)
    assert float(found[1]) < 1e-2  # from 0.55, the mean square of y


def test_the_swap_of_readme(standard_promotion):
    """Both lines train to the same numbers."""
    lines = re.findall(r"^[-+]tx = (.*)$", *blocks("README.md", "diff"), re.MULTILINE)
    names = {"optax": optax, "jgrad": jgrad, "mask": {"w": True, "b": False}}
    names["schedule"] = optax.cosine_decay_schedule(0.1, 10)
    found = []
    for line in lines:
        tx, w = eval(line, names), {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
        state, update = tx.init(w), jax.jit(tx.update)
        for t in range(5):
            g = jax.tree.map(lambda p, t=t: jnp.cos(t + p), w)
            updates, state = update(g, state, w)
            w = optax.apply_updates(w, updates)
        found.append(w)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), *found)


def test_the_order_of_wrappers():
    """Four mini-batches of a float16 model, scaled as the text says, and the average read by name."""
    names = run_example("docs/wrappers.md", 0, {"jgrad": jgrad, "optax": optax})
    tx, w = names["tx"], {"w": jnp.ones((2, 3), jnp.float16)}

    @jax.jit
    def step(w, state):
        loss = lambda w: state.loss_scale * jnp.mean(jnp.square(w["w"].astype(jnp.float32)))
        updates, state = tx.update(jgrad.grad(loss)(w), state, w)
        return optax.apply_updates(w, updates), state

    state = tx.init(w)
    for i in range(4):
        assert w["w"][0, 0] == 1, i
        w, state = step(w, state)
    assert w["w"][0, 0] < 1
    assert int(state.skipped) == 0
    assert 0.999 < optax.tree.get(state, "average")["w"][0, 0] < 1


def test_packed_training(standard_promotion):
    """README's example goes on, packed, to the same loss; and back to the tree."""
    names = run_example("README.md", 0, {})
    expected = names["value"], names["params"]
    names["params"] = {
        "w1": jax.random.normal(jax.random.key(0), (1, 32)),
        "w2": jnp.zeros((32, 1)),
    }
    run_example("docs/packed.md", 0, names)
    params, state = names["params"], names["state"]
    for _ in range(300):
        params, state, value = names["step"](params, state)
    assert float(value) == pytest.approx(float(expected[0]), rel=1e-4)
    saved = jgrad.unpack((params, state))
    assert jax.tree.structure(saved[0]) == jax.tree.structure(expected[1])
    assert jax.tree.structure(jgrad.pack(saved, like=(params, state))) == jax.tree.structure(
        (params, state)
    )


def test_a_recipe_for_integer_leaves():
    """They come back as they were, as by equinox."""
    model = {"w": jnp.ones(3), "n": jnp.arange(2), "z": jnp.ones(2, jnp.complex64)}
    names = {"jgrad": jgrad, "jax": jax, "jnp": jnp, "model": model}
    run_example("docs/packed.md", 1, names)
    assert set(names["packed"].buffers) == {"float32", "complex64"}
    assert_equal(names["model"], model)
    floating, others = equinox.partition(model, equinox.is_inexact_array)
    assert_equal(jgrad.pack(floating), names["packed"])
    assert_equal(equinox.combine(jgrad.unpack(names["packed"]), others), model)


@pytest.mark.slow
def test_muon(capsys):
    """What `describe` prints, and the transformation that its choice makes."""
    names = run_example("docs/muon.md", 0, {"jgrad": jgrad, "jax": jax, "jnp": jnp})
    kinds = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert kinds == [
        ["Adam", "block/b"],
        ["Muon", "block/w"],
        ["Adam", "embed"],
        ["Adam", "head"],
    ]
    assert names["state"].vw["block"]["w"] is None


@pytest.mark.slow
def test_muon_clip():
    """The largest logit of the queries and keys that come out is tau where it was more."""
    names = run_example("docs/muon.md", 1, {"jgrad": jgrad, "jnp": jnp, "optax": optax})
    keys = jax.random.split(jax.random.key(0), 3)
    w = {n: jax.random.normal(k, (8, 2, 4)) for n, k in zip(("query", "key"), keys, strict=False)}
    x = jax.random.normal(keys[2], (5, 8))

    def largest(w):
        query, key = (jnp.einsum("td,dhs->ths", x, w[n]) for n in ("query", "key"))
        return jnp.max(jnp.einsum("ths,uhs->htu", query, key), axis=(1, 2))

    tau = float(jnp.mean(largest(w)))  # one head above, one below
    found = largest(names["clipped"](w, largest(w), tau))
    assert float(found.max()) == pytest.approx(tau, rel=1e-5)
    assert float(found.min()) == pytest.approx(float(largest(w).min()), rel=1e-5)
    state = names["tx"].init(w)
    new, _ = names["step"](w, state, w, largest(w))
    assert new["query"].shape == (8, 2, 4)


def on_a_mesh():
    """Names after the first example of docs/devices.md, on the devices that there are."""
    names = {"jgrad": jgrad, "jax": jax, "optax": optax, "params": {"w": jnp.ones((16, 3))}}
    names["loss"] = lambda w, x: jnp.mean(jnp.square(x @ w["w"]))
    return run_example("docs/devices.md", 0, names)


def test_gradients_in_shard_map(standard_promotion):
    """Those of the whole batch."""
    names = run_example("docs/devices.md", 2, on_a_mesh())
    batch = jnp.arange(128.0).reshape(8, 16)
    found = names["gradients"](names["params"], batch)
    expected = jax.grad(names["loss"])(names["params"], batch)
    assert jnp.allclose(found["w"], expected["w"], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("example", [3, 1], ids=["zero", "jit"])
def test_sharded_state_trains(example, standard_promotion):
    """Ten steps, each with a smaller loss."""
    names = run_example("docs/devices.md", example, on_a_mesh())
    params, state, batch = names["params"], names["state"], jnp.ones((8, 16))
    values = []
    for _ in range(11):
        values.append(float(names["loss"](jgrad.unpack(params), batch)))
        params, state, *_ = names["step"](params, state, batch)
    assert all(b < a for a, b in itertools.pairwise(values))


# ---- what there is -----------------------------------------------------------------------------


def test_the_reference_has_a_line_for_every_public_name():
    found = re.findall(r"^\| `(\w+)", page("docs/reference.md"), re.MULTILINE)
    assert sorted(found) == sorted(PUBLIC)


def test_help_lists_the_public_names_in_groups():
    """Each once; `__all__` has the same groups, as comments."""
    assert sorted(jgrad.__all__) == sorted(PUBLIC)
    found = re.findall(r"^(\S.*)\n\n((?:    \w+ +\S.*\n?)+)", jgrad.__doc__, re.MULTILINE)
    groups = {head: re.findall(r"^    (\w+)  ", names, re.MULTILINE) for head, names in found}
    assert [name for names in groups.values() for name in names] == jgrad.__all__
    written = inspect.getsource(jgrad).partition("\n__all__ = ")[2]
    assert re.findall(r"^    # (.*)$", written, re.MULTILINE) == list(groups)
    for (head, names), rest in zip(groups.items(), written.split("    # ")[1:], strict=True):
        assert re.findall(r'"(\w+)"', rest) == names, head


@pytest.mark.parametrize(
    "call", re.findall(r"^\| `(\w+\(.*?\))` \|", page("docs/reference.md"), re.MULTILINE)
)
def test_signatures(call):
    """As Python has them, up to the dots."""
    name = call.partition("(")[0]
    signature = inspect.signature(getattr(jgrad, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    found = re.sub(r"e-0(\d)", r"e-\1", name + str(inspect.Signature(bare)))
    assert found.startswith(call.removesuffix("...)"))


def test_each_row_of_the_comparison_is_a_test():
    (file,) = (ROOT / "tests").rglob("test_beside_optax.py")
    tests = re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    assert set(re.findall(r"`(test_\w+)`", section("docs/from_optax.md", "What differs"))) == set(
        tests
    )


PITFALLS = "Known pitfalls, E1 to E47"


def test_each_pitfall_has_a_test():
    """E1 to E47 in order, each with a test; and no test carries another number."""
    table = rows(section("docs/correctness.md", PITFALLS))
    assert [row[0] for row in table] == [f"E{n}" for n in range(1, 48)]
    for row in table:
        assert re.search(r"`test_\w+`", row[-1]), row[0]
    numbers = {
        n for name in names_of_tests(r"test_(?:e\d\d_)+\w*") for n in re.findall(r"e(\d\d)_", name)
    }
    assert numbers <= {f"{n:02}" for n in range(1, 48)}


@pytest.mark.parametrize("name", PAGES)
def test_the_tests_that_a_page_names(name):
    """Each is a function, or a file, of tests; one page has files of others, too."""
    files = {file.name for file in (ROOT / "tests").rglob("test_*.py")}
    if name == "benchmarks/notes/tests_of_others.md":
        files |= {"test_minimise.py", "test_optimizers.py"}
    assert set(re.findall(r"\b(test_\w+\.py)", page(name))) <= files
    named = set(re.findall(r"`(test_\w+)`", page(name)))
    assert named <= names_of_tests(r"test_\w+")


def test_one_test_per_number_in_its_row():
    """A test that carries numbers stands in the rows of those numbers only."""
    for row in rows(section("docs/correctness.md", PITFALLS)):
        for name in re.findall(r"`(test_\w+)`", row[-1]):
            numbers = [int(n) for n in re.findall(r"_e(\d\d)(?=_)", name)]
            assert not numbers or int(row[0][1:]) in numbers, name


def test_every_page_is_in_the_site():
    """In a table of contents of the home page."""
    home = page("docs/_extensions/home.py")
    contents = re.findall(r"^```{toctree}\n(?::[^\n]*\n)*\n([^`]*)^```", home, re.M)
    names = "".join(contents).splitlines()
    assert len(names) == len(set(names))
    assert {f"docs/{name}.md" for name in names} >= set(GUIDES)
    assert {f"{name.removeprefix('repository/')}" for name in names} >= set(NOTES)


def test_every_folder_is_in_contributing():
    folders = {file.parent.name for file in (ROOT / "jgrad").glob("_*/__init__.py")}
    assert set(re.findall(r"`(_\w+)`", section("CONTRIBUTING.md", "How it is built"))) == folders


# ---- figures -----------------------------------------------------------------------------------


def measured(work):
    """Of `benchmarks/results.md`: cells by (method, form), for the section of that title."""
    text = page("benchmarks/results.md")
    found = re.search(
        rf"^### {re.escape(work)}\n\n(.*?)(?=\n\n|\Z)", text, re.DOTALL | re.MULTILINE
    )
    return {(row[0], row[1]): row for row in rows(found[1])}


def step_and_build(row):
    """The tables of recipes have bytes and temporaries first; those of Muon are short."""
    if len(row) == 6:
        return row[2], row[3]
    return row[4 if len(row) == 8 else 2], row[7].partition(" ")[0]


def step_and_build_of_memory(row):
    """In the tables of memory."""
    return row[5], row[9].partition(" ")[0]


def test_figures_of_readme():
    *table, beside_float32 = rows(section("README.md", "Times"))
    assert len(table) == 5
    for work, method, form, *figures in table:
        assert tuple(figures) == step_and_build(measured(work)[method, form]), (work, method)
    work, method, form, *figures = beside_float32
    whole = measured(f"memory: {work.removesuffix(', beside float32')}")[method, form]
    assert tuple(figures) == step_and_build_of_memory(whole)


STEPS = "benchmarks/notes/steps.md"


def test_figures_are_those_of_the_benchmark():
    """Whole rows in the notes; in the guide the columns that it shows."""
    figures = [x for x in page(STEPS).splitlines() if len(x.split("|")) == 12]
    assert len(figures) > 20
    assert set(figures) <= set(page("benchmarks/results.md").splitlines())
    titles = re.findall(r"^## (.*)$", page("docs/benchmarks.md"), re.MULTILINE)[:4]
    assert titles[-1] == "Memory"
    for title in titles:
        work = "memory: 20 leaves of 1024 x 512" if title == "Memory" else title
        shown = rows(section("docs/benchmarks.md", title))
        assert len(shown) >= 4
        for row in shown:
            whole = measured(work)[row[0], row[1]]
            if title == "Memory":
                expected = [*whole[:5], *step_and_build_of_memory(whole)]
            else:
                expected = [*whole[:2], *step_and_build(whole)]
            assert row == expected, title


def test_compiled_figures_are_those_of_the_notes():
    """Which `test_figures_of_accelerators` compares with what the compilers made."""
    there = section("benchmarks/notes/accelerators.md", "What each recipe costs")
    shown = rows(section("docs/benchmarks.md", "Compiled for TPU and GPU"))
    assert len(shown) == 5
    assert all(row in rows(there) for row in shown)


def test_targets():
    """What came out is what was measured, and bold where it is above its target."""
    table = rows(section(STEPS, "Targets"))
    assert len(table) == 7
    for work, form, *cells in table:
        results = [step_and_build(x) for (_, of), x in measured(work).items() if of == form]
        for target, found, column in (
            (cells[0], cells[1], [step for step, _ in results]),
            (cells[2], cells[3], [build for _, build in results]),
        ):
            if not target:
                continue
            targets = target.split(" / ")
            targets = targets * len(column) if len(targets) == 1 else targets
            marked = [
                f"**{x}**" if float(x) > float(t) else x
                for x, t in zip(column, targets, strict=True)
            ]
            assert found == " / ".join(marked), (work, form)


def test_figures_on_paper():
    """The table is what the command prints."""
    assert traffic.table(traffic.Machine()) in page("benchmarks/notes/on_paper.md")


OPTIMIZERS = {
    "`gradient_descent`": [jgrad.gradient_descent],
    "momentum, `lars`": [functools.partial(jgrad.gradient_descent, momentum=0.9), jgrad.lars],
    "`adam`, `lamb`": [jgrad.adam, jgrad.lamb],
}


@pytest.mark.slow
def test_the_recipe_of_6_bytes_and_its_checkpoint():
    names = run_example("docs/memory.md", 0, {})
    params, state = names["params"], names["state"]
    found = sum(x.nbytes for x in jax.tree.leaves((params, params, state)))  # and the gradient
    assert found / sum(x.size for x in params.values()) == pytest.approx(6.03, abs=0.02)
    assert all((x < 0).all() for x in params.values())
    run_example("docs/memory.md", 6, names)
    jax.tree.map(np.testing.assert_array_equal, unquantized(names["again"]), names["arrays"])
    new = run_example("docs/memory.md", 7, names)["new"]
    assert new.opt_state.mw["kernel"].codes[...].dtype == jnp.int8
    assert not names["account"].zero


WRAPPERS = {
    "master_weights": jgrad.master_weights,
    "stochastic_rounding": jgrad.stochastic_rounding,
}

MEMORY = [row for row in rows(page("docs/memory.md")) if row[0] in ("float32", "bfloat16")]


@pytest.mark.parametrize("row", MEMORY, ids=lambda row: f"{row[0]} {row[1]}")
def test_memory(row):
    """The bytes of abstract states of a million parameters."""
    dtype, text, *figures = row
    parameter, gradient, moments, master, total = map(float, figures)
    wrapper, name, option = re.fullmatch(
        r"(?:`(\w+)` of )?(.*?)(?:, `moment_dtype=(.*)`)?", text
    ).groups()
    options = {"moment_dtype": option.strip('"')} if option else {}
    size = jnp.dtype(dtype).itemsize
    assert (parameter, gradient) == (size, size)
    assert total == pytest.approx(2 * size + moments + master, abs=1e-9)
    w = {"w": jax.ShapeDtypeStruct((2**20,), dtype)}
    for make in OPTIMIZERS[name]:
        tx = WRAPPERS.get(wrapper, lambda tx: tx)(make(0.1, **options))
        state = jax.eval_shape(tx.init, w)
        found = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / 2**20
        assert found == pytest.approx(moments + master, abs=5e-3)  # a digit more, and counters


# ---- the pages themselves ----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "longest"), LONGEST.items())
def test_length(name, longest):
    """Longer tables and guides belong into docs/."""
    assert len(page(name).splitlines()) <= longest


def test_length_of_all_guides():
    """With README sixteen pages, and as many words as a reader takes an hour for."""
    pages = ["README.md", *GUIDES]
    assert len(pages) <= 16
    assert sum(len(page(name).split()) for name in pages) <= 15_500


def test_the_commands_of_readme():
    """`.ci/run` takes them by number."""
    first, second, third = blocks("README.md", "sh")
    assert "train_digits.py" in first
    assert "pytest" in second
    assert "train_distributed.py" in third


def anchors(text):
    """Of its headings, as GitHub makes them."""
    bare = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", bare, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    """To files, from where the page stands, and to headings of pages."""
    missing = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page(name)):
        file, _, anchor = link.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        if not path.exists() or (anchor and anchor not in anchors(path.read_text())):
            missing.append(link)
    assert not missing


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings(name):
    """What it does, its arguments and what it returns; the equation for what computes."""
    thing = getattr(jgrad, name)
    text = inspect.getdoc(thing)  # Python 3.13 strips the indentation, older ones do not
    first, _, rest = text.partition("\n")
    assert first.endswith(".")
    if isinstance(thing, type):  # a state
        assert "Attributes:" in rest
        return
    for part in ("Args:", "Returns:"):
        assert f"\n{part}\n" in rest
    for argument in thing.__code__.co_varnames[
        : thing.__code__.co_argcount + thing.__code__.co_kwonlyargcount
    ]:
        assert re.search(rf"^  (\w+, )*{argument}(, \w+)*: ", rest, re.MULTILINE), argument
    if name not in ("variable", "is_variable", "variable_data"):
        equation = rest.split("Args:")[0]
        assert re.search(r"^    \S.*[=<]", equation, re.MULTILINE), "no equation"


# ---- recipes -----------------------------------------------------------------------------------

COSTS = "benchmarks/notes/what_wrappers_cost.md"


def test_bytes_of_recipes():
    """The columns of the page are the limits that a test asserts."""
    found = {name: (tree, packed) for name, tree, packed, _ in rows(section(COSTS, "Bytes"))}
    limits = {
        name: tuple(f"{moved:g} / {kept:g}" for moved, kept in both)
        for name, both in LIMITS.items()
    }
    assert found == limits


def test_operations():
    """The column of jgrad is what the test of the counts has."""
    found = {name: float(ours) for name, ours, _ in rows(section(COSTS, "Building"))}
    assert found == {name: limit for name, (_, limit) in OPERATIONS.items()}


def test_a_state_of_optax():
    """The page's line makes a state with which training goes on."""
    w = {"w": jnp.ones(3)}
    for opt_state in (optax.adam(0.1).init(w), optax.adamw(optax.constant_schedule(0.1)).init(w)):
        names = {"jgrad": jgrad, "opt_state": opt_state}
        state = run_example("docs/from_optax.md", 0, names)["state"]
        assert_equal(state, jgrad.adam(0.1).init(w))


def test_donation():
    """As the page has it: the results are in the order of the arguments, and nothing is copied."""
    names = {"functools": functools, "jax": jax, "optax": optax, "tx": jgrad.adam(0.1)}
    step = run_example("docs/memory.md", 1, names)["step"]
    params = {f"w{i}": jnp.ones((64, 64)) for i in range(4)}
    state = names["tx"].init(params)
    text = step.lower(params, state, params).compile().as_text()
    assert not re.findall(r"= f32\[64,64\]\S* copy\(", text)
    swapped = jax.jit(
        lambda grads, state, params: step(params, state, grads), donate_argnums=(1, 2)
    )
    text = swapped.lower(params, state, params).compile().as_text()
    assert len(re.findall(r"= f32\[64,64\]\S* copy\(", text)) >= 4
