"""Broadcasts whole shards, bucket by bucket, to groups of engine ranks, each of which slices out what it lacks.

A group's leader reads a trainer rank's shards and packs them into a bucket. All views (of shards, buckets and
parameters) are made at construction; an update is one `CopyList` to pack a bucket, a broadcast, and one to unpack it.
Two buffers alternate: while one is broadcast, the next bucket is packed into the other
after the previous one has been unpacked from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from sglang_reshard.layout.regions import Box, Region
from sglang_reshard.plan import BroadcastGroup, BroadcastPlan, Bucket, TensorIndex
from sglang_reshard.transports.base import TransportContext
from sglang_reshard.transports.communicator import BroadcastCommunicator, BroadcastCommunicators
from sglang_reshard.transports.copies import CopyList
from sglang_reshard.transports.ipc import DirectReads, read_targets

if TYPE_CHECKING:
    from sglang_reshard.trace.program import Copy, Program


class _BucketOps(NamedTuple):
    """This rank's operations on one bucket. `pack` is None unless this rank is the group's leader."""

    communicator: BroadcastCommunicator
    root: int
    buffer: torch.Tensor
    pack: CopyList | None
    unpack: CopyList


class BroadcastTransport:
    """One engine rank's side. Construction is collective: members connect their groups in the plan's order."""

    def __init__(self, context: TransportContext) -> None:
        plan, groups, engine_rank = context.broadcast, context.broadcast_groups, context.engine_rank
        assert plan is not None
        assert groups is not None
        own = [bucket for bucket in plan.buckets if engine_rank in plan.groups[bucket.group].members]
        largest = max((bucket.nbytes for bucket in own), default=0)
        buffers = [torch.empty(largest, dtype=torch.uint8, device=context.device) for _ in own[:2]]
        self.extra_bytes = sum(b.numel() for b in buffers)
        mask = plan.direct_reads[engine_rank][context.read_plan.shards(context.tensor_index)]
        direct = np.flatnonzero(mask).tolist()  # of shards that no other rank needs
        self._arrivals = context.arrivals
        if context.program.arrivals:
            written = targets_by_bucket(context.tensor_index, context.program, plan, own)
            self._arrivals.place(written, read_targets(context.read_plan, direct))
        self._direct = DirectReads(context, direct)
        self.extra_bytes += self._direct.extra_bytes
        self.read_bytes = dict(self._direct.read_bytes)
        self.received_bytes = self._direct.received_bytes
        for group in plan.groups:
            if engine_rank in group.members:
                groups.get(group.members)
        copies_of: dict[str, list[Copy]] = {}
        for copy in context.program.copies:
            copies_of.setdefault(copy.source, []).append(copy)
        self._ops = [
            self._bucket_ops(context, groups, copies_of, plan.groups[bucket.group], bucket, buffers[i % 2])
            for i, bucket in enumerate(own)
        ]

    def move(self) -> None:
        self._direct.run()
        pending: dist.Work | None = None
        for turn, ops in enumerate(self._ops):
            if ops.pack is not None:
                ops.pack.run()
            work = ops.communicator.broadcast(ops.buffer, ops.root)
            if pending is not None:
                self._unpack(turn - 1, pending)
            pending = work
        if pending is not None:
            self._unpack(len(self._ops) - 1, pending)
        for turn in range(len(self._ops), self._arrivals.turns):
            self._finish(turn)

    def _unpack(self, turn: int, work: dist.Work) -> None:
        ops = self._ops[turn]
        ops.communicator.wait(work)
        ops.unpack.run()
        self._finish(turn)

    def _finish(self, turn: int) -> None:
        if turn < self._arrivals.turns:
            self._direct.run(turn)
            self._arrivals.finish(turn)

    def _bucket_ops(
        self,
        context: TransportContext,
        groups: BroadcastCommunicators,
        copies_of: dict[str, list[Copy]],
        group: BroadcastGroup,
        bucket: Bucket,
        buffer: torch.Tensor,
    ) -> _BucketOps:
        assert context.broadcast is not None
        tensor_index, leads = context.tensor_index, group.leader == context.engine_rank
        pack, unpack = CopyList(), CopyList()
        payload_bytes = 0
        for segment in context.broadcast.bucket_segments(tensor_index, bucket):
            tensor = int(tensor_index.tensor_of(segment.shard))
            tensor_class = tensor_index.tensor_class(tensor)
            dtype = getattr(torch, tensor_class.dtype)
            nbytes = segment.box.numel * tensor_class.item_bytes
            data = buffer[segment.offset : segment.offset + nbytes].view(dtype).view(segment.box.shape)
            if leads:
                region = tensor_class.shard_map.to_local(tensor_index.shard(segment.shard), Region.of(segment.box))
                pack.add(data, context.memory[group.trainer_rank].region(tensor, region, dtype))
            for copy in copies_of.get(tensor_index.layout.tensors[tensor].name, ()):
                _unpack_box(unpack, context.program, copy, segment.box, data)
            payload_bytes += nbytes
        for copies in (pack, unpack):
            copies.build()
            self.extra_bytes += copies.table_bytes
        self.received_bytes += payload_bytes
        if leads:
            self.read_bytes[group.trainer_rank] = self.read_bytes.get(group.trainer_rank, 0) + payload_bytes
        communicator = groups.get(group.members)
        return _BucketOps(communicator, group.leader, buffer[: bucket.nbytes], pack if leads else None, unpack)


def targets_by_bucket(
    index: TensorIndex, program: Program, plan: BroadcastPlan, buckets: Sequence[Bucket]
) -> list[set[str]]:
    """Returns the names of the arrivals that each of an engine rank's buckets has a part of."""
    arriving: dict[str, list[Copy]] = {}
    for copy in program.copies:
        if copy.target in program.arrivals:
            arriving.setdefault(copy.source, []).append(copy)
    found: list[set[str]] = []
    for bucket in buckets:
        targets: set[str] = set()
        for segment in plan.bucket_segments(index, bucket):
            name = index.layout.tensors[int(index.tensor_of(segment.shard))].name
            targets |= {copy.target for copy in arriving.get(name, ()) if copy.within(segment.box)}
        found.append(targets)
    return found


def _unpack_box(unpack: CopyList, program: Program, copy: Copy, box: Box, data: torch.Tensor) -> None:
    """Adds the part of `copy` that lies in `box` of its tensor; `data` holds that box."""
    part = copy.within(box)
    if part is not None:
        unpack.add(part.destination(program.targets[part.target]), data[part.region.slices(box.start)])
