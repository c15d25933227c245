"""Process groups of engine ranks, made once a session and reused.

They are built on the session's own store rather than with `dist.new_group`, so that nothing of the
engine's own world (its group names, its collectives' order) depends on them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Work = dist.Work


class Group:
    """A broadcast group of engine ranks."""

    def __init__(self, store: dist.Store, members: tuple[int, ...], rank: int, backend: str, timeout_s: float) -> None:
        self.members = members
        name = f"{backend}/" + ",".join(map(str, members))
        prefixed = dist.PrefixStore(name, store)
        me, size, timeout = members.index(rank), len(members), timedelta(seconds=timeout_s)
        self._pg: Any
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._pg = dist.ProcessGroupNCCL(prefixed, me, size, options)
        else:
            self._pg = dist.ProcessGroupGloo(prefixed, me, size, timeout=timeout)

    def broadcast(self, buffer: torch.Tensor, root: int) -> Work:
        """Start sending `buffer` (1-D, bytes) from engine rank `root` to all members."""
        options = dist.BroadcastOptions()
        options.rootRank = self.members.index(root)
        options.rootTensor = 0
        return self._pg.broadcast([buffer], options)


class Groups:
    """An engine rank's groups by their members.

    epoch  differs between the Groups of one store, so that none finds what a broken one left there
    """

    def __init__(self, store: dist.Store, rank: int, device: torch.device, timeout_s: float, epoch: int) -> None:
        self._store = dist.PrefixStore(f"groups/{epoch}", store)
        self._rank, self._timeout_s = rank, timeout_s
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._made: dict[tuple[int, ...], Group] = {}

    def get(self, members: tuple[int, ...]) -> Group:
        """The group of these engine ranks; its members must ask for their groups in the same order."""
        if members not in self._made:
            self._made[members] = Group(self._store, members, self._rank, self._backend, self._timeout_s)
        return self._made[members]
