"""Computes what ranks need in addition to buffers: shared memory, descriptors, mappings, handles, and the copies that
`staged`, `update_async` and `delta` keep.

Every tensor of a trainer rank is taken to be a storage by itself, as FSDP2's and tensor parallel shards are. A flat
buffer is one storage, however many tensors it has.
"""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from sglang_reshard.extras.asynchronous.background import ALIGN_BYTES
from sglang_reshard.landings.shadow import shadow_bytes
from sglang_reshard.memory.host_arena import ALIGNMENT
from sglang_reshard.plan import ReadPlan, TensorIndex
from sglang_reshard.plan.tensor_index import TensorClass
from sglang_reshard.routes.delta.offer import PART
from sglang_reshard.routes.strategy import Strategy
from sglang_reshard.trace.program import Program

_ROUND, _LARGE_ROUND = 512, 2 << 20
_SMALL, _SMALL_SEGMENT, _MEDIUM, _MEDIUM_SEGMENT = 1 << 20, 2 << 20, 10 << 20, 20 << 20


class TrainerSizing(msgspec.Struct, frozen=True):
    """One trainer rank's needs. Where its shards are decides which of the first four it has.

    storages     of its shards. With shards on a CPU it keeps a descriptor of each open, and has a mapping of each
    shm_bytes    in /dev/shm, if its process uses no GPU: the storages in whole pages, moved there once
    arena_bytes  in /dev/shm, for shards in the host memory of a process that uses a GPU: copied there in every update
    allocations  of its GPU that shards on a GPU are in: a CUDA IPC handle of each
    async_bytes  of the copy that `update_async` keeps
    delta_bytes  for delta="auto": a copy of the tensors sent to one engine, and encoded changes; 0 if it sends none
    """

    storages: int
    shm_bytes: int
    arena_bytes: int
    allocations: int
    async_bytes: int
    delta_bytes: int


class EngineSizing(msgspec.Struct, frozen=True):
    """One engine rank's needs.

    mappings      storages of trainer ranks of its host that it maps, or opens handles of, at most
    staged_bytes  of the shadow weights of staged=True
    delta_bytes   for delta="auto": its buckets, at most
    """

    mappings: int
    staged_bytes: int
    delta_bytes: int


class Sizing(msgspec.Struct, frozen=True):
    """The needs of all ranks, in the order of ranks."""

    trainer_ranks: tuple[TrainerSizing, ...]
    engine_ranks: tuple[EngineSizing, ...]


def trainer_sizings(index: TensorIndex, sent_bytes: Sequence[int]) -> tuple[TrainerSizing, ...]:
    """Returns the needs of all trainer ranks. `sent_bytes`: what each sends to one engine, in the engine's dtypes."""

    @functools.cache  # most ranks hold shards of the same sizes
    def of_sizes(by_class: tuple[int, ...]) -> TrainerSizing:
        sizes = np.array(by_class, np.int64)[index.class_of]
        held = sizes[sizes > 0]
        return TrainerSizing(
            storages=len(held),
            shm_bytes=_rounded(held, mmap.PAGESIZE),
            arena_bytes=_rounded(held, ALIGNMENT),
            allocations=max(segments(held.tolist()), default=-1) + 1,
            async_bytes=_rounded(held, ALIGN_BYTES),
            delta_bytes=0,
        )

    held = (of_sizes(tuple(_local_bytes(of, rank) for of in index.classes)) for rank in range(len(sent_bytes)))
    return tuple(
        msgspec.structs.replace(needs, delta_bytes=sent + sent // PART)
        for needs, sent in zip(held, sent_bytes, strict=True)
    )


def _local_bytes(kind: TensorClass, trainer_rank: int) -> int:
    shape = kind.shard_map.min_local_shape(trainer_rank)
    return 0 if shape is None else math.prod(shape) * kind.item_bytes


def _rounded(sizes: np.ndarray, unit: int) -> int:
    return int((-(-sizes // unit) * unit).sum())


def engine_sizing(
    strategy: Strategy, engine_rank: int, reads: ReadPlan, program: Program, bucket_bytes: int
) -> EngineSizing:
    """Returns one engine rank's needs. The targets of `program` may be meta tensors."""
    sending = strategy.senders(engine_rank)
    tensors = reads.tensor_ids[reads.copy_ids]
    mapped = 0
    for trainer_rank in reads.traffic():
        if trainer_rank not in sending:
            own = reads.reads_from(trainer_rank)
            mapped += len(np.unique(tensors[own.start : own.stop]))
    return EngineSizing(mapped, shadow_bytes(program), 3 * bucket_bytes if sending else 0)


def segments(sizes: Iterable[int]) -> Iterator[int]:
    """Yields the segment of torch's CUDA allocator that each tensor is in, as a number from 0; -1 if it has no bytes.

    sizes  bytes of each tensor

    A segment is an allocation of the driver. Tensors of up to 1 MiB share segments of 2 MiB. Tensors below
    10 MiB share segments of 20 MiB, and a larger tensor has a separate segment.
    """
    rooms: dict[int, tuple[int, int]] = {}  # by size of segments: the last one, and the bytes that are left in it
    made = 0
    for nbytes in sizes:
        nbytes = -(-nbytes // _ROUND) * _ROUND
        if not nbytes:
            yield -1
            continue
        if nbytes <= _SMALL:
            whole = _SMALL_SEGMENT
        elif nbytes < _MEDIUM:
            whole = _MEDIUM_SEGMENT
        else:
            whole = -(-nbytes // _LARGE_ROUND) * _LARGE_ROUND
        number, left = rooms.get(whole, (-1, 0)) if nbytes < _MEDIUM else (-1, 0)
        if left < nbytes:
            number, left = made, whole
            made += 1
        rooms[whole] = number, left - nbytes
        yield number
