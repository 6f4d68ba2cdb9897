"""`studies/lightbench`: its problems, its search and its page, whose long form is a note."""

import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from studies.lightbench import search, table
from studies.lightbench.problems import LEVELS, PROBLEMS
from studies.lightbench.search import COLUMNS
from studies.lightbench.table import Cell

BY_TITLE = {table.title(column): column for column in COLUMNS}

every_problem = pytest.mark.parametrize(
    ("name", "level"), list(itertools.product(PROBLEMS, LEVELS))
)


@pytest.mark.slow(one_in=48)
@every_problem
def test_a_problem_begins_finite_unsolved_and_with_a_gradient(name, level):
    problem = PROBLEMS[name](level)
    params = problem.init(jax.random.key(1))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
    loss, grads = jax.value_and_grad(problem.loss)(params, jax.random.key(2))
    assert loss.shape == ()
    norm = jgrad.global_norm(grads)
    assert jnp.isfinite(loss)
    assert jnp.isfinite(norm)
    assert norm > 0
    assert not problem.win(params, loss)


@pytest.mark.slow(one_in=32)
@every_problem
def test_the_optimum_wins_and_a_point_far_from_it_does_not(name, level):
    """Of the two networks no optimum is known."""
    problem = PROBLEMS[name](level)
    if problem.optimum is None:
        assert name in ("class_imbalance_rare", "memory_constrained")
        return
    params = problem.init(jax.random.key(1))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, problem.optimum)
    assert problem.win(problem.optimum, problem.loss(problem.optimum, jax.random.key(2)))
    far = jax.tree.map(lambda x: x + 1, problem.optimum)
    assert not problem.win(far, problem.loss(far, jax.random.key(2)))


def test_twenty_problems_each_with_an_equation_and_a_file():
    assert len(PROBLEMS) == 20
    for name, make in PROBLEMS.items():
        assert make.__doc__.endswith(f"; `{name}.py`"), name
        easy, hard = (make(level) for level in LEVELS)
        assert easy.changed
        assert hard.changed


def test_columns():
    """Five methods in three forms, and optax's Adam. What is stored is what the form says."""
    assert len(BY_TITLE) == 16
    params = {"x": jnp.ones((64, 64)), "b": jnp.ones(64)}
    for column in COLUMNS:
        one = search.Setting(0.1, 0.9, 0.99)
        state = column.make(one).init(jax.tree.map(lambda x, c=column: x.astype(c.dtype), params))
        kinds = {
            type(x) for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, jgrad.Blocks))
        }
        assert (jgrad.Blocks in kinds) == (column.form == "8 bits"), column
        assert search.applies(column, params)
    assert (COLUMNS[2].form, COLUMNS[2].dtype) == ("bfloat16", jnp.bfloat16)


def test_where_a_rule_has_no_leaf_to_act_on():
    vector, small = {"x": jnp.ones(4096)}, {"x": jnp.ones((2, 8))}
    no = {t for t, c in BY_TITLE.items() if not search.applies(c, vector)}
    assert no == {t for t in BY_TITLE if t.startswith(("muon", "hyperball"))}
    no = {t for t, c in BY_TITLE.items() if not search.applies(c, small)}
    assert no == {t for t in BY_TITLE if t.endswith(" 8")}


def test_settings_are_the_same_in_each_run():
    """One in each part of a range, so that 16 of them miss no order of magnitude."""
    first, again = search.settings(16), search.settings(16)
    for x, y in zip(first, again, strict=True):
        np.testing.assert_array_equal(x, y)
    part = 16 * np.log(np.sort(first.rate) / 1e-4) / np.log(1e5)
    np.testing.assert_array_equal(np.floor(part), np.arange(16))
    assert ((first.beta1 >= 0) & (first.beta1 < 1) & (first.beta2 >= 0) & (first.beta2 < 1)).all()


@pytest.mark.slow
def test_adam_solves_one_at_a_setting_that_suits_it_and_not_at_others():
    """In all forms; the rates are one that suits it, none at all, and one that is too small."""
    problem = PROBLEMS["ill_conditioned"]("hard")
    rates = np.array([0.05, 0.0, 1e-4], np.float32)
    found = search.Setting(rates, np.full(3, 0.9, np.float32), np.full(3, 0.99, np.float32))
    for title in ("adam", "adam 8", "adam bf16", "optax.adam"):
        strict = "standard" if title == "optax.adam" else "strict"  # optax promotes its betas
        with jax.numpy_dtype_promotion(strict):
            won = search.wins(problem, BY_TITLE[title], found, steps=200, seeds=3)
        np.testing.assert_array_equal(won, [[True] * 3, [False] * 3, [False] * 3], err_msg=title)
        assert search.passes(won)


def test_a_pass_needs_two_seeds_at_one_setting():
    assert search.passes(np.array([[True, False, True], [False] * 3]))
    assert not search.passes(np.array([[True, False, False], [False, True, False]]))


def test_the_page():
    """Parentheses, totals, and which rows a form lost or gained, where it applies."""
    adam, eight = COLUMNS[:2]
    easy = {c: Cell(c is adam, True, 6 if c is adam else 1) for c in COLUMNS}
    hard = {c: Cell(c is not adam, c is not eight, 2) for c in COLUMNS}
    rows = {("powers", "easy"): easy, ("powers", "hard"): hard}
    lines = table.passes(rows).splitlines()
    assert lines[2].startswith("| powers | easy | x | - | - |")
    assert lines[3].startswith("| powers | hard | - | (x) | x |")
    assert lines[4].startswith("| passes of 1 | easy | 1 | 0 |")
    assert lines[6].startswith("| passes of 2 | easy and hard | 1 | 1 |")
    lines = table.beside(rows).splitlines()
    assert lines[2] == "| adam 8 | 1 | powers easy | none | 6 | 1 |"
    assert lines[3] == "| adam bf16 | 2 | powers easy | powers hard | 8 | 3 |"
    assert "`powers.py`" in table.problems(["powers"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--problem=sphere", "value should be one of"),
        ("--seeds=1", "--seeds=1"),
        ("--step=1", "Unknown command line flag 'step'"),
        ("powers", "unexpected arguments: ['powers']"),
    ],
)
def test_a_flag_that_does_not_fit(flag, message):
    run = subprocess.run(
        [sys.executable, "-m", "studies.lightbench", flag], capture_output=True, text=True
    )
    assert run.returncode != 0
    assert message in run.stdout + run.stderr
