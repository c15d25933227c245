"""Connects trainer ranks and engine ranks that send messages to each other: gloo for host memory, NCCL for GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from sglang_reshard.plan.topology import peer_name
from sglang_reshard.routes.base import Meeting
from sglang_reshard.routes.wire.communicator import Communicator, PeerBuffer, PendingOps


class P2pCommunicator(Communicator):
    """Sends and receives messages between trainer ranks and engine ranks.

    A peer id is a trainer rank, or the number of trainer ranks plus an engine rank.

    members        the peer ids that participate, ascending
    trainer_ranks  number of trainer ranks, including those that do not participate
    backend        "gloo" or "nccl"
    device         this rank's GPU, for nccl
    timeout_s      seconds that any one wait may last
    at_once        see `AbortableGroup`
    """

    def __init__(
        self,
        *,
        peer_id: int,
        members: Sequence[int],
        trainer_ranks: int,
        backend: str,
        device: torch.device,
        timeout_s: float,
        at_once: int = 1,
    ) -> None:
        names = [peer_name(member, trainer_ranks) for member in members]
        super().__init__(members, names, peer_id, backend=backend, device=device, timeout_s=timeout_s, at_once=at_once)


class P2pCommunicators:
    """One rank's communicators with the ranks that it sends to or receives from, see `routes.p2p.groups`.

    A trainer rank may be a member of several, an engine rank of one. All members go through theirs in the order of
    `groups`, when they connect and in each round. So no order can deadlock: of all communicators with a rank that waits
    in one, the first has no member that waits in another, as engine ranks are in no other, and trainer ranks are done
    with those before it.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        *,
        peer_id: int,
        peers: Sequence[int],
        trainer_ranks: int,
        backend: str,
        device: torch.device,
        timeout_s: float,
        transfers: int = 1,
    ) -> None:
        """Connects nothing yet.

        groups     the members of all communicators of a transfer
        peers      the ranks that this one sends to, or receives from
        transfers  that this rank takes part in at the same time, this one included
        """
        own = {number: members for number, members in enumerate(groups) if peer_id in members}
        self._peers, self._sends, self._device, self._timeout_s = peers, peer_id < trainer_ranks, device, timeout_s
        self._own = {
            number: P2pCommunicator(
                peer_id=peer_id,
                members=members,
                trainer_ranks=trainer_ranks,
                backend=backend,
                device=device,
                timeout_s=timeout_s,
                at_once=len(own) * transfers,
            )
            for number, members in own.items()
        }
        self._number_of = {peer: number for number in self._own for peer in groups[number]}

    def connect(self, store: dist.Store, address: str = "") -> None:
        """Connects them all within `timeout_s`. Collective over their members.

        store    of the transfer alone
        address  see `AbortableGroup.connect`
        """
        deadline = time.monotonic() + self._timeout_s
        for number, communicator in self._own.items():
            communicator.connect(dist.PrefixStore(str(number), store), deadline, address=address)
        # NCCL connects two GPUs when one first sends to the other.
        room = torch.zeros(len(self._peers), dtype=torch.uint8, device=self._device).split(1)
        bytes_of_peers = list(zip(self._peers, room, strict=False))  # no peers: one empty part
        (self.send if self._sends else self.receive)(bytes_of_peers).wait(deadline)

    def send(self, buffers: Sequence[PeerBuffer]) -> PendingRound:
        """Starts sending, one message to each of several peers."""
        return PendingRound([self._own[n].send(own) for n, own in self._by_communicator(buffers)])

    def receive(self, buffers: Sequence[PeerBuffer]) -> PendingRound:
        """Starts receiving, one message from each of several peers. A peer's messages arrive in the order it sends."""
        return PendingRound([self._own[n].receive(own) for n, own in self._by_communicator(buffers)])

    def abort(self) -> None:
        """Ends all of this rank's waits. May be called from any thread."""
        for communicator in self._own.values():
            communicator.abort()

    def close(self) -> None:
        for communicator in self._own.values():
            communicator.close()

    def _by_communicator(self, buffers: Sequence[PeerBuffer]) -> list[tuple[int, list[PeerBuffer]]]:
        found: dict[int, list[PeerBuffer]] = {}
        for peer, buffer in buffers:
            found.setdefault(self._number_of[peer], []).append((peer, buffer))
        return sorted(found.items(), key=lambda item: item[0])


class PendingRound:
    """The messages of one round, over all communicators."""

    def __init__(self, pending: list[PendingOps]) -> None:
        self._pending = pending

    def wait(self, deadline: float | None = None) -> None:
        """As `PendingOps.wait`."""
        for ops in self._pending:
            deadline = ops.wait(deadline)


def connect_links(
    communicators: P2pCommunicators, meeting: Meeting, engine: int, transfer: str, timeout_s: float
) -> None:
    """Connects a transfer's communicators over the session's store. Collective over their members."""
    store = dist.PrefixStore(f"p2p/{transfer}", meeting.session.store(engine, timeout_s, meeting.scope))
    communicators.connect(store, meeting.session.local_address)
