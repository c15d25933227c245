"""Connects groups of engine ranks that broadcast among themselves: gloo for host memory, NCCL for GPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sglang_reshard.routes.wire.abortable_group import backend_of
from sglang_reshard.routes.wire.communicator import Communicator


class BroadcastCommunicators:
    """One engine rank's communicators by their members, connected on first use and reused.

    epoch    distinguishes the instances that share one store, so that none finds what an aborted one left there
    at_once  communicators that this rank is a member of
    """

    def __init__(self, engine_rank: int, device: torch.device, timeout_s: float, epoch: int, at_once: int = 1) -> None:
        self._epoch, self._address, self._at_once = epoch, "", at_once
        self._store: dist.Store | None = None
        self._engine_rank, self._device, self._timeout_s = engine_rank, device, timeout_s
        self._connected: dict[tuple[int, ...], Communicator] = {}

    def use_store(self, store: dist.Store, address: str = "") -> None:
        """Sets the store over which communicators connect from now on, and see `AbortableGroup.connect`."""
        self._store, self._address = dist.PrefixStore(f"broadcast/{self._epoch}", store), address

    def get(self, members: tuple[int, ...]) -> Communicator:
        """Collective: all members must request their communicators in the same order."""
        if members not in self._connected:
            assert self._store is not None
            communicator = Communicator(
                members,
                [f"engine rank {member}" for member in members],
                self._engine_rank,
                backend=backend_of(self._device),
                device=self._device,
                timeout_s=self._timeout_s,
                at_once=self._at_once,
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
