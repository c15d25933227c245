"""Runs on hosts of test_networks.py: `python module_job.py ROLE FOLDER ADDRESS RANK SIZE TRANSPORT`.

train    a rank of an FSDP2 module, which rank 0 hosts the session of at ADDRESS
receive  a plain module that takes what it is sent, and saves it
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmark.hosts.job import read, write
from sglang_reshard import ModuleReceiver, ModuleSender

VERSIONS = ("1", "2")
_WAIT_S = 300.0


def policy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 65), nn.Tanh(), nn.Linear(65, 3))


def train(folder: Path, address: str, rank: int, size: int, transport: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("gloo")
    model = policy()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sender = ModuleSender(interface=address, timeout_s=_WAIT_S, transport=transport)
    if rank == 0:
        write(folder, "metadata", sender.metadata)
    sender.wait_for_receivers(1, _WAIT_S)
    for version in VERSIONS:
        (model(torch.ones(2, 7)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = {name: p.full_tensor() for name, p in model.named_parameters()}
        (report,) = sender.update(model, weight_version=version).values()
        if rank == 0:
            torch.save(whole, folder / f"sent-{version}")
            write(folder, f"transport-{version}", report.transport)
    sender.close()
    dist.destroy_process_group()


def receive(folder: Path) -> None:
    model = policy().requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    receiver = ModuleReceiver(model)
    receiver.init(read(folder, "metadata"), timeout_s=_WAIT_S)
    for version in VERSIONS:
        assert receiver.receive(_WAIT_S) == version
        torch.save(dict(model.named_parameters()), folder / f"received-{version}")
    receiver.close()


if __name__ == "__main__":
    role, folder, address, rank, size, transport = sys.argv[1:]
    if role == "train":
        train(Path(folder), address, int(rank), int(size), transport)
    else:
        receive(Path(folder))
