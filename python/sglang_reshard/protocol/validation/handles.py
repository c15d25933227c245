"""Validates a trainer rank's memory handles, before its memory is mapped and read."""

from __future__ import annotations

from sglang_reshard.errors import Mismatch
from sglang_reshard.gpu.driver import HANDLE_BYTES
from sglang_reshard.layout.regions import ITEM_BYTES
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.memory.gpu_memory import MARK_WORDS, GpuAllocation, Mark
from sglang_reshard.memory.mapping import Handles, ShardView, ShmStorage

MAX_STORAGE_BYTES = 1 << 46  # half of the addresses that a process has on common machines
_MAX_NUMBER = (1 << 31) - 1  # of processes and descriptors
_MAX_MARKS = 64
_MAX_WORDS = 4096  # characters of a reason, of a GPU's UUID


def check_handles(handles: Handles, layout: SourceLayout, trainer_rank: int) -> None:
    """Raises Mismatch, naming trainer rank and tensor, unless all shards of the rank lie within its storages.

    The storages themselves are checked when they are mapped. `layout` was checked by `check_layout`.
    """
    if handles.reason:
        if handles.storages or handles.shards or handles.marks or len(handles.reason) > _MAX_WORDS:
            raise Mismatch(
                f"invalid memory handles of trainer rank {trainer_rank}: it gives a reason why it has no handles, "
                f"{handles.reason[:80]!r}, but sends {len(handles.storages)} storages and {len(handles.shards)} shards"
            )
        return
    if len(handles.shards) != len(layout.tensors):
        raise Mismatch(
            f"invalid memory handles of trainer rank {trainer_rank}: it describes {len(handles.shards)} shards, but "
            f"its layout has {len(layout.tensors)} tensors"
        )
    for number, storage in enumerate(handles.storages):
        if why := _invalid_storage_reason(storage):
            raise Mismatch(f"invalid storage number {number} of trainer rank {trainer_rank}: {why}")
    for number, mark in enumerate(handles.marks):
        if why := _invalid_mark_reason(mark, number):
            raise Mismatch(f"invalid mark number {number} of trainer rank {trainer_rank}: {why}")
    total = sum(storage.nbytes for storage in handles.storages if isinstance(storage, ShmStorage))
    if total > MAX_STORAGE_BYTES:
        raise Mismatch(
            f"invalid memory handles of trainer rank {trainer_rank}: {total:,} bytes exceed the address space"
        )
    sizes = [storage.nbytes for storage in handles.storages]
    reaches: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    shapes = layout.min_local_shapes(trainer_rank)
    for tensor, view, shape in zip(layout.tensors, handles.shards, shapes, strict=True):
        if shape is None:
            if -1 <= view.storage < len(sizes):
                continue
            raise _invalid_shard(trainer_rank, tensor.name, view, f"there are {len(sizes)} storages")
        if not 0 <= view.storage < len(sizes):
            raise _invalid_shard(
                trainer_rank, tensor.name, view, f"its shape is {shape}, and there are {len(sizes)} storages"
            )
        key = view.strides, shape
        reach = reaches.get(key)
        if reach is None:
            reach = reaches[key] = _reach(view.strides, shape)
        if reach < 0:
            raise _invalid_shard(trainer_rank, tensor.name, view, f"the strides do not fit a shard of {shape}")
        end = (view.offset + reach) * ITEM_BYTES[tensor.dtype]
        if view.offset < 0 or end > sizes[view.storage]:
            why = f"a shard of {shape} reaches to byte {end:,} of {sizes[view.storage]:,}"
            raise _invalid_shard(trainer_rank, tensor.name, view, why)


def _reach(strides: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Returns the elements from a view's first to one past its last; -1 for strides that do not fit the shape."""
    if len(strides) != len(shape) or any(s < 0 for s in strides):
        return -1
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _invalid_shard(trainer_rank: int, name: str, view: ShardView, why: str) -> Mismatch:
    return Mismatch(
        f"trainer rank {trainer_rank}: the shard of {name} is invalid at offset {view.offset} with strides "
        f"{view.strides} of storage number {view.storage}: {why}. Was the tensor replaced? Start a new session"
    )


def _invalid_storage_reason(storage: ShmStorage | GpuAllocation) -> str:
    if not 1 <= storage.nbytes <= MAX_STORAGE_BYTES:
        return f"its size of {storage.nbytes:,} bytes is out of range"
    if isinstance(storage, ShmStorage):
        if not 1 <= storage.pid <= _MAX_NUMBER or not 0 <= storage.fd <= _MAX_NUMBER or storage.inode < 0:
            return f"descriptor {storage.fd} of process {storage.pid}, inode {storage.inode}, cannot exist"
        return ""
    if len(storage.handle) != HANDLE_BYTES:
        return f"its handle has {len(storage.handle)} bytes, expected {HANDLE_BYTES}"
    if not 1 <= len(storage.device_uuid) <= _MAX_WORDS:
        return f"{storage.device_uuid[:80]!r} is not the UUID of a GPU"
    return ""


def _invalid_mark_reason(mark: Mark, number: int) -> str:
    if number >= _MAX_MARKS:
        return f"a trainer rank has at most one for each of its GPUs, {_MAX_MARKS} in total"
    if why := _invalid_storage_reason(mark.allocation):
        return why
    end = mark.offset + MARK_WORDS * 8
    if mark.offset < 0 or mark.offset % 8 or end > mark.allocation.nbytes or not 0 <= mark.seed < 1 << 62:
        return f"it is at byte {mark.offset:,} of {mark.allocation.nbytes:,}, with seed {mark.seed}"
    return ""
