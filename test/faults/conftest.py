"""The table of faults: a row for each that was tried, printed at the end, and written to benchmark/results for `make`.

No row may say "hang", "silent mix" or "leak": the run fails then, whatever its tests said.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from pathlib import Path

import pytest

from benchmark import results
from support.left_behind import Belongings
from support.player import Hang
from support.scenes import Scene

RESULTS = "SGLANG_RESHARD_FAULTS_RESULTS"
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


Case = Callable[..., AbstractContextManager[Row]]
_rows = pytest.StashKey[list[Row]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_rows] = []


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    """A row of the table, to be filled in by what goes on inside."""

    @contextmanager
    def tried(fault: str, phase: str, transport: str, group: str = "") -> Iterator[Row]:
        row = Row(fault, phase, transport, group=group)
        request.config.stash[_rows].append(row)
        try:
            yield row
        except Hang:
            row.outcome = "hang"
            raise
        except BaseException:
            if not row.bad:
                row.outcome = "failed"
            raise

    return tried


@pytest.fixture(scope="module")
def a_scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Processes for all tests of a module, as its SCENE says; who is killed in one is there again in the next."""
    forkserver.ensure_running()
    before = Belongings.of_this_process()
    scene = Scene(tmp_path_factory.mktemp("scene"), **getattr(request.module, "SCENE", {}))
    yield scene
    scene.end()
    left = scene.watch.left_since(before)
    request.config.stash[_rows].append(Row("all of the above", request.module.__name__, "", _left(left)))
    assert left == []


@pytest.fixture
def scene(a_scene: Scene, request: pytest.FixtureRequest) -> Iterator[Scene]:
    a_scene.make_ready()
    failed = request.session.testsfailed
    yield a_scene
    if request.session.testsfailed != failed:
        a_scene.end()  # nobody knows what state it is in


def _left(left: list[str]) -> str:
    return "leak: " + ", ".join(left) if left else "nothing left behind"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash[_rows]
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


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    rows = session.config.stash[_rows]
    if any(row.bad for row in rows) and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if rows and (path := os.environ.get(RESULTS)):
        results.save(Path(path), results.header("make test-faults", []), [asdict(row) for row in rows])


def _seconds(detect_s: float | None) -> str:
    return "" if detect_s is None else f"{detect_s:.2f} s"
