"""Sends, receives and broadcasts among ranks that are known by ids. Every wait ends at a deadline or by an abort.

Communicators connect over the session's store rather than by `dist.new_group`, so that neither side's own world (its
group names, the order of its collectives) depends on them. All are connected before the first byte is written.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

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
    """One rank's communicator with the other `members`, all of them by their ids."""

    def __init__(
        self,
        members: Sequence[int],
        names: Sequence[str],
        own: int,
        *,
        backend: str,
        device: torch.device,
        timeout_s: float,
        at_once: int = 1,
    ) -> None:
        """`own` is this rank's id, and `names` are those of the members; see `AbortableGroup` for the rest."""
        self.members = tuple(members)
        self._group_rank = {member: rank for rank, member in enumerate(members)}
        rank = self._group_rank[own]
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
