"""Defines what a route's plan says: the way that all engine ranks get their weights, and the bytes that are sent to
each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_reshard.memory.peer_memory import ShardRead
from sglang_reshard.plan import ClusterTopology, RankDemand, ReadPlan, TensorIndex

REQUESTED = "requested"  # the reason for a transport that was asked for by its name


@dataclass(frozen=True, slots=True)
class Strategy:
    """The way that all engine ranks get their weights in an update.

    name, reason  the strategy, and why it was chosen
    round_bytes   what a trainer rank sends an engine rank per round, or the latter reads by NIXL, [trainer ranks,
                  engine ranks]; 0 for none
    groups        peer ids of the members of each P2P communicator, see `routes.p2p.groups`
    compares      the route compares what arrives itself: no landing asks trainer ranks for checksums
    """

    name: str
    reason: str
    round_bytes: np.ndarray
    groups: tuple[tuple[int, ...], ...] = ()
    compares: bool = False

    def digest(self) -> str:
        """Returns a hash of all that engine ranks must plan alike."""
        return hashlib.sha256(f"{self.name} {self.round_bytes.tolist()}".encode()).hexdigest()

    def senders(self, engine_rank: int) -> dict[int, int]:
        """Returns trainer rank -> bytes per round, for the trainer ranks that send to an engine rank."""
        column = self.round_bytes[:, engine_rank]
        return {int(t): int(column[t]) for t in np.flatnonzero(column)}

    def mapped_by(self, engine_rank: int, plan: ReadPlan, index: TensorIndex) -> dict[int, list[ShardRead]]:
        """Returns trainer rank -> what an engine rank reads of its memory, which it maps for that."""
        sending = self.senders(engine_rank)
        mapped = (t for t in plan.traffic() if t not in sending)
        return {t: shard_reads(plan, index, np.array(plan.reads_from(t))) for t in mapped}


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
    """Returns for one pair why memory cannot be read; of one on the same host, if there is one."""
    pairs = [(int(t), int(e)) for t, e in np.argwhere(unread)]
    first = next((pair for pair in pairs if pair in topology.unreadable), pairs[0])
    return topology.why_unreadable(*first)


def shard_reads(plan: ReadPlan, index: TensorIndex, numbers: np.ndarray) -> list[ShardRead]:
    """Returns what these reads of the plan, by number, read of shards; each region once."""
    pairs = np.stack([plan.tensor_ids[plan.copy_ids[numbers]], plan.item_ids[numbers]], axis=1)
    item_bytes = [tensor_class.item_bytes for tensor_class in index.classes]
    return [
        ShardRead(tensor, plan.items[item].local_region, item_bytes[index.class_of[tensor]])
        for tensor, item in np.unique(pairs, axis=0).tolist()
    ]
