"""Process groups of engine ranks, made once a session and reused.

They find each other over the session rather than by `dist.new_group`, so that nothing of the
engine's own world (its group names, its collectives' order) depends on them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sglang_reshard.transports.abortable_group import CONNECT_S, AbortableGroup, PeerDisconnected

Work = dist.Work


class BroadcastCommunicator:
    """A broadcast group of engine ranks."""

    def __init__(self, store: dist.Store, members: tuple[int, ...], rank: int, backend: str, timeout_s: float) -> None:
        self.members = members
        name = f"{backend}/" + ",".join(map(str, members))
        prefixed = dist.PrefixStore(name, store)
        self._me, size, self._timeout = members.index(rank), len(members), timedelta(seconds=timeout_s)
        pg: Any
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            pg = dist.ProcessGroupNCCL(prefixed, self._me, size, options)
        else:
            connect = timedelta(seconds=min(timeout_s, CONNECT_S))
            pg = dist.ProcessGroupGloo(prefixed, self._me, size, timeout=connect)
        self._connections = AbortableGroup(pg, backend, self._me, size)

    def abort(self) -> None:
        """From another thread: end this rank's waits."""
        self._connections.break_off()

    def broadcast(self, buffer: torch.Tensor, root: int) -> Work:
        """Start sending `buffer` (1-D, bytes) from engine rank `root` to all members."""
        options = dist.BroadcastOptions()
        options.rootRank = self.members.index(root)
        options.rootTensor = 0
        options.timeout = self._timeout
        if (pg := self._connections.pg) is None:
            raise self._broke("it was given up")
        return pg.broadcast([buffer], options)

    def finish(self, work: Work) -> None:
        """Until a broadcast has arrived, or has left (on a GPU: until the current stream may use the buffer)."""
        on_gpu = self._connections.backend == "nccl"  # where a wait orders streams only
        try:
            self._connections.wait(work.wait if on_gpu else lambda: work.wait(self._timeout))
        except RuntimeError as error:
            raise self._broke(str(error)) from error

    def _broke(self, why: str) -> PeerDisconnected:
        return PeerDisconnected(
            f"engine rank {self.members[self._me]} lost its connection to engine ranks {self._others} in a "
            f"broadcast; did one of them fail? Look at their logs. ({why})"
        )

    @property
    def _others(self) -> list[int]:
        return [member for i, member in enumerate(self.members) if i != self._me]


class BroadcastCommunicators:
    """An engine rank's groups by their members.

    epoch  differs between the Groups of one store, so that none finds what a broken one left there
    """

    def __init__(self, rank: int, device: torch.device, timeout_s: float, epoch: int) -> None:
        self._epoch = epoch
        self._store: dist.Store | None = None
        self._rank, self._timeout_s = rank, timeout_s
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._made: dict[tuple[int, ...], BroadcastCommunicator] = {}

    def meet_over(self, store: dist.Store) -> None:
        """What the groups that are made from now on find each other by."""
        self._store = dist.PrefixStore(f"groups/{self._epoch}", store)

    def abort(self) -> None:
        """From another thread: end all waits of this rank in its groups, which cannot be used any more then."""
        for group in list(self._made.values()):
            group.abort()

    def get(self, members: tuple[int, ...]) -> BroadcastCommunicator:
        """The group of these engine ranks; its members must ask for their groups in the same order."""
        if members not in self._made:
            assert self._store is not None
            self._made[members] = BroadcastCommunicator(
                self._store, members, self._rank, self._backend, self._timeout_s
            )
        return self._made[members]
