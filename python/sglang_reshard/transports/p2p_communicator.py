"""Messages between trainer ranks and engine ranks, over one process group of them that torch.distributed knows not of.

Like groups of engine ranks it is built over the session: neither side's own world (its group
names, the order of its collectives) depends on it. Gloo for memory on the host, NCCL for GPUs.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from sglang_reshard.errors import DeadlineExceeded, ReshardError
from sglang_reshard.protocol.messages import PrepareSend
from sglang_reshard.transports.abortable_group import CONNECT_S, AbortableGroup, PeerDisconnected

PeerBuffer = tuple[int, torch.Tensor]  # who it goes to or comes from, and its bytes (1-D, contiguous)
_POLL_S = 0.0002
_ROUNDING_S = 0.01  # gloo counts whole milliseconds


class PendingOps:
    """Messages under way. Their buffers must be left alone until `wait` returns."""

    def __init__(self, peers: P2pCommunicator, verb: str, works: list[tuple[int, dist.Work]]) -> None:
        self._peers, self._verb, self._works = peers, verb, works

    def wait(self) -> None:
        """Until all have arrived, or have left (on a GPU: until the current stream may use their buffers).

        Raises DeadlineExceeded after the peers' `timeout_s`, and ReshardError at once for a connection that broke.
        """
        if self._works:
            end = time.monotonic() + self._peers.timeout_s
            self._peers.wait(lambda: self._finish(end))
            self._works = []
            self._peers.under_way -= 1

    def _finish(self, end: float) -> None:
        for peer, work in self._works:
            with self._peers.explained(self._verb, peer, end):
                self._peers.finish(work, end)


class P2pCommunicator:
    """One rank's connection to the trainer ranks and engine ranks that it exchanges messages with.

    Ranks are numbered through: trainer ranks first, then engine ranks.

    store          the session's
    route          differs between the Peers of one store, so that none finds what a broken one left there
    members        those that take part, ascending; all of them make their Peers at the same time
    trainer_ranks  how many there are, whether they take part or not
    backend        "gloo" or "nccl"
    device         this rank's GPU, for nccl
    timeout_s      seconds that any one wait may last

    `under_way` counts the travels that have begun and have not ended well.
    """

    def __init__(
        self,
        store: dist.Store,
        route: str,
        *,
        me: int,
        members: Sequence[int],
        trainer_ranks: int,
        backend: str,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.timeout_s, self.under_way = timeout_s, 0
        self._me, self._trainer_ranks = me, trainer_ranks
        self._index = {member: i for i, member in enumerate(members)}
        self._meet(store, f"peers/{route}")
        try:
            pg = self._connected(dist.PrefixStore(f"peers/{route}", store), backend, device)
        except RuntimeError as error:
            raise PeerDisconnected(f"{self.name(me)} could not connect to {self._names(members)}: {error}") from error
        self._connections = AbortableGroup(pg, backend, self._index[me], len(members))
        store.delete_key(_here(f"peers/{route}", me))  # whoever is connected has seen it

    def name(self, member: int) -> str:
        own = member < self._trainer_ranks
        return f"trainer rank {member}" if own else f"engine rank {member - self._trainer_ranks}"

    def send(self, parcels: Sequence[PeerBuffer]) -> PendingOps:
        """Start sending, one message to each of several peers."""
        return self._start("send", parcels)

    def receive(self, parcels: Sequence[PeerBuffer]) -> PendingOps:
        """Start receiving, one message from each of several peers; a peer's messages come in the order of its sends."""
        return self._start("receive", parcels)

    def close(self) -> None:
        """Close all connections: who waits for this rank is told at once (gloo), or runs into the deadline (NCCL)."""
        if self.under_way:
            self.abort()
        else:
            self._connections.drop()

    def abort(self) -> None:
        """From any thread: the same while messages are under way, and end this rank's waits."""
        self._connections.break_off()

    def wait(self, step: Callable[[], None]) -> None:
        """A step that waits for work. Raises what it raises, and ConnectionBroke once these connections are closed."""
        try:
            self._connections.wait(step)
        except ReshardError:
            raise
        except RuntimeError as error:
            who = self.name(self._me)
            raise PeerDisconnected(f"{who} gave up its connections to the other side: {error}") from error

    def finish(self, work: dist.Work, end: float) -> None:
        """Wait for one piece of work until `end`, a time of the monotonic clock."""
        if self._connections.backend != "nccl":
            work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
            return
        # NCCL's own `wait` only orders streams. Errors are looked for, as it is told not to raise them.
        while not work.is_completed():
            if time.monotonic() >= end:
                raise RuntimeError("the GPU was not done at the deadline")
            self._check_nccl()
            time.sleep(_POLL_S)
        self._check_nccl()
        work.wait()

    def _check_nccl(self) -> None:
        pg = self._connections.pg
        if pg is None or pg.get_error() != ErrorType.SUCCESS:
            raise RuntimeError("NCCL reports an error, see the log")

    @contextlib.contextmanager
    def explained(self, verb: str, peer: int, end: float) -> Iterator[None]:
        """Errors of the process group in our words; `end` is when a wait was to end."""
        try:
            yield
        except RuntimeError as error:
            whom = f"from {self.name(peer)}" if verb == "receive" else f"to {self.name(peer)}"
            if time.monotonic() >= end - _ROUNDING_S:
                raise DeadlineExceeded(
                    f"{self.name(self._me)} could not {verb} a message {whom} within {self.timeout_s:.0f} s; "
                    "is it stuck? Look at its log"
                ) from error
            raise PeerDisconnected(
                f"{self.name(self._me)} could not {verb} a message {whom}: the connection broke; "
                f"did that rank fail? Look at its log. ({error})"
            ) from error

    def _start(self, verb: str, parcels: Sequence[PeerBuffer]) -> PendingOps:
        if not parcels:
            return PendingOps(self, verb, [])
        if (pg := self._connections.pg) is None:
            raise PeerDisconnected(f"{self.name(self._me)} has closed its connections to the other side")
        self.under_way += 1
        start = pg.send if verb == "send" else pg.recv
        if self._connections.backend == "nccl":
            with self.explained(verb, parcels[0][0], float("inf")):
                # In one group, which no order within can hold up. Its communicator is that of all members.
                pg._start_coalescing()
                for peer, buffer in parcels:
                    start([buffer], self._index[peer], 0)
                return PendingOps(self, verb, [(parcels[0][0], pg._end_coalescing())])
        works = []
        for peer, buffer in parcels:
            with self.explained(verb, peer, float("inf")):
                works.append((peer, start([buffer], self._index[peer], 0)))
        return PendingOps(self, verb, works)

    def _meet(self, store: dist.Store, prefix: str) -> None:
        """Wait for all members, so that one that does not come can be named."""
        keys = {member: _here(prefix, member) for member in self._index}
        store.set(keys[self._me], "")
        try:
            store.wait(list(keys.values()), timedelta(seconds=self.timeout_s))
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            late = [member for member, key in keys.items() if not store.check([key])]
            raise DeadlineExceeded(
                f"{self.name(self._me)} waited {self.timeout_s:.0f} s for {self._names(late)} to connect; "
                "look at their logs"
            ) from error

    def _connected(self, store: dist.Store, backend: str, device: torch.device) -> Any:
        rank, size = self._index[self._me], len(self._index)
        if backend != "nccl":
            connect = timedelta(seconds=min(self.timeout_s, CONNECT_S))
            return dist.ProcessGroupGloo(store, rank, size, timeout=connect)
        options = dist.ProcessGroupNCCL.Options()
        # The deadlines here come first. NCCL's own, and its way with errors, is to end the process.
        options._timeout = 10 * timedelta(seconds=self.timeout_s)
        with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"), torch.cuda.device(device):
            made: Any = dist.ProcessGroupNCCL(store, rank, size, options)
            made.eager_connect_single_device(device)
        return made

    def _names(self, members: Sequence[int]) -> str:
        return ", ".join(self.name(m) for m in members if m != self._me)


def _here(prefix: str, member: int) -> str:
    return f"{prefix}/here/{member}"


def join_peers(store: dist.Store, connect: PrepareSend, member: int, device: torch.device) -> P2pCommunicator | None:
    """A rank's connection as `connect` says; None where it neither sends nor receives. All members come together.

    member  trainer rank, or the number of trainer ranks plus the engine rank
    """
    members = connect.members()
    if member not in members:
        return None
    return P2pCommunicator(
        store,
        connect.route,
        me=member,
        members=members,
        trainer_ranks=len(connect.shares),
        backend=connect.backend,
        device=device,
        timeout_s=connect.timeout_s,
    )


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A variable that torch reads while a process group is made, and at no other time."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
