"""What the README says is so: its example runs, and its tables name what there is."""

import inspect
import pathlib
import re

import equinox
import jax
import jax.numpy as jnp
import optax
import pytest

import jgrad
from tests.loops import assert_equal

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PUBLIC = [
    name for name, x in vars(jgrad).items() if not (name.startswith("_") or inspect.ismodule(x))
]


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## )", README, re.DOTALL | re.MULTILINE)[1]


def first_cells(text):
    """The name in the first cell of each line of a table."""
    return re.findall(r"^\| `(\w+)", text, re.MULTILINE)


def test_the_example(capsys, standard_promotion):
    """It runs as a reader would run it, and learns; optax's schedules rely on promotion."""
    example = blocks("python")[0]
    exec(compile(example, "README.md", "exec"), {})
    found = re.fullmatch(r"loss (\S+) after 300 steps\n", capsys.readouterr().out)
    assert float(found[1]) < 1e-2  # from 0.55, the mean square of y


def test_the_order_of_wrappers():
    """Four mini-batches of a float16 model, scaled as the text says, and the average read by name."""
    names = {"jgrad": jgrad, "optax": optax}
    exec(compile(blocks("python")[1], "README.md", "exec"), names)
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
    """The example goes on, packed, to the same loss; and back to the tree."""
    first, packed = blocks("python")[0], blocks("python")[2]
    names = {}
    exec(compile(first, "README.md", "exec"), names)
    expected = names["value"], names["params"]
    names["params"] = {
        "w1": jax.random.normal(jax.random.key(0), (1, 32)),
        "w2": jnp.zeros((32, 1)),
    }
    exec(compile(packed, "README.md", "exec"), names)
    params, state = names["params"], names["state"]
    for _ in range(300):
        params, state, value = names["step"](params, state)
    assert float(value) == pytest.approx(float(expected[0]), rel=1e-4)
    saved = jgrad.unpack((params, state))
    assert jax.tree.structure(saved[0]) == jax.tree.structure(expected[1])
    assert jax.tree.structure(jgrad.pack(saved, like=(params, state))) == jax.tree.structure(
        (params, state)
    )


def test_many_devices(standard_promotion):
    """The step with a share of the state, here on one device, trains."""
    names = {"jgrad": jgrad, "jax": jax, "optax": optax}
    names["params"] = {"w": jnp.ones((4, 3))}
    names["loss"] = lambda w, x: jnp.mean(jnp.square(x @ w["w"]))
    exec(compile(blocks("python")[5], "README.md", "exec"), names)
    params, state = names["params"], names["state"]
    values = []
    for _ in range(10):
        params, state, value = names["step"](params, state, jnp.ones((8, 4)))
        values.append(float(value))
    assert values == sorted(values, reverse=True)
    assert values[-1] < values[0]


@pytest.mark.parametrize("recipe", [3, 4])
def test_recipes_for_integer_leaves(recipe):
    """They come back as they were."""
    model = {"w": jnp.ones(3), "n": jnp.arange(2), "z": jnp.ones(2, jnp.complex64)}
    names = {"jgrad": jgrad, "jax": jax, "jnp": jnp, "equinox": equinox, "model": model}
    exec(compile(blocks("python")[recipe], "README.md", "exec"), names)
    assert set(names["packed"].buffers) == {"float32", "complex64"}
    assert_equal(names["model"], model)


def test_the_table_has_a_line_for_every_public_name():
    assert sorted(first_cells(section("What there is"))) == sorted(PUBLIC)


def test_help_lists_the_public_names():
    assert sorted(jgrad.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("call", re.findall(r"^\| `(\w+\(.*?\))` \|", README, re.MULTILINE))
def test_signatures(call):
    """As Python has them, up to the dots."""
    name = call.partition("(")[0]
    signature = inspect.signature(getattr(jgrad, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    found = (name + str(inspect.Signature(bare))).replace("1e-07", "1e-7")
    assert found.startswith(call.removesuffix("...)"))


def test_each_row_of_the_comparison_is_a_test():
    text = section("Beside optax")
    tests = set(
        re.findall(
            r"^def (test_\w+)", (ROOT / "tests/test_beside_optax.py").read_text(), re.MULTILINE
        )
    )
    assert set(re.findall(r"`(test_\w+)`", text)) == tests


def test_figures_are_those_of_the_benchmark():
    figures = [line for line in section("Speed").splitlines() if line.startswith("|")]
    assert len(figures) > 2
    assert set(figures) <= set((ROOT / "benchmarks/results.md").read_text().splitlines())


def test_links_lead_somewhere():
    for link in re.findall(r"\]\((?!https)([^)]+)\)", README):
        file, _, anchor = link.partition("#")
        text = (ROOT / (file or "README.md")).read_text()
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert not anchor or anchor in {h.lower().replace(" ", "-") for h in headings}, link


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
