"""What an update would take by each way: a model with few constants, to choose by and to be checked against.

Every rank's own work is added up (bytes it copies, boxes it touches, messages it handles). An update
takes as long as its busiest rank, or as its busiest host, where ranks share fewer cores than they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_reshard.plan.broadcast import BroadcastPlan
from sglang_reshard.plan.demand import RankDemand


@dataclass(frozen=True, slots=True)
class Costs:
    """What things take.

    copy_bytes_s     bytes a second that one rank copies from memory to memory
    box_s            seconds for each box that is copied, whatever its size
    local_bytes_s    bytes a second between two ranks of one host, through a process group
    network_bytes_s  the same between hosts
    message_s        seconds for each message, on either side
    shares_cores     whether ranks of one host compete for its cores
    """

    copy_bytes_s: float
    box_s: float
    local_bytes_s: float
    network_bytes_s: float
    message_s: float
    shares_cores: bool


# On 2 cores without a GPU, fitted to benchmark/results/bench.json.
CPU = Costs(1e10, 1e-6, 5e9, 1.2e9, 1e-4, shares_cores=True)
# From data sheets (HBM, NVLink, 400 Gb/s network cards); no GPU has confirmed them.
GPU = Costs(1.5e12, 5e-6, 3e11, 4e10, 2e-5, shares_cores=False)


@dataclass(frozen=True, slots=True)
class ClusterTopology:
    """Who runs where: hosts by rank, and the cores of each host.

    one_group  whether trainer ranks and engine ranks can be members of one process group; NCCL refuses two
               ranks on one GPU
    """

    trainer_hosts: tuple[str, ...]
    engine_hosts: tuple[str, ...]
    cores: dict[str, int]
    costs: Costs
    one_group: bool = True

    @classmethod
    def of(cls, needs: Sequence[RankDemand], trainer_hosts: Sequence[str], device_type: str) -> ClusterTopology:
        """The setting of engine ranks on devices of this type ("cpu", "cuda")."""
        engine_hosts = tuple(need.host for need in needs)
        on_gpu = device_type == "cuda"
        apart = not set(engine_hosts) & set(trainer_hosts)
        known = {need.host: need.cores for need in needs}
        # Trainer ranks do not tell; a host of theirs alone is taken to be as large as the engine's largest.
        cores = dict.fromkeys(trainer_hosts, max(known.values(), default=1)) | known
        return cls(tuple(trainer_hosts), engine_hosts, cores, GPU if on_gpu else CPU, apart or not on_gpu)

    def link_bytes_s(self, trainer_rank: int, engine_rank: int) -> float:
        local = self.trainer_hosts[trainer_rank] == self.engine_hosts[engine_rank]
        return self.costs.local_bytes_s if local else self.costs.network_bytes_s


class _Work:
    """Seconds of each rank's own work."""

    def __init__(self, setting: ClusterTopology) -> None:
        self._setting = setting
        self.trainer = np.zeros(len(setting.trainer_hosts))
        self.engine = np.zeros(len(setting.engine_hosts))

    def seconds(self) -> float:
        busiest = max(self.trainer.max(initial=0.0), self.engine.max(initial=0.0))
        if not self._setting.costs.shares_cores:
            return float(busiest)
        of_host: dict[str, float] = {}
        hosts = (*self._setting.trainer_hosts, *self._setting.engine_hosts)
        for host, seconds in zip(hosts, (*self.trainer, *self.engine), strict=True):
            of_host[host] = of_host.get(host, 0.0) + seconds
        cores = self._setting.cores
        return float(max(busiest, *(seconds / cores[host] for host, seconds in of_host.items())))


def exact_seconds(setting: ClusterTopology, needs: Sequence[RankDemand], shares: np.ndarray) -> float:
    """Every engine rank takes exact boxes: links with a share are sent in rounds, the others read from memory.

    shares  bytes that a link carries in one round, [trainer ranks, engine ranks]; 0 where memory is read
    """
    costs, work = setting.costs, _Work(setting)
    for engine_rank, need in enumerate(needs):
        for trainer_rank, (nbytes, boxes) in need.links.items():
            copying = nbytes / costs.copy_bytes_s + boxes * costs.box_s
            work.engine[engine_rank] += copying
            share = int(shares[trainer_rank, engine_rank])
            if share:
                moving = nbytes / setting.link_bytes_s(trainer_rank, engine_rank) + nbytes / share * costs.message_s
                work.engine[engine_rank] += moving
                work.trainer[trainer_rank] += copying + moving
    return work.seconds()


def broadcast_seconds(setting: ClusterTopology, needs: Sequence[RankDemand], plan: BroadcastPlan) -> float:
    """Whole pieces are broadcast; pieces that one rank needs alone are read from memory."""
    costs, work = setting.costs, _Work(setting)
    moved, sent = np.zeros(len(plan.lanes)), np.zeros(len(plan.lanes))
    for r in plan.rounds:
        moved[r.lane] += r.nbytes
        sent[r.lane] += 1
    needed = np.array([need.least_bytes for need in needs], float)
    boxes = np.array([sum(n for _, n in need.links.values()) for need in needs], float)
    carried = np.zeros(len(needs))
    for number, lane in enumerate(plan.lanes):
        local = setting.trainer_hosts[lane.trainer_rank]
        for member in lane.members:
            bytes_s = costs.local_bytes_s if setting.engine_hosts[member] == local else costs.network_bytes_s
            # A broadcast goes down a tree: the leader sends a few times, others pass on what they get.
            work.engine[member] += moved[number] / bytes_s + sent[number] * costs.message_s
            carried[member] += moved[number]
        work.engine[lane.leader] += moved[number] / costs.copy_bytes_s + len(plan.segments[number].piece) * costs.box_s
    # What comes by a group is landed from the bucket, the rest is read: each needed byte is copied once by its rank.
    work.engine += needed / costs.copy_bytes_s + boxes * costs.box_s
    return work.seconds()
