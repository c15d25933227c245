"""What a transport is: built once from a plan, run once an update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_reshard.plan import BroadcastPlan, ReadPlan, TensorIndex
from sglang_reshard.trace.program import Program
from sglang_reshard.transports.broadcast_communicator import BroadcastCommunicators
from sglang_reshard.transports.memory import PeerMemory
from sglang_reshard.transports.p2p_communicator import P2pCommunicator


@dataclass(frozen=True, slots=True)
class TransportContext:
    """One engine rank's side of a plan.

    memory     trainer rank -> its mapped memory, for the trainer ranks whose memory this rank reads
    broadcast  the plan of the groups, and the groups, where there are any
    shares     trainer rank -> bytes that it sends this rank in one round, for those that send
    peers      the connection to them
    """

    engine_rank: int
    device: torch.device
    catalog: TensorIndex
    intake: ReadPlan
    program: Program
    memory: dict[int, PeerMemory]
    broadcast: BroadcastPlan | None
    groups: BroadcastCommunicators | None
    shares: dict[int, int]
    peers: P2pCommunicator | None


class Transport(Protocol):
    """Moves what an engine rank lacks into its live parameters, every time `move` is called.

    received_bytes  bytes that reach this rank in one update
    read_bytes      trainer rank -> bytes that this rank gets out of its memory in one update
    extra_bytes     bytes of the buffers that it holds on to
    """

    received_bytes: int
    read_bytes: dict[int, int]
    extra_bytes: int

    def move(self) -> None: ...
