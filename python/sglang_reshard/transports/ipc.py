"""Reads exactly the elements that an engine rank lacks out of trainer memory on the same host, mapped by handle.

One copy, from the trainer's shard to the live parameter; no buffer, no collective, no process group.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sglang_reshard.transports.base import TransportContext
from sglang_reshard.transports.copies import CopyList, StridedCopy, merge_strided


class IpcTransport:
    """Copies reads of this rank's read plan by one `CopyList`, with a cast where dtypes differ."""

    def __init__(self, context: TransportContext, reads: Iterable[int] | None = None) -> None:
        """`reads` defaults to all reads whose trainer rank sends nothing."""
        if reads is None:
            mapped = (t for t in context.read_plan.traffic() if t not in context.round_bytes)
            reads = (read for trainer_rank in mapped for read in context.read_plan.reads_from(trainer_rank))
        self.read_bytes: dict[int, int] = {}
        copies = []
        for read in reads:
            copy, item, tensor = context.read_plan.read(read)
            trainer_rank = int(context.read_plan.trainer_ranks[read])
            tensor_class = context.tensor_index.tensor_class(tensor)
            mapping, offset, strides = context.memory[trainer_rank].locate(
                tensor, item.local_region, tensor_class.item_bytes
            )
            copies.append(
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
        self._copies = CopyList()
        for c in merge_strided(copies):
            destination = context.program.targets[c.target].as_strided(c.size, c.target_strides, c.target_offset)
            trainer_rank, mapping = c.source
            dtype = getattr(torch, c.dtype)
            memory = context.memory[trainer_rank]
            self._copies.add(destination, memory.view(mapping, c.source_offset, c.source_strides, c.size, dtype))
        self._copies.build()
        self.extra_bytes = self._copies.table_bytes

    def move(self) -> None:
        self._copies.run()
