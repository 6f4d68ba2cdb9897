"""The choice of default tests names tests that there are."""

import ast
import pathlib

import pytest

from tests.support import expensive

TESTS = pathlib.Path(__file__).parent


@pytest.mark.parametrize("file", expensive.DEFAULT)
def test_expensive_tests_exist(file):
    body = ast.parse((TESTS / file).read_text()).body
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    assert expensive.DEFAULT[file].keys() <= functions
