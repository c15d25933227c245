"""Chooses the strategy of an update: the requested transport, or the one that the cost model predicts to be fastest.

ipc        every engine rank reads exactly what it needs from trainer memory on its own host
p2p        trainer ranks send exactly that
ipc+p2p    ipc from trainer ranks on the same host, p2p from the others
broadcast  groups of engine ranks receive whole shards
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.plan.broadcast import BroadcastPlan, plan_broadcast
from sglang_reshard.plan.cost import ClusterTopology, broadcast_seconds, exact_seconds
from sglang_reshard.plan.p2p import round_bytes
from sglang_reshard.plan.read_plan import RankDemand
from sglang_reshard.plan.tensor_index import TensorIndex

TRANSPORTS = ("auto", "ipc", "p2p", "broadcast")


@dataclass(frozen=True, slots=True)
class Strategy:
    """How all engine ranks get their weights in an update.

    name, reason       the strategy, and why it was chosen
    predicted_seconds  by the cost model, for the transfer alone
    round_bytes        what a trainer rank sends an engine rank per round, [trainer ranks, engine ranks]; 0 for none
    broadcast          the plan of its broadcasts, if it has any
    """

    name: str
    reason: str
    predicted_seconds: float
    round_bytes: np.ndarray
    broadcast: BroadcastPlan | None = None

    def digest(self) -> str:
        groups = self.broadcast.digest() if self.broadcast else ""
        return hashlib.sha256(f"{self.name} {self.round_bytes.tolist()} {groups}".encode()).hexdigest()

    def senders(self, engine_rank: int) -> dict[int, int]:
        """Returns trainer rank -> bytes per round, for the trainer ranks that send to an engine rank."""
        column = self.round_bytes[:, engine_rank]
        return {int(t): int(column[t]) for t in np.flatnonzero(column)}


def check_transport(name: str) -> None:
    """Raises Mismatch for the name of a transport that does not exist."""
    if name not in TRANSPORTS:
        raise Mismatch(f"transport {name!r} is not one of: {', '.join(TRANSPORTS)}")


def choose_strategy(
    transport: str, index: TensorIndex, demands: Sequence[RankDemand], topology: ClusterTopology, bucket_bytes: int
) -> Strategy:
    """Chooses the strategy for engine ranks with these demands; every rank that calls it gets the same.

    Raises Unsupported, naming ranks and hosts, for an infeasible transport.
    """
    check_transport(transport)
    local = _traffic(demands, topology, same_host=True)
    remote = _traffic(demands, topology, same_host=False)

    def exact(name: str, sent: np.ndarray, reason: str) -> Strategy:
        per_round = round_bytes(sent, bucket_bytes)
        return Strategy(name, reason, exact_seconds(topology, demands, per_round), per_round)

    def broadcast(reason: str) -> Strategy:
        plan = plan_broadcast(index, demands, topology.trainer_hosts, bucket_bytes)
        return Strategy("broadcast", reason, broadcast_seconds(topology, demands, plan), np.zeros_like(local), plan)

    if transport == "ipc":
        _check_same_host(remote, topology)
        return exact("ipc", np.zeros_like(remote), "requested")
    if transport == "p2p":
        return exact("p2p", local + remote, "requested")
    if transport == "broadcast":
        return broadcast("requested")
    read_or_sent = exact("ipc" if not remote.any() else "ipc+p2p" if local.any() else "p2p", remote, "")
    candidates = [read_or_sent] if topology.one_group or not remote.any() else []
    if topology.one_group and local.any():
        candidates.append(exact("p2p", local + remote, ""))
    try:
        candidates.append(broadcast(""))
    except Unsupported:  # no engine rank on the host of a trainer rank
        # Left to NCCL: it connects unless two ranks really are on one GPU.
        candidates = candidates or [read_or_sent]
    best = min(candidates, key=lambda strategy: strategy.predicted_seconds)
    others = ", ".join(f"{c.name} {c.predicted_seconds:.3g} s" for c in candidates if c is not best)
    predicted = f"auto: predicted transfer time {best.predicted_seconds:.3g} s"
    return replace(best, reason=predicted + (f" ({others})" if others else ""))


def _traffic(demands: Sequence[RankDemand], topology: ClusterTopology, *, same_host: bool) -> np.ndarray:
    """Returns the bytes from trainer ranks to engine ranks on the same host, or on other hosts."""
    found = np.zeros((len(topology.trainer_hosts), len(demands)), np.int64)
    for engine_rank, demand in enumerate(demands):
        for trainer_rank, (nbytes, _) in demand.traffic.items():
            if (topology.trainer_hosts[trainer_rank] == demand.host) == same_host:
                found[trainer_rank, engine_rank] = nbytes
    return found


def _check_same_host(remote: np.ndarray, topology: ClusterTopology) -> None:
    if remote.any():
        trainer_rank, engine_rank = (int(i) for i in np.argwhere(remote)[0])
        raise Unsupported(
            f"engine rank {engine_rank} on {topology.engine_hosts[engine_rank]} needs shards that no trainer rank on "
            f"this host holds (trainer rank {trainer_rank} on {topology.trainer_hosts[trainer_rank]} does), and "
            "transport='ipc' reads memory on the same host only, as the same user; use transport='p2p' or 'auto'"
        )
