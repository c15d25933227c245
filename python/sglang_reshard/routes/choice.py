"""Chooses the strategy of an update: the requested transport, or by `auto` to read what can be read and send the rest.

ipc        every engine rank reads exactly what it needs from trainer memory on its own host
p2p        trainer ranks send exactly that
ipc+p2p    ipc from trainer ranks whose memory the engine rank can map, p2p from the others
broadcast  groups of engine ranks receive whole shards; `auto` uses it only where nothing can be sent
nixl       every engine rank reads exactly what it needs out of registered trainer memory, on any host; never by `auto`
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_reshard.errors import Unsupported
from sglang_reshard.gpu.device import RankDevice
from sglang_reshard.plan.read_plan import RankDemand, ReadPlan
from sglang_reshard.plan.tensor_index import TensorIndex
from sglang_reshard.plan.topology import ClusterTopology
from sglang_reshard.protocol.validation.requests import check_transport
from sglang_reshard.routes.broadcast.plan import BroadcastPlan, plan_broadcast
from sglang_reshard.routes.p2p.groups import check_broadcast_members, plan_p2p_groups
from sglang_reshard.routes.p2p.messages import round_bytes

_REQUESTED = "requested"


@dataclass(frozen=True, slots=True)
class Strategy:
    """How all engine ranks get their weights in an update.

    name, reason  the strategy, and why it was chosen
    round_bytes   what a trainer rank sends an engine rank per round, or the latter reads by NIXL, [trainer ranks,
                  engine ranks]; 0 for none
    groups        peer ids of the members of each P2P communicator, see `routes.p2p.groups`
    broadcast     the plan of its broadcasts, if it has any
    """

    name: str
    reason: str
    round_bytes: np.ndarray
    groups: tuple[tuple[int, ...], ...] = ()
    broadcast: BroadcastPlan | None = None

    def digest(self) -> str:
        groups = self.broadcast.digest() if self.broadcast else ""
        return hashlib.sha256(f"{self.name} {self.round_bytes.tolist()} {groups}".encode()).hexdigest()

    def senders(self, engine_rank: int) -> dict[int, int]:
        """Returns trainer rank -> bytes per round, for the trainer ranks that send to an engine rank."""
        column = self.round_bytes[:, engine_rank]
        return {int(t): int(column[t]) for t in np.flatnonzero(column)}

    def mapped_by(self, engine_rank: int, plan: ReadPlan, index: TensorIndex) -> tuple[int, ...]:
        """Returns the trainer ranks whose memory an engine rank maps, of those that `plan` reads."""
        if self.broadcast is None:
            sending = self.senders(engine_rank)
            return tuple(t for t in plan.traffic() if t not in sending)
        return self.broadcast.mapped_by(engine_rank, plan, index)


def choose_strategy(
    transport: str,
    index: TensorIndex,
    demands: Sequence[RankDemand],
    topology: ClusterTopology,
    bucket_bytes: int,
) -> Strategy:
    """Chooses the strategy for engine ranks with these demands; every rank that calls it gets the same.

    Raises Mismatch for an unknown transport, and Unsupported, naming ranks and hosts, for an infeasible one.
    """
    check_transport(transport)
    read, unread = _traffic(demands, topology)
    if transport == "auto":
        return _read_or_send(index, demands, topology, bucket_bytes, read, unread)
    if transport == "ipc":
        if unread.any():
            raise Unsupported(
                f"{_first_unread(unread, topology)}, and transport='ipc' reads memory on the same host only, as the "
                "same user",
                cure="use transport='p2p' or 'auto'",
            )
        return Strategy("ipc", _REQUESTED, unread)
    if transport == "broadcast":
        return _broadcast(_REQUESTED, index, demands, topology, bucket_bytes)
    if transport == "nixl":
        return Strategy("nixl", _REQUESTED, round_bytes(read + unread, bucket_bytes))
    try:
        return _send("p2p", _REQUESTED, read + unread, topology, bucket_bytes)
    except Unsupported as error:
        by_reading = "use transport='auto' or 'ipc', by which the engine rank reads the GPU's memory"
        raise Unsupported(error.problem, cure=error.cure or by_reading) from None


def _read_or_send(
    index: TensorIndex,
    demands: Sequence[RankDemand],
    topology: ClusterTopology,
    bucket_bytes: int,
    read: np.ndarray,
    unread: np.ndarray,
) -> Strategy:
    """Returns what `auto` chooses: engine ranks read what they can read, and trainer ranks send them the rest.

    Where NCCL would not connect the ranks for that, weights are broadcast, if that can be done.
    """
    if not unread.any():
        return Strategy("ipc", "auto: engine ranks read memory of their own hosts", unread)
    why = _first_unread(unread, topology)
    name, reads = ("ipc+p2p", "what they can") if read.any() else ("p2p", "nothing")
    try:
        return _send(name, f"auto: engine ranks read {reads}; {why}", unread, topology, bucket_bytes)
    except Unsupported as refusal:
        unsent = refusal
    try:
        return _broadcast(f"auto: not {name}: {unsent.problem}", index, demands, topology, bucket_bytes)
    except Unsupported:
        raise Unsupported(f"{why}. Nor can weights be sent: {unsent.problem}", cure=unsent.cure) from None


def _send(name: str, reason: str, sent: np.ndarray, topology: ClusterTopology, bucket_bytes: int) -> Strategy:
    """Returns the strategy by which trainer ranks send these bytes, [trainer ranks, engine ranks].

    Raises Unsupported if NCCL would refuse the communicators for it.
    """
    per_round = round_bytes(sent, bucket_bytes)
    return Strategy(name, reason, per_round, _communicators(topology, per_round))


def _broadcast(
    reason: str, index: TensorIndex, demands: Sequence[RankDemand], topology: ClusterTopology, bucket_bytes: int
) -> Strategy:
    plan = plan_broadcast(index, demands, topology.trainer_hosts, bucket_bytes)
    check_broadcast_members([group.members for group in plan.groups], topology.engine_devices)
    nothing_sent = np.zeros((len(topology.trainer_hosts), len(demands)), np.int64)
    return Strategy("broadcast", reason, nothing_sent, broadcast=plan)


def _traffic(demands: Sequence[RankDemand], topology: ClusterTopology) -> tuple[np.ndarray, np.ndarray]:
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


def _first_unread(unread: np.ndarray, topology: ClusterTopology) -> str:
    """Says of one pair why memory cannot be read; of one on the same host, if there is one."""
    pairs = [(int(t), int(e)) for t, e in np.argwhere(unread)]
    first = next((pair for pair in pairs if pair in topology.unreadable), pairs[0])
    return topology.why_unreadable(*first)


def _communicators(topology: ClusterTopology, per_round: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Returns the peer ids of the members of each P2P communicator. Raises Unsupported if NCCL would refuse them."""
    if not topology.on_gpu:  # gloo connects any ranks
        return plan_p2p_groups(per_round, _no_gpus(topology.trainer_hosts), _no_gpus(topology.engine_hosts), ())
    groups = plan_p2p_groups(per_round, topology.trainer_devices, topology.engine_devices, topology.engine_hosts)
    for members in groups:
        topology.check_messages(members)
    return groups


def _no_gpus(ranks: Sequence[str]) -> list[RankDevice]:
    return [RankDevice()] * len(ranks)
