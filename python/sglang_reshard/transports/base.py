"""Defines what a transport is given and what it offers: built once from a plan, run once per update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from sglang_reshard.plan import BroadcastPlan, ReadPlan, TensorIndex
from sglang_reshard.transports.arrivals import ArrivalMemory
from sglang_reshard.transports.communicator import BroadcastCommunicators, P2pCommunicators
from sglang_reshard.transports.memory import PeerMemory

if TYPE_CHECKING:  # a trainer rank sends without the tracer
    from sglang_reshard.trace.program import Program
    from sglang_reshard.transports.nixl_reader import NixlReader
    from sglang_reshard.transports.relay import Relays


@dataclass(frozen=True, slots=True)
class TransportContext:
    """One engine rank's side of a plan.

    arrivals          the program that is written, and memory for its arrivals, which the transport places
    memory            trainer rank -> its mapped memory, for the trainer ranks whose memory this rank reads
    broadcast         the broadcast plan, None unless the strategy is broadcast
    broadcast_groups  this rank's communicators for it
    round_bytes       trainer rank -> bytes that it sends to this rank per round, for the trainer ranks that send
    p2p               the communicators that connect this rank to them
    nixl              the reader of their memory, if they register it instead of sending
    relays            what is read from other engines instead
    bucket_bytes      size of a bucket
    timeout_s         seconds that any one wait may last
    delta             messages are in the dtypes in which weights are kept, so that deltas of them can be sent
    """

    engine_rank: int
    device: torch.device
    tensor_index: TensorIndex
    read_plan: ReadPlan
    arrivals: ArrivalMemory
    memory: dict[int, PeerMemory]
    broadcast: BroadcastPlan | None
    broadcast_groups: BroadcastCommunicators | None
    round_bytes: dict[int, int]
    p2p: P2pCommunicators | None
    nixl: NixlReader | None = None
    relays: Relays | None = None
    bucket_bytes: int = 0
    timeout_s: float = 0.0
    delta: bool = False

    @property
    def program(self) -> Program:
        return self.arrivals.program


class Transport(Protocol):
    """Moves what an engine rank lacks into its live parameters each time `move` is called.

    received_bytes  bytes that reach this rank in one update
    read_bytes      trainer rank -> bytes of its memory that this rank reads or is sent in one update
    extra_bytes     bytes of the buffers held between updates, without those of arrivals
    """

    received_bytes: int
    read_bytes: dict[int, int]
    extra_bytes: int

    def move(self) -> None: ...
