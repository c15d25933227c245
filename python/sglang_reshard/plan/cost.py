"""Predicts the transfer time of each strategy from a few constants.

Every rank's own work is added up: bytes it copies, boxes it copies, messages it handles. An update takes as long as its
busiest rank, or as its busiest host if ranks share fewer cores than there are ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_reshard.plan.broadcast import BroadcastPlan
from sglang_reshard.plan.read_plan import RankDemand


@dataclass(frozen=True, slots=True)
class Costs:
    """Constants of the cost model.

    copy_bytes_s     memory-to-memory copies of one rank, bytes per second
    box_s            seconds per box copied, of any size
    local_bytes_s    between two ranks on one host through a process group, bytes per second
    network_bytes_s  between two hosts, bytes per second
    message_s        seconds per message, on either side
    shares_cores     whether ranks on one host compete for its cores
    """

    copy_bytes_s: float
    box_s: float
    local_bytes_s: float
    network_bytes_s: float
    message_s: float
    shares_cores: bool


# On 2 cores without a GPU, fitted to benchmark/results/bench.json.
CPU = Costs(1e10, 1e-6, 5e9, 1.2e9, 1e-4, shares_cores=True)
# From data sheets (HBM, NVLink, 400 Gb/s network cards); not measured on a GPU.
GPU = Costs(1.5e12, 5e-6, 3e11, 4e10, 2e-5, shares_cores=False)


@dataclass(frozen=True, slots=True)
class ClusterTopology:
    """The hosts of all ranks, by rank, and the number of CPU cores of each host.

    one_group  whether trainer ranks and engine ranks can be members of one process group; NCCL rejects two ranks on
               one GPU
    """

    trainer_hosts: tuple[str, ...]
    engine_hosts: tuple[str, ...]
    cores: dict[str, int]
    costs: Costs
    one_group: bool = True

    @classmethod
    def of(cls, demands: Sequence[RankDemand], trainer_hosts: Sequence[str], device_type: str) -> ClusterTopology:
        """Returns the topology of engine ranks on devices of this type ("cpu", "cuda")."""
        engine_hosts = tuple(demand.host for demand in demands)
        on_gpu = device_type == "cuda"
        separate = not set(engine_hosts) & set(trainer_hosts)
        known = {demand.host: demand.cores for demand in demands}
        # Trainer ranks do not report cores; their hosts are assumed to be as large as the engine's largest.
        cores = dict.fromkeys(trainer_hosts, max(known.values(), default=1)) | known
        return cls(tuple(trainer_hosts), engine_hosts, cores, GPU if on_gpu else CPU, separate or not on_gpu)

    def bytes_s(self, trainer_rank: int, engine_rank: int) -> float:
        """Returns the bandwidth between two ranks, bytes per second."""
        local = self.trainer_hosts[trainer_rank] == self.engine_hosts[engine_rank]
        return self.costs.local_bytes_s if local else self.costs.network_bytes_s

    def busiest_seconds(self, trainer: np.ndarray, engine: np.ndarray) -> float:
        """Returns the seconds of the busiest rank or host, given each trainer rank's and engine rank's."""
        busiest = max(trainer.max(initial=0.0), engine.max(initial=0.0))
        if not self.costs.shares_cores:
            return float(busiest)
        of_host: dict[str, float] = {}
        for host, seconds in zip((*self.trainer_hosts, *self.engine_hosts), (*trainer, *engine), strict=True):
            of_host[host] = of_host.get(host, 0.0) + seconds
        return float(max(busiest, *(seconds / self.cores[host] for host, seconds in of_host.items())))


def exact_seconds(topology: ClusterTopology, demands: Sequence[RankDemand], round_bytes: np.ndarray) -> float:
    """Predicts an update in which every engine rank gets exactly the regions it needs.

    round_bytes  what a trainer rank sends an engine rank per round, [trainer ranks, engine ranks]; 0 for memory reads
    """
    costs = topology.costs
    trainer, engine = np.zeros(len(topology.trainer_hosts)), np.zeros(len(topology.engine_hosts))
    for engine_rank, demand in enumerate(demands):
        for trainer_rank, (nbytes, boxes) in demand.traffic.items():
            copying = nbytes / costs.copy_bytes_s + boxes * costs.box_s
            engine[engine_rank] += copying
            sent = int(round_bytes[trainer_rank, engine_rank])
            if sent:
                sending = nbytes / topology.bytes_s(trainer_rank, engine_rank) + nbytes / sent * costs.message_s
                engine[engine_rank] += sending
                trainer[trainer_rank] += copying + sending
    return topology.busiest_seconds(trainer, engine)


def broadcast_seconds(topology: ClusterTopology, demands: Sequence[RankDemand], plan: BroadcastPlan) -> float:
    """Predicts an update by broadcasts of whole shards; shards that one rank needs are read from memory."""
    costs, engine = topology.costs, np.zeros(len(topology.engine_hosts))
    nbytes, broadcasts = np.zeros(len(plan.groups)), np.zeros(len(plan.groups))
    for bucket in plan.buckets:
        nbytes[bucket.group] += bucket.nbytes
        broadcasts[bucket.group] += 1
    for number, group in enumerate(plan.groups):
        for member in group.members:
            # A broadcast goes down a tree: the leader sends a few times, others forward what they receive.
            bytes_s = topology.bytes_s(group.trainer_rank, member)
            engine[member] += nbytes[number] / bytes_s + broadcasts[number] * costs.message_s
        packing = nbytes[number] / costs.copy_bytes_s + len(plan.segments[number].shard) * costs.box_s
        engine[group.leader] += packing
    # Each needed byte is copied once by its rank, out of a bucket or out of trainer memory.
    needed = np.array([demand.least_bytes for demand in demands], float)
    boxes = np.array([sum(n for _, n in demand.traffic.values()) for demand in demands], float)
    engine += needed / costs.copy_bytes_s + boxes * costs.box_s
    return topology.busiest_seconds(np.zeros(len(topology.trainer_hosts)), engine)
