"""Starts the server, its clients and the trainer ranks, follows them, ends them, and judges what was seen."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from benchmark.demo import children, tiny_model
from benchmark.environment import environment
from benchmark.soak import expected, seen, verdict
from benchmark.soak.clients import Clients, Tally
from benchmark.soak.progress import Progress
from benchmark.soak.server import Server
from benchmark.soak.standing import Standing
from benchmark.soak.trainer import Job
from benchmark.soak.weights import ENGINE_TP, TRAINER_RANKS
from sglang_reshard.errors import ReshardError


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
    clients: int
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
    with _folder() as folder:
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
    standing = Standing(place.folder / "standing")
    reports = place.folder / "reports"
    reports.mkdir()
    log = place.folder / "server.log"
    with Progress(console, soak.updates) as progress:
        progress.say(f"starting an SGLang server, TP={ENGINE_TP}")
        with Server(place.model, place.environment, log, place.deadline) as server:
            job = Job(
                updates=soak.updates,
                every=soak.every,
                url=server.url,
                server_pid=server.pid,
                standing=str(standing.file),
                seen=str(place.folder / "seen"),
                folder=str(reports),
            )
            with Clients(server.url, standing, soak.clients) as asking:
                progress.say(f"{soak.clients} clients ask; {TRAINER_RANKS} trainer ranks begin")

                def follow() -> None:
                    server.check()
                    progress.show(standing.returned, asking.tallies)

                try:
                    place.run(_torchrun(job), "trainers", follow)
                except ReshardError as error:
                    told = "\n".join(file.read_text() for file in sorted(reports.glob("*.error")))
                    raise ReshardError(f"{children.tail(log)}\n{told or error}") from error
            return job, asking.tallies


def _expected(versions: list[int], place: _Place) -> dict[int, expected.Expected]:
    question = expected.Question(str(place.model), str(place.folder), versions, str(place.folder / "expected"))
    command = [sys.executable, "-m", "benchmark.soak.expected", msgspec.json.encode(question).decode()]
    place.run(command, "expected", lambda: None)
    return expected.read_answer(question)


def _torchrun(job: Job) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={TRAINER_RANKS}",
        "-m",
        "benchmark.soak.trainer",
        msgspec.json.encode(job).decode(),
    ]


@contextmanager
def _folder() -> Iterator[Path]:
    """Removed at the end, whatever it was."""
    folder = Path(tempfile.mkdtemp(prefix="sglang-reshard-soak-"))
    try:
        yield folder
    finally:
        shutil.copytree(folder, "/tmp/soak_dbg", dirs_exist_ok=True, ignore=shutil.ignore_patterns("tmp", "model"))
        shutil.rmtree(folder, ignore_errors=True)
