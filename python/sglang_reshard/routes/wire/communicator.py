"""Sends, receives and broadcasts among ranks that are known by ids. Every wait ends at a deadline or by an abort.

Communicators are process groups outside of torch.distributed's default world. They connect over the session's store
rather than by `dist.new_group`, so that neither side's own world (its group names, the order of its collectives)
depends on them. All are connected before the first byte is written.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from sglang_reshard.errors import DeadlineExceeded, PeerDisconnected, ReshardError
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.plan.topology import peer_name
from sglang_reshard.routes.wire.gloo import GlooGroup
from sglang_reshard.routes.wire.nccl import NcclGroup

T = TypeVar("T")
PeerBuffer = tuple[int, torch.Tensor]  # id of the receiver or sender, and the bytes (1-D, contiguous)
_ROUNDING_S = 0.01  # gloo counts whole milliseconds
_ABORT_S = 10.0  # for an abort in another thread
_GRACE_S = 1.0  # after a deadline, for the call to raise it by itself


class ProcessGroup(Protocol):
    """One rank's end of a group of torch's. Ranks are those within the group.

    Calls may block, also beyond a deadline, but for `adopt_stream`, `abort` and `close`; `start` and `broadcast` do not
    if `starts_at_once`. They raise RuntimeError when a connection breaks, a deadline passes or the group is aborted.
    """

    interface_variable: str  # names this host's interface to the backend
    starts_at_once: bool

    def adopt_stream(self) -> Callable[[], None]:
        """Returns a call that lets another thread continue in this one's place, if operations depend on the thread."""

    def connect(self) -> None:
        """Connects to all other ranks, which are all known to have come."""

    def start(self, verb: str, messages: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[tuple[int, ...], dist.Work]]:
        """Starts to "send" or "receive" a message each. Returns the ranks whose messages an operation consists of."""

    def broadcast(self, buffer: torch.Tensor, root: int) -> dist.Work: ...

    def wait(self, work: dist.Work, deadline: float) -> None:
        """Waits for one operation until `deadline`, a time of the monotonic clock."""

    def abort(self, pending: tuple[object, ...]) -> None:
        """Ends all calls, closes all connections. `pending`: the operations that have not completed."""

    def close(self) -> None:
        """Closes all connections, with no message pending: gloo would keep its connection until it has arrived."""


def backend_of(device: torch.device) -> str:
    """Returns the backend for messages between ranks on such devices."""
    return "nccl" if runtime().is_gpu(device) else "gloo"


class PendingOps:
    """Operations in progress. Their buffers must not be touched until `wait` returns."""

    def __init__(self, communicator: Communicator, what: str, works: list[tuple[str, dist.Work]]) -> None:
        """`works`: each with the step that fails with it, and `what` is that of all of them, for errors."""
        self._communicator, self._what, self._works = communicator, what, works
        communicator.pending.add(self)

    def wait(self, deadline: float | None = None) -> float:
        """Waits until all have arrived, or were sent. Returns the deadline, a time of the monotonic clock.

        Raises DeadlineExceeded at `deadline`, by default after the communicator's `timeout_s`, and PeerDisconnected at
        once if a connection breaks.
        """
        communicator = self._communicator
        end = time.monotonic() + communicator.timeout_s if deadline is None else deadline

        def wait_for_each(group: ProcessGroup) -> None:
            for what, work in self._works:
                with communicator.named_errors(what, end):
                    group.wait(work, end)

        if self in communicator.pending:
            communicator.perform(self._what, wait_for_each, end)
            self._works = []
            communicator.pending.discard(self)
        return end


class Communicator:
    """One rank's communicator with the other members of a group.

    A peer id is a trainer rank, or the number of trainer ranks plus an engine rank.

    name       of this rank, for errors
    timeout_s  seconds that any one wait may last
    pending    operations that were started and have not completed
    """

    def __init__(
        self,
        members: Sequence[int],
        *,
        peer_id: int,
        trainer_ranks: int,
        device: torch.device,
        timeout_s: float,
        at_once: int = 1,
    ) -> None:
        """Connects nothing yet, so that `abort` finds what is being connected.

        members        the peer ids that participate, ascending; `peer_id` is this rank's
        trainer_ranks  number of trainer ranks, including those that do not participate
        device         of the messages; its kind decides between gloo and NCCL
        at_once        groups of this rank that are used at the same time as this one, itself included
        """
        self._names = [peer_name(member, trainer_ranks) for member in members]
        self._group_rank = {member: rank for rank, member in enumerate(members)}
        self._rank, self._device, self._at_once = self._group_rank[peer_id], device, at_once
        self._kind = NcclGroup if runtime().is_gpu(device) else GlooGroup
        self.name, self.timeout_s, self.pending = self._names[self._rank], timeout_s, set[object]()
        self._group: ProcessGroup | None = None
        self._changed, self._aborted, self._closed = threading.Condition(), False, False
        self._aborting = False  # in another thread perhaps

    def connect(self, store: dist.Store, deadline: float | None = None, *, address: str = "") -> None:
        """Connects to all other members. Collective.

        store     of the group alone
        deadline  for all of it, a time of the monotonic clock; None for `timeout_s` from now
        address   of this host, at which the other members reach it; by default the backend's choice

        Raises DeadlineExceeded and PeerDisconnected, naming the members that are missing.
        """
        deadline = time.monotonic() + self.timeout_s if deadline is None else deadline
        joined = [f"joined/{rank}" for rank in range(len(self._names))]
        self._rendezvous(store, joined, deadline, address)
        group = self._kind(store, self._rank, len(self._names), self._device, self.timeout_s, address, self._at_once)
        with self._changed:
            if not (closed := self._closed):
                self._group = group
        if closed:
            group.close()
            raise self._stopped()
        try:
            self.perform(f"could not connect to {self.others()}", lambda group: group.connect(), deadline)
        except (DeadlineExceeded, PeerDisconnected) as error:
            self.abort()
            raise type(error)(f"{error}{self._networks(store, joined)}") from error
        except BaseException:
            self.abort()
            raise
        store.delete_key(joined[self._rank])  # every member that is connected has seen it

    def send(self, buffers: Sequence[PeerBuffer]) -> PendingOps:
        """Starts sending, one message to each of several peers."""
        return self._start("send", buffers)

    def receive(self, buffers: Sequence[PeerBuffer]) -> PendingOps:
        """Starts receiving, one message from each of several peers. A peer's messages arrive in the order it sends."""
        return self._start("receive", buffers)

    def broadcast(self, buffer: torch.Tensor, root: int) -> PendingOps:
        """Starts the broadcast of `buffer` (1-D, bytes) from `root` to all members."""
        rank, what = self._group_rank[root], f"a broadcast with {self.others()}"
        work = self.perform(f"could not start {what}", lambda group: group.broadcast(buffer, rank), starts=True)
        return PendingOps(self, f"could not finish {what}", [(f"could not finish {what}", work)])

    def _start(self, verb: str, buffers: Sequence[PeerBuffer]) -> PendingOps:
        messages = [(self._group_rank[peer], buffer) for peer, buffer in buffers]
        what = self._described(verb, [rank for rank, _ in messages])
        works = self.perform(what, lambda group: group.start(verb, messages), starts=True)
        return PendingOps(self, what, [(self._described(verb, ranks), work) for ranks, work in works])

    def _described(self, verb: str, ranks: Iterable[int]) -> str:
        peers = ", ".join(self._names[rank] for rank in dict.fromkeys(ranks))  # several messages may be of one
        return f"could not {verb} a message {'from' if verb == 'receive' else 'to'} {peers}"

    def perform(
        self, what: str, call: Callable[[ProcessGroup], T], deadline: float | None = None, *, starts: bool = False
    ) -> T:
        """Runs a call of the process group, which may block on other ranks. `starts`: it starts an operation.

        Raises DeadlineExceeded and PeerDisconnected; `what` is the step that failed, for the error.
        """
        deadline = time.monotonic() + self.timeout_s if deadline is None else deadline
        if (group := self._group) is None:
            raise self._stopped()
        with self.named_errors(what, deadline):
            return call(group) if starts and group.starts_at_once else self._run(group, call, deadline)

    @contextlib.contextmanager
    def named_errors(self, what: str, deadline: float) -> Iterator[None]:
        """Turns the process group's errors into errors that say what this rank could not do."""
        try:
            yield
        except ReshardError:
            raise
        except RuntimeError as error:
            if time.monotonic() >= deadline - _ROUNDING_S:
                raise DeadlineExceeded(
                    f"{self.name} {what} within {self.timeout_s:.0f} s. Is that rank stuck? Look at its log"
                ) from error
            raise PeerDisconnected(
                f"{self.name} {what}: the connection broke; did that rank fail? Look at its log. ({error})"
            ) from error

    def _run(self, group: ProcessGroup, call: Callable[[ProcessGroup], T], deadline: float) -> T:
        """Runs `call` until it ends, the group is aborted, or shortly after `deadline`.

        It runs in a separate thread. When a connection breaks, gloo (torch 2.11) ends the waits for messages that have
        not begun to arrive, and forgets those that are halfway: these last until their own timeout, and nothing that
        Python can reach ends them sooner. NCCL's calls wait in C++ for peers that may be stuck. In this case the thread
        is left behind, with the message's buffer, which is no longer written.
        """
        results, failed = list[T](), list[BaseException]()
        adopt_stream = group.adopt_stream()

        def run() -> None:
            try:
                adopt_stream()
                found = [call(group)]
            except BaseException as error:
                failed.append(error)
                found = []
            with self._changed:
                results.extend(found)
                self._changed.notify_all()

        threading.Thread(target=run, name="sglang-reshard wait", daemon=True).start()
        with self._changed:
            self._changed.wait_for(
                lambda: self._aborted or results or failed, max(0.0, deadline - time.monotonic()) + _GRACE_S
            )
        if failed:
            raise failed.pop()  # nothing here keeps it: its traceback refers to the buffers
        if results:
            return results[0]
        if self._aborted:
            raise self._stopped()
        raise RuntimeError("the call had not returned at the deadline")

    def abort(self) -> None:
        """Closes all connections and ends this rank's waits. May be called from any thread."""
        if (group := self._detach(aborting=True)) is None:
            return
        group.abort(tuple(self.pending))
        with self._changed:
            self._aborted, self._aborting = True, False  # from here on nothing is written to the buffers
            self._changed.notify_all()

    def close(self) -> None:
        """Closes all connections. Peers that wait for this rank fail at once (gloo) or at their deadline (NCCL)."""
        if self.pending:
            self.abort()
        elif (group := self._detach()) is not None:
            group.close()
        with self._changed:  # a process that ends while one of its threads is in an abort crashes
            self._changed.wait_for(lambda: not self._aborting, _ABORT_S)

    def _detach(self, *, aborting: bool = False) -> ProcessGroup | None:
        with self._changed:
            group, self._group, self._closed = self._group, None, True
            self._aborting |= aborting and group is not None
        return group

    def others(self) -> str:
        """Returns the names of all other members."""
        return ", ".join(name for rank, name in enumerate(self._names) if rank != self._rank)

    def _stopped(self) -> PeerDisconnected:
        return PeerDisconnected(f"{self.name} stopped waiting for {self.others()}: the process group was aborted")

    def _networks(self, store: dist.Store, joined: list[str]) -> str:
        """Returns where the members are for each other, for the end of an error; empty if all are on one host."""
        try:
            # Those that have connected have deleted theirs, and a `get` would wait for them.
            places = [store.get(key).decode() if store.check([key]) else "" for key in joined]
        except RuntimeError:  # the update was aborted
            return ""
        if len(set(filter(None, places))) < 2:
            return ""
        said = ", ".join(f"{name} is at {place}" for name, place in zip(self._names, places, strict=True) if place)
        variable = self._kind.interface_variable
        return f". {said}. Can they reach each other there? If not, set {variable} on the hosts to another interface"

    def _rendezvous(self, store: dist.Store, joined: list[str], deadline: float, address: str) -> None:
        """Waits until all members have set their keys, so that an error can name those that have not."""
        interface = os.environ.get(self._kind.interface_variable)
        store.set(joined[self._rank], f"interface {interface} of {socket.gethostname()}" if interface else address)
        try:
            store.wait(joined, timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            missing = ", ".join(name for name, key in zip(self._names, joined, strict=True) if not store.check([key]))
            raise DeadlineExceeded(
                f"{self.name} waited {self.timeout_s:.0f} s for {missing} to connect; look at their logs"
            ) from error


class Communicators:
    """One rank's communicators: one for each group of a transfer that it is a member of.

    Of groups that send messages, a trainer rank may be a member of several, an engine rank of one. All members go
    through theirs in the order of `groups`, when they connect and in each round. So no order can deadlock: of all
    communicators with a rank that waits in one, the first has no member that waits in another, as engine ranks are in
    no other, and trainer ranks are done with those before it.
    """

    def __init__(
        self,
        groups: Iterable[tuple[int, ...]],
        *,
        peer_id: int,
        trainer_ranks: int,
        device: torch.device,
        timeout_s: float,
        transfers: int = 1,
    ) -> None:
        """Connects nothing yet.

        groups     the members of all communicators of a transfer
        transfers  that this rank takes part in at the same time, this one included
        """
        numbers = {members: number for number, members in enumerate(groups) if peer_id in members}
        self._numbers, self._sends, self._device, self._timeout_s = numbers, peer_id < trainer_ranks, device, timeout_s
        self._own = {
            members: Communicator(
                members,
                peer_id=peer_id,
                trainer_ranks=trainer_ranks,
                device=device,
                timeout_s=timeout_s,
                at_once=len(numbers) * transfers,
            )
            for members in numbers
        }
        self._with = {peer: communicator for members, communicator in self._own.items() for peer in members}

    def connect(self, store: dist.Store, peers: Sequence[int] = (), address: str = "") -> None:
        """Connects them all within `timeout_s`. Collective over their members.

        store    of the transfer alone
        peers    the ranks that this one sends to, or receives from
        address  see `Communicator.connect`
        """
        deadline = time.monotonic() + self._timeout_s
        for members, communicator in self._own.items():
            of_group = dist.PrefixStore(str(self._numbers[members]), store)
            communicator.connect(of_group, deadline, address=address)
        # NCCL connects two GPUs when one first sends to the other.
        room = torch.zeros(len(peers), dtype=torch.uint8, device=self._device).split(1)
        bytes_of_peers = list(zip(peers, room, strict=False))  # no peers: one empty part
        (self.send if self._sends else self.receive)(bytes_of_peers).wait(deadline)

    def get(self, members: tuple[int, ...]) -> Communicator:
        return self._own[members]

    def send(self, buffers: Sequence[PeerBuffer]) -> PendingRound:
        """Starts sending, one message to each of several peers."""
        return PendingRound([communicator.send(own) for communicator, own in self._divided(buffers)])

    def receive(self, buffers: Sequence[PeerBuffer]) -> PendingRound:
        """Starts receiving, one message from each of several peers. A peer's messages arrive in the order it sends."""
        return PendingRound([communicator.receive(own) for communicator, own in self._divided(buffers)])

    def abort(self) -> None:
        """Ends all of this rank's waits. May be called from any thread."""
        for communicator in self._own.values():
            communicator.abort()

    def close(self) -> None:
        for communicator in self._own.values():
            communicator.close()

    def _divided(self, buffers: Sequence[PeerBuffer]) -> list[tuple[Communicator, list[PeerBuffer]]]:
        found: dict[Communicator, list[PeerBuffer]] = {communicator: [] for communicator in self._own.values()}
        for peer, buffer in buffers:
            found[self._with[peer]].append((peer, buffer))
        return [(communicator, own) for communicator, own in found.items() if own]


class PendingRound:
    """The messages of one round, over all communicators."""

    def __init__(self, pending: list[PendingOps]) -> None:
        self._pending = pending

    def wait(self, deadline: float | None = None) -> None:
        """As `PendingOps.wait`."""
        for ops in self._pending:
            deadline = ops.wait(deadline)
