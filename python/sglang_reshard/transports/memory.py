"""Exports a trainer rank's memory by handle, and maps it on engine ranks of the same host.

A handle refers to a storage, not a tensor, so views of one flat buffer cost one handle. On CPU the storage is moved
once, in place, into unlinked POSIX shared memory: every tensor on it follows, nothing is copied in later updates, and
only a process that may open the trainer's own file descriptors (the same user, the same PID namespace) can map it. On
GPU it is a CUDA IPC handle.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import Region
from sglang_reshard.transports.shm import check_free_shm, map_files, open_shared, raise_descriptor_limit

_MAX_ELEMENTS = 1 << 58  # of a view: torch counts its bytes in 64 bits


class ShmStorage(msgspec.Struct, frozen=True, tag="shm"):
    """POSIX shared memory: an open file descriptor of a process, and the inode that identifies the file."""

    pid: int
    fd: int
    inode: int
    nbytes: int


class CudaStorage(msgspec.Struct, frozen=True, tag="cuda"):
    """A CUDA IPC handle as torch makes it, and the UUID of its GPU (indices differ between processes)."""

    device_uuid: str
    handle: bytes
    nbytes: int
    offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class ShardView(msgspec.Struct, frozen=True, array_like=True):
    """A shard as a view of a storage: offset and strides in elements; storage -1 for an empty shard."""

    storage: int
    offset: int
    strides: tuple[int, ...]


class Handles(msgspec.Struct, frozen=True):
    """All shards of one trainer rank, in the layout's order."""

    storages: tuple[ShmStorage | CudaStorage, ...]
    shards: tuple[ShardView, ...]


def host_identity() -> str:
    """Returns a string equal for processes that can map each other's memory: same machine, PID namespace and user."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        boot = f.read().strip()
    return f"{socket.gethostname()}/{boot[:8]}/{os.readlink('/proc/self/ns/pid')}/user {os.geteuid()}"


class MemoryExporter:
    """A trainer rank's side: makes handles, once per storage.

    It does not keep storages alive: a trainer that offloads its weights gets their memory back. On CPU torch's storage
    moves to shared memory: a numpy array that it was made from no longer shares it, and pinned memory is pageable
    afterwards.
    """

    def __init__(self, trainer_rank: int) -> None:
        self._rank = trainer_rank
        # By address. The weak reference distinguishes a storage from a later one at the same address.
        self._exported: dict[int, tuple[StorageWeakRef, ShmStorage | CudaStorage]] = {}

    def export(self, shards: Sequence[torch.Tensor], names: Sequence[str] = ()) -> Handles:
        """Returns handles of `shards`. Storages that were exported before and have not moved are left as they are.

        names  of the shards' tensors, for error messages

        Raises Unsupported if shared memory is too small, stating how much is needed, and for memory that cannot be
        shared, naming the tensor.
        """
        self._check_limits(shards)
        kept: dict[int, tuple[StorageWeakRef, ShmStorage | CudaStorage]] = {}
        index_of: dict[int, int] = {}
        views = []
        for i, shard in enumerate(shards):
            if shard.numel() == 0:
                views.append(ShardView(-1, 0, ()))
                continue
            storage = shard.untyped_storage()
            handle = self._exported_handle(storage)
            if handle is None:
                name = names[i] if names else f"tensor number {i}"
                handle = _export_storage(storage, f"trainer rank {self._rank}: {name}")
            kept[storage.data_ptr()] = self._exported[storage.data_ptr()] = (StorageWeakRef(storage), handle)
            index = index_of.setdefault(storage.data_ptr(), len(index_of))
            views.append(ShardView(index, int(shard.storage_offset()), tuple(shard.stride())))
        self._exported = kept
        return Handles(tuple(handle for _, handle in kept.values()), tuple(views))

    def _exported_handle(self, storage: torch.UntypedStorage) -> ShmStorage | CudaStorage | None:
        known = self._exported.get(storage.data_ptr())
        return known[1] if known is not None and not known[0].expired() else None

    def close(self) -> None:
        self._exported = {}

    def _check_limits(self, shards: Sequence[torch.Tensor]) -> None:
        new, shared = {}, set()
        for shard in shards:
            if shard.device.type == "cpu" and shard.numel():
                storage = shard.untyped_storage()
                if self._exported_handle(storage) is None:
                    new[storage.data_ptr()] = -(-storage.nbytes() // mmap.PAGESIZE) * mmap.PAGESIZE
                    if storage.is_shared():
                        shared.add(storage.data_ptr())
        who = f"trainer rank {self._rank}"
        if new:
            raise_descriptor_limit(len(new.keys() - shared), who)  # storages shared already have theirs
            check_free_shm(sum(nbytes for address, nbytes in new.items() if address not in shared), who)


def _export_storage(storage: torch.UntypedStorage, where: str) -> ShmStorage | CudaStorage:
    """Returns a handle of `storage`. Moves a CPU storage into shared memory."""
    if storage.nbytes() == 0:
        raise Unsupported(f"{where} has no memory any more: its storage was freed before the update took place")
    if storage.device.type == "cpu":
        try:
            fd, nbytes = storage._share_fd_cpu_()
        except RuntimeError as error:  # other processes of this host use the same file system
            _unlink_partial_file(error)
            raise Unsupported(
                f"{where}: {storage.nbytes():,} bytes of shards could not be moved into shared memory: {error}. Is "
                "/dev/shm full? Enlarge it (docker: --shm-size, or mount -o remount,size=)"
            ) from error
        if fd < 0:  # mapped by UntypedStorage.from_file, which closes the file
            raise Unsupported(f"{where} is mapped from a file and cannot be moved; pass a clone() of it")
        return ShmStorage(os.getpid(), fd, os.fstat(fd).st_ino, nbytes)
    if storage.device.type == "cuda":
        device, handle, nbytes, offset, ref_handle, ref_offset, event, sync = storage._share_cuda_()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return CudaStorage(uuid, handle, nbytes, offset, ref_handle, ref_offset, event, sync)
    raise Unsupported(f"{where} is on a {storage.device.type} device; only CPU and CUDA memory can be shared")


def _unlink_partial_file(error: RuntimeError) -> None:
    """Unlinks the file that torch names in its error: torch unlinks only those that it could make large enough."""
    if found := re.search(rf"torch_{os.getpid()}_\w+", str(error)):
        Path("/dev/shm", found.group()).unlink(missing_ok=True)


class PeerMemory:
    """An engine rank's side: one trainer rank's storages, mapped. All CPU storages are one mapping.

    `handles` were checked by `check_handles`: no view of them exceeds its storage. A view that exceeds the mapping is
    refused here in any case.
    """

    def __init__(self, trainer_rank: int, handles: Handles) -> None:
        self._rank = trainer_rank
        self._views = handles.shards
        mapped, begins = self._map([h for h in handles.storages if isinstance(h, ShmStorage)])
        self._mappings = [mapped.untyped_storage()]
        self._locations: list[tuple[int, int]] = []  # of each storage: number of its mapping, and first byte in it
        on_host = iter(begins)
        for handle in handles.storages:
            if isinstance(handle, ShmStorage):
                self._locations.append((0, next(on_host)))
            else:
                self._locations.append((len(self._mappings), 0))
                self._mappings.append(self._open_cuda(handle))

    def locate(self, tensor: int, region: Region, item_bytes: int) -> tuple[int, int, tuple[int, ...]]:
        """Returns mapping, offset and strides (elements) of a region of the shard of the layout's tensor `tensor`."""
        view = self._views[tensor]
        if view.storage < 0:
            raise Mismatch(f"trainer rank {self._rank} exported an empty shard of tensor number {tensor}")
        mapping, begin = self._locations[view.storage]
        offset = begin // item_bytes + view.offset
        offset += sum(a * s for a, s in zip(region.start, view.strides, strict=True))
        return mapping, offset, tuple(n * s for n, s in zip(region.step, view.strides, strict=True))

    def view(
        self, mapping: int, offset: int, strides: tuple[int, ...], size: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Returns a view of a mapping, in the trainer's own memory. It must not be written to.

        Raises Mismatch if it exceeds the mapping.
        """
        storage = self._mappings[mapping]
        last = offset + sum((n - 1) * s for n, s in zip(size, strides, strict=True))
        outside = min(offset, *strides, 0) < 0 or (last + 1) * dtype.itemsize > storage.nbytes()
        # The stride of a dimension of size 1 addresses nothing, but torch must be able to represent it, too.
        if outside or max(math.prod(size), *strides, 0) > _MAX_ELEMENTS:
            raise Mismatch(
                f"elements {offset} to {last} ({dtype}) of the memory of trainer rank {self._rank} are outside of it, "
                f"which has {storage.nbytes():,} bytes"
            )
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, strides)

    def region(self, tensor: int, region: Region, dtype: torch.dtype) -> torch.Tensor:
        """Returns a view of a region of the shard of the layout's tensor number `tensor`."""
        return self.view(*self.locate(tensor, region, dtype.itemsize), region.count, dtype)

    def _map(self, storages: Sequence[ShmStorage]) -> tuple[torch.Tensor, list[int]]:
        try:
            return map_files([h.nbytes for h in storages], lambda number: self._open_shm(storages[number]))
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise Unsupported(f"the memory of trainer rank {self._rank} cannot be mapped: {error}") from error
            raise Unsupported(
                f"{len(storages)} storages of trainer rank {self._rank} cannot be mapped: {error}; "
                "raise vm.max_map_count (sysctl), which limits the mappings of all trainer ranks together"
            ) from error

    def _open_shm(self, handle: ShmStorage) -> int:
        try:
            return open_shared(handle.pid, handle.fd, handle.inode, handle.nbytes)
        except OSError as error:
            raise Unsupported(
                f"the memory of trainer rank {self._rank} (process {handle.pid}) cannot be opened: {error}. Trainer "
                "and engine must run as the same user in the same PID namespace, and the trainer must be alive"
            ) from error
        except Mismatch as error:
            raise Mismatch(
                f"the memory of trainer rank {self._rank} (process {handle.pid}) is not what it announced: {error}. "
                "Did the trainer restart? Start a new session"
            ) from error

    def _open_cuda(self, handle: CudaStorage) -> torch.UntypedStorage:
        uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        if handle.device_uuid not in uuids:
            raise Unsupported(
                f"GPU {handle.device_uuid} of trainer rank {self._rank} is not visible to this engine rank; "
                "include the trainer's GPUs in the engine's CUDA_VISIBLE_DEVICES"
            )
        arguments: tuple[Any, ...] = (
            uuids.index(handle.device_uuid),
            handle.handle,
            handle.nbytes,
            handle.offset_bytes,
            handle.ref_counter_handle,
            handle.ref_counter_offset,
            handle.event_handle,
            handle.event_sync_required,
        )
        return torch.UntypedStorage._new_shared_cuda(*arguments)
