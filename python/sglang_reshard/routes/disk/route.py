"""The route disk: engine ranks read exactly what they need from the files of a snapshot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_reshard.layout.regions import aligned
from sglang_reshard.plan import ClusterTopology, RankDemand, TensorIndex
from sglang_reshard.routes.disk.engine import DiskEngineEnd as engine_end
from sglang_reshard.routes.strategy import REQUESTED, Strategy, demanded_bytes

__all__ = ["engine_end", "plan"]


def plan(_index: TensorIndex, demands: Sequence[RankDemand], topology: ClusterTopology, bucket_bytes: int) -> Strategy:
    _, unread = demanded_bytes(demands, topology)
    return Strategy("disk", REQUESTED, np.minimum(aligned(unread), bucket_bytes), compares=True)
