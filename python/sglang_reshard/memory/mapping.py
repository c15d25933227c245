"""Exports a trainer rank's memory by handle, for engine ranks of the same host to map (`peer_memory`).

    on a GPU    a CUDA IPC handle of each allocation that shards are in, see `gpu_memory`
    on a host   a file descriptor of each storage. The storage is moved once, in place, into unlinked POSIX shared
                memory: every tensor on it follows, and nothing is copied in later updates
    offloaded   shards in the host memory of a process that uses a GPU, and pinned ones: a file descriptor of an arena,
                into which they are copied in every update, see `host_arena`

A handle refers to a piece of memory, not to a tensor, so views of one flat buffer cost one handle. Only a process that
may open the trainer's own file descriptors (the same user, the same PID namespace) can map what is in host memory.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Sequence
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch.multiprocessing.reductions import StorageWeakRef

from sglang_reshard.errors import Unsupported
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.layout.regions import aligned
from sglang_reshard.memory.gpu_memory import GpuAllocation, GpuExporter, Mark, StorageBytes
from sglang_reshard.memory.host_arena import HostArena
from sglang_reshard.memory.shm import check_free_shm, raise_descriptor_limit, share


class ShmStorage(msgspec.Struct, frozen=True, tag="shm"):
    """POSIX shared memory: an open file descriptor of a process, and the inode that identifies the file."""

    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    fd: Annotated[int, Meta(ge=0, lt=1 << 31)]
    inode: Annotated[int, Meta(ge=0)]
    nbytes: StorageBytes


class ShardView(msgspec.Struct, frozen=True, array_like=True):
    """A shard as a view of `Handles.storages[storage]`: offset and strides in elements; -1 for an empty shard."""

    storage: Annotated[int, Meta(ge=-1)]
    offset: Annotated[int, Meta(ge=0)]
    strides: tuple[Annotated[int, Meta(ge=0)], ...]


class Handles(msgspec.Struct, frozen=True, omit_defaults=True):
    """All shards of one trainer rank, in the layout's order.

    reason  why there are none; empty if there are. The shards can then be sent, but not mapped
    marks   one on each GPU that shards are on, for readers to see that they read this memory
    """

    storages: tuple[ShmStorage | GpuAllocation, ...]
    shards: tuple[ShardView, ...]
    reason: Annotated[str, Meta(max_length=4096)] = ""
    marks: Annotated[tuple[Mark, ...], Meta(max_length=64)] = ()


def host_identity() -> str:
    """Returns a string equal for processes that can map each other's memory: same machine, PID namespace and user."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        boot = f.read().strip()
    return f"{socket.gethostname()}/{boot[:8]}/{os.readlink('/proc/self/ns/pid')}/user {os.geteuid()}"


class MemoryExporter:
    """A trainer rank's side: makes handles, once for each piece of memory.

    It does not keep the shards' memory alive: a trainer that offloads its weights gets it back. A CPU storage that is
    moved in place no longer shares its memory with a numpy array that it was made from.

    Senders to several engines share one, each in its own thread, and use one arena; the first of them copies.
    """

    def __init__(self, trainer_rank: int) -> None:
        self._who = f"trainer rank {trainer_rank}"
        # By address. The weak reference distinguishes a storage from a later one at the same address.
        self._moved: dict[int, tuple[StorageWeakRef, ShmStorage]] = {}
        self._gpu = GpuExporter()
        self._arena: HostArena | None = None
        self._copied = False  # in this update
        self._without_handles: tuple[torch.device, ...] = ()  # GPUs of shards that have none
        self._lock = threading.Lock()

    def begin_update(self) -> None:
        """Shards have other values from now on. Called once for each update of all engines."""
        self._copied = False

    def export(self, shards: Sequence[torch.Tensor], names: Sequence[str] = ()) -> Handles:
        """Returns handles of `shards`, and copies those that are in the arena. Memory that is already exported is not
        changed.

        names  of the shards' tensors, for error messages

        Work on the shards must have ended. If GPU memory has no handles, or the arena no room, `Handles.reason` says
        so. Raises Unsupported if there is too little shared memory to move storages, stating how much is needed, and
        for memory that was freed or is on another kind of device, naming the tensor.
        """
        with self._lock:
            return self._export(shards, names)

    def _export(self, shards: Sequence[torch.Tensor], names: Sequence[str]) -> Handles:
        on_gpu, copied, in_place = self._by_place(shards, names)
        views = [ShardView(-1, 0, ())] * len(shards)
        storages: dict[ShmStorage | GpuAllocation, int] = {}

        def place(number: int, handle: ShmStorage | GpuAllocation, offset: int, view: torch.Tensor) -> None:
            views[number] = ShardView(storages.setdefault(handle, len(storages)), offset, tuple(view.stride()))

        self._without_handles = ()
        try:
            allocations = self._gpu.export((self._where(names, i), shards[i]) for i in on_gpu)
            copies = self._refreshed_arena([shards[i] for i in copied])
        except Unsupported as error:
            self._without_handles = tuple({shards[i].device for i in on_gpu})
            return Handles((), (), str(error))
        for number, (allocation, offset) in zip(on_gpu, allocations, strict=True):
            place(number, allocation, offset, shards[number])
        for number, (handle, copy) in zip(copied, copies, strict=True):
            place(number, handle, int(copy.storage_offset()), copy)
        self._check_limits([shards[i] for i in in_place])
        kept: dict[int, tuple[StorageWeakRef, ShmStorage]] = {}
        for number in in_place:
            shard = shards[number]
            storage = shard.untyped_storage()
            moved = self._handle_of_moved(storage) or _move(storage, self._where(names, number))
            kept[storage.data_ptr()] = self._moved[storage.data_ptr()] = (StorageWeakRef(storage), moved)
            place(number, moved, int(shard.storage_offset()), shard)
        self._moved = kept
        return Handles(tuple(storages), tuple(views), marks=self._gpu.marks)

    def is_current(self) -> bool:
        """Returns whether the last handles are still valid, for shards with the same storages."""
        with self._lock:
            return not self._gpu.exported or self._gpu.is_current()

    def pages(self) -> tuple[object, ...]:
        """Returns what changes if other pages may be at the addresses of the shards that were exported last.

        Only of memory without handles, as virtual memory is: the allocations of other memory have numbers, which are
        in the handles. A memory saver is not seen here.
        """
        with self._lock:
            return tuple(runtime().frees(device) for device in self._without_handles)

    def refresh(self) -> None:
        """Copies the values that shards in the arena have now. Their storages must be those of the last export."""
        with self._lock:
            if self._arena is not None and not self._copied:
                self._arena.refresh_again()
                self._copied = True

    def close(self) -> None:
        with self._lock:
            self._moved, self._gpu, self._arena = {}, GpuExporter(), None

    def _by_place(self, shards: Sequence[torch.Tensor], names: Sequence[str]) -> tuple[list[int], list[int], list[int]]:
        """Returns the numbers of the shards on GPUs, of those that are copied, and of those that are moved in place."""
        gpus = runtime()
        uses_gpu = gpus.uses_gpu()
        on_gpu: list[int] = []
        copied: list[int] = []
        in_place: list[int] = []
        for number, shard in enumerate(shards):
            if shard.numel() == 0:
                continue
            where = self._where(names, number)
            if shard.untyped_storage().nbytes() == 0:
                raise Unsupported(
                    f"{where} no longer has memory: its storage was freed before the update. Bring the weights back "
                    "before calling update"
                )
            if gpus.on_gpu(shard):
                on_gpu.append(number)
            elif shard.device.type != "cpu":
                raise Unsupported(
                    f"{where} is on a {shard.device.type} device, but only CPU and CUDA memory can be shared; move it "
                    "there"
                )
            elif uses_gpu or gpus.is_pinned(shard):
                copied.append(number)
            else:
                in_place.append(number)
        return on_gpu, copied, in_place

    def _refreshed_arena(self, shards: Sequence[torch.Tensor]) -> list[tuple[ShmStorage, torch.Tensor]]:
        """Returns a copy of each shard, and the handle of the arena that all copies are in."""
        if not shards:
            self._arena = None
            return []
        if self._arena is None or not self._arena.fits(shards):
            self._arena, self._copied = None, False  # its room may be needed
            self._arena = HostArena(shards, self._who)
        if not self._copied:
            self._arena.refresh(shards)
            self._copied = True
        handle = _move(self._arena.storage, self._who)
        return [(handle, copy) for copy in self._arena.copies]

    def _handle_of_moved(self, storage: torch.UntypedStorage) -> ShmStorage | None:
        known = self._moved.get(storage.data_ptr())
        return known[1] if known is not None and not known[0].expired() else None

    def _check_limits(self, shards: Sequence[torch.Tensor]) -> None:
        new = {}
        for shard in shards:
            storage = shard.untyped_storage()
            if self._handle_of_moved(storage) is None and not storage.is_shared():  # these have descriptors and room
                new[storage.data_ptr()] = aligned(storage.nbytes(), mmap.PAGESIZE)
        if new:
            raise_descriptor_limit(len(new), self._who)
            check_free_shm(sum(new.values()), self._who)

    def _where(self, names: Sequence[str], number: int) -> str:
        return f"{self._who}: {names[number] if names else f'tensor number {number}'}"


def _move(storage: torch.UntypedStorage, where: str) -> ShmStorage:
    """Returns a handle of a CPU storage, once it is in shared memory."""
    fd, nbytes = share(storage, where)
    if fd < 0:  # mapped by UntypedStorage.from_file, which closes the file
        raise Unsupported(
            f"{where} is mapped from a file, so it cannot be moved into shared memory; pass a clone() of it"
        )
    return ShmStorage(os.getpid(), fd, os.fstat(fd).st_ino, nbytes)
