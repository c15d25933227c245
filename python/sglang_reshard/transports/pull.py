"""What an engine rank reads by itself: boxes of trainer memory, straight into its live parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sglang_reshard.transports.base import Here
from sglang_reshard.transports.landing import CopyList, landing


class Pull:
    """Rows of this rank's intake: one `_foreach_copy_`, with a cast where dtypes differ, and nothing staged.

    read_bytes  trainer rank -> bytes that are read from its memory each time
    """

    def __init__(self, here: Here, rows: Iterable[int]) -> None:
        self._copies = CopyList()
        self.read_bytes: dict[int, int] = {}
        dtypes = [getattr(torch, kind.dtype) for kind in here.catalog.kinds]
        kind_of = here.catalog.kind_of.tolist()
        for row in rows:
            _, part, tensor = here.intake.row(row)
            trainer_rank = int(here.intake.trainer[row])
            box = here.memory[trainer_rank].region(tensor, part.shard, dtypes[kind_of[tensor]])
            self._copies.add(landing(here, row), box)
            self.read_bytes[trainer_rank] = self.read_bytes.get(trainer_rank, 0) + part.nbytes

    def run(self) -> None:
        self._copies.run()
