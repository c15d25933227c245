"""The way that an update goes: asked for, or the one that the cost model finds the quickest.

ipc        every engine rank reads exactly what it lacks from trainer memory on its own host
p2p        trainer ranks send exactly that
ipc+p2p    the first from trainer ranks on the same host, the second from the others
broadcast  groups of engine ranks get whole pieces
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.plan.broadcast import BroadcastPlan, plan_broadcast
from sglang_reshard.plan.cost import ClusterTopology, broadcast_seconds, exact_seconds
from sglang_reshard.plan.demand import RankDemand
from sglang_reshard.plan.p2p import shares
from sglang_reshard.plan.tensor_index import TensorIndex

TRANSPORTS = ("auto", "ipc", "p2p", "broadcast")


@dataclass(frozen=True, slots=True)
class Strategy:
    """How all engine ranks go about an update.

    name, why  the way, and the reason for it
    seconds    what the cost model predicts for its move
    shares     bytes that each link carries in one round, [trainer ranks, engine ranks]; 0 where memory is read
    broadcast  the plan of its groups, if it has any
    """

    name: str
    why: str
    seconds: float
    shares: np.ndarray
    broadcast: BroadcastPlan | None = None

    def digest(self) -> str:
        groups = self.broadcast.digest() if self.broadcast else ""
        return hashlib.sha256(f"{self.name} {self.shares.tolist()} {groups}".encode()).hexdigest()

    def trainer_ranks_sending(self, engine_rank: int) -> dict[int, int]:
        """Trainer rank -> bytes a round, of the links to an engine rank that are sent."""
        column = self.shares[:, engine_rank]
        return {int(t): int(column[t]) for t in np.flatnonzero(column)}


def check_transport(asked: str) -> None:
    """Raise Mismatch for a transport that does not exist."""
    if asked not in TRANSPORTS:
        raise Mismatch(f"transport {asked!r} is not one of: {', '.join(TRANSPORTS)}")


def choose_strategy(
    asked: str, catalog: TensorIndex, needs: Sequence[RankDemand], setting: ClusterTopology, bucket_bytes: int
) -> Strategy:
    """The way for engine ranks with these needs; the same on every rank that asks.

    Raises Unsupported, naming ranks and hosts, for a way that cannot be gone.
    """
    check_transport(asked)
    local = _links(needs, setting, near=True)
    far = _links(needs, setting, near=False)

    def exact(name: str, sent: np.ndarray, why: str) -> Strategy:
        share = shares(sent, bucket_bytes)
        return Strategy(name, why, exact_seconds(setting, needs, share), share)

    def broadcast(why: str) -> Strategy:
        plan = plan_broadcast(catalog, needs, setting.trainer_hosts, bucket_bytes)
        nothing = np.zeros_like(local)
        return Strategy("broadcast", why, broadcast_seconds(setting, needs, plan), nothing, plan)

    if asked == "ipc":
        _check_near(far, setting)
        return exact("ipc", np.zeros_like(far), "asked for")
    if asked == "p2p":
        return exact("p2p", local + far, "asked for")
    if asked == "broadcast":
        return broadcast("asked for")
    near_and_far = exact("ipc" if not far.any() else "ipc+p2p" if local.any() else "p2p", far, "")
    candidates = [near_and_far] if setting.one_group or not far.any() else []
    if setting.one_group and local.any():
        candidates.append(exact("p2p", local + far, ""))
    try:
        candidates.append(broadcast(""))
    except Unsupported:  # no engine rank on the host of a trainer rank
        # NCCL is the judge then: it connects unless two ranks really are on one GPU.
        candidates = candidates or [near_and_far]
    best = min(candidates, key=lambda choice: choice.seconds)
    others = ", ".join(f"{c.name} {c.seconds:.3g} s" for c in candidates if c is not best)
    why = f"auto: predicted to move in {best.seconds:.3g} s" + (f" ({others})" if others else "")
    return Strategy(best.name, why, best.seconds, best.shares, best.broadcast)


def _links(needs: Sequence[RankDemand], setting: ClusterTopology, *, near: bool) -> np.ndarray:
    """Bytes from each trainer rank to each engine rank, where they are on one host, or where they are not."""
    found = np.zeros((len(setting.trainer_hosts), len(needs)), np.int64)
    for engine_rank, need in enumerate(needs):
        for trainer_rank, (nbytes, _) in need.links.items():
            if (setting.trainer_hosts[trainer_rank] == need.host) == near:
                found[trainer_rank, engine_rank] = nbytes
    return found


def _check_near(far: np.ndarray, setting: ClusterTopology) -> None:
    if far.any():
        trainer_rank, engine_rank = (int(i) for i in np.argwhere(far)[0])
        raise Unsupported(
            f"engine rank {engine_rank} on {setting.engine_hosts[engine_rank]} lacks what no trainer rank there holds "
            f"(trainer rank {trainer_rank} on {setting.trainer_hosts[trainer_rank]} does), and transport='ipc' reads "
            "memory of the same host only, as the same user; use transport='p2p' or 'auto'"
        )
