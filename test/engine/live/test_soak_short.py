"""A short soak holds all that the long one has to, and what would break a claim breaks it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from benchmark import results
from benchmark.soak import verdict, weights
from benchmark.soak.clients import Tally
from benchmark.soak.expected import Expected
from benchmark.soak.footprint import Footprint, footprint
from benchmark.soak.seen import Updated, Verified
from sglang_reshard.selftest import tiny_model
from support.left_behind import Belongings, Watch, settled
from support.zygote import as_subreaper

UPDATES, EVERY = 30, 10
MIB = 2**20
# Of each engine rank: embedding, last norm and head; in a layer two norms, two of heads, and four matrices.
PARAMETERS = 3 + 8 * tiny_model.LAYERS


@pytest.mark.engine
def test_thirty_updates_of_a_server_that_is_asked_all_the_time(tmp_path: Path) -> None:
    out, log = tmp_path / "soak.json", tmp_path / "log"
    arguments = ["--updates", str(UPDATES), "--every", str(EVERY), "--out", str(out)]
    strangers, before = descendants(), Belongings.of_this_process()
    watch = Watch()
    # A short name: SGLang puts sockets there, whose paths may not be long.
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary, as_subreaper():
        command = [sys.executable, "-m", "benchmark.soak", *arguments]
        status = soak(command, {"TMPDIR": temporary}, log, lambda: watch.look(p.pid for p in descendants() - strangers))
        assert status == 0, log.read_text()[-8000:]
        assert os.listdir(temporary) == []
        assert settled(lambda: alive(descendants() - strangers)) == []
        assert watch.left_since(before) == []
    head, (summary, *rows) = results.load(out)
    assert head["command"] == " ".join(["python -m benchmark.soak", *arguments])
    assert summary["ok"]
    assert all(summary["claims"].values())
    assert summary["versions_verified"] == 1 + UPDATES // EVERY
    clients = [row for row in rows if row["row"] == "client"]
    assert {client["stream"] for client in clients} == {True, False}
    # They asked while updates ran, and not only in between: each was there for as many as there were updates.
    assert all(client["requests"] > UPDATES for client in clients)
    processes = {row["process"] for row in rows if row["row"] == "process"}
    assert processes >= {"trainer rank 0", "trainer rank 1", "server", "scheduler_TP0", "scheduler_TP1"}
    for version in (row for row in rows if row["row"] == "version"):
        assert version["tensors"] >= weights.ENGINE_TP * PARAMETERS
        assert version["tokens_equal"] or version["lead"] < verdict.LEAST_LEAD


def soak(command: list[str], variables: dict[str, str], log: Path, look: Callable[[], None]) -> int:
    """The exit status. Ended as a user would end it when it takes too long."""
    path = os.pathsep.join([str(results.REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **variables, "PYTHONPATH": path}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        end = time.monotonic() + 540
        try:
            while process.poll() is None and time.monotonic() < end:
                look()
                time.sleep(0.5)
        finally:
            process.terminate()
            process.wait(timeout=60)
        return process.returncode


def descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def alive(processes: set[psutil.Process]) -> list[str]:
    """Those that have not ended; this process has to wait for those that it has adopted."""
    for process in processes:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
    return [str(process) for process in processes if process.is_running()]


def hold(held: float, handles: int = 9) -> Footprint:
    return Footprint(int(held * MIB), int(held * MIB) + MIB, handles, handles, handles)


def updated(holds: list[Footprint]) -> list[Updated]:
    return [Updated(version + 1, 0.1, version, {"engine": there}, 0) for version, there in enumerate(holds)]


def tally(failures: int = 0, wrong: int = 0) -> Tally:
    return Tally(stream=False, seconds=[0.1], tokens=8, failures=failures, wrong_version=wrong)


LIVE = [{"a": "1", "b": "2"}, {"a": "3", "b": "2"}]


def version_rows(last: int = 50, **found: object) -> list[verdict.VersionRow]:
    """Of the first version and a later one; `found` is what was found of that."""
    first = Verified(1, [[1, 2]], LIVE)
    later = msgspec.structs.replace(first, version=last, **found)
    return verdict.versions([first, later], {v: Expected(v, [[1, 2]], 0.5, LIVE) for v in (1, last)})


def claims(
    holds: list[Footprint] | None = None,
    tallies: list[Tally] | None = None,
    rows: list[verdict.VersionRow] | None = None,
) -> dict[str, bool]:
    """Of fifty updates that were all as they should be, but for what is given."""
    lines = updated([hold(500)] * 50 if holds is None else holds)
    rows = version_rows() if rows is None else rows
    return verdict.claims(50, 50, lines, [tally()] if tallies is None else tallies, verdict.processes(lines), rows)


def broken(found: dict[str, bool]) -> set[str]:
    return {name for name, holds in found.items() if not holds}


def moving(last: float) -> list[Footprint]:
    return [hold(500 + (last - 500) * i / 44) for i in range(50)]


# What is wrong -> what `claims` gets, and the claims that do not hold.
FAULTS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "nothing": ({}, set()),
    "memory that grows by more than two percent": ({"holds": moving(515)}, {"memory_flat"}),
    "memory that shrinks by more than two percent": ({"holds": moving(485)}, {"memory_flat"}),
    "nothing: what the first updates take is no growth": ({"holds": [hold(300)] * 4 + [hold(500)] * 46}, set()),
    "a descriptor an update": ({"holds": [hold(500, handles=9 + i) for i in range(50)]}, {"nothing_piles_up"}),
    "one failed request": ({"tallies": [tally(), tally(failures=1)]}, {"no_failed_request"}),
    "one answer of another version": ({"tallies": [tally(), tally(wrong=1)]}, {"no_wrong_version"}),
    "a client that was never answered": (
        {"tallies": [Tally(stream=True)]},
        {"no_failed_request", "no_wrong_version"},
    ),
    "a version that was not verified": ({"rows": version_rows(25)}, {"verified"}),
    "no version that was verified": ({"rows": []}, {"verified"}),
    "nothing was seen": ({"holds": [], "tallies": [], "rows": []}, set(claims())),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_seen(fault: str) -> None:
    given, expected = FAULTS[fault]
    assert broken(claims(**given)) == expected


def test_an_update_that_is_missing_is_seen() -> None:
    assert "updated" in broken(claims([hold(500)] * 49))


def test_memory_that_an_update_keeps_is_seen_in_the_slope() -> None:
    (row,) = verdict.processes(updated([hold(500 + i / 8) for i in range(50)]))
    assert row.bytes_per_update == pytest.approx(MIB / 8)


@pytest.mark.parametrize(
    ("found", "differing"),
    [
        ({"digests": [LIVE[0], {"a": "3", "b": "9"}]}, ["1: b"]),
        ({"digests": [LIVE[0], {"a": "3"}]}, ["1: b"]),
        ({"digests": LIVE[:1]}, ["1: a", "1: b"]),
        ({"tokens": [[1, 3]]}, []),
    ],
)
def test_a_version_that_is_not_what_it_should_be_is_seen(found: dict[str, object], differing: list[str]) -> None:
    rows = version_rows(**found)
    assert rows[-1].differing == differing
    assert broken(claims(rows=rows)) == {"verified"}


def test_any_two_versions_differ_in_every_element_and_are_the_same_bits_again() -> None:
    assert len({weights.pattern(version) for version in range(10_000)}) == 10_000
    assert all(0 <= weights.pattern(version) <= weights.MANTISSA for version in range(10_000))
    name, shape = next(iter(weights.shapes().items()))
    first, other, again = (weights.whole(name, shape, version) for version in (7, 8, 7))
    assert first.ne(other).all()
    assert first.equal(again)
    assert first.isfinite().all()


def test_a_footprint_shows_what_is_held() -> None:
    before = footprint(os.getpid())
    held = b"\x01" * (64 * MIB)
    with open(os.devnull):
        after = footprint(os.getpid())
    assert after.held_bytes - before.held_bytes == pytest.approx(len(held), rel=0.1)
    assert after.descriptors == before.descriptors + 1
