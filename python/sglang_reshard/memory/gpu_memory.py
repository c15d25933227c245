"""Exports a trainer rank's GPU memory: a CUDA IPC handle for each allocation of the driver.

torch's allocator cuts what it allocates (segments of 2 MiB and more) into storages, so that thousands of shards are in
tens of allocations. Whoever maps an allocation sees all of it. The trainer keeps the memory: a handle counts nobody who
opens it, and memory that is freed and allocated again, even at the same address, is another allocation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import msgspec
import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.gpu.runtime import Allocation, runtime


class GpuAllocation(msgspec.Struct, frozen=True, tag="gpu"):
    """A CUDA IPC handle of an allocation on one GPU; `id` is never that of a later one in the same process."""

    device_uuid: str
    handle: bytes
    nbytes: int
    id: int


class GpuExporter:
    """Makes handles of the allocations that a trainer rank's shards are in, once per allocation."""

    def __init__(self) -> None:
        self.exported: dict[Allocation, tuple[torch.device, GpuAllocation]] = {}

    def export(self, shards: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[GpuAllocation, int]]:
        """Returns the allocation of each (name, tensor), and the tensor's first element there, in elements.

        Raises Unsupported, naming the tensor, for memory that has no handles.
        """
        kept: dict[Allocation, tuple[torch.device, GpuAllocation]] = {}
        bases: list[int] = []  # ascending, as `known`; addresses of several GPUs do not overlap
        known: list[Allocation] = []
        found = []
        for name, shard in shards:
            address = shard.data_ptr()
            at = bisect_right(bases, address) - 1
            if at < 0 or address >= known[at].base + known[at].nbytes:
                try:
                    allocation = runtime().allocation(address, shard.device)
                    kept[allocation] = self.exported.get(allocation) or _exported(allocation, shard.device)
                except Unsupported as error:
                    raise Unsupported(f"{name}: {error}") from error
                at += 1
                bases.insert(at, allocation.base)
                known.insert(at, allocation)
            offset, rest = divmod(address - known[at].base, shard.dtype.itemsize)
            if rest:
                raise Unsupported(f"{name}: its address in GPU memory is no multiple of {shard.dtype.itemsize} bytes")
            found.append((kept[known[at]][1], offset))
        self.exported = kept
        return found

    def is_current(self) -> bool:
        """Returns whether what was exported last is there still, and not other allocations at the same addresses."""
        try:
            return all(
                runtime().allocation(allocation.base, device) == allocation
                for allocation, (device, _) in self.exported.items()
            )
        except Unsupported:  # freed
            return False


def _exported(allocation: Allocation, device: torch.device) -> tuple[torch.device, GpuAllocation]:
    handle = runtime().export_handle(allocation, device)
    return device, GpuAllocation(runtime().uuid(device), handle, allocation.nbytes, allocation.id)
