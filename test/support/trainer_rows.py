"""The table of trainers: what each test has shown of one, as it records it, collected from the tests that passed.

record_property("trainer", shown("FSDP1, FULL_SHARD", "the module", "ipc", "run", ratio))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmark import results

PROPERTY = "trainer"


def shown(trainer: str, way: str, transport: str, state: str, ratio: float | None = None) -> dict[str, Any]:
    """A row.

    trainer    and its sharding
    way        what is passed to `update`
    transport  as asked for
    state      "run": its own library trained, and engine ranks' live weights were compared; "read": its shards were,
               put together; "refused"
    ratio      bytes received divided by the least, of all updates the largest
    """
    return {"trainer": trainer, "way": way, "transport": transport, "state": state, "ratio": ratio}


class TrainerRows:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []
        self._ran: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._ran.add(report.nodeid)
            if report.passed:
                found = (row for name, row in report.user_properties if name == PROPERTY)
                self._rows += [{**row, "test": report.nodeid} for row in found]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Rows of tests that were not run this time stay as they are."""
        kept = results.load(self._path)[1] if self._path.exists() else []
        rows = [*(row for row in kept if row["test"] not in self._ran), *self._rows]
        ordered = sorted(rows, key=lambda row: (row["trainer"], row["way"], row["transport"], row["test"]))
        notes = [f"{session.testsfailed} tests failed, whose rows are missing"] if session.testsfailed else []
        results.save(self._path, results.header("make test-trainers", notes), ordered)
