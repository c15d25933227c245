"""The summary of `make test-all`: counts, minutes and the slowest tests, of a whole run only."""

import json
from types import SimpleNamespace

import pytest

from support.summary import Summary


@pytest.fixture
def lines():
    return []


@pytest.fixture
def reporter(lines):
    stats = {"passed": [1, 2, 3], "failed": [4], "error": [5], "skipped": [6], "": [7]}
    return SimpleNamespace(stats=stats, section=lines.append, write_line=lines.append)


@pytest.fixture
def summary(tmp_path):
    summary = Summary(tmp_path / "summary.json")
    for test, seconds in (
        ("test/a/b/test_x.py::t", 30.0),
        ("test/a/test_y.py::t", 40.0),
        ("test/a/b/test_x.py::t", 60.0),
    ):
        summary.pytest_runtest_logreport(SimpleNamespace(nodeid=test, duration=seconds))
    return summary


def test_counts_minutes_and_slowest_tests_are_written(summary, reporter, lines, tmp_path):
    summary.pytest_terminal_summary(reporter, pytest.ExitCode.TESTS_FAILED)
    head, *rows = json.loads((tmp_path / "summary.json").read_text())
    assert {name: head[name] for name in ("passed", "failed", "skipped")} == {"passed": 3, "failed": 2, "skipped": 1}
    assert head["minutes_by_folder"] == {"test/a": 2.2}
    assert head["minutes"] < 1
    assert rows == [
        {"test": "test/a/b/test_x.py::t", "seconds": 90.0},
        {"test": "test/a/test_y.py::t", "seconds": 40.0},
    ]
    assert [line.split()[0] for line in lines[1:]] == ["90.0", "40.0"]


def test_a_run_that_was_broken_off_is_not_written(summary, reporter, tmp_path):
    summary.pytest_terminal_summary(reporter, pytest.ExitCode.INTERRUPTED)
    assert list(tmp_path.iterdir()) == []
