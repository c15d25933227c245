"""The route nixl: engine ranks read exactly what they need out of registered trainer memory, on any host."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_reshard.plan import ClusterTopology, RankDemand, TensorIndex
from sglang_reshard.routes.nixl.engine import NixlEngineEnd as engine_end
from sglang_reshard.routes.nixl.trainer import NixlTrainerEnd as trainer_end
from sglang_reshard.routes.p2p.messages import round_bytes
from sglang_reshard.routes.strategy import REQUESTED, Strategy, demanded_bytes

__all__ = ["engine_end", "plan", "trainer_end"]


def plan(_index: TensorIndex, demands: Sequence[RankDemand], topology: ClusterTopology, bucket_bytes: int) -> Strategy:
    read, unread = demanded_bytes(demands, topology)
    return Strategy("nixl", REQUESTED, round_bytes(read + unread, bucket_bytes))
