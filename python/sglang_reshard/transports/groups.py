"""Process groups of engine ranks, made once a session and reused.

They find each other over the session rather than by `dist.new_group`, so that nothing of the
engine's own world (its group names, its collectives' order) depends on them.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sglang_reshard.errors import ReshardError

Work = dist.Work
_AT_ONCE = timedelta(milliseconds=1)
CONNECT_S = 20.0  # for gloo to connect processes that are all there
_NEVER_SENT = 0x5EA3  # the tag of a message that nobody sends


class ConnectionBroke(ReshardError):
    """To another rank. Most often that rank has failed, and tells why."""


def break_connections(pg: Any, backend: str, size: int, rank: int) -> None:
    """From another thread: end all waits of this process in a process group, on gloo and on NCCL.

    Gloo's own `abort` ends nothing. But a wait for a message that runs out closes all connections of its rank.
    """
    if backend == "nccl":
        pg.abort()
    elif size > 1:
        with contextlib.suppress(RuntimeError):  # which is what it is for; or they are broken already
            pg.recv([torch.empty(1)], (rank + 1) % size, _NEVER_SENT).wait(_AT_ONCE)


class Group:
    """A broadcast group of engine ranks."""

    def __init__(self, store: dist.Store, members: tuple[int, ...], rank: int, backend: str, timeout_s: float) -> None:
        self.members, self._backend = members, backend
        name = f"{backend}/" + ",".join(map(str, members))
        prefixed = dist.PrefixStore(name, store)
        self._me, size, self._timeout = members.index(rank), len(members), timedelta(seconds=timeout_s)
        self._pg: Any
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._pg = dist.ProcessGroupNCCL(prefixed, self._me, size, options)
        else:
            connect = timedelta(seconds=min(timeout_s, CONNECT_S))
            self._pg = dist.ProcessGroupGloo(prefixed, self._me, size, timeout=connect)

    def abort(self) -> None:
        """From another thread: end this rank's waits."""
        break_connections(self._pg, self._backend, len(self.members), self._me)

    def broadcast(self, buffer: torch.Tensor, root: int) -> Work:
        """Start sending `buffer` (1-D, bytes) from engine rank `root` to all members."""
        options = dist.BroadcastOptions()
        options.rootRank = self.members.index(root)
        options.rootTensor = 0
        options.timeout = self._timeout
        return self._pg.broadcast([buffer], options)

    def finish(self, work: Work) -> None:
        """Until a broadcast has arrived, or has left (on a GPU: until the current stream may use the buffer)."""
        try:
            if self._backend == "nccl":
                work.wait()  # orders streams only
            else:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise ConnectionBroke(
                f"engine rank {self.members[self._me]} lost its connection to engine ranks {self._others} in a "
                f"broadcast; did one of them fail? Look at their logs. ({error})"
            ) from error

    @property
    def _others(self) -> list[int]:
        return [member for i, member in enumerate(self.members) if i != self._me]


class Groups:
    """An engine rank's groups by their members.

    epoch  differs between the Groups of one store, so that none finds what a broken one left there
    """

    def __init__(self, rank: int, device: torch.device, timeout_s: float, epoch: int) -> None:
        self._epoch = epoch
        self._store: dist.Store | None = None
        self._rank, self._timeout_s = rank, timeout_s
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._made: dict[tuple[int, ...], Group] = {}

    def meet_over(self, store: dist.Store) -> None:
        """What the groups that are made from now on find each other by."""
        self._store = dist.PrefixStore(f"groups/{self._epoch}", store)

    def abort(self) -> None:
        """From another thread: end all waits of this rank in its groups, which cannot be used any more then."""
        for group in list(self._made.values()):
            group.abort()

    def get(self, members: tuple[int, ...]) -> Group:
        """The group of these engine ranks; its members must ask for their groups in the same order."""
        if members not in self._made:
            assert self._store is not None
            self._made[members] = Group(self._store, members, self._rank, self._backend, self._timeout_s)
        return self._made[members]
