"""Registers a rank's shards with NIXL, so that others read them one-sided; the rank takes no further part."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from sglang_reshard.transports.nixl_agent import NixlAgent, memory_kind
from sglang_reshard.transports.remote_shards import RemoteShard, RemoteShards


class _Registrations:
    """This process's agent for memory that others read. Storages are registered once, for all engines together."""

    def __init__(self, owner: str) -> None:
        self.agent = NixlAgent(owner)
        self._used: dict[tuple[str, int, int, int], tuple[int, list[Any]]] = {}
        self._lock = threading.Lock()

    def add(self, memory: tuple[str, int, int, int]) -> None:
        with self._lock:
            users, registered = self._used.get(memory) or (0, self.agent.register([memory]))
            self._used[memory] = users + 1, registered

    def remove(self, memory: tuple[str, int, int, int]) -> None:
        with self._lock:
            users, registered = self._used.pop(memory)
            if users > 1:
                self._used[memory] = users - 1, registered
            else:
                self.agent.deregister(registered)


@cache
def _registrations(owner: str) -> _Registrations:
    return _Registrations(owner)


class NixlSource:
    """A rank's shards, registered until `close`; it keeps their memory alive as long."""

    def __init__(self, owner: str, shards: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()) -> None:
        """Registers `shards`, in the layout's order, and `others`, which are not described.

        `owner` names the rank in errors. Raises Unsupported without NIXL.
        """
        self._registrations = _registrations(owner)
        storages = [tensor.untyped_storage() for tensor in (*shards, *others)]
        self._storages = {storage.data_ptr(): storage for storage in storages}
        self._memory: list[tuple[str, int, int, int]] = []
        try:
            for memory in (storage_range(storage) for storage in self._storages.values() if storage.nbytes()):
                self._registrations.add(memory)
                self._memory.append(memory)
        except BaseException:
            self.close()
            raise
        found = [RemoteShard(*memory_kind(s.device), s.data_ptr(), tuple(s.stride())) for s in shards]
        self.remote = RemoteShards(self._registrations.agent.metadata(), tuple(found))

    def close(self) -> None:
        while self._memory:
            self._registrations.remove(self._memory.pop())
        self._storages = {}


def storage_range(storage: torch.UntypedStorage) -> tuple[str, int, int, int]:
    """Returns a storage as the range of memory that NIXL registers."""
    kind, gpu = memory_kind(storage.device)
    return kind, storage.data_ptr(), storage.nbytes(), gpu
