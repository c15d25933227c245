"""Reads exactly the elements that an engine rank lacks out of trainer memory on the same host, mapped by handle.

One copy, from the trainer's shard to the live parameter; no buffer, no collective, no process group. Weights that are
quantized on arrival are copied a bucket at a time.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import torch

from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.copying.host_copies import Dimension, Point, is_ascending, merged_boxes
from sglang_reshard.errors import Unsupported
from sglang_reshard.observability.report import Traffic
from sglang_reshard.plan import ClusterTopology, RankDemand, ReadPlan, TensorIndex
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.routes.base import EngineEnd, EngineSide, Meeting, Reads
from sglang_reshard.routes.strategy import REQUESTED, Strategy, demanded_bytes, first_unread

# By storage written to, trainer rank and mapping read from, and dtype there; and by dimensions.
_Boxes = dict[tuple[tuple[str, int, int, str], tuple[Dimension, ...]], list[Point]]


def plan(_index: TensorIndex, demands: Sequence[RankDemand], topology: ClusterTopology, _bucket_bytes: int) -> Strategy:
    """Raises Unsupported, naming ranks and hosts, where memory cannot be read."""
    _, unread = demanded_bytes(demands, topology)
    if unread.any():
        raise Unsupported(
            f"{first_unread(unread, topology)}; transport='ipc' reads memory on the same host only, as the same user",
            cure="use transport='p2p' or 'auto'",
        )
    return Strategy("ipc", REQUESTED, unread)


class DirectReads:
    """Copies from mapped memory, with a cast where dtypes differ: what can be copied at once by one `CopyList`."""

    def __init__(self, reads: Reads, numbers: Sequence[int]) -> None:
        """`numbers` of reads of the read plan. `reads.landing` must have been placed."""
        self.read_bytes: dict[int, int] = {}
        self._landing = reads.landing
        copies: dict[int | None, _Boxes] = {}
        for read in numbers:
            copy, item, tensor = reads.read_plan.read(read)
            trainer_rank = int(reads.read_plan.trainer_ranks[read])
            tensor_class = reads.tensor_index.tensor_class(tensor)
            mapping, offset, strides = reads.memory[trainer_rank].locate(
                tensor, item.local_region, tensor_class.item_bytes
            )
            dimensions = tuple(zip(item.local_region.count, strides, copy.strides, strict=True))
            boxes = copies.setdefault(reads.landing.turn_of(copy.target), {})
            kind = copy.target, trainer_rank, mapping, tensor_class.dtype
            boxes.setdefault((kind, dimensions), []).append((copy.offset + item.offset, offset))
            self.read_bytes[trainer_rank] = self.read_bytes.get(trainer_rank, 0) + item.nbytes
        self._copies = {turn: _copy_list(reads, of_turn) for turn, of_turn in copies.items()}
        self.extra_bytes = sum(copies.table_bytes for copies in self._copies.values())

    def run(self, turn: int | None = None) -> None:
        """Copies what belongs to a turn of the landing, or to none."""
        if turn in self._copies:
            self._copies[turn].run()

    def finish(self, turn: int) -> None:
        """Completes a turn of the landing, if it has so many. All that others send for it has arrived."""
        if turn < self._landing.turns:
            self.run(turn)
            self._landing.arrived(turn)

    def finish_from(self, first: int) -> None:
        """Completes all turns from `first` on, for which nobody sends anything."""
        for turn in range(first, self._landing.turns):
            self.finish(turn)


class IpcEngineEnd(EngineEnd):
    """Reads all that this rank needs from mapped memory. No trainer rank takes part."""

    def __init__(self, side: EngineSide, _strategy: Strategy) -> None:
        self._reads = side.reads

    def connect(self, meeting: Meeting) -> None:
        numbers = mapped_reads(self._reads)
        self._reads.landing.place([], read_targets(self._reads.read_plan, numbers))
        self._copies = DirectReads(self._reads, numbers)
        self.nbytes, self.traffic = self._copies.extra_bytes, Traffic.of(self._copies.read_bytes)

    def move(self, request: DistributedUpdateWeightsReq, taken: bool) -> None:
        self._copies.run()
        self._copies.finish_from(0)


engine_end = IpcEngineEnd


def mapped_reads(reads: Reads, sending: Container[int] = ()) -> list[int]:
    """Returns the numbers of the reads of trainer ranks that are not `sending`."""
    mapped = (t for t in reads.read_plan.traffic() if t not in sending)
    return [read for trainer_rank in mapped for read in reads.read_plan.reads_from(trainer_rank)]


def read_targets(plan: ReadPlan, reads: Iterable[int]) -> set[str]:
    """Returns the names of the storages that these reads are copied to."""
    return {plan.copies[copy].target for copy in set(plan.copy_ids[list(reads)].tolist())}


def _copy_list(reads: Reads, boxes: _Boxes) -> CopyList:
    found = CopyList()
    for (name, trainer_rank, mapping, dtype), dimensions, (to, offset) in merged_boxes(boxes, is_ascending):
        size, source_strides, target_strides = zip(*dimensions, strict=True) if dimensions else ((), (), ())
        target = reads.program.targets[name]
        source = reads.memory[trainer_rank].view(mapping, offset, source_strides, size, getattr(torch, dtype))
        found.add(target.as_strided(size, target_strides, target.storage_offset() + to), source)
    found.build()
    return found
