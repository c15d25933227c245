"""Sends, receives and broadcasts among ranks that are known by ids. Every wait ends at a deadline or by an abort.

Communicators connect over the session's store rather than by `dist.new_group`, so that neither side's own world (its
group names, the order of its collectives) depends on them. All are connected before the first byte is written.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from sglang_reshard.plan.topology import peer_name
from sglang_reshard.routes.wire.abortable_group import AbortableGroup, ProcessGroup

PeerBuffer = tuple[int, torch.Tensor]  # id of the receiver or sender, and the bytes (1-D, contiguous)


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


class Communicator(AbortableGroup):
    """One rank's communicator with the other members of a group.

    A peer id is a trainer rank, or the number of trainer ranks plus an engine rank.
    """

    def __init__(
        self,
        members: Sequence[int],
        *,
        peer_id: int,
        trainer_ranks: int,
        backend: str,
        device: torch.device,
        timeout_s: float,
        at_once: int = 1,
    ) -> None:
        """See `AbortableGroup` for the rest.

        members        the peer ids that participate, ascending; `peer_id` is this rank's
        trainer_ranks  number of trainer ranks, including those that do not participate
        """
        self._group_rank = {member: rank for rank, member in enumerate(members)}
        names, rank = [peer_name(member, trainer_ranks) for member in members], self._group_rank[peer_id]
        super().__init__(names, rank, backend=backend, device=device, timeout_s=timeout_s, at_once=at_once)

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
        backend: str,
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
                backend=backend,
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
        address  see `AbortableGroup.connect`
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
