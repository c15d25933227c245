"""A trainer rank of the soak: `torchrun -m benchmark.soak.trainer JOB`, with the JSON of `Job`."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmark.soak import expected, seen
from benchmark.soak.footprint import footprint, shared_memory_bytes
from benchmark.soak.standing import Standing
from benchmark.soak.weights import ENGINE_TP, Weights, is_verified
from sglang_reshard import WeightSender
from sglang_reshard.errors import EngineRefused
from sglang_reshard.protocol.messages import Verify
from sglang_reshard.selftest.digests import read_live_digests
from tools.oracle.http_engine import HttpEngine

_TIMEOUT_S = 60.0


class Job(msgspec.Struct, frozen=True):
    """every: see `is_verified`. server_pid: whose memory, and whose children's, is looked at.

    standing, seen  files for `Standing` and `seen`
    folder          for digests on their way from the engine ranks, and for errors
    """

    updates: int
    every: int
    url: str
    server_pid: int
    standing: str
    seen: str
    folder: str


def main(job: Job) -> None:
    dist.init_process_group("cpu:gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = Weights(mesh)
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    leads = dist.get_rank() == 0
    sender = WeightSender(job.url, mesh.get_group(), timeout_s=_TIMEOUT_S)
    observer = _Observer(job, pids) if leads else None
    for version in range(1, job.updates + 1):
        weights.become(version)
        if observer is not None:
            observer.standing.begun = version
        verify: Verify = "full" if is_verified(version, job.every) else "off"
        report = sender.update(weights.named, weight_version=str(version), verify=verify)
        if observer is not None:
            observer.standing.returned = version
            observer.look(version, report.seconds["total"])
        dist.barrier()  # no rank's memory is looked at in the middle of its next step, or at its end
    sender.close()
    dist.destroy_process_group()


class _Observer:
    """Trainer rank 0's eyes: what every process holds after an update, and what the engine has of a version."""

    def __init__(self, job: Job, trainer_pids: list[int]) -> None:
        self._job = job
        self._begin = time.monotonic()
        self.standing = Standing(Path(job.standing))
        self._pids = {f"trainer rank {rank}": pid for rank, pid in enumerate(trainer_pids)}
        self._pids |= _engine_processes(job.server_pid)
        self._engine = HttpEngine(job.url.removeprefix("http://"), ENGINE_TP)

    def look(self, version: int, seconds: float) -> None:
        holds = {name: footprint(pid) for name, pid in self._pids.items()}
        since = time.monotonic() - self._begin
        seen.append(Path(self._job.seen), seen.Updated(version, seconds, since, holds, shared_memory_bytes()))
        if is_verified(version, self._job.every):
            digests = read_live_digests(self._engine, self._job.folder)
            seen.append(Path(self._job.seen), seen.Verified(version, self._tokens(), digests))

    def _tokens(self) -> list[list[int]]:
        sampling = {"temperature": 0, "max_new_tokens": expected.NEW_TOKENS, "ignore_eos": True}
        body = {"input_ids": expected.PROMPTS, "sampling_params": sampling}
        answer = httpx.post(f"{self._job.url}/generate", json=body, timeout=_TIMEOUT_S, trust_env=False)
        if answer.status_code != httpx.codes.OK:
            raise EngineRefused(f"/generate answered {answer.status_code} {answer.text[:300]}; see the server's log")
        return [one["output_ids"] for one in answer.json()]


def _engine_processes(server_pid: int) -> dict[str, int]:
    """By the titles that SGLang gives its processes, "sglang::scheduler_TP0" and the like."""
    server = psutil.Process(server_pid)
    titles = {(child.cmdline() or [""])[0]: child.pid for child in server.children(recursive=True)}
    named = {title.removeprefix("sglang::"): pid for title, pid in titles.items() if title.startswith("sglang::")}
    if sum("scheduler" in name for name in named) != ENGINE_TP:
        raise EngineRefused(f"the server has the processes {sorted(titles)}, and not {ENGINE_TP} schedulers")
    return {"server": server_pid, **named}


def run(job: Job) -> None:
    """`main`, whose error the launcher shall be able to tell: in torchrun's output it is hard to find."""
    try:
        main(job)
    except BaseException:
        rank = os.environ["RANK"]
        Path(job.folder, f"{rank}.error").write_text(f"trainer rank {rank}: {traceback.format_exc()}")
        raise


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=Job))
