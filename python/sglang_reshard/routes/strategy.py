"""Defines what a route's plan says: by which way all engine ranks get their weights, and what is sent to each."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_reshard.plan import ClusterTopology, RankDemand, ReadPlan, TensorIndex

REQUESTED = "requested"  # the reason for a transport that was asked for by its name


@dataclass(frozen=True, slots=True)
class Strategy:
    """How all engine ranks get their weights in an update.

    name, reason  the strategy, and why it was chosen
    round_bytes   what a trainer rank sends an engine rank per round, or the latter reads by NIXL, [trainer ranks,
                  engine ranks]; 0 for none
    groups        peer ids of the members of each P2P communicator, see `routes.p2p.groups`
    """

    name: str
    reason: str
    round_bytes: np.ndarray
    groups: tuple[tuple[int, ...], ...] = ()

    def digest(self) -> str:
        """Returns a hash of all that engine ranks must plan alike."""
        return hashlib.sha256(f"{self.name} {self.round_bytes.tolist()}".encode()).hexdigest()

    def senders(self, engine_rank: int) -> dict[int, int]:
        """Returns trainer rank -> bytes per round, for the trainer ranks that send to an engine rank."""
        column = self.round_bytes[:, engine_rank]
        return {int(t): int(column[t]) for t in np.flatnonzero(column)}

    def mapped_by(self, engine_rank: int, plan: ReadPlan, index: TensorIndex) -> tuple[int, ...]:
        """Returns the trainer ranks whose memory an engine rank maps, of those that `plan` reads."""
        sending = self.senders(engine_rank)
        return tuple(t for t in plan.traffic() if t not in sending)


def demanded_bytes(demands: Sequence[RankDemand], topology: ClusterTopology) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes from trainer ranks to engine ranks that can read their memory, and to others.

    Both are [trainer ranks, engine ranks].
    """
    read = np.zeros((len(topology.trainer_hosts), len(demands)), np.int64)
    unread = np.zeros_like(read)
    for engine_rank, demand in enumerate(demands):
        for trainer_rank, (nbytes, _) in demand.traffic.items():
            found = read if topology.can_read(trainer_rank, engine_rank) else unread
            found[trainer_rank, engine_rank] = nbytes
    return read, unread


def first_unread(unread: np.ndarray, topology: ClusterTopology) -> str:
    """Says of one pair why memory cannot be read; of one on the same host, if there is one."""
    pairs = [(int(t), int(e)) for t, e in np.argwhere(unread)]
    first = next((pair for pair in pairs if pair in topology.unreadable), pairs[0])
    return topology.why_unreadable(*first)
