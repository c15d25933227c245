"""Exports a trainer rank's memory by handle, and maps it on engine ranks of the same host.

    on a GPU    a CUDA IPC handle of each allocation that shards are in, see `gpu_memory`
    on a host   a file descriptor of each storage. The storage is moved once, in place, into unlinked POSIX shared
                memory: every tensor on it follows, and nothing is copied in later updates
    offloaded   shards in the host memory of a process that uses a GPU, and pinned ones: a file descriptor of an arena,
                into which they are copied in every update, see `host_arena`

A handle refers to a piece of memory, not to a tensor, so views of one flat buffer cost one handle. Only a process that
may open the trainer's own file descriptors (the same user, the same PID namespace) can map what is in host memory.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache

import msgspec
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sglang_reshard.errors import Mismatch, ReshardError, Unsupported
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.layout.regions import LocalRegion
from sglang_reshard.memory.gpu_memory import GpuAllocation, GpuExporter
from sglang_reshard.memory.host_arena import HostArena
from sglang_reshard.memory.shm import check_free_shm, map_files, open_shared, raise_descriptor_limit, share
from sglang_reshard.observability.logs import get_logger

logger = get_logger(__name__)
_MAX_ELEMENTS = 1 << 58  # of a view: torch counts its bytes in 64 bits
_CPU = torch.device("cpu")


class ShmStorage(msgspec.Struct, frozen=True, tag="shm"):
    """POSIX shared memory: an open file descriptor of a process, and the inode that identifies the file."""

    pid: int
    fd: int
    inode: int
    nbytes: int


class ShardView(msgspec.Struct, frozen=True, array_like=True):
    """A shard as a view of `Handles.storages[storage]`: offset and strides in elements; -1 for an empty shard."""

    storage: int
    offset: int
    strides: tuple[int, ...]


class Handles(msgspec.Struct, frozen=True, omit_defaults=True):
    """All shards of one trainer rank, in the layout's order.

    reason  why there are none; empty if there are. The shards can then be sent, but not mapped
    """

    storages: tuple[ShmStorage | GpuAllocation, ...]
    shards: tuple[ShardView, ...]
    reason: str = ""


def host_identity() -> str:
    """Returns a string equal for processes that can map each other's memory: same machine, PID namespace and user."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        boot = f.read().strip()
    return f"{socket.gethostname()}/{boot[:8]}/{os.readlink('/proc/self/ns/pid')}/user {os.geteuid()}"


class MemoryExporter:
    """A trainer rank's side: makes handles, once for each piece of memory.

    It does not keep the shards' memory alive: a trainer that offloads its weights gets it back. A CPU storage that is
    moved in place no longer shares its memory with a numpy array that it was made from.

    Senders to several engines share one, in a thread each, so that there is one arena: then the first of them copies.
    """

    def __init__(self, trainer_rank: int) -> None:
        self._rank = trainer_rank
        # By address. The weak reference distinguishes a storage from a later one at the same address.
        self._moved: dict[int, tuple[StorageWeakRef, ShmStorage]] = {}
        self._gpu = GpuExporter()
        self._arena: HostArena | None = None
        self._copied = False  # in this update
        self._lock = threading.Lock()

    def begin_update(self) -> None:
        """Shards have other values from now on. Called once for each update of all engines."""
        self._copied = False

    def export(self, shards: Sequence[torch.Tensor], names: Sequence[str] = ()) -> Handles:
        """Returns handles of `shards`, and copies those that are in the arena. What is exported already stays as it is.

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

        try:
            allocations = self._gpu.export((f"trainer rank {self._rank}: {_name(names, i)}", shards[i]) for i in on_gpu)
            copies = self._refreshed_arena([shards[i] for i in copied])
        except Unsupported as error:
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
            moved = self._handle_of_moved(storage) or _move(
                storage, f"trainer rank {self._rank}: {_name(names, number)}"
            )
            kept[storage.data_ptr()] = self._moved[storage.data_ptr()] = (StorageWeakRef(storage), moved)
            place(number, moved, int(shard.storage_offset()), shard)
        self._moved = kept
        return Handles(tuple(storages), tuple(views))

    def is_current(self) -> bool:
        """Returns whether the last handles are still right for shards whose storages are the same as then."""
        with self._lock:
            return not self._gpu.exported or self._gpu.is_current()

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
            where = f"trainer rank {self._rank}: {_name(names, number)}"
            if shard.untyped_storage().nbytes() == 0:
                raise Unsupported(f"{where} has no memory any more: its storage was freed before the update took place")
            if gpus.on_gpu(shard):
                on_gpu.append(number)
            elif shard.device.type != "cpu":
                raise Unsupported(f"{where} is on a {shard.device.type} device; only CPU and CUDA memory can be shared")
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
            self._arena = HostArena(shards, f"trainer rank {self._rank}")
        if not self._copied:
            self._arena.refresh(shards)
            self._copied = True
        handle = _move(self._arena.storage, f"trainer rank {self._rank}")
        return [(handle, copy) for copy in self._arena.copies]

    def _handle_of_moved(self, storage: torch.UntypedStorage) -> ShmStorage | None:
        known = self._moved.get(storage.data_ptr())
        return known[1] if known is not None and not known[0].expired() else None

    def _check_limits(self, shards: Sequence[torch.Tensor]) -> None:
        new, shared = {}, set()
        for shard in shards:
            storage = shard.untyped_storage()
            if self._handle_of_moved(storage) is None:
                new[storage.data_ptr()] = -(-storage.nbytes() // mmap.PAGESIZE) * mmap.PAGESIZE
                if storage.is_shared():
                    shared.add(storage.data_ptr())
        who = f"trainer rank {self._rank}"
        if new:
            raise_descriptor_limit(len(new.keys() - shared), who)  # storages shared already have theirs
            check_free_shm(sum(nbytes for address, nbytes in new.items() if address not in shared), who)


def _name(names: Sequence[str], number: int) -> str:
    return names[number] if names else f"tensor number {number}"


def _move(storage: torch.UntypedStorage, where: str) -> ShmStorage:
    """Returns a handle of a CPU storage, once it is in shared memory."""
    fd, nbytes = share(storage, where)
    if fd < 0:  # mapped by UntypedStorage.from_file, which closes the file
        raise Unsupported(f"{where} is mapped from a file and cannot be moved; pass a clone() of it")
    return ShmStorage(os.getpid(), fd, os.fstat(fd).st_ino, nbytes)


class PeerMemory:
    """An engine rank's side: one trainer rank's memory, mapped. All that is in host memory is one mapping.

    `handles` were checked by `check_handles`: no view of them exceeds its storage. A view that exceeds the mapping is
    refused here in any case.
    """

    def __init__(self, trainer_rank: int, handles: Handles, device: torch.device = _CPU) -> None:
        """Maps GPU memory for `device`, the engine rank's own, whichever GPU it is on.

        Raises Unsupported for memory that cannot be mapped, and Mismatch for other memory than was announced.
        """
        if handles.reason:
            raise Unsupported(handles.reason)
        self._rank = trainer_rank
        self._views = handles.shards
        self._mappings: list[torch.UntypedStorage] = []
        self._locations: list[tuple[int, int]] = []  # of each storage: number of its mapping, and first byte in it
        with ExitStack() as opened:
            begins = iter(self._map_host([h for h in handles.storages if isinstance(h, ShmStorage)], device, opened))
            for handle in handles.storages:
                if isinstance(handle, ShmStorage):
                    self._locations.append((0, next(begins)))
                else:
                    self._locations.append((len(self._mappings), 0))
                    address = _open_gpu(handle, trainer_rank, device)
                    opened.callback(runtime().close_handle, address, device)
                    self._mappings.append(runtime().storage(address, handle.nbytes, device))
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Unmaps the memory, once work on the device has ended. No view of it may be used any more."""
        self._opened.close()  # host memory is unregistered before it is unmapped
        self._mappings = []

    def locate(self, tensor: int, region: LocalRegion, item_bytes: int) -> tuple[int, int, tuple[int, ...]]:
        """Returns mapping, offset and strides (elements) of a region of the shard of the layout's tensor `tensor`."""
        view = self._views[tensor]
        if view.storage < 0:
            raise Mismatch(f"trainer rank {self._rank} exported an empty shard of tensor number {tensor}")
        mapping, begin = self._locations[view.storage]
        offset, strides = region.memory(view.strides)
        return mapping, begin // item_bytes + view.offset + offset, strides

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

    def region(self, tensor: int, region: LocalRegion, dtype: torch.dtype) -> torch.Tensor:
        """Returns a view of a region of the shard of the layout's tensor number `tensor`."""
        return self.view(*self.locate(tensor, region, dtype.itemsize), region.count, dtype)

    def _map_host(self, storages: Sequence[ShmStorage], device: torch.device, opened: ExitStack) -> list[int]:
        """Maps files, and makes them readable by kernels of `device`. Returns the first byte of each in the mapping."""
        try:
            mapped, begins = map_files([h.nbytes for h in storages], lambda i: _open_shm(storages[i], self._rank))
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise Unsupported(f"the memory of trainer rank {self._rank} cannot be mapped: {error}") from error
            raise Unsupported(
                f"{len(storages)} storages of trainer rank {self._rank} cannot be mapped: {error}; "
                "raise vm.max_map_count (sysctl), which limits the mappings of all trainer ranks together"
            ) from error
        self._mappings.append(mapped.untyped_storage())
        if mapped.numel() and runtime().is_gpu(device):
            if runtime().register_host(mapped.data_ptr(), mapped.numel(), device):
                opened.callback(runtime().unregister_host, mapped.data_ptr(), device)
            else:
                _warn_unregistered()
        return begins


def unreadable_reason(handles: Handles, trainer_rank: int, device: torch.device) -> str:
    """Returns why an engine rank on `device` cannot map a trainer rank's memory; empty if it can.

    Opens one handle of each kind, and closes it again. `handles` were checked by `check_handles`.
    """
    smallest = {type(handle): handle for handle in sorted(handles.storages, key=lambda handle: -handle.nbytes)}
    try:
        for handle in smallest.values():
            if isinstance(handle, ShmStorage):
                os.close(_open_shm(handle, trainer_rank))
            else:
                runtime().close_handle(_open_gpu(handle, trainer_rank, device), device)
    except ReshardError as error:
        return str(error)
    return handles.reason


def _open_shm(handle: ShmStorage, trainer_rank: int) -> int:
    try:
        return open_shared(handle.pid, handle.fd, handle.inode, handle.nbytes)
    except OSError as error:
        raise Unsupported(
            f"the memory of trainer rank {trainer_rank} (process {handle.pid}) cannot be opened: {error}. Trainer "
            "and engine must run as the same user in the same PID namespace, and the trainer must be alive"
        ) from error
    except Mismatch as error:
        raise Mismatch(
            f"the memory of trainer rank {trainer_rank} (process {handle.pid}) is not what it announced: {error}. "
            "Did the trainer restart? Start a new session"
        ) from error


def _open_gpu(handle: GpuAllocation, trainer_rank: int, device: torch.device) -> int:
    where = f"the memory of trainer rank {trainer_rank} on GPU {handle.device_uuid}"
    if not runtime().is_gpu(device):
        raise Unsupported(f"{where} cannot be mapped by an engine rank on {device}; use transport='p2p'")
    try:
        return runtime().open_handle(handle.handle, device)
    except Unsupported as error:
        raise Unsupported(
            f"{where} cannot be mapped for {device}: {error}. Is there peer access between them (nvidia-smi topo -p2p "
            "r), and is the trainer alive? transport='p2p' does without"
        ) from error


@cache
def _warn_unregistered() -> None:
    logger.warning(
        "trainers' host memory cannot be registered with CUDA, and is copied as pageable memory, which takes longer"
    )
