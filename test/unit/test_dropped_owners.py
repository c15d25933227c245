"""Senders and receivers that are dropped without `close()` keep no thread, descriptor or shared memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_reshard import Snapshots
from sglang_reshard.api.multi_engine import MultiEngineSender
from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.control import ControlServer
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.extras.modules.receiver import ModuleReceiver
from sglang_reshard.extras.modules.sender import ModuleSender
from sglang_reshard.extras.parameter_stream import ParameterStream
from sglang_reshard.protocol.session import Session
from support.toy import ToyRank, checkpoint
from support.toy_serving import receiver_of
from support.world import run_world

DROPPED, SOON_S = 4, 20.0


def census() -> tuple[int, int, int]:
    shared = [name for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name]  # as torch names its own
    return threading.active_count(), len(os.listdir("/proc/self/fd")), len(shared)


def receiver() -> WeightReceiver:
    return receiver_of(ToyRank(0, 1))


def alone(**options: Any) -> WeightSender:
    """A sender of one trainer rank, with an engine in this process."""
    return WeightSender.within(
        Session.host(), trainer_rank=0, global_ranks=(0,), send=receiver().update, timeout_s=30, **options
    )


def updated(sender: WeightSender, *versions: int) -> WeightSender:
    for version in versions:
        sender.update(checkpoint(version).items())
    return sender


def of_engines() -> Any:
    server = ControlServer.open()
    sender = MultiEngineSender(server.address, trainer_rank=0, global_ranks=(0,), timeout_s=30)
    sender.set_engines({"a": receiver().update, "b": receiver().update})
    sender.update(checkpoint(1).items())
    return server, sender


def snapshots(folder: Path) -> Any:
    written = Snapshots(alone(), folder, keep=1)
    written.write(checkpoint(1).items(), f"step-{time.monotonic_ns()}")
    return written


KINDS: dict[str, Callable[[Path], Any]] = {
    "unused": lambda _: alone(),
    "after updates": lambda _: updated(alone(delta="auto"), 1, 2),
    "after sending": lambda _: updated(alone(transport="p2p"), 1),
    "after a background update": lambda _: alone().update_async(checkpoint(1).items()).wait(),
    "of an adapter": lambda _: alone().lora_adapter("policy", "{}"),
    "of engines": lambda _: of_engines(),
    "snapshots": snapshots,
    "stream": lambda _: ParameterStream(receiver().update),
}


def settles(before: tuple[int, int, int]) -> None:
    end = time.monotonic() + SOON_S
    while True:
        gc.collect()
        if all(now <= then for now, then in zip(census(), before, strict=True)):
            return
        assert time.monotonic() < end, (before, census(), [thread.name for thread in threading.enumerate()])
        time.sleep(0.05)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_what_is_dropped_keeps_nothing(make: Callable[[Path], Any], tmp_path: Path) -> None:
    make(tmp_path)  # imports, and makes what a process keeps once
    gc.collect()
    time.sleep(0.2)
    settles(before := census())
    for _ in range(DROPPED):
        make(tmp_path)
    settles(before)


class Collector(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, 8))


def train_modules(trainer: Any) -> None:
    for _ in range(2):
        before = census()
        for _ in range(DROPPED):
            sender = ModuleSender(trainer.group, timeout_s=30)
            collectors = [ModuleReceiver(Collector()) for _ in range(2)]
            for collector in collectors:
                collector.init(sender.metadata)
                collector.start()
            sender.wait_for_receivers(2)
            sender.update({"weight": torch.ones(8, 8)}.items())
            del sender, collector, collectors
        # The first round also makes what a process keeps.
    settles(before)


def test_module_senders_and_receivers(tmp_path: Path) -> None:
    run_world(1, 0, train_modules, lambda *_: None, deadline_s=90)


SCRIPT = """
from test_dropped_owners import alone, of_engines, updated
kept = updated(alone(), 1), of_engines()
updated(alone(), 1)
print("done", flush=True)
"""


def test_a_process_ends_at_once_with_what_was_not_closed() -> None:
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": path},
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
