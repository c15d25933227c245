"""An engine rank that is sent all it lacks, and what a process has open."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from sglang_reshard.landings.base import Landing
from sglang_reshard.landings.converting import converting
from sglang_reshard.routes.base import Reads
from sglang_reshard.routes.wire.communicator import Communicator
from sglang_reshard.trace.program import Program

CPU = torch.device("cpu")


def reads_of(rank: int, index: Any, plan: Any, targets: Any) -> Reads:
    landing = converting(Landing(Program(tuple(plan.copies), targets)), CPU, 1 << 20)
    return Reads(rank, CPU, index, plan, landing, {})


def connected(store: dist.Store, name: str, **options: Any) -> Communicator:
    communicator = Communicator(**options)
    communicator.connect(dist.PrefixStore(name, store))
    return communicator


def open_here() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
