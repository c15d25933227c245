"""An engine rank's side of shared memory: maps what it reads of a trainer rank's memory, by that one's handles.

Only storages that are read are mapped, and only pages that are read are registered with CUDA: a trainer rank of a large
model has thousands of them.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from typing import NamedTuple

import torch

from sglang_reshard.errors import Mismatch, ReshardError, Unsupported
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.layout.regions import LocalRegion, aligned
from sglang_reshard.memory.gpu_memory import GpuAllocation, unlike_mark
from sglang_reshard.memory.mapping import Handles, ShardView, ShmStorage
from sglang_reshard.memory.shm import map_files, open_shared
from sglang_reshard.observability.logs import get_logger

logger = get_logger(__name__)
ByteRanges = dict[int, list[tuple[int, int]]]  # storage -> (first byte, one past the last), ascending and apart
_MAX_ELEMENTS = 1 << 58  # of a view: torch counts its bytes in 64 bits
_GAP_BYTES = 1 << 18  # pages that are not read are registered too if they are fewer: each registration takes its time
_CPU = torch.device("cpu")


class ShardRead(NamedTuple):
    """A region of a trainer rank's shard of the layout's tensor number `tensor`, whose elements have `item_bytes`."""

    tensor: int
    region: LocalRegion
    item_bytes: int


def byte_ranges(views: Sequence[ShardView], reads: Iterable[ShardRead], gap_bytes: int = 0) -> ByteRanges:
    """Returns the bytes from the first to the last element of each read. Empty shards have none.

    views      of a trainer rank's shards, in the layout's order
    gap_bytes  ranges that are at most so far apart become one
    """
    spans: dict[tuple[LocalRegion, tuple[int, ...]], tuple[int, int]] = {}  # in elements; few are distinct
    found: dict[int, set[tuple[int, int]]] = {}
    for tensor, region, item_bytes in reads:
        view = views[tensor]
        if view.storage < 0:
            continue
        key = region, view.strides
        if key not in spans:
            first, steps = region.memory(view.strides)  # strides of a shard are not negative
            spans[key] = first, first + sum((n - 1) * s for n, s in zip(region.count, steps, strict=True))
        first, last = spans[key]
        begin, end = (view.offset + first) * item_bytes, (view.offset + last + 1) * item_bytes
        found.setdefault(view.storage, set()).add((begin, end))
    return {storage: merged(ranges, gap_bytes) for storage, ranges in found.items()}


def merged(ranges: Iterable[tuple[int, int]], gap_bytes: int = 0) -> list[tuple[int, int]]:
    """Returns ranges in ascending order; those that are at most `gap_bytes` apart become one."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if joined and begin - joined[-1][1] <= gap_bytes:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def covered(ranges: Mapping[int, Sequence[tuple[int, int]]], by: Mapping[int, Sequence[tuple[int, int]]]) -> bool:
    """Returns whether each range lies within one of `by`, in the same storage; these are ascending and apart."""
    for storage, of_storage in ranges.items():
        known = by.get(storage, ())
        begins = [begin for begin, _ in known]
        for first, last in of_storage:
            at = bisect_right(begins, first) - 1
            if at < 0 or last > known[at][1]:
                return False
    return True


class PeerMemory:
    """One trainer rank's memory, mapped as far as it is read. All that is in host memory is one mapping.

    `handles` were checked by `check_handles`: no view of them exceeds its storage. A view that exceeds the mapping is
    refused here in any case.
    """

    def __init__(
        self,
        trainer_rank: int,
        handles: Handles,
        device: torch.device = _CPU,
        reads: Iterable[ShardRead] | None = None,
    ) -> None:
        """Maps GPU memory for `device`, the engine rank's own; the memory may be on any GPU.

        reads  what will be read: storages that none of it is in are not mapped. None for all of every shard

        Raises Unsupported for memory that cannot be mapped, and Mismatch for other memory than was announced.
        """
        if handles.reason:
            raise Unsupported(handles.reason)
        self._rank, self._device, self._views = trainer_rank, device, handles.shards
        if reads is None:
            self._ranges: ByteRanges = {number: [(0, s.nbytes)] for number, s in enumerate(handles.storages)}
        else:
            self._ranges = byte_ranges(self._views, reads, _GAP_BYTES)
        used = [(number, handles.storages[number]) for number in sorted(self._ranges)]
        self._mappings: list[torch.UntypedStorage] = []
        self._locations: dict[int, tuple[int, int]] = {}  # of each storage: number of its mapping, first byte in it
        with ExitStack() as opened:
            self._map_host({number: s for number, s in used if isinstance(s, ShmStorage)}, opened)
            self._open_gpu({number: s for number, s in used if isinstance(s, GpuAllocation)}, opened)
            self._opened = opened.pop_all()

    def covers(self, reads: Iterable[ShardRead]) -> bool:
        """Returns whether all of this is mapped."""
        return covered(byte_ranges(self._views, reads), self._ranges)

    def close(self) -> None:
        """Unmaps the memory, once work on the device has ended. Its views must not be used afterwards."""
        unmap([self])

    def locate(self, tensor: int, region: LocalRegion, item_bytes: int) -> tuple[int, int, tuple[int, ...]]:
        """Returns mapping, offset and strides (elements) of a region of the shard of the layout's tensor `tensor`."""
        view = self._views[tensor]
        if view.storage not in self._locations:
            raise Mismatch(
                f"the plan reads tensor number {tensor} of trainer rank {self._rank}, whose shard is empty or not "
                "mapped; this is a bug, please report it"
            )
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
                f"elements {offset} to {last} ({dtype}) are outside the memory of trainer rank {self._rank}, which has "
                f"{storage.nbytes():,} bytes"
            )
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, strides)

    def region(self, tensor: int, region: LocalRegion, dtype: torch.dtype) -> torch.Tensor:
        """Returns a view of a region of the shard of the layout's tensor number `tensor`."""
        return self.view(*self.locate(tensor, region, dtype.itemsize), region.count, dtype)

    def _map_host(self, storages: dict[int, ShmStorage], opened: ExitStack) -> None:
        """Maps files, and makes the ranges that are read accessible to kernels of the device."""
        files = list(storages.values())
        try:
            mapped, begins = map_files([h.nbytes for h in files], lambda i: _open_shm(files[i], self._rank))
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise Unsupported(f"the memory of trainer rank {self._rank} cannot be mapped: {error}") from error
            raise Unsupported(
                f"{len(files)} storages of trainer rank {self._rank} cannot be mapped: {error}. Raise vm.max_map_count "
                "(sysctl), which limits an engine rank's mappings of all trainer ranks together"
            ) from error
        self._mappings.append(mapped.untyped_storage())
        self._locations.update((number, (0, begin)) for number, begin in zip(storages, begins, strict=True))
        if mapped.numel() and runtime().is_gpu(self._device):
            of_files = zip(begins, map(self._ranges.__getitem__, storages), strict=True)
            read = [(file + begin, file + end) for file, ranges in of_files for begin, end in ranges]
            page = mmap.PAGESIZE
            pages = merged(((begin // page * page, aligned(end, page)) for begin, end in read), _GAP_BYTES)
            if not self._register([(mapped.data_ptr() + begin, end - begin) for begin, end in pages], opened):
                _warn_unregistered()

    def _register(self, ranges: Sequence[tuple[int, int]], opened: ExitStack) -> bool:
        """Registers (address, bytes) with CUDA: all of them, or none if the host cannot register one."""
        with ExitStack() as registered:
            for address, nbytes in ranges:
                if not runtime().register_host(address, nbytes, self._device):
                    return False
                registered.callback(runtime().unregister_host, address, self._device)
            opened.push(registered.pop_all())
        return True

    def _open_gpu(self, allocations: dict[int, GpuAllocation], opened: ExitStack) -> None:
        addresses = _open_gpu(list(allocations.values()), self._rank, self._device)
        opened.callback(runtime().close_handles, addresses, self._device)
        for (number, allocation), address in zip(allocations.items(), addresses, strict=True):
            self._locations[number] = len(self._mappings), 0
            self._mappings.append(runtime().storage(address, allocation.nbytes, self._device))


def unmap(memories: Sequence[PeerMemory]) -> None:
    """Unmaps the memory of several trainer ranks: after one wait for work on each device, for all of it together."""
    runtime().synchronize({memory._device for memory in memories})
    for memory in memories:
        memory._opened.close()  # host memory is unregistered before it is unmapped
        memory._mappings = []


def unreadable_reason(handles: Handles, trainer_rank: int, device: torch.device) -> str:
    """Returns why an engine rank on `device` cannot read a trainer rank's memory; empty if it can.

    Opens one handle of each kind, and closes it again; of a GPU one that has a mark, which must read as it was written.
    `handles` were checked by `check_handles`.
    """
    smallest = {type(handle): handle for handle in sorted(handles.storages, key=lambda handle: -handle.nbytes)}
    try:
        for handle in smallest.values():
            if isinstance(handle, ShmStorage):
                os.close(_open_shm(handle, trainer_rank))
            elif not handles.marks:
                runtime().close_handles(_open_gpu([handle], trainer_rank, device), device)
        for mark in handles.marks:
            addresses = _open_gpu([mark.allocation], trainer_rank, device)
            try:
                reason = unlike_mark(mark, addresses[0], device)
            finally:
                runtime().close_handles(addresses, device)
            if reason:
                return f"the memory of trainer rank {trainer_rank} on GPU {mark.allocation.device_uuid} {reason}"
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
            f"the memory of trainer rank {trainer_rank} (process {handle.pid}) is not what that rank announced: "
            f"{error}. Did the trainer restart? Start a new session"
        ) from error


def _open_gpu(allocations: Sequence[GpuAllocation], trainer_rank: int, device: torch.device) -> list[int]:
    if not allocations:
        return []
    uuids = ", ".join(sorted({allocation.device_uuid for allocation in allocations}))
    where = f"the memory of trainer rank {trainer_rank} on GPU {uuids}"
    if not runtime().is_gpu(device):
        raise Unsupported(f"{where} cannot be mapped by an engine rank on {device}; use transport='p2p'")
    try:
        return runtime().open_handles([allocation.handle for allocation in allocations], device)
    except Unsupported as error:
        raise Unsupported(
            f"{where} cannot be mapped for {device}: {error}. Is there peer access between them (nvidia-smi topo -p2p "
            "r), and is the trainer alive? transport='p2p' needs no peer access"
        ) from error


@cache
def _warn_unregistered() -> None:
    logger.warning(
        "the trainers' host memory cannot be registered with CUDA (cudaHostRegister failed); copies from it are slower"
    )
