"""Chooses the strategy of an update: the requested transport, or the one that the cost model predicts to be fastest.

ipc        every engine rank reads exactly what it needs from trainer memory on its own host
p2p        trainer ranks send exactly that
ipc+p2p    ipc from trainer ranks whose memory the engine rank can map, p2p from the others
broadcast  groups of engine ranks receive whole shards
nixl       every engine rank reads exactly that out of registered trainer memory, on any host; not for `auto` to choose
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sglang_reshard.errors import Unsupported
from sglang_reshard.gpu.device import RankDevice
from sglang_reshard.plan.cost import Costs, broadcast_seconds, exact_seconds, pull_seconds, usual_costs
from sglang_reshard.plan.read_plan import RankDemand, ReadPlan
from sglang_reshard.plan.tensor_index import TensorIndex
from sglang_reshard.plan.topology import ClusterTopology
from sglang_reshard.protocol.validation.requests import check_transport
from sglang_reshard.routes.broadcast.plan import BroadcastPlan, plan_broadcast
from sglang_reshard.routes.p2p.groups import check_broadcast_members, plan_p2p_groups
from sglang_reshard.routes.p2p.messages import round_bytes


@dataclass(frozen=True, slots=True)
class Strategy:
    """How all engine ranks get their weights in an update.

    name, reason       the strategy, and why it was chosen
    predicted_seconds  by the cost model, for the transfer alone
    round_bytes        what a trainer rank sends an engine rank per round, or the latter reads by NIXL, [trainer ranks,
                       engine ranks]; 0 for none
    groups             peer ids of the members of each P2P communicator, see `routes.p2p.groups`
    broadcast          the plan of its broadcasts, if it has any
    """

    name: str
    reason: str
    predicted_seconds: float
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
    costs: Costs | None = None,
    *,
    delta: bool = False,
) -> Strategy:
    """Chooses the strategy for engine ranks with these demands; every rank that calls it gets the same.

    costs  of the cost model; by default those of the engine's devices
    delta  "auto" takes no broadcast, of which no delta can be sent, if there is another way

    Raises Unsupported, naming ranks and hosts, for an infeasible transport.
    """
    check_transport(transport)
    costs = costs or usual_costs(topology)
    read, unread = _traffic(demands, topology)

    def exact(name: str, sent: np.ndarray, reason: str) -> Strategy:
        per_round = round_bytes(sent, bucket_bytes)
        groups = _communicators(topology, per_round)
        return Strategy(name, reason, exact_seconds(topology, costs, demands, per_round), per_round, groups)

    def broadcast(reason: str) -> Strategy:
        plan = plan_broadcast(index, demands, topology.trainer_hosts, bucket_bytes)
        check_broadcast_members([group.members for group in plan.groups], topology.engine_devices)
        seconds = broadcast_seconds(topology, costs, demands, plan)
        return Strategy("broadcast", reason, seconds, np.zeros_like(read), broadcast=plan)

    def ipc(reason: str) -> Strategy:
        if unread.any():
            raise Unsupported(
                f"{_first_unread(unread, topology)}, and transport='ipc' reads memory on the same host only, as the "
                "same user; use transport='p2p' or 'auto'"
            )
        return exact("ipc", unread, reason)

    def nixl(reason: str) -> Strategy:
        seconds = pull_seconds(topology, costs, demands)
        return Strategy("nixl", reason, seconds, round_bytes(read + unread, bucket_bytes))

    by_name: dict[str, Callable[[str], Strategy]] = {
        "ipc": ipc,
        "ipc+p2p": lambda reason: exact("ipc+p2p", unread, reason),
        "p2p": lambda reason: exact("p2p", read + unread, reason),
        "broadcast": broadcast,
        "nixl": nixl,
    }
    if transport != "auto":
        return by_name[transport]("requested")
    best_by_reading = () if not read.any() and unread.any() else ("ipc+p2p",) if unread.any() else ("ipc",)
    attempts = {name: _attempt(by_name[name]) for name in (*best_by_reading, "p2p", "broadcast")}
    candidates = [found for found in attempts.values() if isinstance(found, Strategy) and not _is_ipc(found.broadcast)]
    refused = {name: found for name, found in attempts.items() if isinstance(found, Unsupported)}
    if not candidates:
        raise _none_is_feasible(refused, unread, topology)
    exact_ways = [found for found in candidates if found.broadcast is None]
    candidates = exact_ways if delta and exact_ways else candidates
    best = min(candidates, key=lambda strategy: strategy.predicted_seconds)
    return replace(best, reason=_reason(best, candidates, refused, unread, topology))


def _is_ipc(plan: BroadcastPlan | None) -> bool:
    """Returns whether no shard is broadcast, as each is needed by one rank only."""
    return plan is not None and not plan.buckets


def _attempt(make: Callable[[str], Strategy]) -> Strategy | Unsupported:
    try:
        return make("")
    except Unsupported as error:
        return error


def _reason(
    best: Strategy,
    candidates: Sequence[Strategy],
    refused: Mapping[str, Unsupported],
    unread: np.ndarray,
    topology: ClusterTopology,
) -> str:
    """Returns why `auto` took a strategy: its prediction, those of the others, and why some are none."""
    others = ", ".join(f"{c.name} {c.predicted_seconds:.3g} s" for c in candidates if c is not best)
    reason = f"auto: predicted transfer time {best.predicted_seconds:.3g} s" + (f" ({others})" if others else "")
    if topology.unreadable and best.round_bytes.any():
        reason += f"; {_first_unread(unread, topology)}"
    return reason + "".join(f"; not {name}: {_shortened(error)}" for name, error in refused.items())


def _none_is_feasible(refused: Mapping[str, Unsupported], unread: np.ndarray, topology: ClusterTopology) -> Unsupported:
    """Returns the error for ranks that can neither read nor be sent what they need, or not all of them."""
    by_messages = refused.get("ipc+p2p") or refused["p2p"]
    if not topology.unreadable:
        return by_messages
    without_other_ways = str(by_messages).partition("; use transport=")[0]
    return Unsupported(f"{without_other_ways}. Nor can its memory be read: {_first_unread(unread, topology)}")


def _shortened(error: Unsupported) -> str:
    """Returns what an error says before its cure."""
    return str(error).partition("; ")[0].partition(", and transport=")[0]


def _traffic(demands: Sequence[RankDemand], topology: ClusterTopology) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes from trainer ranks to engine ranks that can read their memory, and to others."""
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
