"""What README, the notes, docs/ and docstrings say is so: names exist, and figures are those measured.

`guides/` runs the blocks of code, `test_cards.py` counts the figures of methods.md.
"""

import doctest
import functools
import importlib.util
import inspect
import re

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import jgrad
from benchmarks.accelerators import largest, llama
from studies import host_traffic, traffic
from tests.everywhere.test_recipes import LIMITS, OPERATIONS
from tests.support.loops import train
from tests.support.pages import GUIDES, PAGES, ROOT, blocks, docstring, page, rows, section
from tests.support.public import EXPORTED

PUBLIC = [
    name for name, x in vars(jgrad).items() if not (name.startswith("_") or inspect.ismodule(x))
]
pytestmark = pytest.mark.ci
FILES = sorted((ROOT / "tests").rglob("test_*.py"))
TESTS = {test for file in FILES for test in re.findall(r"(?m)^def (test_\w+)", file.read_text())}

every_page = pytest.mark.parametrize("name", PAGES)
every_name = pytest.mark.parametrize("name", PUBLIC)


# ---- docstrings --------------------------------------------------------------------------------

SECTIONS = ["Args", "Attributes", "Returns", "Raises", "Example", "Source"]
WITHOUT_EQUATION = ("variable", "is_variable", "variable_data")


@every_name
def test_docstring(name):
    """What it does, its sections in order, each argument, and the equation of what computes."""
    thing = getattr(jgrad, name)
    text = docstring(name, thing)
    first, _, rest = text.partition("\n")
    assert first.endswith(".")
    found = re.findall(rf"^({'|'.join(SECTIONS)}):", rest, re.MULTILINE)
    assert found == [section for section in SECTIONS if section in found]
    if isinstance(thing, type):
        is_function = "__call__" in vars(thing)
        assert {"Example"} | (set() if is_function else {"Attributes"}) <= {*found}
        return
    assert {"Args", "Returns", "Example"} <= {*found}
    code = thing.__code__
    for argument in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        assert re.search(rf"^  (\w+, )*{argument}(, \w+)*: ", rest, re.MULTILINE), argument
    equation = re.search(r"^    \S.*[=<]", rest.partition("Args:")[0], re.MULTILINE)
    assert equation or name in WITHOUT_EQUATION


@every_name
def test_example_of_docstring(name):
    """Of two to eight lines, with an output to compare, under the suite's strict promotion."""
    names = {"jax": jax, "jnp": jnp, "jgrad": jgrad, "optax": optax}
    assert docstring(name, getattr(jgrad, name))
    finder = doctest.DocTestFinder(recurse=False)
    (found,) = finder.find(getattr(jgrad, name), name, globs=names)
    lines = [line for x in found.examples for line in (x.source + x.want).splitlines()]
    assert 2 <= len(lines) <= 8
    assert any(x.want for x in found.examples)
    printed = []
    doctest.DocTestRunner(verbose=False).run(found, out=printed.append)
    assert not printed, "".join(printed)


# ---- names -------------------------------------------------------------------------------------


def test_the_reference_has_every_public_name():
    """Once, in the groups of `help(jgrad)`, behind a section on options."""
    _, _, *sections = page("docs/reference.md").split("\n## ")
    groups = {x.partition("\n")[0]: re.findall(r"`(\w+)`", x) for x in sections}
    assert groups == {re.split("[:,]", head)[0]: names for head, names in help_groups().items()}


def help_groups():
    found = re.findall(r"^(\S.*)\n\n((?:    \w+[, ].*\n?)+)", inspect.getdoc(jgrad), re.MULTILINE)
    described = r"^    (\w+)  "
    return {
        head: re.findall(described, names, re.MULTILINE) or re.findall(r"\w+", names)
        for head, names in found
    }


def test_help_lists_the_public_names_in_groups():
    """Each once; `__all__` has the same groups, as comments."""
    assert sorted(EXPORTED) == sorted(PUBLIC)
    groups = help_groups()
    assert [name for names in groups.values() for name in names] == EXPORTED
    written = inspect.getsource(jgrad).partition("\n__all__ = ")[2]
    assert re.findall(r"^    # (.*)$", written, re.MULTILINE) == list(groups)
    for (head, names), rest in zip(groups.items(), written.split("    # ")[1:], strict=True):
        assert re.findall(r'"(\w+)"', rest) == names, head


@every_page
def test_what_a_page_names_is_there(name):
    """Tests by their names, and in the guides to the house files and commands, too."""
    text = page(name)
    others = {"test_minimise.py", "test_optimizers.py"} if "tests_of_others" in name else set()
    assert set(re.findall(r"\b(test_\w+\.py)", text)) <= {file.name for file in FILES} | others
    assert set(re.findall(r"`(test_\w+)`", text)) <= TESTS
    if name in ("README.md", "CONTRIBUTING.md", "BUILD_NOTES.md"):
        paths = re.findall(r"`((?:tests|benchmarks|studies|colabs|docs|\.ci)/[\w./]+)`", text)
        assert not [path for path in paths if not (ROOT / path).exists()]
        modules = re.findall(r"python -m ((?:tests|benchmarks|studies)[\w.]*)", text)
        assert not [module for module in modules if not importlib.util.find_spec(module)]


def test_masks_choose_leaves_by_name():
    """By the number of axes, they would choose biases of attention, and every norm in a stack."""
    files = [*sorted((ROOT / "colabs").glob("*.py")), *sorted((ROOT / "colabs").glob("*.ipynb"))]
    texts = {name: docstring(name, getattr(jgrad, name)) for name in PUBLIC}
    texts |= {name: page(name) for name in ("README.md", *GUIDES)}
    texts |= {file.name: file.read_text() for file in files}
    by_axes = r"lambda \w+: .*(\.ndim|\.shape\)) (> 1|>= 2)"
    assert not [name for name, text in texts.items() if re.search(by_axes, text)]


def test_each_row_of_the_comparison_is_a_test():
    (file,) = (file for file in FILES if file.name == "test_beside_optax.py")
    named = re.findall(r"`(test_\w+)`", section("docs/from_optax.md", "What differs"))
    assert len(named) == len(set(named)) > 7
    assert set(named) <= set(re.findall(r"(?m)^def (test_\w+)", file.read_text()))


def test_each_pitfall_has_a_test():
    """E1 to E51 in order; a test that carries numbers stands in the rows of these only."""
    table = rows(section("benchmarks/notes/pitfalls.md", "The table"))
    assert [row[0] for row in table] == [f"E{n}" for n in range(1, 52)]
    numbers_of = lambda test: {int(n) for n in re.findall(r"_e(\d\d)(?=_)", test)}
    for number, *_, last in table:
        tests = re.findall(r"`(test_\w+)`", last)
        assert tests, number
        assert all(int(number[1:]) in (numbers_of(x) or [int(number[1:])]) for x in tests), number
    numbered = [x for x in TESTS if re.match(r"test_(e\d\d_)+", x)]
    assert set().union(*map(numbers_of, numbered)) <= {*range(1, 52)}


def anchors(text):
    """Of its headings, as GitHub makes them."""
    bare = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", bare, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@every_page
def test_links_lead_somewhere(name):
    """To files, from where the page stands, and to headings of pages."""
    missing = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page(name)):
        file, _, anchor = link.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        if not path.exists() or (anchor and anchor not in anchors(path.read_text())):
            missing.append(link)
    assert not missing


@pytest.mark.parametrize(
    ("pages", "words"),
    [
        (["README.md"], 800),
        (["CONTRIBUTING.md"], 2600),
        (["BUILD_NOTES.md"], 4000),
        (["README.md", *GUIDES], 15_000),  # what a reader takes an hour for
        (["docs/runs.md"], 850),
    ],
)
def test_length(pages, words):
    """With README twenty-four pages; what was measured is in the notes. Code counts."""
    assert len(pages) <= 24
    texts = [re.sub(r"<!--.*?-->", "", page(name), flags=re.DOTALL) for name in pages]
    assert sum(len(text.split()) for text in texts) <= words


def test_the_commands_of_readme():
    """`.ci/run` takes them by number; the page is read at a sitting."""
    assert len(page("README.md").splitlines()) <= 110
    first, second, third = blocks("README.md", "sh")
    assert "train_digits.py" in first
    assert "pytest" in second
    assert "train_distributed.py" in third


def test_the_swap_of_readme(standard_promotion):
    """Both lines train to the same numbers."""
    lines = re.findall(r"^[-+]tx = (.*)$", *blocks("README.md", "diff"), re.MULTILINE)
    names = {"optax": optax, "jgrad": jgrad, "mask": {"w": True, "b": False}}
    names["schedule"] = optax.cosine_decay_schedule(0.1, 10)
    w = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    grads = [jax.tree.map(lambda x, t=t: jnp.cos(t + 2 * x), w) for t in range(5)]
    before, now = (train(eval(line, names), w, grads)[0] for line in lines)
    chex.assert_trees_all_close(before, now, rtol=1e-6)


# ---- figures -----------------------------------------------------------------------------------

STEPS = "benchmarks/notes/steps.md"
COSTS = "benchmarks/notes/what_wrappers_cost.md"
RESULTS = page("benchmarks/results.md")


def measured(work):
    """Of `benchmarks/results.md`: cells by (method, form), for the section of that title."""
    found = re.search(
        rf"^### {re.escape(work)}\n\n(.*?)(?=\n\n|\Z)", RESULTS, re.DOTALL | re.MULTILINE
    )
    return {(row[0], row[1]): row for row in rows(found[1])}


def step_and_build(row, work=""):
    """The ratios of a row: tables of memory and of recipes have other columns before them."""
    if work.startswith("memory"):
        return row[5], row[9].partition(" ")[0]
    if len(row) == 6:
        return row[2], row[3]
    return row[4 if len(row) == 8 else 2], row[7].partition(" ")[0]


def test_figures_of_readme():
    table = rows(section("README.md", "Times"))
    assert len(table) == 4
    for title, method, form, *figures in table:
        work = title.removesuffix(", relative to jgrad in float32")
        work = f"memory: {work}" if work != title else title
        assert tuple(figures) == step_and_build(measured(work)[method, form], work), title


# Of the table that `benchmarks.accelerators.decoder_peaks` wrote.
PEAKS = (
    "AdamW in 8 bits",
    "AdamW of optax, bfloat16 weights",
    "AdamW of optax, float32 weights",
)


def bullet(first):
    """Of README's reasons, the one that begins so."""
    (reason,) = re.findall(
        rf"^- \*\*{first} (.*?)(?=^- )", page("README.md"), re.DOTALL | re.MULTILINE
    )
    return reason


def test_sizes():
    """Of the largest model with all in host memory, and of optax's, as they were compiled."""
    found = largest.known()
    on_host = "AdamW, bfloat16, all in host memory, bfloat16 moments, in the backward pass"
    all_on_host, of_optax = found["v5e", on_host], found["v5e", "optax AdamW, bfloat16"]
    peak, host = f"{all_on_host.peak / 1e9:.1f} GB", f"{all_on_host.host / 1e9:.0f} GB"
    billion = f"{llama.size(llama.FAMILY[of_optax.model]) / 1e9:.1f} billion"
    for text in bullet("Models"), page("docs/larger_than_device.md"):
        text = re.sub(r"\s+", " ", text)
        assert f"{all_on_host.model}" in text
        assert f"peaks at {peak}" in text
        assert f"{host} on the host" in text
        assert billion in text


def test_peaks_of_readme():
    """On a TPU: of a decoder in the backward pass, and of optax."""
    peaks = {name: tpu for name, tpu, _ in rows(section("benchmarks/notes/peaks.md", "The peak"))}
    expected = [peaks[name].rpartition(" → ")[2] for name in PEAKS]
    assert re.findall(r"\d+\.\d+", bullet("4")) == expected
    figures = {x.rpartition(" → ")[2] for x in peaks.values()} | {"4.03"}
    assert set(re.findall(r"\d+\.\d+", section("docs/four_bytes.md", "The peak"))) <= figures


def test_a_decoder_in_the_backward_pass():
    """Its peaks are those of the notes."""
    table = rows(page("benchmarks/notes/on_paper.md"))
    recipe = "bf16: stochastic(AdamW, 8 bits)"
    names = [["8 B", "16: v5e:4x4", x] for x in (f"{recipe}, in backward", recipe)]
    expected = [row[5] for name in names for row in table if row[:3] == name]
    found = re.findall(r"\d+\.\d+", section("docs/four_bytes.md", "When it doesn't help"))
    assert found == expected


def test_figures_are_those_of_the_benchmark():
    """Whole rows in the notes; in the guide the columns that it shows."""
    figures = [x for x in page(STEPS).splitlines() if len(x.split("|")) == 12]
    assert len(figures) > 20
    assert set(figures) <= set(page("benchmarks/results.md").splitlines())
    titles = re.findall(r"^## (.*)$", page("docs/benchmarks.md"), re.MULTILINE)[:2]
    for title in titles:
        shown = rows(section("docs/benchmarks.md", title))
        assert len(shown) >= 4
        for row in shown:
            whole = measured(title)[row[0], row[1]]
            assert row == [*whole[: len(row) - 2], *step_and_build(whole, title)], title
    shown = section("docs/benchmarks.md", "Muon and wrappers").partition("optax.contrib.muon")[0]
    shapes = [x for x in re.findall(r"(?m)^### (.*)$", RESULTS) if " matrices of " in x]
    steps = sorted(row[2] for x in shapes for row in measured(x).values())
    assert re.findall(r"\d+\.\d+", shown) == [steps[0], steps[-1]]


def test_targets():
    """What came out is what was measured, and bold where it is above its target."""
    table = rows(section(STEPS, "Targets"))
    assert len(table) == 7
    for work, form, *cells in table:
        results = [step_and_build(x) for (_, of), x in measured(work).items() if of == form]
        columns = zip(*results, strict=True)
        for target, found, column in zip(cells[::2], cells[1::2], columns, strict=True):
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
    """The tables are what the commands print."""
    machine, there = traffic.Machine(), page("benchmarks/notes/on_paper.md")
    assert traffic.table(machine) in there
    assert host_traffic.table(machine) in there
    tokens = {row[0]: row[3].partition(";")[0] for row in rows(host_traffic.table(machine))}
    shown = re.findall(r"\d,\d00", section("docs/larger_than_device.md", "What it costs"))
    assert shown == [tokens["bfloat16 moments"], tokens["weights, bfloat16 moments"]]
    assert host_traffic.rates(machine) in there


def test_bytes_over_the_link():
    """By hand: float32 moments need 8 bytes each way beside 6 operations per token."""
    v5e, machine = host_traffic.HOSTS[0], traffic.Machine()
    found = host_traffic.passes(8.0, weights=False)
    expected = 8 / (0.8 * 16e9) * (0.4 * 197e12) / 6
    assert host_traffic.tokens(found, v5e, machine) == pytest.approx(expected)
    # With few bytes of moments, the weights of the forward pass decide.
    found = host_traffic.passes(2.0, weights=True)
    expected = 2 / (0.8 * 16e9) * (0.4 * 197e12) / 2
    assert host_traffic.tokens(found, v5e, machine) == pytest.approx(expected)
    # New ones go back while others come, but the memory of a host does one or the other.
    gh200 = host_traffic.HOSTS[2]
    assert host_traffic.seconds(found[1], gh200, machine) == pytest.approx(8 / (0.8 * 512e9))


def test_bytes_and_operations_of_recipes():
    """The columns of the notes are the limits that tests assert."""
    shown = {name: forms for name, *forms, _ in rows(section(COSTS, "Bytes"))}
    assert shown == {
        name: [f"{moved:g} / {kept:g}" for moved, kept in forms] for name, forms in LIMITS.items()
    }
    shown = {name: float(ours) for name, ours, _ in rows(section(COSTS, "Building"))}
    assert shown == {name: limit for name, (_, limit) in OPERATIONS.items()}


OPTIMIZERS = {
    "`gradient_descent`": [jgrad.gradient_descent],
    "momentum, `lion`, `lars`": [
        functools.partial(jgrad.gradient_descent, momentum=0.9),
        jgrad.lion,
        jgrad.lars,
    ],
    "`adam`": [jgrad.adam, jgrad.lamb],  # as the page says
    "`adan`": [jgrad.adan],
    "`adafactor`": [jgrad.adafactor],
}
MEMORY = [row for row in rows(page("docs/memory.md")) if row[0] in ("float32", "bfloat16")]


@pytest.mark.parametrize("row", MEMORY, ids=lambda row: f"{row[0]} {row[1]}")
def test_memory(row):
    """The bytes of abstract states of a million parameters."""
    dtype, text, *figures = row
    kept, total = map(float, figures)
    pattern = r"(?:`(\w+)` of )?(.*?)(?:, `moment_dtype=\"?(\w*)\"?`)?"
    wrapper, name, option = re.fullmatch(pattern, text).groups()
    size = jnp.dtype(dtype).itemsize
    assert total == pytest.approx(2 * size + kept, abs=1e-9)  # and its gradient
    w = {"w": jax.ShapeDtypeStruct((2**10, 2**10), dtype)}
    assert name in OPTIMIZERS, f"docs/memory.md has {name}; OPTIMIZERS needs a row of that name"
    for make in OPTIMIZERS[name]:
        tx = make(0.1, **{"moment_dtype": option} if option else {})
        tx = getattr(jgrad, wrapper)(tx) if wrapper else tx
        state = jax.eval_shape(tx.init, w)
        found = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / 2**20
        assert found == pytest.approx(kept, abs=5e-3)  # a digit more, and counters
