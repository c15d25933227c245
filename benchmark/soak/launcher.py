"""Starts the server, its clients and the trainer ranks, follows them, ends them, and judges what was seen."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from benchmark.environment import environment
from benchmark.soak import expected, seen, verdict
from benchmark.soak.clients import Tally, asking
from benchmark.soak.standing import Standing
from benchmark.soak.trainer import Job
from benchmark.soak.weights import ENGINE_TP, TRAINER_RANKS
from benchmark.world import find_tests
from sglang_reshard.errors import ReshardError
from sglang_reshard.patches.sound_weights import SERVE_DUMMY
from sglang_reshard.selftest import children, engines, tiny_model
from sglang_reshard.selftest.digests import LOADER
from sglang_reshard.selftest.events import Note
from sglang_reshard.selftest.progress import Progress

_SAY_EVERY_S = 30.0
_CLIENTS = 3  # every second one streams


class Found(msgspec.Struct, frozen=True):
    """What was seen of one soak, judged. claims: claim -> whether it holds."""

    updated: list[seen.Updated]
    tallies: list[Tally]
    processes: list[verdict.ProcessRow]
    versions: list[verdict.VersionRow]
    claims: dict[str, bool]

    @property
    def ok(self) -> bool:
        return all(self.claims.values())


@dataclass(frozen=True, slots=True)
class Soak:
    """What is asked for. every: see `weights.is_verified`. deadline_s: of all of it."""

    updates: int
    every: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a soak runs. deadline: a time.monotonic() after which its processes are ended."""

    folder: Path
    model: Path
    environment: dict[str, str]
    deadline: float

    def run(self, command: list[str], name: str, poll: Callable[[], None]) -> None:
        children.run(command, self.environment, self.folder / f"{name}.log", self.deadline, poll)


def run(soak: Soak, console: Console) -> Found:
    """Raises ReshardError when something ends that should not, KeyboardInterrupt when told to stop. Either way
    all processes and files of the soak are gone afterwards."""
    deadline = time.monotonic() + soak.deadline_s
    with tempfile.TemporaryDirectory(prefix="sglang-reshard-soak-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        place = _Place(folder, folder / "model", environment(folder, ENGINE_TP, "cpu", "qwen3"), deadline)
        tiny_model.save(place.model, TRAINER_RANKS, ENGINE_TP)
        job, tallies = _updates(soak, place, console)
        updated, verified = seen.read(Path(job.seen))
        console.print(f"comparing {len(verified)} versions with stock loads and with transformers", highlight=False)
        of_versions = verdict.versions(verified, _expected([v.version for v in verified], place))
    of_processes = verdict.processes(updated)
    claims = verdict.claims(soak.updates, soak.every, updated, tallies, of_processes, of_versions)
    return Found(updated, tallies, of_processes, of_versions, claims)


def _updates(soak: Soak, place: _Place, console: Console) -> tuple[Job, list[Tally]]:
    find_tests()
    from support.servers import launch

    standing = Standing(place.folder / "standing")
    reports = place.folder / "reports"
    reports.mkdir()
    log = place.folder / "server.log"
    options = ["--context-length", str(tiny_model.CONTEXT_LENGTH), "--custom-weight-loader", LOADER]
    url = f"http://127.0.0.1:{children.free_port()}"
    options += ["--port", url.rpartition(":")[2]]
    command = launch(place.model, ENGINE_TP, *options, "--dtype", expected.DTYPE, "--log-level", "warning")
    served = {**place.environment, SERVE_DUMMY: "1"}  # clients ask before the first update, too
    with Progress(console) as progress:
        progress.show(Note(f"starting an SGLang server, TP={ENGINE_TP}"))
        with children.started(command, served, log) as server, ExitStack() as clients:
            engines.await_health(url, server, log)
            tallies = clients.enter_context(asking(url, standing, _CLIENTS))
            progress.show(Note(f"{_CLIENTS} clients ask; {TRAINER_RANKS} trainer ranks begin"))
            job = Job(
                updates=soak.updates,
                every=soak.every,
                url=url,
                server_pid=server.processes[0].pid,
                standing=str(standing.file),
                seen=str(place.folder / "seen"),
                folder=str(reports),
            )
            said = time.monotonic()

            def follow() -> None:
                nonlocal said
                engines.check_alive(server, log)
                if time.monotonic() - said > _SAY_EVERY_S:
                    said = time.monotonic()
                    answered = sum(len(tally.seconds) for tally in tallies)
                    failed = sum(tally.failures for tally in tallies)
                    updates = f"{standing.returned} of {soak.updates} updates"
                    progress.show(Note(f"{updates}, {answered:,} requests answered, {failed} failed"))

            try:
                place.run(children.torchrun(TRAINER_RANKS, "benchmark.soak.trainer", job), "trainers", follow)
            except ReshardError as error:
                told = "\n".join(file.read_text() for file in sorted(reports.glob("*.error")))
                raise ReshardError(f"{children.tail(log)}\n{told or error}") from error
        return job, tallies


def _expected(versions: list[int], place: _Place) -> dict[int, expected.Expected]:
    question = expected.Question(str(place.model), str(place.folder), versions, str(place.folder / "expected"))
    command = [sys.executable, "-m", "benchmark.soak.expected", msgspec.json.encode(question).decode()]
    place.run(command, "expected", lambda: None)
    return expected.read_answer(question)
