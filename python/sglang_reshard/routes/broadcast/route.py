"""The route broadcast: groups of engine ranks read whole shards once, and broadcast them. Trainer ranks do nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_reshard.plan import ClusterTopology, RankDemand, TensorIndex
from sglang_reshard.routes.broadcast.engine import BroadcastEngineEnd as engine_end
from sglang_reshard.routes.broadcast.plan import BroadcastStrategy, plan_broadcast
from sglang_reshard.routes.p2p.groups import check_broadcast_members
from sglang_reshard.routes.strategy import REQUESTED, Strategy

__all__ = ["engine_end", "plan"]


def plan(
    index: TensorIndex,
    demands: Sequence[RankDemand],
    topology: ClusterTopology,
    bucket_bytes: int,
    reason: str = REQUESTED,
) -> Strategy:
    """Raises Unsupported for a trainer rank whose memory nobody can read, and for groups that NCCL would refuse."""
    broadcasts = plan_broadcast(index, demands, topology.trainer_hosts, bucket_bytes)
    trainer_ranks = len(topology.trainer_hosts)
    check_broadcast_members([group.members for group in broadcasts.groups], topology.engine_devices)
    if topology.on_gpu:
        for members in dict.fromkeys(group.members for group in broadcasts.groups):
            topology.check_messages([trainer_ranks + engine_rank for engine_rank in members])
    nothing_sent = np.zeros((trainer_ranks, len(demands)), np.int64)
    return BroadcastStrategy("broadcast", reason, nothing_sent, broadcasts=broadcasts)
