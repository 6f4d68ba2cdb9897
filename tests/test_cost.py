"""The table of CPU seconds, and the budget."""

import types

import pytest

from tests import cost


def counted(seconds, *, budget, workers=()):
    config = types.SimpleNamespace(getoption=lambda _: budget)
    found = cost.Cost(config)
    found.of_tests, found.of_workers = dict(seconds), list(workers)
    return found


def test_the_table():
    lines = cost.table({"a/t.py::x": 1.0, "a/t.py::y[1]": 2.0, "b/t.py::x": 4.0}, 10.0)
    assert [line.split()[:3] for line in lines[2:6]] == [
        ["4.0", "1", "b"],
        ["3.0", "2", "a"],
        ["3.0", "imports", "and"],
        ["10.0", "3", "in"],
    ]
    assert [line.split()[-1] for line in lines[8:11]] == ["b/t.py::x", "a/t.py::y[1]", "a/t.py::x"]


@pytest.mark.parametrize(
    ("seconds", "budget", "status"), [(1, True, 0), (999, True, 1), (999, False, 0)]
)
def test_more_than_the_budget_is_a_failure(seconds, budget, status, monkeypatch):
    """Workers have counted themselves; without any, this process has."""
    session = types.SimpleNamespace(exitstatus=0)
    monkeypatch.setattr(cost.time, "process_time", lambda: 0.0)
    counted({}, budget=budget, workers=[seconds / 2, seconds / 2]).pytest_sessionfinish(session)
    assert session.exitstatus == status


def test_workers_send_what_they_counted():
    output = {}
    worker = counted({"a": 1.0}, budget=False)
    worker.config.workeroutput = output
    worker.pytest_sessionfinish(None)
    assert output["cost_of_tests"] == {"a": 1.0}
    assert output["cost"] > 0
    both = counted({}, budget=False)
    both.pytest_testnodedown(types.SimpleNamespace(workeroutput=output), None)
    assert both.of_tests == {"a": 1.0}
    assert both.total() >= output["cost"]
