"""Broadcasts whole shards, bucket by bucket, to groups of engine ranks; each slices out the elements it lacks.

A group's leader reads a trainer rank's shards and packs them into a bucket. All views (of shards, buckets and
parameters) are made once; an update is one `CopyList` to pack a bucket, a broadcast, and one to unpack it. Two buffers
alternate: while one is broadcast, the next bucket is packed into the other after the previous one has been unpacked
from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.layout.regions import Region
from sglang_reshard.observability.report import Traffic
from sglang_reshard.plan import ClusterTopology, RankDemand, TensorIndex
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.routes.base import EngineEnd, EngineSide, Meeting
from sglang_reshard.routes.broadcast.plan import BroadcastStrategy, Bucket, plan_broadcast
from sglang_reshard.routes.ipc import DirectReads, read_targets
from sglang_reshard.routes.strategy import REQUESTED, Strategy
from sglang_reshard.routes.wire.communicator import Communicator, Communicators
from sglang_reshard.routes.wire.rounds import BUCKETS, Wait, run_rounds

if TYPE_CHECKING:
    from sglang_reshard.trace.program import Copy, Program


def plan(
    index: TensorIndex,
    demands: Sequence[RankDemand],
    topology: ClusterTopology,
    bucket_bytes: int,
    reason: str = REQUESTED,
) -> Strategy:
    """Raises Unsupported for a trainer rank whose memory nobody can read, and for groups that NCCL would refuse."""
    broadcasts = plan_broadcast(index, demands, topology, bucket_bytes)
    trainer_ranks = len(topology.trainer_hosts)
    for members in dict.fromkeys(group.members for group in broadcasts.groups):
        peers = [trainer_ranks + engine_rank for engine_rank in members]
        topology.check_communicator(peers, cure="use transport='ipc', which needs no communicator")
    nothing_sent = np.zeros((trainer_ranks, len(demands)), np.int64)
    return BroadcastStrategy("broadcast", reason, nothing_sent, broadcasts=broadcasts)


class _BucketOps(NamedTuple):
    """This rank's operations on one bucket. `pack` copies nothing unless this rank is the group's leader."""

    communicator: Communicator
    root: int
    buffer: torch.Tensor
    pack: CopyList
    unpack: CopyList


class BroadcastEngineEnd(EngineEnd):
    """One engine rank's part. No trainer rank takes part: leaders read mapped memory."""

    def __init__(self, side: EngineSide, strategy: Strategy) -> None:
        assert isinstance(strategy, BroadcastStrategy)
        self._side, self._plan = side, strategy.broadcasts
        self._ops: list[_BucketOps] = []

    def connect(self, meeting: Meeting) -> None:
        reads, session = self._side.reads, meeting.session
        members = list(dict.fromkeys(group.members for group in self._plan.groups))
        self.connections = groups = Communicators(
            members,
            peer_id=reads.engine_rank,
            trainer_ranks=0,
            device=reads.device,
            timeout_s=reads.timeout_s,
        )
        # Named by the update, so that all ranks use the same name and none that an aborted update left behind.
        store = session.store(self._side.request.engine, reads.timeout_s, meeting.scope)
        groups.connect(dist.PrefixStore(f"broadcast/{meeting.update}", store), address=session.local_address)
        byte = torch.zeros(1, dtype=torch.uint8, device=reads.device)
        for own in members:
            if reads.engine_rank in own:
                groups.get(own).broadcast(byte, own[0]).wait()  # NCCL connects GPUs when they are first used
        self.prepare(groups)

    def prepare(self, groups: Communicators) -> None:
        """Makes all views and buffers."""
        reads, plan = self._side.reads, self._plan
        engine_rank = reads.engine_rank
        own = plan.buckets(reads.tensor_index, engine_rank)
        largest = max((bucket.nbytes for bucket in own), default=0)
        buffers = [torch.empty(largest, dtype=torch.uint8, device=reads.device) for _ in own[:BUCKETS]]
        mask = plan.direct_reads[engine_rank][reads.read_plan.shards(reads.tensor_index)]
        direct = np.flatnonzero(mask).tolist()  # of shards that no other rank needs
        if reads.program.arrivals:
            written = targets_by_bucket(reads.tensor_index, reads.program, own)
            reads.landing.place(written, read_targets(reads.read_plan, direct))
        self._direct = DirectReads(reads, direct)
        self.nbytes = sum(b.numel() for b in buffers) + self._direct.extra_bytes
        self._read_bytes = dict(self._direct.read_bytes)
        self._received_bytes = sum(self._read_bytes.values())
        copies_of: dict[str, list[Copy]] = {}
        for copy in reads.program.copies:
            copies_of.setdefault(copy.source, []).append(copy)
        self._ops = [self._bucket_ops(groups, copies_of, bucket, buffers[i % BUCKETS]) for i, bucket in enumerate(own)]
        self.traffic = Traffic(self._received_bytes, self._read_bytes)

    def move(self, request: DistributedUpdateWeightsReq, taken: bool) -> None:
        """Raises as `PendingOps.wait` does."""
        self._direct.run()
        run_rounds(len(self._ops), self._broadcast, self._unpack)
        self._direct.finish_from(len(self._ops))

    def _broadcast(self, turn: int) -> Wait:
        ops = self._ops[turn]
        ops.pack.run()
        return ops.communicator.broadcast(ops.buffer, ops.root).wait

    def _unpack(self, turn: int) -> None:
        self._ops[turn].unpack.run()
        self._direct.finish(turn)

    def _bucket_ops(
        self, groups: Communicators, copies_of: dict[str, list[Copy]], bucket: Bucket, buffer: torch.Tensor
    ) -> _BucketOps:
        reads, group = self._side.reads, bucket.group
        layout, leads = reads.tensor_index.layout, group.leader == reads.engine_rank
        pack, unpack = CopyList(), CopyList()
        payload_bytes = sum(segment.nbytes for segment in bucket.segments)
        for tensor, shard, box, offset, nbytes in bucket.segments:
            tensor_class = reads.tensor_index.tensor_class(tensor)
            dtype = getattr(torch, tensor_class.dtype)
            data = buffer[offset : offset + nbytes].view(dtype).view(box.shape)
            if leads:
                region = tensor_class.shard_map.to_local(shard, Region.of(box))
                pack.add(data, reads.memory[group.trainer_rank].region(tensor, region, dtype))
            for copy in copies_of.get(layout.tensors[tensor].name, ()):
                if (part := copy.within(box)) is not None:
                    destination = part.destination(reads.program.targets[part.target])
                    unpack.add(destination, data[part.region.slices(box.start)])
        for copies in (pack, unpack):
            copies.build()
            self.nbytes += copies.table_bytes
        self._received_bytes += payload_bytes
        if leads:
            self._read_bytes[group.trainer_rank] = self._read_bytes.get(group.trainer_rank, 0) + payload_bytes
        communicator = groups.get(group.members)
        return _BucketOps(communicator, group.leader, buffer[: bucket.nbytes], pack, unpack)


engine_end = BroadcastEngineEnd


def targets_by_bucket(index: TensorIndex, program: Program, buckets: Sequence[Bucket]) -> list[set[str]]:
    """Returns the names of the arrivals that each of an engine rank's buckets has a part of."""
    arriving: dict[str, list[Copy]] = {}
    for copy in program.copies:
        if copy.target in program.arrivals:
            arriving.setdefault(copy.source, []).append(copy)
    return [
        {
            copy.target
            for segment in bucket.segments
            for copy in arriving.get(index.layout.tensors[segment.tensor].name, ())
            if copy.within(segment.box)
        }
        for bucket in buckets
    ]
