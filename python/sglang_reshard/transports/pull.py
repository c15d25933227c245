"""What an engine rank reads by itself: boxes of trainer memory, straight into its live parameters."""

from __future__ import annotations

import torch

from sglang_reshard.transports.base import Here
from sglang_reshard.transports.landing import CopyList, Landings


class Pull:
    """This rank's `Direct`s of a plan: one `_foreach_copy_`, with a cast where dtypes differ, and nothing staged.

    read_bytes  trainer rank -> bytes that are read from its memory each time
    """

    def __init__(self, here: Here, landings: Landings) -> None:
        self._copies = CopyList()
        self.read_bytes: dict[int, int] = {}
        for direct in here.plan.directs:
            if direct.engine_rank != here.engine_rank:
                continue
            before = self._copies.source_bytes
            for i in direct.pieces:
                shard_box = piece_in_memory(here, direct.trainer_rank, i)
                landings.add(self._copies, i, here.pieces.all[i].box, shard_box)
            self.read_bytes[direct.trainer_rank] = self._copies.source_bytes - before

    def run(self) -> None:
        self._copies.run()


def piece_in_memory(here: Here, trainer_rank: int, index: int) -> torch.Tensor:
    """A piece in the mapped memory of a trainer rank that holds it."""
    piece = here.pieces.all[index]
    number = here.pieces.tensor_of[index]
    tensor = here.pieces.layout.tensors[number]
    shape = here.pieces.layout.holdings(tensor).local_shapes[trainer_rank]
    shard = here.memory[trainer_rank].shard(number, shape, tensor.dtype)
    stop = tuple(a + n for a, n in zip(piece.at, piece.box.shape, strict=True))
    return shard[tuple(slice(a, b) for a, b in zip(piece.at, stop, strict=True))]
