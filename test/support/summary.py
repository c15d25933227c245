"""The summary of `make test-all`: a table of its slowest tests, and the same with counts and minutes as a file.

`test/conftest.py` registers it where SGLANG_RESHARD_SUMMARY is set, to the path of the file.
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from benchmark import results

_SLOWEST = 40
_COMPLETE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


class Summary:
    """A pytest plugin. `path` is the file that it writes."""

    def __init__(self, path: Path) -> None:
        self._path, self._started = path, time.time()
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds up setup, call and teardown. The first test of a module pays for what the module shares."""
        self._seconds[report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        slowest = sorted(self._seconds.items(), key=lambda item: -item[1])[:_SLOWEST]
        terminalreporter.section(f"the {len(slowest)} slowest tests")
        for test, seconds in slowest:
            terminalreporter.write_line(f"{seconds:7.1f} s  {test}")
        if exitstatus in _COMPLETE:
            self._write(terminalreporter.stats, slowest)

    def _write(self, stats: dict[str, list[Any]], slowest: list[tuple[str, float]]) -> None:
        head = {
            **results.header("make test-all", []),
            "passed": len(stats.get("passed", ())),
            "failed": len(stats.get("failed", ())) + len(stats.get("error", ())),
            "skipped": len(stats.get("skipped", ())),
            "minutes": round((time.time() - self._started) / 60, 1),
            "minutes_by_folder": self._minutes_by_folder(),
        }
        results.save(self._path, head, [{"test": test, "seconds": round(seconds, 1)} for test, seconds in slowest])

    def _minutes_by_folder(self) -> dict[str, float]:
        seconds: dict[str, float] = defaultdict(float)
        for test, duration in self._seconds.items():
            seconds["/".join(test.partition("::")[0].split("/")[:2])] += duration
        return {folder: round(total / 60, 1) for folder, total in sorted(seconds.items())}
