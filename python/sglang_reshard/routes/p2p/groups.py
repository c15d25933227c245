"""Plans which ranks are members of one communicator: NCCL accepts each GPU once.

Ranks that share a GPU occur where trainer and engine are colocated: an engine over two of four trainer hosts is sent
shards by trainer ranks of all four, and some of these run on its GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sglang_reshard.errors import Unsupported
from sglang_reshard.gpu.rank_info import RankGpuInfo
from sglang_reshard.plan.topology import peer_name

Members = tuple[int, ...]  # peer ids, ascending: a trainer rank, or the number of trainer ranks plus an engine rank


def plan_p2p_groups(
    round_bytes: np.ndarray,
    trainer_devices: Sequence[RankGpuInfo],
    engine_devices: Sequence[RankGpuInfo],
    engine_hosts: Sequence[str],
) -> tuple[Members, ...]:
    """Returns the members of each communicator, in the order of their first engine ranks.

    round_bytes  what a trainer rank sends an engine rank, [trainer ranks, engine ranks]; 0 for nothing

    An engine rank that is sent anything is a member of exactly one communicator, with all trainer ranks that send to
    it. There is one for all if no GPU occurs twice in it, else one for each host of engine ranks, or for each engine
    rank of a host where that does not suffice. Ranks without a GPU never clash.

    Raises Unsupported, naming two ranks on one GPU that would have to be members of one communicator. Without a remedy,
    an engine rank is one of them: its caller knows whether the engine rank can read the GPU's memory instead.
    """
    gpus = [device.uuid for device in (*trainer_devices, *engine_devices)]

    def members(engine_ranks: Sequence[int]) -> Members:
        senders = np.flatnonzero(round_bytes[:, engine_ranks].any(axis=1)).tolist()
        return (*senders, *(len(trainer_devices) + e for e in engine_ranks))

    def split(engine_ranks: Sequence[int]) -> list[Members]:
        whole = members(engine_ranks)
        if _twice(whole, gpus) is None:
            return [whole]
        hosts = {engine_hosts[e]: [f for f in engine_ranks if engine_hosts[f] == engine_hosts[e]] for e in engine_ranks}
        if len(hosts) > 1:
            return [group for of_host in hosts.values() for group in split(of_host)]
        return [members([e]) for e in engine_ranks]

    receivers = np.flatnonzero(round_bytes.any(axis=0)).tolist()
    groups = split(receivers) if receivers else []
    _check_gpus(groups, gpus, len(trainer_devices), ("give each trainer rank its own GPU", ""))
    return tuple(sorted(groups, key=lambda group: next(m for m in group if m >= len(trainer_devices))))


def check_broadcast_members(groups: Iterable[Sequence[int]], engine_devices: Sequence[RankGpuInfo]) -> None:
    """Raises Unsupported, naming them, for two engine ranks on one GPU in one broadcast group."""
    gpus = [device.uuid for device in engine_devices]
    _check_gpus(groups, gpus, 0, ("", "use transport='ipc', which needs no communicator"))


def _check_gpus(
    groups: Iterable[Sequence[int]], gpus: Sequence[str], trainer_ranks: int, remedies: Sequence[str]
) -> None:
    """Raises Unsupported for two members on one GPU. `remedies`: if both are trainer ranks, and if not."""
    for group in groups:
        if (twice := _twice(group, gpus)) is not None:
            first, second = (peer_name(peer_id, trainer_ranks) for peer_id in twice)
            raise Unsupported(
                f"{first} and {second} share one GPU ({gpus[twice[0]]}), and NCCL accepts a GPU only once in a "
                "communicator",
                cure=remedies[twice[1] >= trainer_ranks],
            )


def _twice(members: Iterable[int], gpus: Sequence[str]) -> tuple[int, int] | None:
    """Returns the first two members that are on one GPU."""
    seen: dict[str, int] = {}
    for member in members:
        if gpus[member] and gpus[member] in seen:
            return seen[gpus[member]], member
        seen[gpus[member]] = member
    return None
