"""What an engine rank reads by itself: boxes of trainer memory, straight into its live parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sglang_reshard.transports.base import TransportContext
from sglang_reshard.transports.copies import CopyList
from sglang_reshard.transports.strided_copies import StridedCopy, merge_strided


class DirectRead:
    """Rows of this rank's intake: one `_foreach_copy_`, with a cast where dtypes differ, and nothing staged.

    read_bytes  trainer rank -> bytes that are read from its memory each time
    """

    def __init__(self, here: TransportContext, rows: Iterable[int]) -> None:
        self.read_bytes: dict[int, int] = {}
        strips = []
        for row in rows:
            copy, part, tensor = here.intake.row(row)
            trainer_rank = int(here.intake.trainer[row])
            kind = here.catalog.kind(tensor)
            stretch, offset, strides = here.memory[trainer_rank].place(tensor, part.shard, kind.item_bytes)
            to_offset, source = copy.offset + part.offset, (trainer_rank, stretch)
            count = part.shard.count
            strips.append(StridedCopy(copy.target, to_offset, copy.strides, source, offset, strides, count, kind.dtype))
            self.read_bytes[trainer_rank] = self.read_bytes.get(trainer_rank, 0) + part.nbytes
        self._copies = CopyList()
        for s in merge_strided(strips):
            to = here.program.targets[s.to].as_strided(s.size, s.to_strides, s.to_offset)
            trainer_rank, stretch = s.source
            memory = here.memory[trainer_rank]
            self._copies.add(to, memory.view(stretch, s.offset, s.strides, s.size, getattr(torch, s.dtype)))

    def run(self) -> None:
        self._copies.run()
