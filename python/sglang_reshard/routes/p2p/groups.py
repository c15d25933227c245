"""Plans which ranks are members of one communicator: NCCL accepts each GPU once.

Ranks that share a GPU occur where trainer and engine are colocated: an engine over two of four trainer hosts is sent
shards by trainer ranks of all four, and some of these run on its GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_reshard.plan import ClusterTopology

Members = tuple[int, ...]  # peer ids, ascending: a trainer rank, or the number of trainer ranks plus an engine rank


def plan_p2p_groups(round_bytes: np.ndarray, topology: ClusterTopology) -> tuple[Members, ...]:
    """Returns the members of each communicator, in the order of their first engine ranks.

    round_bytes  what a trainer rank sends an engine rank, [trainer ranks, engine ranks]; 0 for nothing

    An engine rank that is sent anything is a member of exactly one communicator, with all trainer ranks that send to
    it. There is one for all if no GPU occurs twice in it, else one for each host of engine ranks, or for each engine
    rank of a host where that does not suffice; even then a GPU may occur twice. Ranks without a GPU never clash.
    """
    trainer_ranks, engine_hosts = len(topology.trainer_hosts), topology.engine_hosts

    def members(engine_ranks: Sequence[int]) -> Members:
        senders = np.flatnonzero(round_bytes[:, engine_ranks].any(axis=1)).tolist()
        return (*senders, *(trainer_ranks + e for e in engine_ranks))

    def split(engine_ranks: Sequence[int]) -> list[Members]:
        whole = members(engine_ranks)
        if topology.sharing_gpu(whole) is None:
            return [whole]
        hosts = {engine_hosts[e]: [f for f in engine_ranks if engine_hosts[f] == engine_hosts[e]] for e in engine_ranks}
        if len(hosts) > 1:
            return [group for of_host in hosts.values() for group in split(of_host)]
        return [members([e]) for e in engine_ranks]

    receivers = np.flatnonzero(round_bytes.any(axis=0)).tolist()
    groups = split(receivers) if receivers else []
    return tuple(sorted(groups, key=lambda group: next(m for m in group if m >= trainer_ranks)))
