"""Exports a trainer rank's GPU memory: a CUDA IPC handle for each allocation of the driver.

torch's allocator cuts what it allocates (segments of 2 MiB and more) into storages, so that thousands of shards are in
tens of allocations. A process that maps an allocation sees all of it. The trainer keeps the memory: a handle counts
nobody who opens it, and memory that is freed and allocated again, even at the same address, is another allocation.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from sglang_reshard.errors import Unsupported
from sglang_reshard.gpu.driver import HANDLE_BYTES
from sglang_reshard.gpu.runtime import Allocation, runtime

MAX_STORAGE_BYTES = 1 << 46  # half of the addresses that a process has on common machines
StorageBytes = Annotated[int, Meta(ge=1, le=MAX_STORAGE_BYTES)]
MARK_WORDS = 512  # of 8 bytes: a page
_STEP = -0x61C8864680B583EB  # odd, and without a pattern


class GpuAllocation(msgspec.Struct, frozen=True, tag="gpu"):
    """A CUDA IPC handle of an allocation on one GPU; `id` is never that of a later one in the same process."""

    device_uuid: Annotated[str, Meta(min_length=1, max_length=4096)]
    handle: Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    nbytes: StorageBytes
    id: int


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """A page of known words in GPU memory, at `offset` bytes of an allocation; `seed` says which words."""

    allocation: GpuAllocation
    offset: Annotated[int, Meta(ge=0, multiple_of=8)]
    seed: Annotated[int, Meta(ge=0, lt=1 << 62)]


class GpuExporter:
    """Makes handles of the allocations that a trainer rank's shards are in, once per allocation."""

    def __init__(self) -> None:
        self.exported: dict[Allocation, tuple[torch.device, GpuAllocation]] = {}
        self._pages: dict[torch.device, tuple[torch.Tensor, int]] = {}  # marks, with their seeds
        self._frees: dict[torch.device, int | None] = {}  # of torch's allocator, before the last look
        self.marks: tuple[Mark, ...] = ()

    def export(self, shards: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[GpuAllocation, int]]:
        """Returns the allocation of each (name, tensor), and the tensor's first element there, in elements.

        Raises Unsupported, naming the tensor, for memory that has no handles.
        """
        listed = list(shards)
        devices = list(dict.fromkeys(shard.device for _, shard in listed))
        self._frees = {device: runtime().frees(device) for device in devices}
        self._pages = {d: page for d in devices if (page := self._pages.get(d) or _new_page(d)) is not None}
        before, self.exported, self.marks = self.exported, {}, ()
        kept: dict[Allocation, tuple[torch.device, GpuAllocation]] = {}
        bases: list[int] = []  # ascending, as `known`; addresses of several GPUs do not overlap
        known: list[Allocation] = []

        def find(name: str, memory: torch.Tensor, device: torch.device) -> tuple[GpuAllocation, int]:
            """Returns the allocation, and the byte in it."""
            address = memory.data_ptr()
            at = bisect_right(bases, address) - 1
            if at < 0 or address >= known[at].base + known[at].nbytes:
                try:
                    allocation = runtime().allocation(address, device)
                    kept[allocation] = before.get(allocation) or _exported(allocation, device)
                except Unsupported as error:
                    raise Unsupported(f"{name}: {error}") from error
                at += 1
                bases.insert(at, allocation.base)
                known.insert(at, allocation)
            return kept[known[at]][1], address - known[at].base

        found = []
        for name, shard in listed:
            allocation, begin = find(name, shard, shard.device)
            offset, rest = divmod(begin, shard.dtype.itemsize)
            if rest:
                raise Unsupported(
                    f"{name}: its address in GPU memory is not a multiple of {shard.dtype.itemsize} bytes; clone() it"
                )
            found.append((allocation, offset))
        marks = []
        for device, (words, seed) in self._pages.items():
            with suppress(Unsupported):  # torch's allocator has begun to make memory of another kind
                marks.append(Mark(*find("the page that readers check", words, device), seed))
        self.exported, self.marks = kept, tuple(marks)
        return found

    def is_current(self) -> bool:
        """Returns whether what was exported last is there still, and not other allocations at the same addresses.

        As long as torch's allocator has freed nothing since, none is asked for: there are thousands.
        """
        frees = {device: runtime().frees(device) for device in self._frees}
        if frees == self._frees and None not in frees.values():
            return True
        try:
            is_same = all(
                runtime().allocation(allocation.base, device) == allocation
                for allocation, (device, _) in self.exported.items()
            )
        except Unsupported:  # freed
            return False
        if is_same:
            self._frees = frees
        return is_same


def _exported(allocation: Allocation, device: torch.device) -> tuple[torch.device, GpuAllocation]:
    handle = runtime().export_handle(allocation, device)
    return device, GpuAllocation(runtime().uuid(device), handle, allocation.nbytes, allocation.id)


def unlike_mark(mark: Mark, address: int, device: torch.device) -> str:
    """Returns the difference between the mapping at `address` and the written mark, as a clause; empty if it does not.

    A kernel of `device` reads it, as an update's kernels do: a copy to the host would take another way.
    """
    storage = runtime().storage(address, mark.allocation.nbytes, device)
    page = torch.empty(0, dtype=torch.int64, device=storage.device)
    page = page.set_(storage, mark.offset // page.itemsize, (MARK_WORDS,), (1,))
    with runtime().using(device):
        if torch.equal(page, mark_words(mark.seed).to(page.device)):
            return ""
    return (
        f"is mapped for {device} and reads as other bytes than were written there: reads from GPU to GPU are broken "
        "between the two. Switch off PCIe ACS and the IOMMU, or use transport='p2p' with NCCL_P2P_DISABLE=1 on all "
        "ranks, because NCCL reads in the same way"
    )


def mark_words(seed: int) -> torch.Tensor:
    """Returns the words of a mark: int64, [MARK_WORDS]."""
    return torch.arange(MARK_WORDS) * _STEP + seed  # beyond 64 bits it begins again


def _new_page(device: torch.device) -> tuple[torch.Tensor, int] | None:
    """Returns a mark's page, and its seed; None if there is no memory for it."""
    seed = secrets.randbits(62)
    try:
        return runtime().filled(mark_words(seed), device), seed
    except RuntimeError:
        return None
