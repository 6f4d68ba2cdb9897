"""The examples in docstrings run, under the suite's strict promotion, and show what they say."""

import doctest
import inspect
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jgrad

GLOBALS = {"jax": jax, "jnp": jnp, "jgrad": jgrad, "optax": optax}
SECTIONS = ["Args", "Attributes", "Returns", "Raises", "Example", "Source"]


@pytest.mark.parametrize("name", jgrad.__all__)
def test_example(name):
    """One of every public name, of two to eight lines, with an output to compare."""
    finder = doctest.DocTestFinder(recurse=False)
    (found,) = finder.find(getattr(jgrad, name), name, globs=dict(GLOBALS))
    lines = [line for x in found.examples for line in (x.source + x.want).splitlines()]
    assert 2 <= len(lines) <= 8
    assert any(x.want for x in found.examples)
    printed = []
    doctest.DocTestRunner(verbose=False).run(found, out=printed.append)
    assert not printed, "".join(printed)


@pytest.mark.parametrize("name", jgrad.__all__)
def test_sections_have_an_order(name):
    text = inspect.getdoc(getattr(jgrad, name))
    found = re.findall(rf"^({'|'.join(SECTIONS)}):", text, re.MULTILINE)
    assert "Example" in found
    assert found == [section for section in SECTIONS if section in found]
