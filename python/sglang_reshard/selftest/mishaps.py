"""Kills a trainer rank, then an engine rank, in the middle of an update of a server.

An error has to come within the deadline. Until the next update the server says what it said before, or refuses to say
anything: it never serves weights of two versions, nor new ones of an update that failed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sglang_reshard.api.remote_engine import RemoteEngine
from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.errors import ReshardError
from sglang_reshard.selftest import children, engines, models
from sglang_reshard.selftest.asking import Said, prompts, said
from sglang_reshard.selftest.events import EventWriter, Row
from sglang_reshard.selftest.job import Job
from sglang_reshard.selftest.reference import distance
from sglang_reshard.selftest.trainer import Trainer, join

_TIMEOUT_S = 30.0
_GRACE_S = 15.0  # after which an error that has to come by then is late
_TRAINER, _ENGINE = "a trainer rank", "an engine rank"
# Updates run one after the other, each as soon as the last one has ended, until the process is killed in one of them.
_AFTER_UPDATES, _MOST_UPDATES = 3.5, 2000


class Mishap(msgspec.Struct, frozen=True):
    """victim: which process is killed. pid: of the server."""

    job: Job
    url: str
    pid: int
    victim: str


def take(job: Job, environment: dict[str, str], log: Path, deadline: float, poll: Callable[[], None]) -> None:
    """Starts the server, and for each of the two victims trainer ranks that update it."""
    run, model = job.run, Path(job.folder) / "model"
    events = EventWriter(Path(job.events))
    models.save(run.model, model, run.source, run.target)
    with contextlib.ExitStack() as stack:
        with events.phase(f"start a server: {run.target}, {run.dtype}, on dummy weights", 12 + 5 * run.target.ranks):
            serving = engines.serving(run, model, environment, log.with_suffix(".server.log"))
            url, server = stack.enter_context(serving)
            poll()
        for victim in (_TRAINER, _ENGINE):
            mishap = Mishap(job, url, server.processes[0].pid, victim)
            with events.phase(f"kill {victim} in the middle of an update", 25.0):
                _play(mishap, environment, log, deadline, poll)


def _play(mishap: Mishap, environment: dict[str, str], log: Path, deadline: float, poll: Callable[[], None]) -> None:
    """Returns when the first trainer rank has seen what comes of it. Raises ReshardError if that fails itself."""
    ranks = mishap.job.run.source.ranks
    with children.started_ranks(ranks, "sglang_reshard.selftest.mishaps", mishap, environment, log) as trainers:
        first = trainers.processes[0]
        while first.poll() is None and time.monotonic() < deadline:
            trainers.census()
            poll()
            time.sleep(0.1)
        poll()
        if first.poll() != 0:
            raise ReshardError(f"trainer rank 0 failed after {mishap.victim} was killed.\n{children.tail(log)}")


class Scene:
    """One trainer rank of one mishap."""

    def __init__(self, mishap: Mishap) -> None:
        run = mishap.job.run
        self._mishap, self._run, self._folder = mishap, run, Path(mishap.job.folder)
        self._device = join(run)
        self._first = dist.get_rank() == 0
        self._events = EventWriter(Path(mishap.job.events) if self._first else None)
        self._engine = RemoteEngine(mishap.url) if self._first else None
        config = models.config(self._folder / "model")
        self._trainer = Trainer(config, run.source, self._device, models.trainer_dtype(run.model))
        self._prompts = prompts(self._trainer.vocabulary)
        self._versions = self._two_versions()
        self._sender = WeightSender(mishap.url, dist.group.WORLD, timeout_s=_TIMEOUT_S)

    def play(self) -> None:
        """Brings the server to two versions in turns, until the victim is gone."""
        answers = []
        for version in self._versions:
            self._become(version)
            self._update()
            answers.append(self._says())
        if self._mishap.victim == _ENGINE:
            self._repaired(answers[-1])
        self._become(self._versions[0])
        dist.barrier()
        warm = time.perf_counter()
        self._update()
        self._arm(_AFTER_UPDATES * (time.perf_counter() - warm))
        error, begin = "", 0.0
        try:
            for number in range(_MOST_UPDATES):
                self._become(self._versions[number % 2])
                begin = time.perf_counter()
                self._update()
        except ReshardError as raised:
            error = f"{type(raised).__name__}: {raised}"
        if self._first:
            self._judge(answers, error, time.perf_counter() - begin)
        # No farewell to the other trainer ranks: one of them may be gone.
        os._exit(0)

    def _two_versions(self) -> list[list[torch.Tensor]]:
        """Takes two steps. Returns copies of this rank's shards after each."""
        found = []
        for seed in range(2):
            self._trainer.step(seed)
            found.append([local(p).detach().clone() for p in self._trainer.model.parameters()])
        return found

    def _become(self, version: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, shard in zip(self._trainer.model.parameters(), version, strict=True):
                local(parameter).copy_(shard)

    def _update(self) -> None:
        self._sender.update(self._trainer.named(), partial=self._trainer.partial)

    def _arm(self, seconds: float) -> None:
        """Has the victim killed after so many seconds."""
        if self._mishap.victim == _TRAINER and dist.get_rank() == dist.get_world_size() - 1:
            pid = os.getpid()
        elif self._mishap.victim == _ENGINE and self._first:
            pid = max(schedulers(self._mishap.pid))
        else:
            return
        timer = threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))
        timer.daemon = True
        timer.start()

    def _judge(self, answers: list[Said], error: str, seconds: float) -> None:
        """Looks at what the server says after the update has failed."""
        try:
            now, told = said(self._engine, self._prompts), "the server says what one version says"
        except ReshardError as refusal:
            now, told = [], f"the server refuses requests ({type(refusal).__name__})"
        wrong = ["nobody noticed"] * (not error)
        wrong += [f"the error came after {seconds:.0f} s"] * (seconds > _TIMEOUT_S + _GRACE_S)
        wrong += ["the server says what no version of the weights says"] * (bool(now) and now not in answers)
        self._events.write(Row(self._run.name, f"{self._mishap.victim} is killed in the middle of an update",
                               not wrong, seconds=seconds, why="; ".join(wrong) or f"an error in time; {told}",
                               more={"error": error[:300]}))  # fmt: skip

    def _repaired(self, before: Said) -> None:
        """New trainer ranks have updated the server that the others left: transformers says what it should say."""
        checkpoint = self._folder / "repaired"
        self._trainer.save_checkpoint(checkpoint)
        if self._first:
            apart = distance(checkpoint, self._prompts, before, self._device)
            self._events.write(
                Row(
                    self._run.name,
                    "after that, new trainer ranks update the same server",
                    not (wrong := apart.wrong(self._run.dtype)),
                    why=wrong,
                    more=apart._asdict(),
                )
            )
        dist.barrier()

    def _says(self) -> Said:
        found = said(self._engine, self._prompts) if self._first else []
        dist.barrier()
        return found


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def schedulers(server: int) -> list[int]:
    """Returns the process numbers of a server's engine ranks, which SGLang names by titles."""
    found = []
    for child in psutil.Process(server).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "sglang::scheduler" in " ".join(child.cmdline()):
                found.append(child.pid)
    return found


if __name__ == "__main__":
    Scene(msgspec.json.decode(sys.argv[1], type=Mishap)).play()
