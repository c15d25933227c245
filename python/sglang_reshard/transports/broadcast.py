"""Broadcast and slice: a leader reads a trainer rank's shards, its group gets them bucket by bucket.

All views (of shards, buckets and parameters) are made when the plan is; an update is one
`_foreach_copy_` to pack a bucket, a broadcast, and one `_foreach_copy_` to land it. Two buckets
take turns: while one travels, the next is packed and the one before is landed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_reshard.plan import Lane, Round
from sglang_reshard.transports.base import Here
from sglang_reshard.transports.groups import Group, Work
from sglang_reshard.transports.landing import CopyList, Landings, payload_bytes
from sglang_reshard.transports.pull import Pull, piece_in_memory


@dataclass(frozen=True, slots=True)
class _Turn:
    """This rank's part in one round. `pack` is None unless it leads."""

    group: Group
    root: int
    bucket: torch.Tensor
    pack: CopyList | None
    land: CopyList


class BroadcastTransport:
    """See the module's text. Groups are made here, in the plan's order, by all their members together."""

    def __init__(self, here: Here) -> None:
        rank = here.engine_rank
        mine = [r for r in here.plan.rounds if rank in here.plan.lanes[r.lane].members]
        largest = max((r.nbytes for r in mine), default=0)
        buckets = [torch.empty(largest, dtype=torch.uint8, device=here.device) for _ in mine[:2]]
        landings = Landings(here.pieces, here.program)
        self.extra_bytes = sum(b.numel() for b in buckets)
        self._pull = Pull(here, landings)
        self.read_bytes = dict(self._pull.read_bytes)
        self.received_bytes = sum(self.read_bytes.values())
        for lane in here.plan.lanes:
            if rank in lane.members:
                here.groups.get(lane.members)
        self._turns = [
            self._turn(here, landings, here.plan.lanes[r.lane], r, buckets[i % 2]) for i, r in enumerate(mine)
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
        work.wait()
        turn.land.run()

    def _turn(self, here: Here, landings: Landings, lane: Lane, r: Round, bucket: torch.Tensor) -> _Turn:
        leads = lane.leader == here.engine_rank
        pack, land = CopyList(), CopyList()
        for segment in r.segments:
            tensor = here.pieces.layout.tensors[here.pieces.tensor_of[segment.piece]]
            nbytes = segment.box.numel * tensor.spec.item_bytes
            typed = bucket[segment.offset : segment.offset + nbytes].view(getattr(torch, tensor.dtype))
            boxed = typed.view(segment.box.shape)
            if leads:
                piece = here.pieces.all[segment.piece]
                shard = piece_in_memory(here, lane.trainer_rank, segment.piece)
                pack.add(boxed, shard[segment.box.relative_to(piece.box.start).slices()])
            landings.add(land, segment.piece, segment.box, boxed)
        payload = payload_bytes(here.pieces, r)
        self.received_bytes += payload
        if leads:
            self.read_bytes[lane.trainer_rank] = self.read_bytes.get(lane.trainer_rank, 0) + payload
        group = here.groups.get(lane.members)
        return _Turn(group, lane.leader, bucket[: r.nbytes], pack if leads else None, land)
