"""The route p2p: trainer ranks send exactly the elements that engine ranks lack.

ipc+p2p is the same where engine ranks map the memory of some trainer ranks, and are sent the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_reshard.errors import Unsupported
from sglang_reshard.gpu.rank_info import RankGpuInfo
from sglang_reshard.plan import ClusterTopology, RankDemand, TensorIndex
from sglang_reshard.routes.p2p.engine import P2pEngineEnd as engine_end
from sglang_reshard.routes.p2p.groups import plan_p2p_groups
from sglang_reshard.routes.p2p.messages import round_bytes
from sglang_reshard.routes.p2p.trainer import P2pTrainerEnd as trainer_end
from sglang_reshard.routes.strategy import REQUESTED, Strategy, demanded_bytes

__all__ = ["engine_end", "plan", "send", "trainer_end"]


def plan(_index: TensorIndex, demands: Sequence[RankDemand], topology: ClusterTopology, bucket_bytes: int) -> Strategy:
    """Returns the strategy that sends all weights from trainer ranks. Raises Unsupported if NCCL would refuse it."""
    read, unread = demanded_bytes(demands, topology)
    try:
        return send("p2p", REQUESTED, read + unread, topology, bucket_bytes)
    except Unsupported as error:
        by_reading = "use transport='auto' or 'ipc', with which the engine rank reads the GPU's memory"
        raise Unsupported(error.problem, cure=error.cure or by_reading) from None


def send(name: str, reason: str, sent: np.ndarray, topology: ClusterTopology, bucket_bytes: int) -> Strategy:
    """Returns the strategy that sends these bytes, [trainer ranks, engine ranks].

    Raises Unsupported if NCCL would refuse the communicators for it.
    """
    per_round = round_bytes(sent, bucket_bytes)
    return Strategy(name, reason, per_round, _communicators(topology, per_round))


def _communicators(topology: ClusterTopology, per_round: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Returns the peer ids of the members of each communicator. Raises Unsupported if NCCL would refuse them."""
    if not topology.on_gpu:  # gloo connects any ranks
        return plan_p2p_groups(per_round, _no_gpus(topology.trainer_hosts), _no_gpus(topology.engine_hosts), ())
    groups = plan_p2p_groups(per_round, topology.trainer_devices, topology.engine_devices, topology.engine_hosts)
    for members in groups:
        topology.check_messages(members)
    return groups


def _no_gpus(ranks: Sequence[str]) -> list[RankGpuInfo]:
    return [RankGpuInfo()] * len(ranks)
