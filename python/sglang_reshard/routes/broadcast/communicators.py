"""Connects groups of engine ranks that broadcast among themselves: gloo for host memory, NCCL for GPUs.

They are connected over the session's store rather than by `dist.new_group`, so that the engine's own world (its group
names, the order of its collectives) does not depend on them. All are connected before the first byte is written, and
every wait ends at a deadline, or when another thread aborts.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from sglang_reshard.routes.wire.abortable_group import AbortableGroup, backend_of


class BroadcastCommunicator(AbortableGroup):
    """Broadcasts among `members`, a group of engine ranks."""

    def __init__(
        self, members: tuple[int, ...], engine_rank: int, device: torch.device, timeout_s: float, at_once: int = 1
    ) -> None:
        """`at_once`: see `AbortableGroup`."""
        self.members = members
        names, rank = [f"engine rank {member}" for member in members], members.index(engine_rank)
        super().__init__(names, rank, backend=backend_of(device), device=device, timeout_s=timeout_s, at_once=at_once)

    def broadcast(self, buffer: torch.Tensor, root: int) -> PendingBroadcast:
        """Starts the broadcast of `buffer` (1-D, bytes) from engine rank `root` to all members."""
        rank = self.members.index(root)
        what = f"could not start a broadcast with {self.others()}"
        work = self.perform(what, lambda group: group.broadcast(buffer, rank), starts=True)
        self.pending.add(work)
        return PendingBroadcast(self, work)

    def finish(self, work: dist.Work) -> None:
        deadline = time.monotonic() + self.timeout_s
        what = f"could not finish a broadcast with {self.others()}"
        self.perform(what, lambda group: group.wait(work, deadline), deadline)
        self.pending.discard(work)


class PendingBroadcast:
    """A broadcast in progress. Its buffer must not be touched until `wait` returns."""

    def __init__(self, communicator: BroadcastCommunicator, work: dist.Work) -> None:
        self._communicator, self._work = communicator, work

    def wait(self) -> None:
        """Waits until it has arrived, or was sent."""
        self._communicator.finish(self._work)


class BroadcastCommunicators:
    """One engine rank's communicators by their members, connected on first use and reused.

    epoch    distinguishes the instances that share one store, so that none finds what an aborted one left there
    at_once  communicators that this rank is a member of
    """

    def __init__(self, engine_rank: int, device: torch.device, timeout_s: float, epoch: int, at_once: int = 1) -> None:
        self._epoch, self._address, self._at_once = epoch, "", at_once
        self._store: dist.Store | None = None
        self._engine_rank, self._device, self._timeout_s = engine_rank, device, timeout_s
        self._connected: dict[tuple[int, ...], BroadcastCommunicator] = {}

    def use_store(self, store: dist.Store, address: str = "") -> None:
        """Sets the store over which communicators connect from now on, and see `AbortableGroup.connect`."""
        self._store, self._address = dist.PrefixStore(f"broadcast/{self._epoch}", store), address

    def get(self, members: tuple[int, ...]) -> BroadcastCommunicator:
        """Collective: all members must request their communicators in the same order."""
        if members not in self._connected:
            assert self._store is not None
            communicator = BroadcastCommunicator(
                members, self._engine_rank, self._device, self._timeout_s, self._at_once
            )
            self._connected[members] = communicator  # before it connects, so that it can be aborted
            of_group = dist.PrefixStore(",".join(map(str, members)), self._store)
            communicator.connect(of_group, address=self._address)
            byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
            communicator.broadcast(byte, members[0]).wait()  # NCCL connects GPUs when they are first used
        return self._connected[members]

    def abort(self) -> None:
        """Ends all of this rank's waits; the communicators can no longer be used. May be called from any thread."""
        for communicator in list(self._connected.values()):
            communicator.abort()

    def close(self) -> None:
        for communicator in self._connected.values():
            communicator.close()
