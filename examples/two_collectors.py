"""A trainer of two FSDP2 ranks, and two collectors that take its weights when they are ready, on CPU.

    .venv/bin/python examples/two_collectors.py

The first collector takes new weights between its rollouts. The second has a thread that takes them as they come, and
keeps them out of its rollouts. A policy is a plain torch module; there is no inference engine.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from sglang_reshard import ModuleReceiver, ModuleSender

TRAINERS, STEPS = 2, 5


def policy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


def train(rank: int, port: int, metadata: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(TRAINERS))
    dist.init_process_group("gloo")
    model = policy()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sender = ModuleSender()
    if rank == 0:
        for _ in range(2):
            metadata.put(sender.metadata)  # whoever has it can join
    sender.wait_for_receivers(2)
    for step in range(1, STEPS + 1):
        loss = (model(torch.randn(32, 4)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sender.update(model, weight_version=str(step))
    sender.close()
    dist.destroy_process_group()


def collect(number: int, metadata: Any) -> None:
    model = policy().requires_grad_(False)
    receiver = ModuleReceiver(model)
    receiver.init(metadata.get())
    if number == 1:
        receiver.start()
    versions = []
    while receiver.version != str(STEPS):
        if number == 0:
            receiver.poll_and_apply(timeout=0.1)
        with receiver.reading() as version:
            rollout = model(torch.randn(256, 4)).mean()
        if version is not None and version not in versions:
            versions.append(version)
            print(f"collector {number}: version {version}, mean action {rollout:+.3f}", flush=True)
    receiver.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue, port = context.Queue(), free_port()
    trainers = [context.Process(target=train, args=(rank, port, queue)) for rank in range(TRAINERS)]
    collectors = [context.Process(target=collect, args=(number, queue)) for number in range(2)]
    processes = [*trainers, *collectors]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    raise SystemExit(max(process.exitcode or 0 for process in processes))
