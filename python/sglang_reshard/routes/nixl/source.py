"""Registers a rank's shards with NIXL, so that others read them one-sided; the rank takes no further part.

NIXL registers memory for reading and writing alike: it has no option for less. So memory in a shared-memory file is
mapped once more, without the right to write, and that mapping is registered. All others are registered as they are:
memory of GPUs, and host memory of this process alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from sglang_reshard.errors import ReshardError, Unsupported
from sglang_reshard.memory.shm import allocate_shared, read_only_view
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.routes.nixl.agent import NixlAgent, memory_kind
from sglang_reshard.routes.nixl.remote_shards import HOST, RemoteShard, RemoteShards

logger = get_logger(__name__)


@dataclass(slots=True)
class _Registered:
    """A storage that is registered.

    memory   where it was then, see `storage_range`
    users    `NixlSource`s that have it
    handles  of the registration
    address  at which others read it
    view     the mapping that is registered, if it is not the storage's own memory
    """

    memory: tuple[str, int, int, int]
    users: int
    handles: list[Any]
    address: int
    view: torch.Tensor | None


class _Registrations:
    """This process's agent for memory that others read. Storages are registered once, for all engines together."""

    def __init__(self, owner: str) -> None:
        self.agent = NixlAgent(owner)
        self._owner = owner
        self._used: dict[tuple[str, int, int, int], _Registered] = {}
        self._lock = threading.Lock()

    def add(self, storage: torch.UntypedStorage) -> _Registered:
        memory = storage_range(storage)
        with self._lock:
            known = self._used.get(memory)
            if known is None:
                known = self._used[memory] = self._read_only(storage) or _Registered(
                    memory, 0, self.agent.register_ranges([memory]), storage.data_ptr(), None
                )
            known.users += 1
            return known

    def remove(self, known: _Registered) -> None:
        with self._lock:
            known.users -= 1
            if not known.users:
                del self._used[known.memory]
                self.agent.deregister(known.handles)

    def _read_only(self, storage: torch.UntypedStorage) -> _Registered | None:
        view = read_only_view(storage)
        if view is None:
            return None
        try:
            handles = self.agent.register_ranges([(HOST, view.data_ptr(), storage.nbytes(), 0)])
        except ReshardError as error:  # some network cards register only what can be written, too
            logger.warning(
                "%s; %d bytes of shards are registered with NIXL without write protection: peers could write to them",
                error,
                storage.nbytes(),
            )
            return None
        return _Registered(storage_range(storage), 0, handles, view.data_ptr(), view)


@cache
def _registrations(owner: str) -> _Registrations:
    return _Registrations(owner)


class NixlSource:
    """A rank's shards, registered until `close`; it keeps their memory alive as long.

    writable_bytes  of memory that peers could write to: that which cannot be mapped for reading alone
    """

    def __init__(self, owner: str, shards: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()) -> None:
        """Registers `shards`, in the layout's order, and `others`, which are not described.

        `owner` names the rank in errors. Raises Unsupported without NIXL.
        """
        self._registrations = _registrations(owner)
        self._registered: dict[int, tuple[torch.UntypedStorage, _Registered]] = {}  # by the storage's address
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in (*shards, *others)}
        try:
            for address, storage in storages.items():
                if storage.nbytes():
                    self._registered[address] = storage, self._registrations.add(storage)
        except BaseException:
            self.close()
            raise
        found = [RemoteShard(*self.place(shard), tuple(shard.stride())) for shard in shards]
        self.remote = RemoteShards(self._registrations.agent.metadata(), tuple(found))
        writable = [storage.nbytes() for storage, known in self._registered.values() if known.view is None]
        self.writable_bytes = sum(writable)
        if self.writable_bytes:
            logger.info(
                "%s: %d bytes of memory (of GPUs, or private to this process) cannot be registered with NIXL for "
                "reading only. A process that gets this rank's NIXL metadata could write to them",
                owner,
                self.writable_bytes,
            )

    def place(self, tensor: torch.Tensor) -> tuple[str, int, int]:
        """Returns where others read a tensor that is registered: kind of memory, GPU, address."""
        begin = tensor.untyped_storage().data_ptr()
        address = self._registered[begin][1].address if begin in self._registered else begin
        return *memory_kind(tensor.device), address + tensor.data_ptr() - begin if tensor.numel() else 0

    def close(self) -> None:
        while self._registered:
            self._registrations.remove(self._registered.popitem()[1][1])


def allocate_readable(nbytes: int, device: torch.device, who: str) -> torch.Tensor:
    """Returns memory that peers can read and not write, once it is registered: bytes, 1-D.

    On a GPU, and where there is too little shared memory, they could write to it, too.
    """
    if device.type == "cpu" and nbytes:
        try:
            return torch.empty(0, dtype=torch.uint8).set_(allocate_shared(nbytes, who))
        except Unsupported as error:
            logger.warning(
                "%s; this memory is registered with NIXL without write protection: peers could write to it", error
            )
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def storage_range(storage: torch.UntypedStorage) -> tuple[str, int, int, int]:
    """Returns a storage as the range of memory that NIXL registers."""
    kind, gpu = memory_kind(storage.device)
    return kind, storage.data_ptr(), storage.nbytes(), gpu
