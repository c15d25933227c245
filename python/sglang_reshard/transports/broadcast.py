"""Broadcast and slice: a leader reads a trainer rank's shards, its group gets them bucket by bucket.

All views (of shards, buckets and parameters) are made when the plan is; an update is one
`_foreach_copy_` to pack a bucket, a broadcast, and one `_foreach_copy_` to land it. Two buckets
take turns: while one travels, the next is packed and the one before is landed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sglang_reshard.layout.regions import Region
from sglang_reshard.plan import BroadcastGroup, Bucket
from sglang_reshard.transports.base import TransportContext
from sglang_reshard.transports.broadcast_communicator import BroadcastCommunicator, BroadcastCommunicators, Work
from sglang_reshard.transports.copies import CopyList, DestinationViews
from sglang_reshard.transports.direct_read import DirectRead


@dataclass(frozen=True, slots=True)
class _Turn:
    """This rank's part in one round. `pack` is None unless it leads."""

    group: BroadcastCommunicator
    root: int
    bucket: torch.Tensor
    pack: CopyList | None
    land: CopyList


class BroadcastTransport:
    """See the module's text. Groups are made here, in the plan's order, by all their members together."""

    def __init__(self, here: TransportContext) -> None:
        plan, groups, rank = here.broadcast, here.groups, here.engine_rank
        assert plan is not None
        assert groups is not None
        mine = [r for r in plan.rounds if rank in plan.lanes[r.lane].members]
        largest = max((r.nbytes for r in mine), default=0)
        buckets = [torch.empty(largest, dtype=torch.uint8, device=here.device) for _ in mine[:2]]
        self.extra_bytes = sum(b.numel() for b in buckets)
        by_itself = plan.alone[rank][here.intake.pieces(here.catalog)]
        self._pull = DirectRead(here, np.flatnonzero(by_itself).tolist())
        self.read_bytes = dict(self._pull.read_bytes)
        self.received_bytes = sum(self.read_bytes.values())
        for lane in plan.lanes:
            if rank in lane.members:
                groups.get(lane.members)
        landings = DestinationViews(here.catalog, here.program)
        self._turns = [
            self._turn(here, groups, landings, plan.lanes[r.lane], r, buckets[i % 2]) for i, r in enumerate(mine)
        ]

    def move(self) -> None:
        self._pull.run()
        travelling: tuple[_Turn, Work] | None = None
        for turn in self._turns:
            if turn.pack is not None:
                turn.pack.run()
            work = turn.group.broadcast(turn.bucket, turn.root)
            if travelling:
                self._land(*travelling)
            travelling = (turn, work)
        if travelling:
            self._land(*travelling)

    @staticmethod
    def _land(turn: _Turn, work: Work) -> None:
        turn.group.finish(work)
        turn.land.run()

    def _turn(
        self,
        here: TransportContext,
        groups: BroadcastCommunicators,
        landings: DestinationViews,
        lane: BroadcastGroup,
        r: Bucket,
        bucket: torch.Tensor,
    ) -> _Turn:
        assert here.broadcast is not None
        leads = lane.leader == here.engine_rank
        pack, land = CopyList(), CopyList()
        payload = 0
        for segment in here.broadcast.boxes(here.catalog, r):
            number = int(here.catalog.tensor_of(segment.piece))
            kind = here.catalog.kind(number)
            dtype = getattr(torch, kind.dtype)
            nbytes = segment.box.numel * kind.item_bytes
            boxed = bucket[segment.offset : segment.offset + nbytes].view(dtype).view(segment.box.shape)
            if leads:
                at = here.catalog.piece(segment.piece).in_shard(Region.of(segment.box))
                pack.add(boxed, here.memory[lane.trainer_rank].region(number, at, dtype))
            landings.add(land, number, segment.box, boxed)
            payload += nbytes
        self.received_bytes += payload
        if leads:
            self.read_bytes[lane.trainer_rank] = self.read_bytes.get(lane.trainer_rank, 0) + payload
        return _Turn(groups.get(lane.members), lane.leader, bucket[: r.nbytes], pack if leads else None, land)
