"""The table of faults: a row for each that was tried, printed at the end of a run and saved for `make test-faults`.

A row travels as a property of its test's report, so that the process that prints need not be the one that tested.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from benchmark import results

PROPERTY = "fault"
_RESULTS = "SGLANG_RESHARD_FAULTS_RESULTS"
_BAD = ("hang", "silent mix", "leak", "failed")


@dataclass
class Row:
    """One fault.

    outcome   what the engine has afterwards, and how it was made good
    detect_s  from the fault until the last survivor has raised or answered; None where nobody has to notice
    group     rows that are printed as one
    """

    fault: str
    phase: str
    transport: str
    outcome: str = ""
    detect_s: float | None = None
    group: str = ""

    @property
    def bad(self) -> bool:
        return self.outcome.startswith(_BAD)


class FaultTable:
    """A pytest plugin. No row may say "hang", "silent mix" or "leak": the run fails then, whatever its tests said."""

    def __init__(self) -> None:
        self._rows: list[Row] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The last report of a test has all of its rows."""
        if report.when == "teardown":
            self._rows += [Row(**row) for name, row in report.user_properties if name == PROPERTY]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        rows = self._rows
        if not rows:
            return
        terminalreporter.section("faults")
        lines = [("fault", "phase", "transport", "outcome", "detected in")]
        lines += [(r.fault, r.phase, r.transport, r.outcome, _seconds(r.detect_s)) for r in _grouped(rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(5)]
        for line in lines:
            terminalreporter.write_line("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)))
        slowest = max((r.detect_s for r in rows if r.detect_s is not None and "kill" in r.fault), default=0.0)
        bad = sum(row.bad for row in rows)
        terminalreporter.write_line(f"{len(rows)} faults, {bad} of them bad; a kill was noticed within {slowest:.2f} s")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if any(row.bad for row in self._rows) and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._rows and (path := os.environ.get(_RESULTS)):
            results.save(Path(path), results.header("make test-faults", []), [asdict(row) for row in self._rows])


def _grouped(rows: list[Row]) -> Iterator[Row]:
    """Rows of a group as one, but for those that are bad."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.group and not row.bad:
            groups.setdefault(row.group, []).append(row)
        else:
            yield row
    for group, members in sorted(groups.items()):
        counts = Counter(row.outcome for row in members)
        outcome = ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
        slowest = max((row.detect_s for row in members if row.detect_s is not None), default=None)
        yield Row(f"{len(members)} {group}", "any", "all", outcome, slowest)


def _seconds(detect_s: float | None) -> str:
    return "" if detect_s is None else f"{detect_s:.2f} s"
