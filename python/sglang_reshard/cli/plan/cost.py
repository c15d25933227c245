"""Predicts the transfer time of each strategy from a few constants.

Every rank's own work is added up: bytes it copies, boxes it copies, messages it handles. An update takes as long as its
busiest rank, or as its busiest host if ranks share fewer cores than there are ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sglang_reshard.plan import ClusterTopology, RankDemand
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
    cores            CPU cores of a host, for which its ranks compete; 0 if they do not
    """

    copy_bytes_s: float
    box_s: float
    local_bytes_s: float
    network_bytes_s: float
    message_s: float
    read_s: float
    cores: int


# On 2 cores without a GPU, fitted to benchmark/results/bench.json.
CPU = Costs(1e10, 1e-6, 5e9, 1.2e9, 1e-4, 1e-5, cores=2)
# From data sheets (HBM, NVLink, 400 Gb/s network cards); not measured on a GPU. A box is a tile or more of a kernel's
# (`copying.copy_table`), of which a GPU makes hundreds in a microsecond, and no launch of its own.
GPU = Costs(1.5e12, 5e-9, 3e11, 4e10, 2e-5, 1e-6, cores=0)


def costs_with(links: tuple[float, float], topology: ClusterTopology) -> Costs:
    """Returns the constants for these ranks, with given speeds within a host and between hosts; 0 for their own.

    Hosts are assumed to have as many cores as this one.
    """
    usual = GPU if topology.on_gpu else replace(CPU, cores=len(os.sched_getaffinity(0)))
    local, network = links
    return replace(usual, local_bytes_s=local or usual.local_bytes_s, network_bytes_s=network or usual.network_bytes_s)


def predicted_seconds(
    strategy: Strategy, topology: ClusterTopology, costs: Costs, demands: Sequence[RankDemand]
) -> float:
    """Predicts the seconds of an update's transfer alone: those of the busiest rank or host."""
    speeds = _Speeds(topology, costs)
    trainer, engine = np.zeros(len(topology.trainer_hosts)), np.zeros(len(topology.engine_hosts))
    if isinstance(strategy, BroadcastStrategy):
        _add_broadcasts(engine, strategy.broadcasts, speeds, demands)
    else:
        _add_exact(trainer, engine, strategy, speeds, demands)
    busiest = max(trainer.max(initial=0.0), engine.max(initial=0.0))
    if not costs.cores:
        return float(busiest)
    of_host: dict[str, float] = {}
    for host, seconds in zip((*topology.trainer_hosts, *topology.engine_hosts), (*trainer, *engine), strict=True):
        of_host[host] = of_host.get(host, 0.0) + seconds
    return float(max(busiest, *(seconds / costs.cores for seconds in of_host.values())))


@dataclass(frozen=True, slots=True)
class _Speeds:
    """Bytes per second between a trainer rank and an engine rank."""

    topology: ClusterTopology
    costs: Costs

    def of_messages(self, trainer_rank: int, engine_rank: int) -> float:
        same_host = self.topology.same_host(trainer_rank, engine_rank)
        return self.costs.local_bytes_s if same_host else self.costs.network_bytes_s

    def of_reads(self, trainer_rank: int, engine_rank: int) -> float:
        """Returns that of copies out of the trainer rank's mapped memory."""
        same_gpu = self.topology.same_gpu(trainer_rank, engine_rank)
        return self.costs.local_bytes_s if self.topology.on_gpu and not same_gpu else self.costs.copy_bytes_s


def _add_exact(
    trainer: np.ndarray, engine: np.ndarray, strategy: Strategy, speeds: _Speeds, demands: Sequence[RankDemand]
) -> None:
    """Adds the seconds of an update that brings every engine rank exactly the regions it needs.

    By one-sided reads of NIXL trainer ranks do nothing; by messages both sides do the same.
    """
    costs = speeds.costs
    for engine_rank, demand in enumerate(demands):
        for trainer_rank, (nbytes, boxes) in demand.traffic.items():
            sent = int(strategy.round_bytes[trainer_rank, engine_rank])
            if not sent:
                engine[engine_rank] += nbytes / speeds.of_reads(trainer_rank, engine_rank) + boxes * costs.box_s
                continue
            seconds = nbytes / speeds.of_messages(trainer_rank, engine_rank)
            seconds += nbytes / costs.copy_bytes_s + boxes * costs.box_s
            if strategy.name == "nixl":
                engine[engine_rank] += seconds + boxes * costs.read_s
            else:
                engine[engine_rank] += seconds + nbytes / sent * costs.message_s
                trainer[trainer_rank] += seconds + nbytes / sent * costs.message_s


def _add_broadcasts(engine: np.ndarray, plan: BroadcastPlan, speeds: _Speeds, demands: Sequence[RankDemand]) -> None:
    """Adds the seconds of broadcasts of whole shards; shards that one rank needs are read from memory."""
    costs = speeds.costs
    for group, shards, nbytes in zip(plan.groups, plan.shards, plan.nbytes, strict=True):
        for member in group.members:
            # A broadcast goes down a tree: the leader sends a few times, others forward what they receive.
            engine[member] += nbytes / speeds.of_messages(group.trainer_rank, member)
            engine[member] += -(-nbytes // plan.bucket_bytes) * costs.message_s
        engine[group.leader] += nbytes / speeds.of_reads(group.trainer_rank, group.leader)
        engine[group.leader] += len(shards) * costs.box_s
    for trainer_rank, engine_rank in np.argwhere(plan.direct_bytes).tolist():
        direct = plan.direct_bytes[trainer_rank, engine_rank]
        engine[engine_rank] += direct / speeds.of_reads(trainer_rank, engine_rank) - direct / costs.copy_bytes_s
    # Each needed byte is copied once by its rank, out of a bucket or out of trainer memory.
    for engine_rank, demand in enumerate(demands):
        boxes = sum(n for _, n in demand.traffic.values())
        engine[engine_rank] += demand.least_bytes / costs.copy_bytes_s + boxes * costs.box_s
