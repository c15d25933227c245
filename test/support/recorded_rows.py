"""Collects the rows that tests record as a property, from the tests that passed, into a file of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmark import results


class RecordedRows:
    """A pytest plugin.

    path      the file
    recorded  the property's name
    command   that runs these tests, for the file's header
    order     names of a row's values by which rows are sorted
    """

    def __init__(self, path: Path, recorded: str, command: str, order: tuple[str, ...]) -> None:
        self._path, self._recorded, self._command, self._order = path, recorded, command, order
        self._rows: list[dict[str, Any]] = []
        self._ran: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._ran.add(report.nodeid)
            if report.passed:
                found = (row for name, row in report.user_properties if name == self._recorded)
                self._rows += [{**row, "test": report.nodeid} for row in found]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Keeps the rows of tests that did not run this time."""
        kept = results.load(self._path)[1] if self._path.exists() else []
        rows = [*(row for row in kept if row["test"] not in self._ran), *self._rows]
        ordered = sorted(rows, key=lambda row: (*(row[name] for name in self._order), row["test"]))
        notes = [f"{session.testsfailed} tests failed, whose rows are missing"] if session.testsfailed else []
        results.save(self._path, results.header(self._command, notes), ordered)
