"""Runs on one host: `python -m benchmark.deltas.job ROLE JOB`, a `Job` in JSON. It writes JSON to the job's folder.

train    trains, and sends the weights after every step, in each way in turn. In the background, it goes on with steps
receive  a model that takes every update, and compares its last weights' digest
"""

from __future__ import annotations

import json
import os
import sys
import time

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from transformers import Qwen3ForCausalLM

from benchmark.deltas.training import LARGE, Trainer, config
from benchmark.hosts.job import read, write
from benchmark.world import digest, timed
from sglang_reshard import ModuleReceiver, ModuleSender
from sglang_reshard.trainer.options import Delta

_WAIT_S = 300.0
_PORT = 29534


class Way(msgspec.Struct, frozen=True):
    """A way of sending."""

    transport: str
    delta: Delta
    relay: bool = False
    learning_rate: float = 1e-6
    background: bool = False

    @property
    def name(self) -> str:
        return "-".join(map(str, msgspec.structs.astuple(self)))


class Job(msgspec.Struct, frozen=True):
    """One process's part. `address` is that of the trainer's host; of each way's updates the first is not timed."""

    folder: str
    address: str
    ways: tuple[Way, ...]
    rank: int = 0
    receivers: int = 1
    updates: int = 3
    steps_before: int = 5


def train(job: Job) -> None:
    os.environ.update(MASTER_ADDR=job.address, MASTER_PORT=str(_PORT), RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    trainer = Trainer(LARGE, job.steps_before)
    masters = dict(trainer.model.named_parameters())
    sent = {name: p.detach().to(torch.bfloat16) for name, p in masters.items()}
    of_ways = []
    for way in job.ways:
        trainer.begin(way.learning_rate)
        sender = ModuleSender(
            interface=job.address, transport=way.transport, delta=way.delta, relay=way.relay, timeout_s=_WAIT_S
        )
        write(job.folder, f"metadata-{way.name}", sender.metadata)
        sender.wait_for_receivers(job.receivers, _WAIT_S)
        seconds, reports = [], []
        alone = [timed(trainer.step) for _ in range(job.updates + 1)][1:] if way.background else []
        meanwhile: list[float] = []
        for version in range(job.updates + 1):
            trainer.step()
            torch._foreach_copy_(list(sent.values()), list(masters.values()))
            began, label = time.perf_counter(), f"{way.name}/{version}"
            if way.background:
                handle = sender.update_async(list(sent.items()), weight_version=label)
                while True:
                    step = timed(trainer.step)
                    if handle.done():  # this step was partly alone
                        break
                    meanwhile.append(step)
                told = handle.wait() or {}
            else:
                told = sender.update(list(sent.items()), weight_version=label)
            if version:
                seconds.append(time.perf_counter() - began)
                reports.append([json.loads(report.json()) for report in told.values()])
        of_ways.append({"seconds": seconds, "reports": reports, "alone": alone, "meanwhile": meanwhile})
        write(job.folder, f"digest-{way.name}", digest(sent.values()))
        sender.close()
    write(job.folder, "timed", json.dumps(of_ways))
    dist.destroy_process_group()


def receive(job: Job) -> None:
    model: nn.Module = Qwen3ForCausalLM(config(LARGE)).bfloat16()
    model.requires_grad_(False)
    for way in job.ways:
        receiver = ModuleReceiver(model)
        receiver.init(read(job.folder, f"metadata-{way.name}"), timeout_s=_WAIT_S)
        for version in range(job.updates + 1):
            assert receiver.receive(_WAIT_S) == f"{way.name}/{version}"
        own = digest(p for _, p in model.named_parameters())
        write(job.folder, f"exact-{way.name}-{job.rank}", str(own == read(job.folder, f"digest-{way.name}")))
        receiver.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"train": train, "receive": receive}[sys.argv[1]](msgspec.json.decode(sys.argv[2], type=Job))
