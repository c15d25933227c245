"""Predicts the transfer time of each strategy from a few constants.

Every rank's own work is added up: bytes it copies, boxes it copies, messages it handles. An update takes as long as its
busiest rank, or as its busiest host if ranks share fewer cores than there are ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_reshard.plan import ClusterTopology, RankDemand
from sglang_reshard.plan.topology import Relation
from sglang_reshard.routes.broadcast.plan import BroadcastPlan, BroadcastStrategy
from sglang_reshard.routes.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Costs:
    """Constants of the cost model.

    copy_bytes_s     memory-to-memory copies of one rank, bytes per second
    box_s            seconds per box copied, of any size
    local_bytes_s    between two ranks on one host through a process group, or two GPUs, bytes per second
    network_bytes_s  between two hosts, bytes per second
    message_s        seconds per message, on either side
    read_s           seconds per box that is read one-sided, in addition to its bytes
    shares_cores     whether ranks on one host compete for its cores
    """

    copy_bytes_s: float
    box_s: float
    local_bytes_s: float
    network_bytes_s: float
    message_s: float
    read_s: float
    shares_cores: bool


# On 2 cores without a GPU, fitted to benchmark/results/bench.json.
CPU = Costs(1e10, 1e-6, 5e9, 1.2e9, 1e-4, 1e-5, shares_cores=True)
# From data sheets (HBM, NVLink, 400 Gb/s network cards); not measured on a GPU. A box is a tile or more of a kernel's
# (`copying.copy_table`), of which a GPU makes hundreds in a microsecond, and no launch of its own.
GPU = Costs(1.5e12, 5e-9, 3e11, 4e10, 2e-5, 1e-6, shares_cores=False)


def usual_costs(topology: ClusterTopology) -> Costs:
    return GPU if topology.on_gpu else CPU


def predicted_seconds(
    strategy: Strategy, topology: ClusterTopology, costs: Costs, demands: Sequence[RankDemand]
) -> float:
    """Predicts the seconds of an update's transfer alone."""
    if isinstance(strategy, BroadcastStrategy):
        return _broadcast_seconds(topology, costs, demands, strategy.broadcasts)
    if strategy.name == "nixl":
        return _pull_seconds(topology, costs, demands)
    return _exact_seconds(topology, costs, demands, strategy.round_bytes)


def _exact_seconds(
    topology: ClusterTopology, costs: Costs, demands: Sequence[RankDemand], round_bytes: np.ndarray
) -> float:
    """Predicts an update that brings every engine rank exactly the regions it needs.

    round_bytes  what a trainer rank sends an engine rank per round, [trainer ranks, engine ranks]; 0 for memory reads
    """
    trainer, engine = np.zeros(len(topology.trainer_hosts)), np.zeros(len(topology.engine_hosts))
    for engine_rank, demand in enumerate(demands):
        for trainer_rank, (nbytes, boxes) in demand.traffic.items():
            copying = nbytes / costs.copy_bytes_s + boxes * costs.box_s
            sent = int(round_bytes[trainer_rank, engine_rank])
            if sent:
                bytes_s = _bytes_s(topology, costs, trainer_rank, engine_rank)
                sending = nbytes / bytes_s + nbytes / sent * costs.message_s
                engine[engine_rank] += copying + sending
                trainer[trainer_rank] += copying + sending
            else:
                engine[engine_rank] += nbytes / _read_bytes_s(topology, costs, trainer_rank, engine_rank)
                engine[engine_rank] += boxes * costs.box_s
    return _busiest_seconds(topology, costs, trainer, engine)


def _pull_seconds(topology: ClusterTopology, costs: Costs, demands: Sequence[RankDemand]) -> float:
    """Predicts an update with one-sided reads: engine ranks read the regions they need, trainer ranks do nothing."""
    engine = np.zeros(len(topology.engine_hosts))
    for engine_rank, demand in enumerate(demands):
        for trainer_rank, (nbytes, boxes) in demand.traffic.items():
            engine[engine_rank] += nbytes / _bytes_s(topology, costs, trainer_rank, engine_rank)
            engine[engine_rank] += nbytes / costs.copy_bytes_s + boxes * (costs.box_s + costs.read_s)
    return _busiest_seconds(topology, costs, np.zeros(len(topology.trainer_hosts)), engine)


def _broadcast_seconds(
    topology: ClusterTopology, costs: Costs, demands: Sequence[RankDemand], plan: BroadcastPlan
) -> float:
    """Predicts an update by broadcasts of whole shards; shards that one rank needs are read from memory."""
    engine = np.zeros(len(topology.engine_hosts))
    nbytes, broadcasts = np.zeros(len(plan.groups)), np.zeros(len(plan.groups))
    for bucket in plan.buckets:
        nbytes[bucket.group] += bucket.nbytes
        broadcasts[bucket.group] += 1
    for number, group in enumerate(plan.groups):
        for member in group.members:
            # A broadcast goes down a tree: the leader sends a few times, others forward what they receive.
            bytes_s = _bytes_s(topology, costs, group.trainer_rank, member)
            engine[member] += nbytes[number] / bytes_s + broadcasts[number] * costs.message_s
        read_bytes_s = _read_bytes_s(topology, costs, group.trainer_rank, group.leader)
        engine[group.leader] += nbytes[number] / read_bytes_s + len(plan.segments[number].shard) * costs.box_s
    for trainer_rank, engine_rank in np.argwhere(plan.direct_bytes).tolist():
        direct = plan.direct_bytes[trainer_rank, engine_rank]
        engine[engine_rank] += direct / _read_bytes_s(topology, costs, trainer_rank, engine_rank)
        engine[engine_rank] -= direct / costs.copy_bytes_s
    # Each needed byte is copied once by its rank, out of a bucket or out of trainer memory.
    needed = np.array([demand.least_bytes for demand in demands], float)
    boxes = np.array([sum(n for _, n in demand.traffic.values()) for demand in demands], float)
    engine += needed / costs.copy_bytes_s + boxes * costs.box_s
    return _busiest_seconds(topology, costs, np.zeros(len(topology.trainer_hosts)), engine)


def _bytes_s(topology: ClusterTopology, costs: Costs, trainer_rank: int, engine_rank: int) -> float:
    """Returns the bandwidth of messages between two ranks."""
    other_host = topology.relation(trainer_rank, engine_rank) is Relation.OTHER_HOST
    return costs.network_bytes_s if other_host else costs.local_bytes_s


def _read_bytes_s(topology: ClusterTopology, costs: Costs, trainer_rank: int, engine_rank: int) -> float:
    """Returns the bytes per second that an engine rank copies out of a trainer rank's memory."""
    over_link = topology.on_gpu and topology.relation(trainer_rank, engine_rank) is not Relation.SAME_GPU
    return costs.local_bytes_s if over_link else costs.copy_bytes_s


def _busiest_seconds(topology: ClusterTopology, costs: Costs, trainer: np.ndarray, engine: np.ndarray) -> float:
    """Returns the seconds of the busiest rank or host, given each trainer rank's and engine rank's."""
    busiest = max(trainer.max(initial=0.0), engine.max(initial=0.0))
    if not costs.shares_cores:
        return float(busiest)
    of_host: dict[str, float] = {}
    for host, seconds in zip((*topology.trainer_hosts, *topology.engine_hosts), (*trainer, *engine), strict=True):
        of_host[host] = of_host.get(host, 0.0) + seconds
    return float(max(busiest, *(seconds / topology.cores[host] for host, seconds in of_host.items())))
