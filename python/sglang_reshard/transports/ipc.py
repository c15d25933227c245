"""Reads exactly the elements that an engine rank lacks out of trainer memory on the same host, mapped by handle.

One copy, from the trainer's shard to the live parameter; no buffer, no collective, no process group. Weights that are
quantized on arrival are copied a bucket at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from sglang_reshard.plan import ReadPlan
from sglang_reshard.transports.base import TransportContext
from sglang_reshard.transports.copies import CopyList
from sglang_reshard.transports.merging import StridedCopy, merge_strided


class DirectReads:
    """Copies from mapped memory, with a cast where dtypes differ: what can be copied at once by one `CopyList`."""

    def __init__(self, context: TransportContext, reads: Sequence[int]) -> None:
        """`reads` of the read plan. `context.arrivals` must have been placed."""
        self.read_bytes: dict[int, int] = {}
        copies: dict[int | None, list[StridedCopy]] = {}
        for read in reads:
            copy, item, tensor = context.read_plan.read(read)
            trainer_rank = int(context.read_plan.trainer_ranks[read])
            tensor_class = context.tensor_index.tensor_class(tensor)
            mapping, offset, strides = context.memory[trainer_rank].locate(
                tensor, item.local_region, tensor_class.item_bytes
            )
            copies.setdefault(context.arrivals.turn_of(copy.target), []).append(
                StridedCopy(
                    target=copy.target,
                    target_offset=copy.offset + item.offset,
                    target_strides=copy.strides,
                    source=(trainer_rank, mapping),
                    source_offset=offset,
                    source_strides=strides,
                    size=item.local_region.count,
                    dtype=tensor_class.dtype,
                )
            )
            self.read_bytes[trainer_rank] = self.read_bytes.get(trainer_rank, 0) + item.nbytes
        self.received_bytes = sum(self.read_bytes.values())
        self._copies = {turn: _copy_list(context, of_turn) for turn, of_turn in copies.items()}
        self.extra_bytes = sum(copies.table_bytes for copies in self._copies.values())

    def run(self, turn: int | None = None) -> None:
        """Copies what belongs to a turn of `ArrivalMemory`, or to none."""
        if turn in self._copies:
            self._copies[turn].run()


class IpcTransport:
    """Reads all that this rank needs from mapped memory."""

    def __init__(self, context: TransportContext) -> None:
        reads, self._arrivals = mapped_reads(context), context.arrivals
        self._arrivals.place([], read_targets(context.read_plan, reads))
        self._reads = DirectReads(context, reads)
        self.read_bytes, self.received_bytes = self._reads.read_bytes, self._reads.received_bytes
        self.extra_bytes = self._reads.extra_bytes

    def move(self) -> None:
        self._reads.run()
        for turn in range(self._arrivals.turns):
            self._reads.run(turn)
            self._arrivals.finish(turn)


def mapped_reads(context: TransportContext) -> list[int]:
    """Returns the reads whose trainer rank sends nothing."""
    mapped = (t for t in context.read_plan.traffic() if t not in context.round_bytes)
    return [read for trainer_rank in mapped for read in context.read_plan.reads_from(trainer_rank)]


def read_targets(plan: ReadPlan, reads: Iterable[int]) -> set[str]:
    """Returns the names of the storages that these reads are copied to."""
    return {plan.copies[copy].target for copy in set(plan.copy_ids[list(reads)].tolist())}


def _copy_list(context: TransportContext, copies: Iterable[StridedCopy]) -> CopyList:
    found = CopyList()
    for c in merge_strided(copies):
        target = context.program.targets[c.target]
        trainer_rank, mapping = c.source
        source = context.memory[trainer_rank].view(
            mapping, c.source_offset, c.source_strides, c.size, getattr(torch, c.dtype)
        )
        found.add(target.as_strided(c.size, c.target_strides, target.storage_offset() + c.target_offset), source)
    found.build()
    return found
