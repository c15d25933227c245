"""Runs on one host: `python -m benchmark.hosts.job ROLE JOB`, with a `Job` in JSON. It writes JSON to the job's folder.

train    a trainer rank; rank 0 hosts the session, times updates and counts what its host sends
receive  a plain module that takes every update, and compares its last values
source   sends bytes to the sink, as fast as one TCP connection does
sink     receives and times them
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmark.matrices import value
from sglang_reshard import ModuleReceiver, ModuleSender

_WAIT_S, _PORT, _CHUNK = 300.0, 29533, 1 << 20


class Job(msgspec.Struct, frozen=True):
    """One process's part. `address` is that of the first trainer's host; updates are those that are timed."""

    folder: str
    address: str
    transport: str = "p2p"
    relay: bool = False
    on_failure: Literal["raise", "exclude"] = "raise"
    rank: int = 0
    trainers: int = 1
    receivers: int = 1
    updates: int = 3
    tensors: int = 100
    side: int = 1024

    @property
    def nbytes(self) -> int:
        return self.tensors * self.side * self.side * 2


def train(job: Job) -> None:
    os.environ.update(MASTER_ADDR=job.address, MASTER_PORT=str(_PORT), RANK=str(job.rank), WORLD_SIZE=str(job.trainers))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (job.trainers,))
    whole = torch.zeros(job.side, job.side, dtype=torch.bfloat16)
    state = {f"w{i}": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None) for i in range(job.tensors)}
    sender = ModuleSender(interface=job.address, transport=job.transport, relay=job.relay, timeout_s=_WAIT_S)
    if job.rank == 0:
        write(job.folder, "metadata", sender.metadata)
    sender.wait_for_receivers(job.receivers, _WAIT_S)
    seconds, sent, transports = [], 0, set()
    for version in range(job.updates + 1):
        for number, tensor in enumerate(state.values()):
            tensor.to_local().fill_(value(number, version))
        dist.barrier()
        sent_before, began = _host_sent(), time.perf_counter()
        reports = sender.update(list(state.items()), weight_version=str(version), on_failure=job.on_failure)
        if version:  # the first one plans and connects
            seconds.append(time.perf_counter() - began)
            sent += _host_sent() - sent_before
        if reports:
            transports = {report.transport for report in reports.values() if report.success}
    if job.rank == 0:
        write(job.folder, "timed", json.dumps({"seconds": seconds, "transports": sorted(transports)}))
    write(job.folder, f"sent-{job.rank}", str(sent // max(1, job.updates)))
    sender.close()
    dist.destroy_process_group()


def receive(job: Job) -> None:
    model = nn.Module()
    for number in range(job.tensors):
        parameter = nn.Parameter(torch.empty(job.side, job.side, dtype=torch.bfloat16), requires_grad=False)
        model.register_parameter(f"w{number}", parameter)
    receiver = ModuleReceiver(model)
    receiver.init(read(job.folder, "metadata"), timeout_s=_WAIT_S)
    for version in range(job.updates + 1):
        assert receiver.receive(_WAIT_S) == str(version)
    exact = all((p == value(n, job.updates)).all() for n, (_, p) in enumerate(model.named_parameters()))
    write(job.folder, f"exact-{job.rank}", str(exact))
    receiver.close()


def sink(job: Job) -> None:
    with socket.create_server((job.address, _PORT)) as server:
        write(job.folder, "listening", "")
        connection, _ = server.accept()
        began, arrived = time.perf_counter(), 0
        while arrived < job.nbytes:
            arrived += len(connection.recv(_CHUNK))
        write(job.folder, "link", str(arrived / (time.perf_counter() - began)))


def source(job: Job) -> None:
    read(job.folder, "listening")
    with socket.create_connection((job.address, _PORT)) as connection:
        chunk, left = bytes(_CHUNK), job.nbytes
        while left > 0:
            connection.sendall(chunk)
            left -= _CHUNK


ROLES: dict[str, Callable[[Job], None]] = {"train": train, "receive": receive, "sink": sink, "source": source}


def sent_by_link(devices: str) -> int:
    """Returns the bytes that a host has sent, by its /proc/net/dev. Not by /sys, which shows another namespace's."""
    (line,) = (line for line in devices.splitlines() if line.strip().startswith("eth0:"))
    return int(line.partition(":")[2].split()[8])


def _host_sent() -> int:
    return sent_by_link(Path("/proc/net/dev").read_text())


def write(folder: str | Path, name: str, text: str) -> None:
    """Renames it into place, so that a reader never sees half of it."""
    path = Path(folder, name)
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)


def read(folder: str | Path, name: str) -> str:
    path, end = Path(folder, name), time.monotonic() + _WAIT_S
    while not path.exists():
        assert time.monotonic() < end, f"{name} was not written"
        time.sleep(0.05)
    return path.read_text()


if __name__ == "__main__":
    ROLES[sys.argv[1]](msgspec.json.decode(sys.argv[2], type=Job))
