"""One end of an update between two hosts whose link fails: `python link_job.py ROLE FOLDER ADDRESS TRANSPORT STATION`.

train     one trainer rank: an update, then one in which it waits at the station, if that is one of its own
receive   a plain module that takes both, and waits in the second one if the station is one of its own. Once that has
          failed it takes the weights of another trainer, "again"
again     that trainer

They tell of themselves by files of the folder: "at" (come to the station), "told-ROLE" (what the second update ended
with, when, and the values of the module), "again" (those of the module after the third one).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmark.hosts.job import read, write
from sglang_reshard import ModuleReceiver, ModuleSender
from support.stations import Arm, At, Stations

TENSORS, SIDE = 24, 512
TRAINER_STATIONS = ("publish", "announce", "send")
_WAIT_S = 300.0
_PORT = 29534
_BUCKET_BYTES = 4 << 20  # so that most of the weights have not arrived when some are written


class Gate:
    """What a process tells the test at its station, and waits for there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def send(self, _at: At) -> None:
        write(self._folder, "at", "")

    def recv(self) -> str:
        read(self._folder, "go")
        return "go"


def told(error: Exception | None) -> str:
    return f"{time.monotonic()} {type(error).__name__}: {error}" if error is not None else f"{time.monotonic()} nothing"


def sender(folder: Path, address: str, transport: str, name: str) -> ModuleSender:
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{_PORT}", rank=0, world_size=1)
    found = ModuleSender(interface=address, transport=transport, bucket_bytes=_BUCKET_BYTES)
    write(folder, f"metadata-{name}", found.metadata)
    found.wait_for_receivers(1, _WAIT_S)
    return found


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    return [(f"w{n}", torch.full((SIDE, SIDE), float(version))) for n in range(TENSORS)]


def train(folder: Path, address: str, transport: str, station: str) -> None:
    ours = sender(folder, address, transport, "train")
    ours.update(weights(1), weight_version="1", verify="full")
    if station in TRAINER_STATIONS:
        Stations(Gate(folder)).install("trainer").arm(Arm(station))  # type: ignore[arg-type]
    failure = None
    try:
        ours.update(weights(2), weight_version="2", verify="full")
    except Exception as error:
        failure = error
    write(folder, "told-train", told(failure))
    ours.close()


def again(folder: Path, address: str, transport: str, _station: str) -> None:
    ours = sender(folder, address, transport, "again")
    ours.update(weights(3), weight_version="3", verify="full")
    ours.close()


def receive(folder: Path, _address: str, _transport: str, station: str) -> None:
    model = nn.Module()
    for number in range(TENSORS):
        model.register_parameter(f"w{number}", nn.Parameter(torch.zeros(SIDE, SIDE), requires_grad=False))
    receiver = ModuleReceiver(model)
    receiver.init(read(folder, "metadata-train"))
    assert receiver.receive(_WAIT_S) == "1"
    if station not in TRAINER_STATIONS:
        Stations(Gate(folder)).install("engine").arm(Arm(station))  # type: ignore[arg-type]
    failure: Any = None
    try:
        receiver.receive(_WAIT_S)
    except Exception as error:
        failure = error
    write(folder, "told-receive", f"{told(failure)}\n{values(model)}")
    receiver.close()
    receiver.init(read(folder, "metadata-again"))
    receiver.receive(_WAIT_S)
    write(folder, "again", values(model))


def values(model: nn.Module) -> str:
    """All that are in the module, in order."""
    found = sorted({float(v) for p in model.parameters() for v in p.unique()})
    return " ".join(f"{value:g}" for value in found)


if __name__ == "__main__":
    role, where, *others = sys.argv[1:]
    {"train": train, "receive": receive, "again": again}[role](Path(where), *others)
