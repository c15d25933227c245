"""An engine rank that is sent all it lacks, and what a process has open."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from sglang_reshard.trace.program import Program
from sglang_reshard.transports.arrivals import ArrivalMemory
from sglang_reshard.transports.base import TransportContext
from sglang_reshard.transports.communicator import P2pCommunicator

CPU = torch.device("cpu")


def context_of(
    rank: int, index: Any, plan: Any, targets: Any, own_shares: dict[int, int], peers: Any
) -> TransportContext:
    arrivals = ArrivalMemory(Program(tuple(plan.copies), targets), CPU, 1 << 20)
    return TransportContext(rank, CPU, index, plan, arrivals, {}, None, None, own_shares, peers)


def connected(store: dist.Store, name: str, **options: Any) -> P2pCommunicator:
    communicator = P2pCommunicator(**options)
    communicator.connect(dist.PrefixStore(name, store))
    return communicator


def open_here() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
